"""Valid requests of every path, and ways to spoil them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object", "required": ["city"], "additionalProperties": False,
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
}  # fmt: skip
FUNCTION = {"name": "weather", "description": "It.", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
SAMPLING = {
    "model": "tiny", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "seed": 1, "n": 1,
    "stop": ["zz"], "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"65": 1},
    "user": "me", "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "stop_token_ids": [3],
    "priority": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """A request; `wrong` where it must be refused, whatever else is right about it."""

    path: str
    body: Any = None
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    required: tuple[str, ...] = ()
    wrong: bool = False

    def content(self) -> bytes | None:
        if self.raw is not None:
            return self.raw
        return None if self.body is None else json.dumps(self.body).encode()


CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto",
    "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False}, "metadata": {"a": "b"}, "store": False,
}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
]  # fmt: skip
BLOCKS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "x"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
]  # fmt: skip
CLAUDE = {
    "model": "tiny", "max_tokens": 2, "system": [{"type": "text", "text": "Be brief."}],
    "tools": [{"name": "weather", "description": "It.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "messages": BLOCKS,
    "stop_sequences": ["zz"], "thinking": {"type": "disabled"}, "temperature": 0.5, "top_k": 3,
}  # fmt: skip
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHATS = "/v1/chat/completions"
VALID = [
    Sent(CHATS, SAMPLING | CHAT, required=("model", "messages")),
    Sent(CHATS, SAMPLING | CHAT | STREAM, required=("model", "messages")),
    Sent(CHATS, {"model": "tiny", "messages": HI, "max_tokens": 4, "response_format": FORM}),
    Sent(CHATS, {"model": "tiny", "messages": HI, "max_tokens": 3, "grammar": 'root ::= "ab"'}),
    Sent(CHATS, {"model": "tiny", "messages": HI, "max_tokens": 3, "regex": "[ab]{2}", "n": 2}),
    Sent("/v1/completions", SAMPLING | {"prompt": ["a", "b"], "logprobs": 1}, required=("model",)),
    Sent("/v1/completions", SAMPLING | STREAM | {"prompt": [65, 66], "echo": True}),
    Sent("/v1/responses", {
        "model": "tiny", "max_output_tokens": 2, "tools": [FUNCTION | {"type": "function"}],
        "tool_choice": "auto", "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}},
        "input": ITEMS, "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.3,
    }, required=("model", "input")),
    Sent("/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 2, "stream": True}),
    Sent("/v1/messages", CLAUDE, required=("model", "messages", "max_tokens")),
    Sent("/v1/messages", CLAUDE | {"stream": True}),
    Sent("/v1/messages/count_tokens", {"model": "tiny", "messages": BLOCKS}, required=("model",)),
    Sent("/v1/embeddings", {"model": "encoder", "input": ["a", "b"], "encoding_format": "base64",
                            "dimensions": 4, "truncate": True}, required=("model", "input")),
    Sent("/v1/embeddings", {"model": "encoder", "input": [[1, 2], [3]]}),
    Sent("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["b", {"text": "c"}],
                        "top_n": 1, "return_documents": True},
         required=("model", "query", "documents")),
    Sent("/tokenize", {"model": "tiny", "messages": HI, "with_pieces": True}, required=("model",)),
    Sent("/tokenize", {"model": "tiny", "prompt": "abc", "add_special_tokens": False}),
    Sent("/detokenize", {"model": "tiny", "tokens": [65, 66]}, required=("model", "tokens")),
]  # fmt: skip
LISTS = [
    Sent(p, None, "GET") for p in ("/v1/models", "/v1/models/tiny", "/health", "/metrics", "/")
]
TEXTS = (
    "", "\0", "\ud800", "\U0010ffff", "a" * 3000, "é" * 700, "\u202e\u0301" * 40, "<|im_start|>",
    "<|im_end|>\n<|im_start|>system\n", "<tool_call>{", "{{ 7 * 7 }}", "%s%n", "tiny", "encoder",
    "../../etc/passwd", "NaN", "true", "-1", "1e999", "data: [DONE]\n\n", "\r\n\r\n", "(" * 500,
    "(a*)*b", "[", "root ::= root", "$ref", "https://example.com/x.json",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 1.5, -0.0, 1e308, -1e308, 5e-324, 2**31 - 1, 2**31, 2**53 + 1, -(2**63), 2**63,
    2**64, 10**40, 0.1 + 0.2, 100, 257, 258, 999_999,
)  # fmt: skip
SCHEMAS = (
    {"$ref": "#"}, {"type": "objekt"}, {"type": ["string", "null"]}, {"not": {}}, {"enum": []},
    {"anyOf": [{"$ref": "#/x"}]}, {"pattern": "(("}, {"minLength": 10**9}, {"maxItems": -1},
    {"type": "array", "minItems": 10**7}, {"properties": []}, {"multipleOf": 0}, False, True,
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, {"type": "string", "format": "x"},
)  # fmt: skip
METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PROPFIND")


def odd(rng: random.Random) -> Any:
    """Some value that probably should not be where it gets."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice(TEXTS), lambda: rng.choice(NUMBERS), lambda: rng.choice(SCHEMAS),
        lambda: rng.choice((None, True, False, [], {}, [[]], [{}], [None], {"": None})),
        lambda: [rng.choice(NUMBERS) for _ in range(rng.choice((1, 3, 400)))],
        lambda: {rng.choice(TEXTS): rng.choice(TEXTS) for _ in range(3)},
        lambda: nested(rng.choice((5, 60, 99, 150, 600)), rng.random() < 0.5),
        lambda: rng.choice(rng.choice(VALID).body.copy().popitem()),
    )  # fmt: skip
    return rng.choice(kinds)()


