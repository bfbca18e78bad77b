"""Mutated requests to a running server: an answer, or a 4xx in the shape of the interface that says
what is wrong; never a 5xx, a hang, or a slot that stays taken."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from conftest import TINY, RunningServer
from request_mutations import LISTS, VALID, Sent, mutated

from rlx.serve.model_pool import ModelSpec
from rlx.serve.server_config import Limits, ServerConfig

SECONDS = 10  # the most for one request, on a busy machine
LEAKS = ("Traceback", ".py", "site-packages", "object at 0x", "rlx.")


@pytest.fixture(scope="module")
def fuzzed(tool_model: Path, tiny_encoder: Path, tiny_reranker: Path) -> Iterator[RunningServer]:
    specs = (
        ModelSpec("tiny", str(tool_model), options=TINY | {"context": 512}),
        ModelSpec("encoder", str(tiny_encoder), options={"threads": 1}),
        ModelSpec("reranker", str(tiny_reranker), options={"threads": 1}),
    )
    limits = Limits(body_bytes=256 << 10, body_seconds=2, most_tokens=64, default_tokens=8)
    running = RunningServer(ServerConfig(specs, port=0, shutdown_seconds=5, limits=limits))
    yield running
    running.stop()


def send(server: RunningServer, sent: Sent) -> httpx.Response:
    headers = {k.encode("latin-1", "replace"): v.encode("latin-1") for k, v in sent.headers.items()}
    return server.client.request(
        sent.method, sent.path, content=sent.content(), headers=headers, timeout=SECONDS
    )


def told_error(found: httpx.Response, path: str) -> str:
    """The message of an error, which has the shape of its interface."""
    body = found.json()
    if path.startswith("/v1/messages") and "type" in body:
        assert body["type"] == "error" and set(body["error"]) <= {"type", "message", "details"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    message: str = body["error"]["message"]
    assert 10 < len(message) < 2500 and not [leak for leak in LEAKS if leak in message], message
    return message


def check(server: RunningServer, sent: Sent) -> int:
    found = send(server, sent)
    assert found.status_code < 500, server.logged.getvalue()[-3000:]
    if found.status_code >= 400:
        if sent.method != "HEAD":
            told_error(found, sent.path)
        return found.status_code
    assert not sent.wrong, found.text[:300]
    if found.headers["content-type"].startswith("text/event-stream"):
        for line in found.text.split("\n"):
            if line.startswith("data: {"):
                told = json.loads(line.removeprefix("data: "))
                assert told.get("type") != "error" and not told.get("error"), line
    elif found.headers["content-type"] == "application/json" and found.content:
        assert "error" not in found.json() or found.json()["error"] is None
    return found.status_code


def test_what_is_mutated_is_valid(fuzzed: RunningServer) -> None:
    for sent in (*VALID, *LISTS):
        assert send(fuzzed, sent).status_code == 200, send(fuzzed, sent).text


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 200), pytest.param(2, 2000, marks=pytest.mark.nightly)]
)
def test_mutated_requests(fuzzed: RunningServer, seed: int, count: int) -> None:
    rng, seen = random.Random(seed), Counter[int]()
    known = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "temperature": 0}
    before = fuzzed.post("/v1/completions", known).json()["choices"]
    for number in range(count):
        way, sent = mutated(rng)
        try:
            seen[check(fuzzed, sent)] += 1
        except (AssertionError, httpx.HTTPError) as error:
            shown = repr(sent.content())[:1500]
            where = f"{number}: {way}: {sent.method} {sent.path} {sent.headers}"
            raise AssertionError(f"{where}\n{shown}\n{error!r}") from error
    assert seen[400] > count / 3 and seen[200] > count / 50 and seen[404] and seen[405], seen
    fuzzed.wait_idle()
    assert fuzzed.post("/v1/completions", known).json()["choices"] == before
    events = [json.loads(line)["event"] for line in fuzzed.logged.getvalue().splitlines()]
    assert not {"failed", "stream failed"} & {*events}


@pytest.mark.parametrize("sent", [VALID[n] for n in (2, 5, 8, 9)], ids=lambda sent: sent.path)
def test_a_wrong_flag_holds_no_model(fuzzed: RunningServer, sent: Sent) -> None:
    found = fuzzed.post(sent.path, sent.body | {"stream": "yes"})
    assert found.status_code == 400 and "'stream'" in told_error(found, sent.path)
    fuzzed.wait_idle(1)


HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
BODY = json.dumps(VALID[2].body)
BROKEN = {
    "a body that ends early": f"{HEAD}Content-Length: {len(BODY) + 50}\r\n\r\n{BODY}",
    "a length that is no number": f"{HEAD}Content-Length: ten\r\n\r\n{BODY}",
    "a negative length": f"{HEAD}Content-Length: -5\r\n\r\n{BODY}",
    "a huge length": f"{HEAD}Content-Length: 99999999999999999999\r\n\r\n{BODY}",
    "two lengths": f"{HEAD}Content-Length: 5\r\nContent-Length: 900\r\n\r\n{BODY}",
    "a chunk of no size": f"{HEAD}Transfer-Encoding: chunked\r\n\r\nzz\r\n{BODY}\r\n0\r\n\r\n",
    "an endless chunk": f"{HEAD}Transfer-Encoding: chunked\r\n\r\nfffffff\r\n{BODY}",
    "length and chunks": f"{HEAD}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no request": "\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "no version": "POST /v1/chat/completions\r\n\r\n",
    "a line break in a header": f"{HEAD}X: a\r\n b\x00c\r\n\r\n",
    "many headers": HEAD + "".join(f"X-{i}: y\r\n" for i in range(9000)) + "\r\n",
    "half a head": HEAD,
}


CASES = [(name, closes) for name in BROKEN for closes in (True, False)]
CASES.remove(("half a head", False))  # waits for the time of a head, as another test does


@pytest.mark.parametrize(("name", "closes"), CASES)
def test_broken_http(fuzzed: RunningServer, name: str, closes: bool) -> None:
    """A client that breaks the protocol gets a 4xx or a closed connection, within the time for a
    body; one that also leaves costs nothing."""
    place = urlsplit(fuzzed.url)
    with socket.create_connection((place.hostname, place.port), timeout=SECONDS) as connection:
        connection.sendall(BROKEN[name].encode("latin-1"))
        if closes:
            connection.shutdown(socket.SHUT_WR)
        begin, answer = time.monotonic(), b""
        try:
            while part := connection.recv(65536):
                answer += part
                if b"\r\n\r\n" in answer:
                    break
        except ConnectionError:
            pass
    assert time.monotonic() - begin < SECONDS
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    fuzzed.wait_idle()
    assert fuzzed.client.get("/health").status_code == 200


def test_the_mutations_reach_every_path() -> None:
    rng = random.Random(3)
    seen: Any = Counter(mutated(rng)[1].path for _ in range(2000))
    assert all(seen[path] > 20 for path in {sent.path for sent in VALID})
