"""A Ray Serve application: the server of `rlx serve` on many machines.

    serve run rlx.serve.ray:app model=smollm2-135m no_auth=true

Two deployments. `Front` reads requests, and passes each to a replica of `Models`, which its
`PrefixRouter` chooses; `Models` runs the application of `rlx serve`, with models of its own.
Ray starts replicas again that die, and more of them as requests queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from rlx.errors import OptionError, UnsupportedError, did_you_mean
from rlx.serve.api_errors import ApiError, error_response
from rlx.serve.app import OPEN_PATHS, make_app
from rlx.serve.auth import ApiKeys
from rlx.serve.context import ServerContext
from rlx.serve.json_body import read_body
from rlx.serve.model_pool import ModelSpec
from rlx.serve.ray_request import RoutedRequest
from rlx.serve.server_config import ServerConfig, config_of, find_keys

try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.config import RequestRouterConfig
    from ray.serve.exceptions import BackPressureError

    from rlx.serve.prefix_router import PrefixRouter, replica_tag
except ImportError as missing:
    raise UnsupportedError(
        f"this needs Ray Serve, which is not installed ({missing})", where="rlx.serve.ray",
        hint="pip install 'ray[serve,data]'",
    ) from None  # fmt: skip

_ATTEMPTS = 3
_QUEUED = 64  # messages of an answer that wait for the front
_LAST_SECONDS = 1.0  # for the end of an answer that nobody reads
_OWN = {"model", "replicas", "fronts", "cpus", "gpus", "spread", "no_auth", "log_prompts"}
_SHARED = ("models", "api_keys", "api_key_file", "limits")  # with the file of `rlx serve`


class Front:
    """Lets requests in, finds a replica for each, and repeats those whose replica died before it
    began to answer."""

    def __init__(self, models: Any, config: ServerConfig) -> None:
        self._models = models.options(stream=True)
        self._keys, self._limits = ApiKeys(config.keys), config.limits

    def __serve_build_asgi_app__(self) -> Any:
        return Starlette(routes=[Mount("/", app=self._serve)])

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            request = await self._read(Request(scope, receive))
            await self._pass_on(request, send)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)

    async def _read(self, request: Request) -> RoutedRequest:
        """The request with its body; strangers may not send one."""
        limits, client = self._limits, request.client
        routed = RoutedRequest.of(request.scope, b"")
        if routed.scope["path"] not in OPEN_PATHS and request.method != "OPTIONS":
            self._keys.caller(request.headers, client.host if client else "local")
        body = await read_body(request, limits.body_bytes, limits.body_seconds)
        return RoutedRequest.of(request.scope, body)

    async def _pass_on(self, request: RoutedRequest, send: Send) -> None:
        for attempt in range(_ATTEMPTS):
            began = False
            answer = self._models.answer.remote(request)
            try:
                async for messages in answer:
                    for message in messages:
                        began = True
                        await send(message)
                return
            except BackPressureError as error:
                raise ApiError(
                    429, "The queue is full.", code="queue_full", headers={"Retry-After": "1"}
                ) from error
            except RayActorError as error:
                if began:  # a part of the answer is sent: only an end is left
                    raise
                if attempt == _ATTEMPTS - 1:
                    raise ApiError(
                        503, "The replica that answered was lost.", code="replica_lost",
                        headers={"Retry-After": "1"},
                    ) from error  # fmt: skip
            finally:
                answer.cancel()  # whoever asked may be gone


class Models:
    """A replica: models, and the application that answers with them."""

    async def __init__(self, config: ServerConfig) -> None:  # type: ignore[misc]
        self._context = ServerContext(config)
        self._context.tag = replica_tag(serve.get_replica_context().replica_id)
        self._app = make_app(self._context)
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()
        for info in self._context.pool.models():  # a replica is ready when its models are
            if info.parent is None:
                (await self._context.pool.acquire(info.name, "tokens")).release()

    async def __del__(self) -> None:
        await self._life.__aexit__(None, None, None)

    async def answer(self, request: RoutedRequest) -> AsyncIterator[list[Message]]:
        """Messages of the answer, as many at once as there are."""
        async with aclosing(run_app(self._app, request)) as messages:
            async for some in messages:
                yield some


async def run_app(app: Any, request: RoutedRequest) -> Any:
    """Run an ASGI application for a request that is here whole. It waits for a reader of its
    messages that is slow; one that goes away is a client that does."""
    queue: asyncio.Queue[Message | None] = asyncio.Queue(_QUEUED)
    given = [{"type": "http.request", "body": request.body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if given:
            return given.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message | None) -> None:
        if not gone.is_set():
            await queue.put(message)

    async def work() -> None:
        try:
            await app(dict(request.scope), receive, send)
        finally:
            await send(None)

    working = asyncio.ensure_future(work())
    try:
        ended = False
        while not ended:
            some = [await queue.get()]
            while not queue.empty():
                some.append(queue.get_nowait())
            ended = some[-1] is None
            if messages := [message for message in some if message is not None]:
                yield messages
        await working
    finally:
        gone.set()
        while not queue.empty():  # what waits for room goes on
            queue.get_nowait()
        await asyncio.wait({working}, timeout=_LAST_SECONDS)
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working


def app(args: Mapping[str, Any]) -> Any:
    """The application, of the `args` in a configuration of Ray Serve.

    `models`, `limits`, `api_keys` and `api_key_file` are those of the file of `rlx serve`; `model`
    is one `MODEL` or `NAME=MODEL`. `replicas` is a number, or [least, most] to follow the requests
    that run and wait, or all of Ray's `autoscaling_config`; each takes `cpus` (1) and `gpus`. A
    replica with the prefix of a request is preferred unless it has `spread` (8) requests more than
    another.
    """
    config = _config(args)
    requests = max((int(m.options.get("requests") or 8) for m in config.models), default=8)
    cpus = float(args.get("cpus", 1))
    specs = tuple(
        replace(m, options={"threads": max(1, int(cpus)), **m.options}) for m in config.models
    )
    router = RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={"spread": int(args.get("spread", 8))},
    )
    models = serve.deployment(Models).options(
        **_scale(args.get("replicas", 1), requests),
        max_ongoing_requests=4 * requests,
        max_queued_requests=1024,
        health_check_period_s=2,  # after which another is started
        request_router_config=router,
        ray_actor_options={"num_cpus": cpus, "num_gpus": float(args.get("gpus", 0))},
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        name="Front",
        num_replicas=int(args.get("fronts", 1)),
        max_ongoing_requests=config.limits.connections,
        ray_actor_options={"num_cpus": 0},
    )
    bound = models.bind(replace(config, models=specs))
    return front.bind(bound, replace(config, models=()))


def _scale(replicas: Any, requests: int) -> dict[str, Any]:
    """How many replicas: a number, or what the requests that run and wait need."""
    if isinstance(replicas, list | tuple) and len(replicas) == 2:
        replicas = {"min_replicas": int(replicas[0]), "max_replicas": int(replicas[1])}
    if isinstance(replicas, Mapping):
        return {"autoscaling_config": {"target_ongoing_requests": requests, **replicas}}
    if not str(replicas).isdigit() or not int(replicas):
        raise OptionError(
            "not a number of replicas", where="replicas", got=repr(replicas)[:60],
            expected="a number above 0, [least, most], or an autoscaling_config of Ray Serve",
        )  # fmt: skip
    return {"num_replicas": int(replicas)}


def _config(args: Mapping[str, Any]) -> ServerConfig:
    where = Path("args of rlx.serve.ray:app")
    base = ServerConfig(
        models=(ModelSpec.of(args["model"]),) if "model" in args else (),
        keys=find_keys((), None),
        no_auth=str(args.get("no_auth", "")).lower() == "true",
        log_prompts=str(args.get("log_prompts", "")).lower() == "true",
        idle_seconds=0.0,
    )
    wrong = [name for name in args if name not in (*_OWN, *_SHARED)]
    if wrong:
        names = sorted((*_OWN, *_SHARED))
        raise OptionError(
            "unknown setting", where=str(where), got=wrong[0], expected=", ".join(names),
            hint=did_you_mean(wrong[0], names),
        )  # fmt: skip
    config = config_of({name: args[name] for name in args if name in _SHARED}, where, base)
    ApiKeys(config.keys)  # those that are none are told now
    if not config.models:
        raise OptionError("no model to serve", where=str(where), hint="give model or models")
    if not config.keys and not config.no_auth:
        raise OptionError(
            "others could use this application without a key", where=str(where),
            hint="give api_key_file (or RLX_API_KEYS), or no_auth: true if everyone may who "
            "reaches the address of Ray's proxy",
        )  # fmt: skip
    return config
