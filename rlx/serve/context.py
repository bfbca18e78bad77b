"""What the handlers of a server share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from rlx.serve.api_errors import ApiError
from rlx.serve.auth import ApiKeys
from rlx.serve.chat import Answers, Terms
from rlx.serve.events import Event, Finished
from rlx.serve.json_body import Fields, read_json
from rlx.serve.logs import Log
from rlx.serve.merge import merged
from rlx.serve.metrics import Metrics
from rlx.serve.model_pool import ModelPool
from rlx.serve.server_config import Limits, ServerConfig
from rlx.serve.streams import while_connected

_T = TypeVar("_T")
_PRIORITY = 100


class ServerContext:
    """A server's models, keys, limits, metrics and log."""

    def __init__(self, config: ServerConfig, log: Log | None = None) -> None:
        self.config = config
        self.log = log or Log(prompts=config.log_prompts)
        limits = config.limits
        self.pool = ModelPool(
            config.models, idle_seconds=config.idle_seconds, most_tokens=limits.most_tokens,
            default_tokens=limits.default_tokens, on_event=self.log,
        )  # fmt: skip
        self.keys = ApiKeys(config.keys)
        self.metrics = Metrics(self.pool.loaded)
        self.draining = False
        self.tag = ""  # of this server among others; ids of stored responses begin with it

    @property
    def limits(self) -> Limits:
        return self.config.limits

    def reload(self, config: ServerConfig) -> None:
        """Models, keys and limits of another configuration, from the next request on."""
        config.check()
        self.keys.replace(config.keys)
        self.pool.configure(config.models)
        self.config = config

    async def observed(
        self, answers: Answers, request: Request
    ) -> AsyncIterator[tuple[int, Event]]:
        """Events of all answers with their numbers, counted and timed."""
        metrics, name = self.metrics, answers.model.name
        first, between = metrics.first_token.labels(name), metrics.inter_token.labels(name)
        last: list[float | None] = [None] * len(answers.answers)
        told = request.scope.setdefault("rlx.log", {})
        told["model"] = name
        told["prompt_tokens"] = told.get("prompt_tokens", 0) + len(answers.prompt)
        began = request.scope.get("rlx.began", time.perf_counter())
        metrics.prompt_tokens.labels(name).inc(len(answers.prompt))
        async for number, event in merged(answers.answers):
            if isinstance(event, Finished):
                metrics.completion_tokens.labels(name).inc(event.usage.completion_tokens)
                metrics.cached_tokens.labels(name).inc(event.usage.cached_tokens)
                written = told.get("completion_tokens", 0) + event.usage.completion_tokens
                told["completion_tokens"] = written
                told["finish_reason"] = event.reason
                check_end(event)
            else:
                now, before = time.perf_counter(), last[number]
                if before is None:
                    first.observe(now - began)
                else:
                    between.observe(now - before)
                last[number] = now
            yield number, event


def check_end(event: Finished) -> None:
    """Raise for an answer that was not finished."""
    if event.reason == "timeout":
        raise ApiError(504, "The answer took longer than a request may.", code="timeout")
    if event.reason == "cancelled":
        raise ApiError(503, "The answer was cancelled: the server shuts down.", code="cancelled")
    if event.reason == "error":
        raise ApiError(500, "The server failed to answer; its log says why.", code="internal_error")


def context_of(request: Request) -> ServerContext:
    found: ServerContext = request.app.state.context
    return found


async def body_of(request: Request, known: frozenset[str]) -> Fields:
    """The fields of the body of a request."""
    context = context_of(request)
    limits = context.limits
    body = await read_json(request, limits.body_bytes, limits.body_seconds)
    if context.log.prompts:
        request.scope.setdefault("rlx.log", {})["body"] = body
    return Fields(body, known)


def terms_of(request: Request, fields: Fields) -> Terms:
    """How a request is scheduled: its key or address has a fair share."""
    priority = fields.whole("priority", -_PRIORITY, _PRIORITY) or 0
    caller = request.scope.get("rlx.caller")
    user = None if caller is None else caller.name
    return Terms(priority, user, context_of(request).limits.request_seconds)


async def connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """`work`, cancelled if the client goes away."""
    return await while_connected(request, work)
