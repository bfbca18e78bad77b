"""The ASGI application: routes, and what every request goes through."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlx.serve.anthropic import messages
from rlx.serve.api_errors import ApiError, api_error, error_response
from rlx.serve.auth import is_loopback, refuse_other_sites
from rlx.serve.context import ServerContext, context_of
from rlx.serve.openai import responses
from rlx.serve.openai.chat_completions import chat_completions
from rlx.serve.openai.completions import completions
from rlx.serve.openai.embeddings import embeddings, rerank
from rlx.serve.openai.listing import detokenize, model, models, tokenize
from rlx.serve.page import chat_page

OPEN_PATHS = {"/health", "/"}
"""What needs no key."""


async def health(request: Request) -> Response:
    """Whether the server takes requests."""
    context = context_of(request)
    told = {"status": "draining" if context.draining else "ok"}
    return JSONResponse(told, 503 if context.draining else 200)


async def metrics(request: Request) -> Response:
    told = context_of(request).metrics
    return Response(told.text(), headers={"content-type": told.content_type})


ROUTES = [
    Route("/", chat_page, methods=["GET"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    *responses.routes(),
    *messages.routes(),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v1/rerank", rerank, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{name:path}", model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
]


class Gate:
    """Lets requests in: keys, the end of the server, a number for each, its metrics and its line in
    the log."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self.app, self.context = app, context
        self._paths = {r.path for r in ROUTES if isinstance(r, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, number = time.perf_counter(), secrets.token_hex(8)
        scope["rlx.began"], scope["rlx.log"] = began, {}
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()), (b"x-request-id", number.encode())
                ]  # fmt: skip
            await send(message)

        context, path = self.context, scope["path"]
        context.metrics.in_flight.inc()
        try:
            refused = self._refusal(scope)
            if refused is not None:
                await error_response(refused, path)(scope, receive, watched)
            else:
                await self.app(scope, receive, watched)
        except Exception as error:
            told = self._failure(error, path)
            if status:  # a part of the answer is sent: only an end is left
                raise
            await error_response(told, path)(scope, receive, watched)
        finally:
            seconds = time.perf_counter() - began
            gone = scope.get("rlx.gone")
            shown = path if path in self._paths else "other"
            context.metrics.in_flight.dec()
            context.metrics.requests.labels(shown, "499" if gone else str(status)).inc()
            context.metrics.seconds.labels(shown).observe(seconds)
            self._log(scope, number, 499 if gone else status, seconds)

    def _failure(self, error: Exception, path: str) -> ApiError:
        told = api_error(error)
        if told.status == 500 and not isinstance(error, ApiError):
            self.context.log.failure("failed", error, path=path[:200])
        if told.status in (408, 413):
            told.headers["Connection"] = "close"  # the rest of the body is not read
        return told

    def _refusal(self, scope: Scope) -> ApiError | None:
        path, context = scope["path"], self.context
        if path in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        try:
            client, config = scope.get("client"), context.config
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
            if not context.keys:
                local = is_loopback(config.host) and not config.no_auth
                refuse_other_sites(headers, config.cors_origins, local)
            scope["rlx.caller"] = context.keys.caller(headers, client[0] if client else "local")
        except ApiError as error:
            return error
        if context.draining and path != "/metrics":
            wait = {"Retry-After": "5", "Connection": "close"}
            return ApiError(503, "The server is shutting down.", code="shutting_down", headers=wait)
        return None

    def _log(self, scope: Scope, number: str, status: int, seconds: float) -> None:
        caller, told = scope.get("rlx.caller"), dict(scope["rlx.log"])
        if scope.get("rlx.gone"):
            told["gone"] = scope["rlx.gone"]
        level = logging.ERROR if status >= 500 and status != 503 else logging.INFO
        self.context.log(
            "request", level=level, id=number, method=scope["method"], path=scope["path"][:200],
            status=status, seconds=round(seconds, 4),
            caller=None if caller is None else caller.name, **told,
        )  # fmt: skip


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    what = "Unknown request URL" if error.status_code == 404 else str(error.detail)
    told = ApiError(error.status_code, f"{what}: {place}.", headers=error.headers)
    return error_response(told, request.url.path)


def make_app(context: ServerContext) -> Starlette:
    """The application of a server."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.ensure_future(context.pool.watch())
        preload = asyncio.ensure_future(_preload(context))
        try:
            yield
        finally:
            for task in (watching, preload):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await context.pool.close()

    around = [Middleware(Gate, context=context)]
    if context.config.cors_origins:
        allowed: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        allowed["allow_origins"] = list(context.config.cors_origins)
        around.insert(0, Middleware(CORSMiddleware, **allowed))
    handlers: dict[Any, Any] = {HTTPException: _not_found}
    app = Starlette(
        routes=ROUTES, middleware=around, exception_handlers=handlers, lifespan=lifespan
    )
    app.state.context = context
    return app


async def _preload(context: ServerContext) -> None:
    """Load all models now, not with the first request."""
    for info in context.pool.models() if context.config.preload else []:
        if info.parent is None:
            with suppress(ApiError):  # it is in the log
                (await context.pool.acquire(info.name, "tokens")).release()
