"""Log probabilities of prompts (`echo` with `logprobs`) against the model's logits in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RunningServer, StartServer
from test_serve_chat import events

import rlx
from rlx.models.batch.engine import Engine

URL = "/v1/completions"
NEAR = 2e-6  # f32 logits of other chunks are the same bits; a sum over the vocabulary is not


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Iterator[Any]:
    with rlx.load(tiny_model, kv="f32", threads=1) as loaded:
        yield loaded


def expected(model: Any, tokens: list[int]) -> Any:
    """Log probabilities [tokens, vocab] after each token."""
    logits = np.asarray(model.logits(tokens), np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random letters, as tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(97, 123, length)]


def ask(server: RunningServer, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 3, "temperature": 0}
    response = server.post(URL, body | more)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("length", [1, 2, 33, 150])
def test_logprobs_of_a_prompt(server: RunningServer, model: Any, length: int) -> None:
    tokens = prompt_of(length)
    answer = ask(server, tokens, max_tokens=0)
    choice, logs = answer["choices"][0], expected(model, tokens)
    told, text = choice["logprobs"], model.decode(tokens)
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert told["tokens"] == list(text) and told["text_offset"] == list(range(length))
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    own = logs[np.arange(length - 1), tokens[1:]]
    assert np.abs(np.array(told["token_logprobs"][1:]) - own).max(initial=0) < NEAR
    best = np.sort(logs, axis=-1)[:, ::-1]
    for at, top in enumerate(told["top_logprobs"][1:]):
        if len(top) == 3:  # tokens with one text are told once
            assert np.abs(np.array([*top.values()]) - best[at, :3]).max() < NEAR


def test_a_generated_token_follows(server: RunningServer, model: Any) -> None:
    tokens = prompt_of(40)
    whole = ask(server, tokens, max_tokens=1, logprobs=1)["choices"][0]
    logs = expected(model, tokens)
    assert len(whole["logprobs"]["tokens"]) == 41
    assert whole["logprobs"]["text_offset"][-1] == 40
    assert abs(whole["logprobs"]["token_logprobs"][-1] - logs[-1].max()) < NEAR
    body = {"model": "tiny", "prompt": tokens, "echo": True, "logprobs": 1, "temperature": 0}
    parts = [p["choices"][0] for p in events(server, URL, body | {"max_tokens": 1})]
    assert "".join(p["text"] for p in parts) == whole["text"]
    for name, rows in whole["logprobs"].items():
        streamed = [row for p in parts if p["logprobs"] for row in p["logprobs"][name]]
        assert streamed == rows, name
    plain = ask(server, tokens, max_tokens=0, logprobs=0)["choices"][0]["logprobs"]
    assert plain["top_logprobs"] is None
    assert plain["token_logprobs"] == whole["logprobs"]["token_logprobs"][:-1]


def test_the_end_token_has_one_too(server: RunningServer, model: Any) -> None:
    """Clients that ask for one token take its row away."""
    tokens = prompt_of(20)
    drawn = int(expected(model, tokens)[-1].argmax())
    told = ask(server, tokens, max_tokens=1, stop_token_ids=[drawn])["choices"][0]
    assert told["finish_reason"] == "stop" and told["text"] == model.decode(tokens)
    assert len(told["logprobs"]["token_logprobs"]) == 21
    assert abs(told["logprobs"]["token_logprobs"][-1] - expected(model, tokens)[-1].max()) < NEAR


def test_scores_do_not_depend_on_company(server: RunningServer) -> None:
    """Bit for bit, with what the prefix cache has and while others run."""
    prompts = [prompt_of(130)[:n] + prompt_of(20, n) for n in (64, 100, 130, 128)]
    alone = [ask(server, p, max_tokens=2)["choices"][0] for p in prompts]
    with ThreadPoolExecutor(8) as workers:
        others = [
            workers.submit(server.post, URL, {"model": "tiny", "prompt": p, "max_tokens": 30})
            for p in prompts
        ]
        together = list(workers.map(lambda p: ask(server, p, max_tokens=2)["choices"][0], prompts))
        assert all(o.result().status_code == 200 for o in others)
    assert together == alone
    joint = ask(server, prompts, max_tokens=2)["choices"]
    assert [c | {"index": 0} for c in joint] == alone


def test_how_much_is_scored_is_bounded(start: StartServer) -> None:
    server = start()
    body = {"model": "tiny", "echo": True, "logprobs": 20, "max_tokens": 0}
    response = server.post(URL, body | {"prompt": [prompt_of(200)] * 64})
    assert response.status_code == 400 and "12483 tokens" in response.text
    server.wait_idle()
    assert server.post(URL, body | {"prompt": prompt_of(200)}).status_code == 200


def test_rows_of_logits_are_bounded(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run never has more rows than executables are compiled for, whatever is scored."""
    with Engine(tiny_model, requests=2, kv="f32", threads=1) as engine:
        most, seen, run = engine.runner.pool.requests + engine.runner.pool.drafts, [], None
        run = engine.runner.run

        def watched(scheduled: Any) -> Any:
            seen.append(sum(part.rows for part in scheduled))
            return run(scheduled)

        monkeypatch.setattr(engine.runner, "run", watched)
        replies = [
            engine.submit(prompt_of(200, i), prompt_logprobs=1, max_tokens=3, speculate=8)
            for i in range(3)
        ]
        assert [len(r.wait().prompt_logprobs) for r in replies] == [199] * 3
        assert max(seen) <= most and max(seen) > 2


def test_answers_that_do_not_end(server: RunningServer, model: Any) -> None:
    """`ignore_eos`, as load generators ask for it."""
    end = min(model.tokenizer.end_ids)
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 9, "logit_bias": {str(end): 100}}
    plain = server.post(URL, body).json()
    assert plain["usage"]["completion_tokens"] == 0
    for path, more in (
        (URL, body),
        ("/v1/chat/completions", body | {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        asked = {n: v for n, v in more.items() if n != "prompt" or path == URL}
        found = server.post(path, asked | {"ignore_eos": True}).json()
        assert found["usage"]["completion_tokens"] == 9, found
        usage = {"include_usage": True, "continuous_usage_stats": True}
        last = events(server, path, asked | {"ignore_eos": True, "stream_options": usage})[-1]
        assert last["usage"]["completion_tokens"] == 9
