"""Wrong requests: the status, and an error in OpenAI's shape that names the parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import RunningServer, StartServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
OK = {"model": "tiny", "messages": HI, "max_tokens": 2}


def error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["message"]
    return found


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"frobnicate": 1}, "frobnicate"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_a_wrong_parameter_is_named(server: RunningServer, more: Any, param: str) -> None:
    found = error(server.post(CHAT, OK | more), 400)
    assert found["param"] == param
    assert found["type"] == "invalid_request_error"


def test_a_grammar_that_cannot_be_followed(server: RunningServer) -> None:
    error(server.post(CHAT, OK | {"regex": "[a"}), 400)
    error(server.post(CHAT, OK | {"grammar": "root ::= nothing"}), 400)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "blah"}}}
    error(server.post(CHAT, OK | {"response_format": form}), 400)
    error(server.post(CHAT, OK | {"regex": "a", "grammar": 'root ::= "a"'}), 400)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "parse"),
        (b"{", "parse"),
        (b"[1]", "object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a":' * 100000, "nested"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested"),
        (b'{"a": ' + b"9" * 5000 + b"}", "parse"),
    ],
)
def test_what_is_not_json(server: RunningServer, body: bytes, why: str) -> None:
    found = error(server.client.post(CHAT, content=body), 400)
    assert why in found["message"]


def test_lone_surrogates_are_refused(server: RunningServer) -> None:
    body = json.dumps(OK | {"messages": [{"role": "user", "content": "a\ud800b"}]})
    error(server.client.post(CHAT, content=body.encode()), 400)
    error(server.client.post(CHAT, content=json.dumps(OK | {"model": "\ud800"}).encode()), 404)


def test_unknown_models_paths_and_methods(server: RunningServer) -> None:
    found = error(server.post(CHAT, OK | {"model": "gpt-9"}), 404)
    assert (found["code"], found["param"]) == ("model_not_found", "model")
    error(server.client.get("/v1/models/gpt-9"), 404)
    error(server.client.get("/v1/nothing"), 404)
    error(server.client.get(CHAT), 405)
    assert error(server.post(CHAT, OK | {"model": "encoder"}), 400)["param"] == "model"
    assert error(server.post("/v1/embeddings", {"model": "tiny", "input": "a"}), 400)


def test_a_prompt_beyond_the_context(server: RunningServer) -> None:
    long = [{"role": "user", "content": "x" * 300}]
    found = error(server.post(CHAT, OK | {"messages": long}), 400)
    assert found["code"] == "context_length_exceeded" and "256" in found["message"]
    huge = {"model": "tiny", "prompt": "x" * 100_000}
    assert error(server.post(TEXT, huge), 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": HI}, "messages"),
    ],
)
def test_wrong_completions(server: RunningServer, more: Any, param: str) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2} | more
    assert error(server.post(TEXT, body), 400)["param"] == param


def test_tokens_beyond_the_vocabulary(server: RunningServer) -> None:
    error(server.post(TEXT, {"model": "tiny", "prompt": [999_999]}), 400)
    error(server.post("/detokenize", {"model": "tiny", "tokens": [999_999]}), 400)
    error(server.post("/v1/embeddings", {"model": "encoder", "input": [[999_999]]}), 400)


def test_bodies_are_limited(start: StartServer) -> None:
    server = start(limits={"body_bytes": 1000, "most_tokens": 4})
    long = OK | {"messages": [{"role": "user", "content": "x" * 2000}]}
    assert error(server.post(CHAT, long), 413)["code"] == "body_too_large"

    def parts() -> Any:
        for _ in range(100):
            yield b" " * 100

    error(server.client.post(CHAT, content=parts()), 413)
    assert error(server.post(CHAT, OK | {"max_tokens": 5}), 400)["param"] == "max_tokens"
    unsaid = server.post(CHAT, {"model": "tiny", "messages": HI, "logit_bias": {"65": 100}})
    assert unsaid.json()["usage"]["completion_tokens"] == 4


def test_messages_of_errors_have_no_paths(start: StartServer, tmp_path: Any) -> None:
    from rlx.serve.model_pool import ModelSpec

    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    missing = ModelSpec("missing", str(tmp_path / "missing.gguf"))
    server = start(models=(ModelSpec("broken", str(broken)), missing))
    for name in ("broken", "missing"):
        found = error(server.post(CHAT, OK | {"model": name}), 500)
        assert found["code"] == "model_load_failed"
        assert str(tmp_path) not in found["message"]
