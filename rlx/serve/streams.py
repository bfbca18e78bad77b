"""Server-sent events, and what happens when a client goes away or does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from json.encoder import encode_basestring_ascii as json_text
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rlx.serve.api_errors import ApiError

__all__ = ["DONE", "EventStream", "json_text", "while_connected"]  # json.dumps of a text: faster

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream(Response):
    """Sends events as they come. A client that goes away ends them at once; one that does not read
    is cut off after `write_seconds`, and until then costs the buffer of its connection alone."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]],
        write_seconds: float,
    ) -> None:  # fmt: skip
        self.status_code, self.background = 200, None
        self._events, self._close, self._seconds = events, close, write_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(scope, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                scope.setdefault("rlx.gone", "disconnected")
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._close()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        watch = _Watch(self._seconds, scope)
        try:
            async with aclosing(self._events):
                async for part in self._events:
                    watch.begin()
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    watch.end()
        finally:
            watch.stop()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Watch:
    """Aborts a connection whose writes wait for longer than some seconds. One timer for all of
    them: a timeout for each would cost more than its write."""

    def __init__(self, seconds: float, scope: Scope) -> None:
        self._scope, self._seconds = scope, seconds
        self._writes, self._writing, self._stuck = 0, False, -1
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds / 2, self._look)

    def begin(self) -> None:
        self._writes += 1
        self._writing = True

    def end(self) -> None:
        self._writing = False

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        """Twice in a row in the same write: it is stuck."""
        if self._writing and self._stuck == self._writes:
            self._scope["rlx.gone"] = "slow reader"
            transport = self._scope.get("extensions", {}).get("rlx.transport")
            if transport is not None:
                transport.abort()
            return
        self._stuck = self._writes if self._writing else -1
        self._timer = self._loop.call_later(self._seconds / 2, self._look)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled if the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            request.scope["rlx.gone"] = "disconnected"
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            raise ApiError(499, "The client went away.")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
