"""Structured output where the vocabulary puts a space before every text: SentencePiece BPE with
byte fallback, as in Llama 2, TinyLlama, Phi-3 and Baichuan."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers as lib

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "formats"))
import vocab_files as v
from tiny import VOCAB, write_folder

import rlx
from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer.from_json import tokenizer_from_file
from rlx.formats.tokenizer.gguf_vocabulary import tokenizer_from_gguf
from rlx.models.model_file import ModelFile

MARKS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{i:02X}>" for i in range(128)]
WORDS = ["▁", "a", "b", "c", "1", '"', ":", "ab", "abc", "▁a", "▁ab", "▁abc", '":', "▁1"]
MERGES = [("a", "b"), ("ab", "c"), ("▁", "a"), ("▁", "ab"), ("▁", "abc"), ('"', ":"), ("▁", "1")]
TOKENS = [*MARKS, *BYTES, *WORDS]


def from_gguf(folder: Path) -> Tokenizer:
    kinds = [v.UNKNOWN, v.CONTROL, v.CONTROL] + [v.BYTE] * 128 + [v.NORMAL] * len(WORDS)
    made = {a + b: i for i, (a, b) in reversed(list(enumerate(MERGES)))}
    scores = [-float(made.get(t, 99)) for t in TOKENS]
    tokens = list(zip(TOKENS, kinds, scores, strict=True))
    return tokenizer_from_gguf(v.vocab_file(folder, "llama", tokens, add_space_prefix=True))


def from_json(folder: Path, metaspace: bool) -> Tokenizer:
    vocab = {t: i for i, t in enumerate(TOKENS)}
    model = lib.models.BPE(vocab, MERGES, unk_token="<unk>", byte_fallback=True)
    backend = lib.Tokenizer(model)
    norm, dec = lib.normalizers, lib.decoders
    if metaspace:
        backend.pre_tokenizer = lib.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    parts = [dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse(), dec.Strip(" ", 1, 0)]
    backend.decoder = dec.Sequence(parts)
    backend.add_special_tokens(MARKS)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer_from_file(folder / "tokenizer.json")


MAKERS: dict[str, Callable[[Path], Tokenizer]] = {
    "gguf": from_gguf,
    "prepend": lambda folder: from_json(folder, metaspace=False),
    "metaspace": lambda folder: from_json(folder, metaspace=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_folder("llama", path)
    return path


@pytest.fixture(params=MAKERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    assert len(TOKENS) <= VOCAB
    return MAKERS[request.param](tmp_path)


@pytest.fixture
def model(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[rlx.LanguageModel]:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: tokenizer)
    found = rlx.load(folder)
    assert isinstance(found, rlx.LanguageModel)
    with found:
        yield found


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token(i) for i in ids]


def test_a_continuation_has_no_space_before_it(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, tokenizer.encode("abc", add_special=False)) == ["▁abc"]
    assert texts(tokenizer, tokenizer.encode_continuation("abc")) == ["abc"]
    assert texts(tokenizer, tokenizer.encode_continuation(" abc")) == ["▁abc"]
    assert texts(tokenizer, tokenizer.encode_continuation("<s>", parse_special=True)) == ["<s>"]
    spelt = texts(tokenizer, tokenizer.encode_continuation("<s>", parse_special=False))
    assert spelt == ["<0x3C>", "<0x73>", "<0x3E>"]
    # a text that follows is a text again
    assert texts(tokenizer, tokenizer.encode("abc", add_special=False)) == ["▁abc"]


def answer(model: Any, **settings: Any) -> str:
    made = model.generate("abc", stream=False, max_tokens=90, **settings)
    assert made.finish_reason == "stop"
    return str(made.text)


def test_a_regular_expression(model: rlx.LanguageModel) -> None:
    for seed, pattern in enumerate(["abc", " abc", "[ab]{3}c 1", "a?bcab(abc|q)!"]):
        text = answer(model, regex=pattern, seed=seed, temperature=2.0)
        assert re.fullmatch(pattern, text), (pattern, text)


def test_a_json_schema(model: rlx.LanguageModel) -> None:
    schema = {
        "type": "object",
        "properties": {"abc": {"const": 1}, "b": {"enum": ["abc", " ab"]}},
        "required": ["abc", "b"],
        "additionalProperties": False,
    }
    for seed in range(3):
        made = json.loads(answer(model, json_schema=schema, seed=seed, temperature=2.0))
        assert made["abc"] == 1 and made["b"] in ("abc", " ab")


def test_a_grammar(model: rlx.LanguageModel) -> None:
    made = answer(model, grammar='root ::= "abc" (" abc" | ":") "1"', seed=1, temperature=2.0)
    assert made in ("abc abc1", "abc:1")


def test_requests_of_an_engine(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: tokenizer)
    with rlx.Engine(folder, requests=2, context=64) as engine:
        replies = [engine.submit("a", regex=p, max_tokens=20) for p in ("abc", " abc1")]
        assert [reply.wait().text for reply in replies] == ["abc", " abc1"]
