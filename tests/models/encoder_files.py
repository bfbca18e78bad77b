"""Tiny encoders as users have them: with a tokenizer, sentence-transformers' files, or in GGUF."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from tiny_encoders import CONFIGS, VOCAB, write_folder

from rlx.formats.gguf.writer import PackedTensor, write_gguf
from rlx.ir.quant.scheme import QuantScheme, encode
from rlx.models.model_file import ModelFile

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, *string.ascii_lowercase, *(f"##{c}" for c in string.ascii_lowercase)]
WORDS += [*string.digits, ".", ",", "!", "?", "the", "cat", "##s"][: VOCAB - len(WORDS)]


def write_tokenizer(folder: Path, *, like_roberta: bool = False) -> None:
    """BERT's kind: letters, continued letters, a few words; [CLS] text [SEP]. Pairs are marked as
    BERT does, or with two marks between texts of one kind."""
    vocab = {word: i for i, word in enumerate(dict.fromkeys(WORDS))}
    special = [
        {"id": i, "content": t, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i, t in enumerate(SPECIAL)
    ]  # fmt: skip
    sequence = {"A": {"Sequence": {"id": "A", "type_id": 0}}}
    sequence["B"] = {"Sequence": {"id": "B", "type_id": int(not like_roberta)}}
    mark = {t: {"SpecialToken": {"id": t, "type_id": 0}} for t in ("[CLS]", "[SEP]")}
    template = {
        "type": "TemplateProcessing",
        "single": [mark["[CLS]"], sequence["A"], mark["[SEP]"]],
        "pair": [
            mark["[CLS]"],
            sequence["A"],
            *[mark["[SEP]"]] * (1 + like_roberta),
            sequence["B"],
            mark["[SEP]"],
        ],
        "special_tokens": {
            t: {"id": t, "ids": [vocab[t]], "tokens": [t]} for t in ("[CLS]", "[SEP]")
        },
    }
    described = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
            "strip_accents": None, "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab,
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")


def write_model(
    folder: Path, name: str = "bert", *, classifier: bool = False, **config: Any
) -> Path:
    """The folder of a tiny encoder, with a classifier or without."""
    write_folder(name, folder)
    classes = CONFIGS[name]["architectures"] if classifier else []
    settings = {**CONFIGS[name], "architectures": classes, **config}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    write_tokenizer(folder, like_roberta=name in ("roberta", "mpnet"))
    return folder


def write_modules(folder: Path, *modules: tuple[str, dict[str, Any]]) -> None:
    """modules.json and the folders it names, as sentence-transformers writes them."""
    listed = []
    for i, (kind, config) in enumerate(modules):
        path = "" if i == 0 else f"{i}_{kind}"
        listed.append({"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"})
        if path:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")


def write_gguf_copy(
    folder: Path, path: Path, scheme: str | None = None, *, pooling: int = 1
) -> None:
    """The model of a folder as a GGUF file of llama.cpp's making: its names, its vocabulary with
    spaces where words begin, matrices packed where asked for."""
    model = ModelFile.open(folder)
    c, arch = model.config, model.config.arch
    kind = {"bert": "bert", "nomic_bert": "nomic-bert", "modernbert": "modern-bert"}[arch]
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    ordered = sorted(words, key=words.get)
    texts = [
        w if w.startswith("[") and w.endswith("]") else w[2:] if w.startswith("##") else "▁" + w
        for w in ordered
    ]
    metadata: dict[str, Any] = {
        "general.architecture": kind,
        f"{kind}.block_count": c.layers,
        f"{kind}.context_length": c.context,
        f"{kind}.embedding_length": c.hidden,
        f"{kind}.feed_forward_length": c.ffn,
        f"{kind}.attention.head_count": c.heads,
        f"{kind}.attention.layer_norm_epsilon": c.eps,
        f"{kind}.attention.causal": False,
        f"{kind}.pooling_type": pooling,
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array([3 if t.startswith("[") else 1 for t in texts], "i4"),
        "tokenizer.ggml.unknown_token_id": words["[UNK]"],
        "tokenizer.ggml.cls_token_id": words["[CLS]"],
        "tokenizer.ggml.seperator_token_id": words["[SEP]"],
    }
    if c.rope is not None:
        metadata[f"{kind}.rope.freq_base"] = c.rope.theta
    if c.local_rope is not None:
        metadata[f"{kind}.rope.freq_base_swa"] = c.local_rope.theta
        metadata[f"{kind}.attention.sliding_window"] = 2 * c.encoder.window
        metadata[f"{kind}.attention.sliding_window_pattern"] = 3
    write_gguf(path, metadata, _tensors(model, scheme))


def _tensors(model: ModelFile, scheme: str | None) -> dict[str, Any]:
    given = model.weights()
    packing = None if scheme is None else QuantScheme.parse(scheme)
    found: dict[str, Any] = {}
    for pattern in [*model.arch.BODY, *model.arch.HEAD]:
        layers = range(model.config.layers) if "{i}" in pattern else [0]
        for name in (pattern.replace("{i}", str(i)) for i in layers):
            if name not in given or name.startswith("cls."):
                continue
            array = np.ascontiguousarray(given.get(name).array, np.float32)
            wide = array.ndim == 2 and packing is not None and not array.shape[1] % 32
            if wide and name.startswith(("blk.", "token_embd.")):
                assert packing is not None
                data = encode(packing, array).data
                found[name] = PackedTensor(array.shape, packing, data)
            else:
                found[name] = array
    return found
