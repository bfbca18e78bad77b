"""Keys, limits, cancellation, slow readers, metrics, logs, reload and the end of a server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import TINY, RunningServer, StartServer

from rlx.errors import OptionError
from rlx.serve.auth import ApiKeys, is_loopback, keys_of_file, keys_of_text
from rlx.serve.model_pool import ModelSpec
from rlx.serve.server_config import ServerConfig, read_config

CHAT = "/v1/chat/completions"
OK = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
# a byte again and again: never an end, to the context of 256
LONG = OK | {"max_tokens": 200, "logit_bias": {"65": 100}, "temperature": 0}


# -- keys -------------------------------------------------------------------------------------


def test_keys(start: StartServer) -> None:
    server = start(keys=("secret-key-1", "secret-key-2"))
    assert server.client.get("/health").status_code == 200
    for headers, code in (
        ({}, "missing_api_key"),
        ({"Authorization": "Bearer wrong-key-99"}, "invalid_api_key"),
        ({"Authorization": "Basic secret-key-1"}, "missing_api_key"),
        ({"x-api-key": "secret-key-"}, "invalid_api_key"),
    ):
        for path in ("/v1/models", "/metrics"):
            response = server.client.get(path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == code
            assert response.headers["www-authenticate"] == "Bearer"
    for headers in ({"Authorization": "Bearer secret-key-2"}, {"x-api-key": "secret-key-1"}):
        assert server.client.get("/v1/models", headers=headers).status_code == 200
    assert "secret-key" not in server.logged.getvalue()
    assert "key-" in server.logged.getvalue()


def test_keys_from_files_and_text(tmp_path: Path) -> None:
    assert keys_of_text("one-key-a, two-key-b\n# none\nthree-key # last") == [
        "one-key-a", "two-key-b", "three-key",
    ]  # fmt: skip
    file = tmp_path / "keys"
    file.write_text("one-key-a\n")
    file.chmod(0o644)
    with pytest.raises(OptionError, match="others may read"):
        keys_of_file(file)
    file.chmod(0o600)
    assert keys_of_file(file) == ["one-key-a"]
    with pytest.raises(OptionError, match="not an API key"):
        ApiKeys(["short"])


def test_strangers_need_a_key() -> None:
    config = ServerConfig(host="0.0.0.0")
    with pytest.raises(OptionError, match="without a key"):
        config.check()
    assert replace(config, no_auth=True).check() and replace(config, keys=("k" * 8,)).check()
    assert is_loopback("127.0.0.7") and is_loopback("::1") and is_loopback("localhost")
    assert not is_loopback("example.org") and not is_loopback("::")


def test_pages_of_other_sites_are_refused(server: RunningServer, start: StartServer) -> None:
    """A browser lets any page post plain text to this machine, and names can be made to point at
    it. A server without keys does not answer either."""
    own = str(server.client.base_url).rstrip("/")
    for headers, code in (
        ({"Origin": "http://page.example"}, "wrong_origin"),
        ({"Origin": "null"}, "wrong_origin"),
        ({"Host": "page.example"}, "wrong_host"),
        ({"Host": "page.example:8000", "Origin": "http://page.example:8000"}, "wrong_host"),
    ):
        response = server.client.post(CHAT, json=OK, headers=headers)
        assert response.status_code == 403 and response.json()["error"]["code"] == code
    for headers in ({}, {"Origin": own}, {"Host": "localhost:1"}, {"Host": "[::1]:80"}):
        assert server.client.post(CHAT, json=OK, headers=headers).status_code == 200
    keyed = start(keys=("secret-key-1",))
    headers = {"Authorization": "Bearer secret-key-1", "Host": "models.example"}
    assert keyed.client.post(CHAT, json=OK, headers=headers).status_code == 200
    everyone = start(no_auth=True, cors_origins=("http://page.example",))
    headers = {"Host": "models.example", "Origin": "http://page.example"}
    assert everyone.client.post(CHAT, json=OK, headers=headers).status_code == 200
    headers["Origin"] = "http://other.example"
    assert everyone.client.post(CHAT, json=OK, headers=headers).status_code == 403


def test_cors_is_off_unless_asked_for(server: RunningServer, start: StartServer) -> None:
    page = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    asked = server.client.options(CHAT, headers=page)
    assert "access-control-allow-origin" not in asked.headers
    other = start(cors_origins=("http://page.example",), keys=("secret-key-1",))
    asked = other.client.options(CHAT, headers=page)
    assert asked.headers["access-control-allow-origin"] == "http://page.example"
    wrong = other.client.options(CHAT, headers=page | {"Origin": "http://other.example"})
    assert "access-control-allow-origin" not in wrong.headers


# -- clients that go away, and those that do not read -------------------------------------------


def raw(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was sent."""
    made = socket.create_connection((server.client.base_url.host, server.client.base_url.port))
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    made.sendall(head.encode() + data)
    return made