def nested(depth: int, lists: bool) -> Any:
    made: Any = 0
    for _ in range(depth):
        made = [made] if lists else {"items": made}
    return made


def spoiled(rng: random.Random, value: Any) -> Any:
    """The value with one part of it replaced, dropped, added or repeated."""
    how = rng.random()
    if isinstance(value, dict) and value and how < 0.9:
        key = rng.choice([*value])
        if how < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if how < 0.2:
            return value | {rng.choice([key + "x", "type", "name", "content", ""]): odd(rng)}
        return value | {key: spoiled(rng, value[key])}
    if isinstance(value, list) and value and how < 0.9:
        at = rng.randrange(len(value))
        if how < 0.15:
            return value * rng.choice((2, 30, 300))
        if how < 0.25:
            return value[:at] + value[at + 1 :]
        return [*value[:at], spoiled(rng, value[at]), *value[at + 1 :]]
    if rng.random() < 0.5:  # of the same type: what is behind the first checks
        if isinstance(value, str):
            return rng.choice((rng.choice(TEXTS), value + rng.choice(TEXTS), value * 3, value[1:]))
        if isinstance(value, int | float):
            return rng.choice((rng.choice(NUMBERS), value + 1, value * 2, -value))
    return odd(rng)


def by_fields(rng: random.Random, sent: Sent) -> Sent:
    body = sent.body
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body = spoiled(rng, body)
    return replace(sent, body=body)


def without_a_field(rng: random.Random, sent: Sent) -> Sent:
    gone = rng.choice(sent.required or ("model",))
    return replace(sent, body={k: v for k, v in sent.body.items() if k != gone}, wrong=True)


def with_another_field(rng: random.Random, sent: Sent) -> Sent:
    name = rng.choice(("frobnicate", "Model", "messages ", "é", "__proto__", "max-tokens", ""))
    return replace(sent, body=sent.body | {name: odd(rng)}, wrong=True)


def by_bytes(rng: random.Random, sent: Sent) -> Sent:
    raw = bytearray(sent.content() or b"")
    for _ in range(rng.choice((1, 3, 20))):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return replace(sent, raw=bytes(raw))


def cut(rng: random.Random, sent: Sent) -> Sent:
    raw = sent.content() or b""
    return replace(sent, raw=raw[: rng.randrange(len(raw))], wrong=True)


def not_json(rng: random.Random, sent: Sent) -> Sent:
    good = sent.content() or b""
    text = good.decode()
    forms: tuple[bytes, ...] = (
        text.encode("utf-16"), text.encode("utf-32"), b"\xef\xbb\xbf" + good, b"[" + good + b"]",
        good + b"}", good[:-1] + b', "temperature": NaN}', good[:-1] + b', "seed": Infinity}',
        good[:-1] + b', "seed": ' + b"9" * 5000 + b"}", good[:-1] + b', "top_p": 1e999}',
        b'{"a":' * 20_000, b"[" * 60_000, b'"text"', b"null", b"1", b"model=tiny&prompt=a",
        good[:-1] + b",}", good.replace(b'"', b"'"), b"\0" * 100, b"<xml/>", good[:-1] + b', "a"}',
    )  # fmt: skip
    return replace(sent, raw=rng.choice(forms), wrong=True)


def too_large(rng: random.Random, sent: Sent) -> Sent:
    return replace(sent, raw=b" " * 300_000 + (sent.content() or b""), wrong=True)


def by_method(rng: random.Random, sent: Sent) -> Sent:
    if rng.random() < 0.3:
        return replace(rng.choice(LISTS), method=rng.choice(("POST", "PUT", "DELETE")), wrong=True)
    return replace(sent, method=rng.choice(METHODS), wrong=True)


def by_path(rng: random.Random, sent: Sent) -> Sent:
    forms = (
        sent.path + "x", "/v2" + sent.path, sent.path.upper(), sent.path + "%00",
        sent.path + "/%2e", "/v1/models/" + "x" * 3000, "/v1/models/..%2f..%2fetc%2fpasswd",
        "/%ff%fe", "/v1/responses/x", "/v1/models/%F0%9F%98%80",
    )  # fmt: skip
    method = rng.choice(("GET", sent.method))
    return replace(sent, path=rng.choice(forms), method=method, wrong=True)


def by_headers(rng: random.Random, sent: Sent) -> Sent:
    kinds = ("text/plain", "", "multipart/form-data; boundary=x", "a" * 999)
    given = (
        {"content-type": rng.choice(kinds)},
        {"content-encoding": "gzip"}, {"authorization": "Bearer " + "x" * 2000}, {"accept": "x"},
        {"authorization": "Basic é"}, {"x-api-key": "\xff" * 9},
        {"expect": "100-continue"}, {"origin": "https://example.com"}, {"x" * 500: "y" * 9000},
        {"cookie": "a=b;" * 500}, {"range": "bytes=0-1"}, {"host": "example.com"},
        {"anthropic-version": "1999"}, {"openai-beta": "x"}, {"if-none-match": "*"},
    )  # fmt: skip
    return replace(sent, headers=dict(rng.choice(given)))


WAYS = ((by_fields, 12), (by_bytes, 2), (cut, 1), (not_json, 2), (without_a_field, 1),
        (with_another_field, 1), (too_large, 0.3), (by_method, 1), (by_path, 1),
        (by_headers, 1))  # fmt: skip


def mutated(rng: random.Random) -> tuple[str, Sent]:
    """A spoiled request, and how it was spoiled."""
    (way,) = rng.choices([w for w, _ in WAYS], [n for _, n in WAYS])
    return way.__name__, way(rng, rng.choice(VALID))
