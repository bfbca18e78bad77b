"""`/v1/completions`, tokens, vectors and lists of models, against the models used directly."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RunningServer
from test_serve_chat import events

import rlx

URL = "/v1/completions"
FIELDS = {"model": "tiny", "prompt": "abc", "max_tokens": 6, "seed": 3, "temperature": 1.0}


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    with rlx.load(tiny_model, kv="f32", threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def encoder(tiny_encoder: Path) -> Any:
    with rlx.load(tiny_encoder, threads=1) as loaded:
        yield loaded


def ask(server: RunningServer, path: str = URL, **body: Any) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_prompts_of_texts_and_tokens(server: RunningServer, model: Any) -> None:
    alone = model.generate("abc", stream=False, max_tokens=6, seed=3, temperature=1.0).text
    assert ask(server, **FIELDS)["choices"][0]["text"] == alone
    tokens = model.tokenize("abc")
    assert ask(server, **FIELDS | {"prompt": tokens})["choices"][0]["text"] == alone
    many = ask(server, **FIELDS | {"prompt": ["abc", "x"], "n": 2})
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3]
    assert many["choices"][0]["text"] == alone
    assert many["usage"]["prompt_tokens"] == 4 and many["usage"]["completion_tokens"] == 24
    lists = ask(server, **FIELDS | {"prompt": [tokens, model.tokenize("x")], "n": 2})
    assert [c["text"] for c in lists["choices"]] == [c["text"] for c in many["choices"]]
    streamed = [""] * 4
    for chunk in events(server, URL, FIELDS | {"prompt": ["abc", "x"], "n": 2}):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == [c["text"] for c in many["choices"]]


def test_echo_default_length_and_logprobs(server: RunningServer) -> None:
    plain = ask(server, **FIELDS)["choices"][0]["text"]
    assert ask(server, **FIELDS | {"echo": True})["choices"][0]["text"] == "abc" + plain
    parts = events(server, URL, FIELDS | {"echo": True})
    assert "".join(p["choices"][0]["text"] for p in parts) == "abc" + plain
    short = {n: v for n, v in FIELDS.items() if n != "max_tokens"} | {"logit_bias": {"65": 100}}
    assert ask(server, **short)["usage"]["completion_tokens"] == 16
    told = ask(server, **FIELDS | {"logprobs": 2})["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == 6
    assert all(1 <= len(top) <= 2 for top in told["top_logprobs"])
    for token, p, top in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert p <= max(top.values()) + 1e-9
        assert token not in top or token == "\ufffd" or top[token] == p


def test_streamed_usage_of_several_prompts(server: RunningServer) -> None:
    body = FIELDS | {"prompt": ["abc", "x"], "stream_options": {"include_usage": True}}
    last = events(server, URL, body)[-1]
    assert last["usage"]["prompt_tokens"] == 4 and last["usage"]["completion_tokens"] == 12


def test_tokens_there_and_back(server: RunningServer, model: Any) -> None:
    found = ask(server, "/tokenize", model="tiny", prompt="héllo", with_pieces=True)
    assert found["tokens"] == model.tokenize("héllo")
    assert (found["count"], found["max_model_len"], len(found["pieces"])) == (6, 256, 6)
    assert ask(server, "/detokenize", model="tiny", tokens=found["tokens"])["text"] == "héllo"
    talk = [{"role": "user", "content": "Hi"}]
    chat = ask(server, "/tokenize", model="tiny", messages=talk)
    assert chat["tokens"] == model.apply_chat_template(talk)
    assert server.post("/tokenize", {"model": "tiny"}).status_code == 400
    assert ask(server, "/tokenize", model="encoder", prompt="the cat")["count"] == 4


def test_vectors_are_those_of_the_encoder(server: RunningServer, encoder: Any) -> None:
    texts = ["the cat", "a b c", "?"]
    expected = encoder.embed(texts)
    found = ask(server, "/v1/embeddings", model="encoder", input=texts)
    rows = np.array([d["embedding"] for d in found["data"]], np.float32)
    assert np.array_equal(rows, expected)  # the shortest decimals that are these numbers
    assert [d["index"] for d in found["data"]] == [0, 1, 2]
    tokens = [encoder.tokenizer.encode(t) for t in texts]
    assert found["usage"]["prompt_tokens"] == sum(map(len, tokens))
    packed = ask(server, "/v1/embeddings", model="encoder", input=texts, encoding_format="base64")[
        "data"
    ][1]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), expected[1])
    bare = [encoder.tokenizer.encode(t, add_special=False) for t in texts]
    by_ids = ask(server, "/v1/embeddings", model="encoder", input=bare)
    assert [d["embedding"] for d in by_ids["data"]] == [d["embedding"] for d in found["data"]]
    one = ask(server, "/v1/embeddings", model="encoder", input=texts[0])["data"]
    assert one[0]["embedding"] == found["data"][0]["embedding"]


def test_dimensions_and_lengths_of_vectors(server: RunningServer, encoder: Any) -> None:
    found = ask(server, "/v1/embeddings", model="encoder", input="the cat", dimensions=5)
    expected = encoder.embed("the cat", truncate_dim=5)
    assert np.array_equal(np.array(found["data"][0]["embedding"], np.float32), expected)
    body = {"model": "encoder", "input": "the cat"}
    for wrong in ({"dimensions": 4096}, {"dimensions": 0}, {"input": ""}, {"input": []},
                  {"input": "a " * 500}, {"encoding_format": "hex"}):  # fmt: skip
        response = server.post("/v1/embeddings", body | wrong)
        assert response.status_code == 400, (wrong, response.text)
    cut = ask(server, "/v1/embeddings", model="encoder", input="a " * 500, truncate=True)
    assert cut["usage"]["prompt_tokens"] == encoder.max_tokens


@pytest.mark.parametrize("name", ["encoder", "reranker"])
def test_documents_are_ranked(
    server: RunningServer, tiny_encoder: Path, tiny_reranker: Path, name: str
) -> None:
    texts = ["a b", "the cat", "x y z", "?"]
    with rlx.load(tiny_encoder if name == "encoder" else tiny_reranker, threads=1) as alone:
        expected = alone.rerank("the cats", texts, top=3)
    found = ask(
        server, "/v1/rerank", model=name, query="the cats", documents=texts, top_n=3,
        return_documents=True,
    )  # fmt: skip
    assert [r["index"] for r in found["results"]] == [r.index for r in expected]
    assert [r["relevance_score"] for r in found["results"]] == [r.score for r in expected]
    assert [r["document"]["text"] for r in found["results"]] == [texts[r.index] for r in expected]
    assert found["usage"]["total_tokens"] > 0


def test_models_are_listed(server: RunningServer) -> None:
    found = server.client.get("/v1/models").json()
    assert [m["id"] for m in found["data"]] == ["tiny", "encoder", "reranker"]
    assert server.client.get("/v1/models/tiny").json()["object"] == "model"