def wait_for(what: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Held:
    """Holds an engine in the middle of a run, so that a test sees requests that run."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.inside = threading.Event(), threading.Event()
        run = engine.runner.run

        def held(*given: Any) -> Any:
            self.inside.set()
            assert self.go.wait(20)
            return run(*given)

        monkeypatch.setattr(engine.runner, "run", held)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    server.post(CHAT, OK)
    server.wait_idle()
    engine = server.engine()
    before = engine.stats().finished.get("cancelled", 0)
    held = Held(engine, monkeypatch)
    gone = raw(server, LONG | {"stream": stream})
    assert held.inside.wait(10)
    gone.close()
    time.sleep(0.1)  # the server sees it while the engine is held
    held.go.set()
    server.wait_idle()
    assert engine.stats().finished.get("cancelled", 0) == before + 1
    assert engine.stats().pages_used == 0
    wait_for(lambda: '"status": 499' in server.logged.getvalue())


def test_a_slow_reader_is_cut_off(start: StartServer) -> None:
    server = start(limits={"write_seconds": 0.3})
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect((server.client.base_url.host, server.client.base_url.port))
    # much more than the buffers of both sides hold
    body = LONG | {"n": 16, "stream": True, "logprobs": True, "top_logprobs": 20}
    data = json.dumps(body).encode()
    slow.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    )
    slow.sendall(data)
    wait_for(lambda: "slow reader" in server.logged.getvalue(), 30)
    server.wait_idle()
    assert server.post(CHAT, OK).status_code == 200
    slow.close()


def test_headers_have_limits(start: StartServer) -> None:
    server = start(limits={"header_bytes": 4096, "header_seconds": 0.3})
    place = (server.client.base_url.host, server.client.base_url.port)
    for sent in (b"GET /health HTTP/1.1\r\nX: " + b"a" * 20000, b"GET /hea"):
        with socket.create_connection(place) as made:
            made.settimeout(10)
            made.sendall(sent)
            try:
                answer = made.recv(1000)
            except ConnectionResetError:
                answer = b""
            assert b"200" not in answer
    assert server.client.get("/health").status_code == 200


def test_a_body_that_does_not_come(start: StartServer) -> None:
    server = start(limits={"body_seconds": 0.2})
    with socket.create_connection(
        (server.client.base_url.host, server.client.base_url.port)
    ) as made:
        made.settimeout(10)
        made.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode()
        )
        assert b" 408 " in made.recv(1000)


def test_a_full_queue_says_when_to_come_again(
    start: StartServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TINY | {"requests": 1, "waiting": 1}
    server = start(models=(ModelSpec("tiny", str(tiny_model), options=options),))
    assert server.post(CHAT, OK).status_code == 200
    held = Held(server.engine(), monkeypatch)
    waiting = [raw(server, LONG)]
    assert held.inside.wait(10)
    waiting.append(raw(server, LONG))
    wait_for(lambda: server.engine().stats().waiting == 1)
    refused = server.post(CHAT, OK)
    held.go.set()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    for made in waiting:
        made.close()
    server.wait_idle()


def test_a_request_has_its_time(start: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(limits={"request_seconds": 0.2})
    server.post(CHAT, OK)  # loads
    server.wait_idle()
    engine = server.engine()
    run = engine.runner.run

    def slow(*given: Any) -> Any:
        time.sleep(0.05)
        return run(*given)

    monkeypatch.setattr(engine.runner, "run", slow)
    found = server.post(CHAT, LONG)
    assert found.status_code == 504 and found.json()["error"]["code"] == "timeout"
    streamed = server.post(CHAT, LONG | {"stream": True})
    assert streamed.status_code == 200 and '"code": "timeout"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")


# -- what can be seen ---------------------------------------------------------------------------


def test_metrics(start: StartServer) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    server = start()
    server.post(CHAT, OK | {"stream": True, "logit_bias": {"65": 100}})
    server.post(CHAT, OK | {"model": "none"})
    server.client.get("/some/other")
    server.wait_idle()
    told = server.client.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (s.name, *sorted(s.labels.values())): s.value
        for family in text_string_to_metric_families(told.text)
        for s in family.samples
    }
    assert found["rlx_requests_total", CHAT, "200"] or found["rlx_requests_total", "200", CHAT]
    assert found["rlx_requests_total", *sorted((CHAT, "404"))] == 1
    assert found["rlx_requests_total", *sorted(("other", "404"))] == 1
    prompt = server.post("/tokenize", {"model": "tiny", "messages": OK["messages"]}).json()["count"]
    assert found["rlx_prompt_tokens_total", "tiny"] == prompt
    assert found["rlx_completion_tokens_total", "tiny"] == 2
    assert found["rlx_engine_tokens_out_total", "tiny"] == 2
    assert found["rlx_time_to_first_token_seconds_count", "tiny"] == 1
    assert found["rlx_inter_token_seconds_count", "tiny"] <= 1
    assert found["rlx_engine_running", "tiny"] == found["rlx_engine_waiting", "tiny"] == 0
    assert found["rlx_kv_pages_free", "tiny"] > 0 == found["rlx_kv_pages_used", "tiny"]
    assert found["rlx_model_loaded", "tiny"] == 1


def test_logs_have_no_prompts_unless_asked(start: StartServer) -> None:
    quiet, loud = start(), start(log_prompts=True)
    body = OK | {"messages": [{"role": "user", "content": "my secret words"}]}
    for one in (quiet, loud):
        one.post(CHAT, body)
        one.post(CHAT, body | {"temperature": "my secret words"})
    lines = [json.loads(line) for line in quiet.logged.getvalue().splitlines()]
    assert "my secret words" not in quiet.logged.getvalue()
    assert "my secret words" in loud.logged.getvalue()
    asked = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in asked] == [200, 400]
    assert asked[0]["completion_tokens"] == 2 and asked[0]["model"] == "tiny"
    assert {"time", "level", "id", "seconds", "path"} <= set(asked[0])


def test_a_failure_of_our_own_is_logged_not_told(
    start: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    server.post(CHAT, OK)
    server.wait_idle()

    def broken(*_: Any) -> Any:
        raise RuntimeError("inner secret")

    with monkeypatch.context() as patch:
        patch.setattr(server.engine().runner, "run", broken)
        failed = server.post(CHAT, OK)
        streamed = server.post(CHAT, OK | {"stream": True})
    assert failed.status_code == 500 and "inner secret" not in failed.text
    assert "internal_error" in streamed.text and "inner secret" not in streamed.text
    assert "inner secret" in server.logged.getvalue()
    assert server.post(CHAT, OK).status_code == 200


# -- configuration, and the end -----------------------------------------------------------------


def test_a_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'api_keys = ["secret-key-1"]\n[limits]\nmost_tokens = 7\n'
        '[[models]]\nname = "a"\npath = "x.gguf"\nrequests = 2\n[models.adapters]\nfine = "f"\n'
    )
    found = read_config(file, ServerConfig())
    assert found.keys == ("secret-key-1",) and found.limits.most_tokens == 7
    (spec,) = found.models
    assert (spec.name, spec.path, spec.options) == ("a", "x.gguf", {"requests": 2})
    assert spec.adapters == (("fine", "f"),)
    for wrong in ("models = 3", "x = 1", "[limits]\nx = 1", "[[models]]\nname = 'a'", "a b"):
        file.write_text(wrong)
        with pytest.raises(OptionError):
            read_config(file, ServerConfig())


def process(arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and its address."""
    started = subprocess.Popen(
        [sys.executable, "-c", "from rlx.cli import main; main()", "serve", "--port=0", *arguments],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert started.stderr is not None
    for line in started.stderr:
        told = json.loads(line)
        if told["event"] == "listening":
            return started, told["address"]
    raise AssertionError("it did not start")


def test_sigterm_finishes_what_runs_and_exits_with_0(tiny_model: Path) -> None:
    running, url = process([f"tiny={tiny_model}", "--shutdown-seconds", "20"])
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        assert client.post(CHAT, json=OK).status_code == 200
        texts: list[str] = []
        with client.stream("POST", CHAT, json=LONG | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)  # it has begun
            running.send_signal(signal.SIGTERM)
            texts += lines
    assert texts[-2:] == ["data: [DONE]", ""]
    assert sum('"finish_reason":"length"' in line for line in texts) == 1
    assert running.wait(20) == 0


def test_sighup_reads_models_and_keys_again(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    model = f'[[models]]\nname = "NAME"\npath = "{tiny_model}"\nthreads = 1\n'
    file.write_text('api_keys = ["secret-key-1"]\n' + model.replace("NAME", "one"))
    running, url = process(["--config", str(file)])
    assert running.stderr is not None

    def listed(key: str) -> list[str]:
        told = httpx.get(f"{url}/v1/models", headers={"x-api-key": key}, trust_env=False).json()
        return [m["id"] for m in told.get("data", [])]

    try:
        assert listed("secret-key-1") == ["one"]
        for text, event in ((model.replace("NAME", "two"), "reloaded"), ("wrong", "reload failed")):
            file.write_text('api_keys = ["secret-key-2"]\n' + text)
            running.send_signal(signal.SIGHUP)
            while json.loads(line := running.stderr.readline())["event"] != event:
                assert line
            assert listed("secret-key-2") == ["two"] and listed("secret-key-1") == []
    finally:
        os.kill(running.pid, signal.SIGTERM)
        assert running.wait(20) == 0
