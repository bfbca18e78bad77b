"""Hugging Face folders written as GGUF: the same logits, tokens and settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
import tokenizers
from tiny import VOCAB, write_folder

from rlx import CompileOptions, DimBinding, Session
from rlx.errors import UnsupportedError
from rlx.formats.gguf import GgufFile
from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer.from_json import tokenizer_from_file
from rlx.formats.tokenizer.gguf_vocabulary import tokenizer_from_gguf
from rlx.models.builder import LOGITS, build_graph
from rlx.models.model_file import ModelFile
from rlx.models.sampling import recommended_sampling
from rlx.models.to_gguf import quantize_model

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
NAMES = [
    "llama", "llama_tied", "llama_llama3", "llama_linear", "llama_yarn", "mistral", "qwen2",
    "qwen3", "gemma2", "gemma3", "phi3", "gpt2",
]  # fmt: skip
TEXTS = ["the end of the text", "in 2024, 17 then", "  spaces\n\nand <|end|>marks<|end|>", "th" * 9]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "n"), ("Ġ", "t"), ("Ġt", "h"), ("e", "x")]


def byte_level(*cuts: Any, **options: Any) -> Any:
    """A vocabulary of bytes and a few merges."""
    pre = tokenizers.pre_tokenizers
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # the last are space and line feed
    tokens = [*letters, *(a + b for a, b in MERGES)]
    model = tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, MERGES, **options)
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre.Sequence([*cuts, pre.ByteLevel(add_prefix_space=False)])
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.add_tokens(["<think>"])
    return made


def spaced() -> Any:
    """The kind that SentencePiece files become."""
    pieces = ["th", "the", "▁the", "en", "▁t", "▁th"]
    controls = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens = [*controls, *"▁thendofx0124", *pieces]
    splits = [(p[:i], p[i:]) for p in pieces for i in range(1, len(p))]
    merges = [(a, b) for a, b in splits if a in tokens and b in tokens]
    vocab = {t: i for i, t in enumerate(tokens)}
    model = tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    norm, dec = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    parts = [dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse(), dec.Strip(" ", 1, 0)]
    made.decoder = dec.Sequence(parts)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def both(folder: Path, backend: Any, end: str = "<|end|>") -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a folder, and that of the GGUF file made of it."""
    write_folder("llama", folder)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": end, "bos_token": "<s>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    quantize_model(folder, folder / "out.gguf", "F32")
    with GgufFile(folder / "out.gguf") as file:
        return tokenizer_from_file(folder / "tokenizer.json"), tokenizer_from_gguf(file)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_logits(name: str, tmp_path: Path) -> None:
    write_folder(name, tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    quantize_model(tmp_path, tmp_path / "out.gguf", "F32")
    golden = np.load(GOLDENS / f"logits_{name}.npz")
    tokens, want = golden["tokens"].astype(np.int32), golden["logits"]
    model = ModelFile.open(tmp_path / "out.gguf")
    described = build_graph(model, model.weights(), LOGITS, context=40, kv="f32")
    binding = DimBinding().set_live("seq", 32).set_live("past_seq", 39)
    compiled = Session("cpu").compile(described.module, CompileOptions(binding=binding))
    compiled.set_params(described.params)
    (got,) = compiled.run(ids=tokens[None], sizes={"past_seq": 0})
    # the bar of tests/models/test_goldens.py, which reads the folder itself
    np.testing.assert_allclose(got[0], want, rtol=0, atol=1e-4 * float(np.abs(want).max()))


@pytest.mark.parametrize("name", ["smollm", "gpt-2", "llama-bpe", "qwen2", "spaced"])
def test_the_same_tokens(name: str, tmp_path: Path) -> None:
    pre = tokenizers.pre_tokenizers
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    splits = {"smollm": [pre.Digits(individual_digits=True)], "gpt-2": []}
    if name == "spaced":
        backend = spaced()
    elif name in splits:
        backend = byte_level(*splits[name])
    else:
        backend = byte_level(ignore_merges=name == "llama-bpe")
        split = tokenizers.Regex(pattern % ("{1,3}" if name == "llama-bpe" else ""))
        backend.pre_tokenizer = pre.Sequence(
            [pre.Split(split, "isolated"), pre.ByteLevel(False, use_regex=False)]
        )
    want, got = both(tmp_path, backend, "</s>" if name == "spaced" else "<|end|>")
    for text in TEXTS:
        assert got.encode(text) == want.encode(text)
        assert got.decode(got.encode(text)) == want.decode(want.encode(text))
    assert got.eos_id == want.eos_id and got.bos_id == want.bos_id
    assert got.vocabulary.special == want.vocabulary.special
    assert got.vocabulary.templates == want.vocabulary.templates
    assert len(got) >= VOCAB


def test_the_same_sampling(tmp_path: Path) -> None:
    config = {"do_sample": True, "temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    both(tmp_path, byte_level())
    with GgufFile(tmp_path / "out.gguf") as file:
        names = {"temp": 0.5, "top_k": 20, "penalty_repeat": 1.25}
        assert {n: file.metadata.get(f"general.sampling.{n}") for n in names} == names
    found = recommended_sampling(ModelFile.open(tmp_path / "out.gguf"))
    assert found == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}


def test_what_gguf_cannot_express(tmp_path: Path) -> None:
    odd = byte_level(tokenizers.pre_tokenizers.Punctuation())
    with pytest.raises(UnsupportedError, match="a pre-tokenizer that cannot be written"):
        both(tmp_path, odd)
    other = byte_level()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[a-z]"), "isolated")
    other.pre_tokenizer = split
    with pytest.raises(UnsupportedError, match="no name for"):
        both(tmp_path, other)
    write_folder("olmo2", tmp_path)
    with pytest.raises(UnsupportedError, match=r"an architecture.*got olmo2.*llama"):
        quantize_model(tmp_path, tmp_path / "out.gguf", "F32")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"activation_function": "relu"}),
        ("gemma3", {"rope_local_base_freq": 55.0}),
        ("gemma2", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
        ("llama_yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}),
    ],
)
def test_settings_that_have_no_key_are_refused(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """A reader of the file would take its own, and give other results."""
    write_folder(name, tmp_path)
    given = json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) | fields
    (tmp_path / "config.json").write_text(json.dumps(given), encoding="utf-8")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedError, match="a GGUF file cannot tell"):
        quantize_model(tmp_path, tmp_path / "out.gguf", "F32")
