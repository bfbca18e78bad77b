"""Running a server: sockets, signals, and an end in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rlx.errors import RlxError
from rlx.serve.app import make_app
from rlx.serve.context import ServerContext
from rlx.serve.logs import JsonLines
from rlx.serve.server_config import Limits, ServerConfig


def _protocol(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol with limits on headers, whose transport handlers may abort."""
    base: Any = AutoHTTPProtocol

    class Protocol(base):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._app: Any = self.app
            self.app: Any = self._with_transport
            self._head = 0
            self._timer: asyncio.TimerHandle | None = None

        async def _with_transport(self, scope: Any, receive: Any, send: Any) -> None:
            scope.setdefault("extensions", {})["rlx.transport"] = self.transport
            await self._app(scope, receive, send)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._timer = self.loop.call_later(limits.header_seconds, self._late)

        def connection_lost(self, error: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._head = self._head + len(data) if self._waits else 0
            if self._head > limits.header_bytes:
                self.transport.abort()

        @property
        def _waits(self) -> bool:
            """Whether the head of a request is not there yet."""
            return self.cycle is None or bool(self.cycle.response_complete)

        def _late(self) -> None:
            if self.cycle is None:  # the first head; later ones have the time of keep-alive
                self.transport.abort()

    return Protocol


class Server(uvicorn.Server):
    """A server that ends in order and then exits with 0, and reads its configuration again when it
    is told to."""

    def __init__(
        self, config: ServerConfig, *, reread: Callable[[], ServerConfig] | None = None,
        context: ServerContext | None = None,
    ) -> None:  # fmt: skip
        self.context = context or ServerContext(config.check())
        limits, self._reread = config.limits, reread
        super().__init__(
            uvicorn.Config(
                make_app(self.context),
                host=config.host,
                port=config.port,
                http=_protocol(limits),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=limits.connections,
                timeout_keep_alive=limits.keep_alive_seconds,
                timeout_graceful_shutdown=max(1, round(config.shutdown_seconds)),
                h11_max_incomplete_event_size=limits.header_bytes,
                lifespan="on",
            )
        )

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.context.draining = True
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = [signal.SIGINT, signal.SIGTERM]
        before = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        if self._reread is not None and hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def reload(self) -> None:
        """Take models, keys and limits from the configuration again; it stays if that is wrong."""
        assert self._reread is not None
        log = self.context.log
        try:
            self.context.reload(self._reread())
        except (RlxError, OSError, ValueError) as error:
            log("reload failed", level=logging.ERROR, error=str(error))
        else:
            log("reloaded", models=[info.name for info in self.context.pool.models()])

    @property
    def address(self) -> str:
        """Where it listens, once it has started."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            names = [info.name for info in self.context.pool.models()]
            self.context.log("listening", address=self.address, models=names)


def serve(config: ServerConfig, reread: Callable[[], ServerConfig] | None = None) -> None:
    """Serve until a signal ends it."""
    errors = logging.getLogger("uvicorn.error")
    errors.handlers, errors.propagate = [JsonLines()], False
    errors.setLevel(logging.WARNING)
    server = Server(config, reread=reread)
    server.run()
    if not server.started:
        raise SystemExit(1)
