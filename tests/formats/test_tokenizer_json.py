"""Tokenizers from `tokenizer.json`: ids and texts as the library has them, settings from beside."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers as lib

from rlx.errors import FormatError, InputError
from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer.from_json import tokenizer_from_file

TEXTS = ["the cat sat", "a cat, an é", "日本 🦙 sat", "  two  spaces ", "don't do not."]


def byte_level() -> Any:
    backend = lib.Tokenizer(lib.models.BPE())
    backend.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = lib.decoders.ByteLevel()
    alphabet = lib.pre_tokenizers.ByteLevel.alphabet()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=alphabet,
        special_tokens=["<s>", "</s>", "<pad>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def llama() -> Any:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"acehnst", "th"]
    vocab = {t: i for i, t in enumerate(tokens)}
    model = lib.models.BPE(vocab, [("t", "h")], unk_token="<unk>", byte_fallback=True)
    backend = lib.Tokenizer(model)
    norm, dec = lib.normalizers, lib.decoders
    backend.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    parts = [dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse(), dec.Strip(" ", 1, 0)]
    backend.decoder = dec.Sequence(parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace() -> Any:
    pieces = [("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in "acdehnost,.'é"), ("▁cat", -4.0)]
    backend = lib.Tokenizer(lib.models.Unigram(pieces, 0, False))
    backend.pre_tokenizer = lib.pre_tokenizers.Metaspace()
    backend.decoder = lib.decoders.Metaspace()
    return backend


def wordpiece() -> Any:
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "s", "##at", "a", "an", "do", "not"]
    words += [",", ".", "'", "don", "##'", "t", "e"]
    vocab = {w: i for i, w in enumerate(words)}
    backend = lib.Tokenizer(lib.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = lib.normalizers.BertNormalizer()
    backend.pre_tokenizer = lib.pre_tokenizers.BertPreTokenizer()
    backend.decoder = lib.decoders.WordPiece()
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    backend.post_processor = lib.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return backend


def odd() -> Any:
    """Joined in a way that only the library knows."""
    backend = byte_level()
    backend.decoder = lib.decoders.Sequence(
        [lib.decoders.ByteLevel(), lib.decoders.Strip(" ", 1, 0)]
    )
    return backend


TOKENIZERS = {
    "bytes": byte_level,
    "spaces": llama,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "odd": odd,
}


def loaded(folder: Path, backend: Any, **files: object) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return tokenizer_from_file(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_and_texts_are_those_of_the_library(tmp_path: Path, kind: str) -> None:
    backend = TOKENIZERS[kind]()
    tokenizer = loaded(tmp_path, backend)
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == backend.decode(ids)
    rng = random.Random(4)
    for _ in range(200):
        ids = [rng.randrange(backend.get_vocab_size()) for _ in range(rng.randrange(1, 9))]
        if backend.id_to_token(ids[0]).startswith("##"):
            continue  # the library shows the mark of a word that continues nothing, we do not
        if kind in ("bytes", "spaces") and "\ufffd" in backend.decode(ids):
            continue  # how many signs stand for one broken character is a matter of taste
        assert tokenizer.decode(ids) == backend.decode(ids)
        stream = tokenizer.stream(at_start=True)
        assert "".join(map(stream.push, ids)) + stream.flush() == backend.decode(ids)


def test_the_tokenizers_are_recognised(tmp_path: Path) -> None:
    found = {k: loaded(tmp_path, make()).vocabulary.decoder.kind for k, make in TOKENIZERS.items()}
    assert found == {
        "bytes": "byte_level",
        "spaces": "metaspace",
        "metaspace": "metaspace",
        "wordpiece": "wordpiece",
        "odd": "library",
    }


def test_what_stands_around_a_text(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, wordpiece())
    assert tokenizer.vocabulary.prefix == (1,)
    assert tokenizer.vocabulary.suffix == (2,)
    assert tokenizer.encode("the cat") == [1, 3, 4, 2]
    assert tokenizer.encode("the cat", add_special=False) == [3, 4]


def test_limits_of_training_do_not_hold_here(tmp_path: Path) -> None:
    backend = wordpiece()
    backend.enable_truncation(4)
    backend.enable_padding(length=10)
    assert loaded(tmp_path, backend).encode("the cat sat a an") == [1, 3, 4, 5, 8, 9, 2]


def test_settings_beside_the_file(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": None,
        "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "D"}, {"name": "tools", "template": "T"}],
    }
    generation = {"eos_token_id": [1, 7]}
    backend = byte_level()
    tokenizer = loaded(tmp_path, backend, tokenizer_config=config, generation_config=generation)
    v = tokenizer.vocabulary
    assert (v.bos, v.eos, v.pad, v.unknown) == (0, 1, 2, None)
    assert tokenizer.end_ids == {1, 7}
    assert tokenizer.adds_bos
    assert tokenizer.encode("a")[0] == 0
    assert v.templates == {"default": "D", "tools": "T"}
    assert tokenizer.chat_template("tools").render([]) == "T"
    with pytest.raises(InputError, match="no chat template 'x'; expected default, tools"):
        tokenizer.chat_template("x")


def test_a_setting_can_take_bos_away(tmp_path: Path) -> None:
    config = {"bos_token": "[CLS]", "add_bos_token": False}
    assert loaded(tmp_path, wordpiece(), tokenizer_config=config).encode("cat") == [4, 2]


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("J é")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert loaded(tmp_path, llama()).vocabulary.templates == {"default": "J é", "rag": "R"}
    (tmp_path / "chat_template.jinja").unlink()
    found = loaded(tmp_path, llama(), chat_template={"chat_template": "C"}).vocabulary.templates
    assert found == {"default": "C", "rag": "R"}


def test_files_that_are_no_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        tokenizer_from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(FormatError, match="not a tokenizer"):
        tokenizer_from_file(tmp_path / "tokenizer.json")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(FormatError, match="not valid JSON"):
        tokenizer_from_file(tmp_path / "tokenizer.json")
