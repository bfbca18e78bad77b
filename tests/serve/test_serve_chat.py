"""`/v1/chat/completions` against a running server; answers are those of an engine used directly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RunningServer

import rlx

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
FIELDS = {"model": "tiny", "messages": HI, "max_tokens": 8, "seed": 1, "temperature": 1.0}


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    with rlx.load(tiny_model, kv="f32", threads=1) as loaded:
        yield loaded


def ask(server: RunningServer, **more: Any) -> dict[str, Any]:
    response = server.post(URL, FIELDS | more)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of a stream, without its end."""
    response = server.post(path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, last, nothing = response.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def told(answer: dict[str, Any], choice: int = 0) -> str:
    text: str = answer["choices"][choice]["message"]["content"]
    return text


def test_an_answer_is_that_of_the_model(server: RunningServer, model: Any) -> None:
    found = ask(server)
    alone = model.chat(HI, stream=False, max_tokens=8, seed=1, temperature=1.0)
    assert told(found) == alone.text
    assert found["object"] == "chat.completion" and found["model"] == "tiny"
    assert found["choices"][0]["finish_reason"] == alone.finish_reason == "length"
    count = len(model.apply_chat_template(HI))
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (count, 8)
    assert usage["total_tokens"] == count + 8


def test_a_stream_has_the_same_text_and_its_usage(server: RunningServer) -> None:
    whole = ask(server)
    found = events(server, URL, FIELDS | {"stream_options": {"include_usage": True}})
    *chunks, last = found
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(c["object"] == "chat.completion.chunk" and c["usage"] is None for c in chunks)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == told(whole)
    assert [c["choices"][0]["finish_reason"] for c in chunks][-2:] == [None, "length"]
    assert last["choices"] == []
    same = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [last["usage"][n] for n in same] == [whole["usage"][n] for n in same]
    assert "usage" not in events(server, URL, FIELDS)[0]


def test_n_answers_have_seeds_of_their_own(server: RunningServer) -> None:
    found = ask(server, n=3)
    assert [c["index"] for c in found["choices"]] == [0, 1, 2]
    texts = [told(found, i) for i in range(3)]
    assert texts == [told(ask(server, seed=1 + i)) for i in range(3)]
    assert len(set(texts)) == 3
    assert found["usage"]["completion_tokens"] == 24
    streamed = ["", "", ""]
    for chunk in events(server, URL, FIELDS | {"n": 3}):
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


def test_stop_strings_end_an_answer(server: RunningServer) -> None:
    text = told(ask(server, max_tokens=30))
    stop = text[4:6]
    found = ask(server, max_tokens=30, stop=[stop])
    assert told(found) == text[: text.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"


def test_logprobs_are_those_of_the_logits(server: RunningServer, model: Any) -> None:
    found = ask(server, logprobs=True, top_logprobs=3)
    content = found["choices"][0]["logprobs"]["content"]
    assert len(content) == 8 and all(len(c["top_logprobs"]) == 3 for c in content)
    drawn = [c["bytes"][0] for c in content]  # tokens are bytes
    prompt = model.apply_chat_template(HI)
    rows = model.logits([*prompt, *_ids(model, drawn)])[len(prompt) - 1 : -1].astype(np.float64)
    logs = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    expected = logs[np.arange(8), _ids(model, drawn)]
    # the same f32 logits in batches of other sizes: about 1e-6 of their size
    assert np.allclose([c["logprob"] for c in content], expected, atol=1e-4)
    best = np.sort(logs, -1)[:, ::-1][:, :3]
    tops = [[t["logprob"] for t in c["top_logprobs"]] for c in content]
    assert np.allclose(tops, best, atol=1e-4)
    assert ask(server)["choices"][0]["logprobs"] is None
    plain = ask(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(c["top_logprobs"] == [] for c in plain)
    parts = [c["choices"][0]["logprobs"] for c in events(server, URL, FIELDS | {"logprobs": True})]
    assert [t["logprob"] for p in parts if p for t in p["content"]] == [t["logprob"] for t in plain]


def _ids(model: Any, pieces: list[int]) -> list[int]:
    by_byte = {model.tokenizer.piece(t): t for t in range(256)}
    return [by_byte[bytes([b])] for b in pieces]


def test_logit_bias_and_penalties_reach_the_sampler(server: RunningServer, model: Any) -> None:
    token = model.tokenizer.encode("q")[0]
    assert told(ask(server, logit_bias={str(token): 100})) == "q" * 8
    allowed = {str(token): 100, str(model.tokenizer.encode("z")[0]): 99}
    found = told(ask(server, logit_bias=allowed, temperature=0, frequency_penalty=2))
    assert set(found) == {"q", "z"}  # q loses 2 each time
    more = told(ask(server, temperature=0, max_tokens=20))
    alone = model.chat(HI, stream=False, max_tokens=20, temperature=0, repetition_penalty=50.0)
    assert told(ask(server, temperature=0, max_tokens=20, repetition_penalty=50)) == alone.text
    assert alone.text != more


def test_extensions_of_sampling(server: RunningServer, model: Any) -> None:
    greedy = told(ask(server, temperature=0))
    assert told(ask(server, top_k=1)) == greedy
    assert told(ask(server, min_p=1.0)) == greedy
    assert told(ask(server, grammar='root ::= "yes" | "no"')) in ("yes", "no")
    assert told(ask(server, regex="[ab]{3}")).strip("ab") == ""
    stops = model.tokenizer.encode(greedy[0])
    assert told(ask(server, temperature=0, stop_token_ids=stops)) == ""


@pytest.mark.parametrize("stream", [False, True])
def test_answers_follow_a_json_schema(server: RunningServer, stream: bool) -> None:
    schema = {
        "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}
    asked = {"response_format": form, "max_tokens": 60}
    if stream:
        parts = events(server, URL, FIELDS | asked)
        text = "".join(p["choices"][0]["delta"].get("content", "") for p in parts)
    else:
        text = told(ask(server, **asked))
    assert set(json.loads(text)) == {"ok"}
    begun = told(ask(server, response_format={"type": "json_object"}))
    assert begun.startswith("{")


def test_content_parts_and_roles(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    joined = ask(server, messages=[{"role": "user", "content": "H\ni"}])
    assert told(ask(server, messages=[{"role": "user", "content": parts}])) == told(joined)
    system, developer = (
        told(ask(server, messages=[{"role": role, "content": "Be brief."}, *HI]))
        for role in ("system", "developer")
    )
    assert system == developer != told(ask(server))


def test_length_limits_and_aliases(server: RunningServer) -> None:
    assert ask(server, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    body = {"model": "tiny", "messages": HI, "logit_bias": {"65": 100}}
    found = server.post(URL, body).json()  # nothing said: to the end of the context
    assert found["usage"]["total_tokens"] == 256
    assert found["choices"][0]["finish_reason"] == "length"


def test_a_prefix_is_reused(server: RunningServer) -> None:
    long = [{"role": "user", "content": "x" * 150}]
    ask(server, messages=long)
    again = ask(server, messages=long)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128


def test_alone_and_in_a_crowd_the_same_bits(server: RunningServer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    bodies = [
        FIELDS | {"seed": i, "messages": [{"role": "user", "content": "abc" * i}]}
        for i in range(1, 13)
    ]
    alone = [told(server.post(URL, body).json()) for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(lambda body: told(server.post(URL, body).json()), bodies))
    assert crowd == alone
