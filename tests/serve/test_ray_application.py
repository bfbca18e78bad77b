"""Parts of the application of Ray Serve that need no cluster: prefixes, settings, passing on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlx.errors import OptionError
from rlx.serve.prefix_keys import prefix_keys
from rlx.serve.ray_request import RoutedRequest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray, in its own files
]


def _keys(**body: Any) -> list[bytes]:
    return prefix_keys(json.dumps(body).encode())


def _shared(a: list[bytes], b: list[bytes]) -> int:
    """How many keys both begin with; a later one is never equal again."""
    same = [x == y for x, y in zip(a, b, strict=False)]
    assert same == sorted(same, reverse=True)
    assert len({*a, *b}) == len(a) + len(b) - sum(same)
    return sum(same)


def test_requests_share_keys_as_far_as_they_begin_alike() -> None:
    system = {"role": "system", "content": "You are a pirate. " * 30}  # 540 characters
    asked = [[system, {"role": "user", "content": t}] for t in ("Who?", "What is there to see?")]
    one, two = (_keys(model="m", messages=m) for m in asked)
    assert _shared(one, two) == 6  # 580 characters in blocks of 96
    longer = _keys(model="m", messages=[*asked[0], {"role": "assistant", "content": "Me! " * 50}])
    assert _shared(one, longer) == len(one) - 1  # all but the last, which was no whole block
    assert _shared(one, _keys(model="other", messages=asked[0])) == 0
    assert _shared(one, _keys(model="m", tools=[{"name": "f"}], messages=asked[0])) == 0
    assert _shared(_keys(prompt="a" * 500), _keys(prompt="a" * 300 + "b" * 200)) == 3
    assert _keys(prompt="short") == _keys(prompt="short", max_tokens=3, stream=True)


def test_any_body_has_keys_or_none() -> None:
    for body in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"prompt": 3}', b"null"):
        assert prefix_keys(body) == []
    assert prefix_keys(b'{"prompt": "\\ud800 alone"}')
    long = _keys(prompt="x" * 1_000_000)
    assert len(long) == 512


def test_a_request_is_carried_without_its_prefix_and_to_the_replica_with_its_response() -> None:
    scope = {"type": "http", "method": "GET", "path": "/llm/v1/responses/resp_00ff00ff_abc",
             "root_path": "/llm", "headers": [], "app": object(), "state": {}}  # fmt: skip
    routed = RoutedRequest.of(scope, b"")
    assert routed.home == "00ff00ff" and "app" not in routed.scope
    assert routed.scope["path"] == "/v1/responses/resp_00ff00ff_abc"
    there = {**scope, "path": "/llm/v1/responses", "method": "POST"}
    body = b'{"previous_response_id": "resp_12345678_9", "input": "go on"}'
    assert RoutedRequest.of(there, body).home == "12345678"
    for wrong in (b'{"previous_response_id": 3}', b'{"previous_response_id"', b"{}"):
        assert RoutedRequest.of(there, wrong).home == ""


def test_an_answer_ends_with_its_reader_and_waits_for_a_slow_one() -> None:
    from rlx.serve.ray import _QUEUED, run_app

    sent, ended = [0], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"hello"
        leaving = asyncio.ensure_future(receive())
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            sent[0] += 1
        ended.append(leaving.result()["type"])

    async def deaf(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def main() -> None:
        answer = run_app(app, RoutedRequest({}, b"hello"))
        assert (await anext(answer))[0]["body"] == b"x"
        for _ in range(100):
            await asyncio.sleep(0)
        assert sent[0] <= 2 * _QUEUED, "no more than a queue ahead of the reader"
        await asyncio.wait_for(answer.aclose(), 5)
        answer = run_app(deaf, RoutedRequest({}, b""))
        await anext(answer)
        await asyncio.wait_for(answer.aclose(), 5)

    asyncio.run(main())
    assert ended == ["http.disconnect", "cancelled"]


def test_a_failed_application_is_an_error_of_the_reader() -> None:
    from rlx.serve.ray import run_app

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start"})
        raise KeyError("broken")

    async def main() -> list[Any]:
        found: list[Any] = []
        with pytest.raises(KeyError, match="broken"):
            async for some in run_app(app, RoutedRequest({}, b"")):
                found += some
        return found

    assert asyncio.run(main()) == [{"type": "http.response.start"}]


def test_the_example_of_a_configuration_is_one_of_ray_serve() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from rlx.serve.ray import app

    told = yaml.safe_load((ROOT / "deploy" / "ray-serve.yaml").read_text(encoding="utf-8"))
    schema = ServeDeploySchema(**told)
    (application,) = schema.applications
    assert application.import_path == "rlx.serve.ray:app"
    front = app(application.args)._bound_deployment
    assert front.name == "Front" and [d.name for d in application.deployments] == ["Models"]
    models = front.init_args[0]._bound_deployment
    config = models.init_args[0]
    assert [(m.name, m.options["requests"], m.options["threads"]) for m in config.models] == [
        ("chat", 16, 4)
    ]
    scale = models._deployment_config.autoscaling_config
    assert (scale.min_replicas, scale.max_replicas, scale.target_ongoing_requests) == (1, 8, 16)
    assert models.ray_actor_options["num_cpus"] == 4


def test_arguments_that_are_wrong_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx.serve.ray import app

    monkeypatch.delenv("RLX_API_KEYS", raising=False)
    for args, what in (
        ({"model": "m"}, "without a key"),
        ({"no_auth": True}, "no model to serve"),
        ({"model": "m", "no_auth": True, "replica": 2}, "unknown setting"),
        ({"models": [{"name": "m"}], "no_auth": True}, "a model without a path"),
        ({"model": "m", "api_keys": ["short"]}, "not an API key"),
        ({"model": "m", "no_auth": True, "replicas": 0}, "not a number of replicas"),
        ({"model": "m", "no_auth": True, "replicas": [1, 2, 3]}, "not a number of replicas"),
    ):
        with pytest.raises(OptionError, match=what):
            app(args)
    monkeypatch.setenv("RLX_API_KEYS", "a-key-of-the-machine")
    assert app({"model": "m", "replicas": "2"})._bound_deployment.name == "Front"


@pytest.mark.parametrize("module", ["rlx.serve.ray", "rlx.ray"])
def test_without_ray_the_error_says_what_to_install(module: str) -> None:
    code = f"""
import sys
sys.modules["ray"] = None
import importlib
try:
    importlib.import_module("{module}").embed(None, "model")
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.startswith("UnsupportedError") and "ray[serve,data]" in done.stdout
