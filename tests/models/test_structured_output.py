"""Structured output: whatever a model of random weights would say, what comes out fits."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from tiny import VOCAB, write_folder

import rlx
from rlx.models.model_file import ModelFile

END = VOCAB - 1
SCHEMAS = 200


class Ascii:
    """Token t is the character 32 + t; some tokens are words, as in a real vocabulary."""

    end_ids = frozenset({END})
    bos_id = None
    vocabulary = SimpleNamespace(special=frozenset({END}))
    words = ("true", "false", "null", '": ', '", "', "{}", "[]", "12", "-3", "ab", "cde")

    def piece(self, token: int) -> bytes:
        if token < 95:
            return bytes([32 + token])
        return self.words[token - 95].encode() if token - 95 < len(self.words) else b""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) - 32 for c in text if 32 <= ord(c) < 127]

    encode_continuation = encode

    def stream(self) -> Ascii:
        return self

    def push(self, token: int) -> str:
        return self.piece(token).decode()

    def flush(self) -> str:
        return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_folder("llama", path)
    return path


@pytest.fixture
def model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[rlx.LanguageModel]:
    tokenizer = Ascii()
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: tokenizer)
    found = rlx.load(folder)
    assert isinstance(found, rlx.LanguageModel)
    with found:
        yield found


def answer(model: Any, **settings: Any) -> str:
    made = model.generate("x", stream=False, max_tokens=110, **settings)
    assert made.finish_reason == "stop"
    return str(made.text)


def schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Something small enough to be finished within the context."""
    kinds = ["integer", "string", "boolean", "null", "enum", "const"]
    kind = rng.choice([*kinds, "object", "array", "object", "array"] if depth else kinds)
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(60)}
    if kind == "string":
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": 3 + rng.randrange(3)}
    if kind == "enum":
        return {"enum": rng.sample(["a", "bc", 7, None, True, [1, 2], {"k": "v"}], 3)}
    if kind == "const":
        return {"const": rng.choice(["fixed", 12, False, {"a": [0]}])}
    if kind == "array":
        few = rng.randrange(2)
        items = schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": few, "maxItems": few + 1}
    if kind == "object":
        names = rng.sample(["id", "x y", "q'", "n"], rng.randrange(1, 3))
        required = [n for n in names if rng.random() < 0.7]
        parts = {n: schema(rng, depth - 1) for n in names}
        return {"type": "object", "properties": parts, "required": required,
                "additionalProperties": False}  # fmt: skip
    return {"type": kind}


def fits(value: Any, s: dict[str, Any]) -> bool:
    """Whether a value is valid: the rules of JSON Schema, for what `schema` uses of it."""
    if "enum" in s:
        return any(json.dumps(value) == json.dumps(v) for v in s["enum"])
    if "const" in s:
        return json.dumps(value) == json.dumps(s["const"])
    kind = s["type"]
    if kind == "integer":
        return type(value) is int and s["minimum"] <= value <= s["maximum"]
    if kind == "string":
        return isinstance(value, str) and s["minLength"] <= len(value) <= s["maxLength"]
    if kind == "array":
        counted = isinstance(value, list) and s["minItems"] <= len(value) <= s["maxItems"]
        return counted and all(fits(v, s["items"]) for v in value)
    if kind == "object":
        known = isinstance(value, dict) and set(s["required"]) <= value.keys()
        return known and all(k in s["properties"] and fits(v, s["properties"][k])
                             for k, v in value.items())  # fmt: skip
    return value is None if kind == "null" else isinstance(value, bool)


def test_the_check_of_this_test_can_fail() -> None:
    assert not fits(True, {"type": "integer", "minimum": 0, "maximum": 3})
    assert not fits({"a": 1}, {"type": "object", "properties": {}, "required": []})
    assert not fits(1, {"const": True}) and not fits("abcd", {"enum": ["abc"]})


def test_every_answer_fits_its_schema(model: rlx.LanguageModel) -> None:
    rng = random.Random(11)
    for seed in range(SCHEMAS):
        wanted = schema(rng)
        text = answer(model, json_schema=wanted, seed=seed, temperature=1.5, top_k=0, top_p=1.0)
        assert fits(json.loads(text), wanted), (wanted, text)


def test_a_regular_expression_is_matched(model: rlx.LanguageModel) -> None:
    for seed in range(20):
        text = answer(model, regex=r"[a-f]{2,4}-(19|20)\d\d!?", seed=seed, temperature=2.0)
        assert re.fullmatch(r"[a-f]{2,4}-(19|20)[0-9][0-9]!?", text)


def test_gbnf_and_lark_grammars_are_followed(model: rlx.LanguageModel) -> None:
    gbnf = 'root ::= item ("+" item)?\nitem ::= [0-9] | "(" item ")"'
    lark = 'start: item ("+" item)?\nitem: /[0-9]/ | "(" item ")"'
    for grammar in (gbnf, lark):
        text = answer(model, grammar=grammar, seed=4, temperature=0.5)
        assert re.fullmatch(r"\(*\d\)*(\+\(*\d\)*)?", text) and text.count("(") == text.count(")")


def test_many_requests_have_grammars_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Ascii()
    monkeypatch.setattr(ModelFile, "tokenizer", lambda self: tokenizer)
    with rlx.Engine(folder, requests=3) as engine:
        patterns = [r"a{3}", r"[bc]{2}", r"\d{5}", r"(x|y)z"]
        replies = [engine.submit("x", regex=pattern, max_tokens=20) for pattern in patterns]
        plain = engine.submit("x", max_tokens=3, temperature=0)
        for pattern, reply in zip(patterns, replies, strict=True):
            assert re.fullmatch(pattern, reply.wait().text)
        assert len(plain.wait().tokens) == 3


def test_penalties_count_beside_a_grammar(model: rlx.LanguageModel) -> None:
    bias = {ord("b") - 32: 50.0}
    assert answer(model, regex="[abc]{4}", logit_bias=bias, temperature=0) == "bbbb"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regex": "("}, "cannot be followed"),
        ({"grammar": "root ::= ("}, "not a GBNF grammar"),
        ({"json_schema": "{"}, "not a JSON schema"),
        ({"json_schema": {"type": "nothing"}}, "cannot be followed"),
        ({"regex": "a", "grammar": "b"}, "one kind of structured output"),
    ],
)
def test_what_is_no_grammar(
    model: rlx.LanguageModel, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(rlx.OptionError, match=message):
        model.generate("x", stream=False, **settings)
    assert answer(model, regex="a", temperature=0) == "a"
