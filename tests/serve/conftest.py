"""Running servers for tests: a tiny chat model, a tiny encoder, and SmolLM2 from the cache."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "goldens"))
from cli_support import write_tiny
from encoder_files import write_model

from rlx.formats.fetch import cached
from rlx.serve.context import ServerContext
from rlx.serve.logs import Log
from rlx.serve.model_pool import ModelSpec
from rlx.serve.server import Server
from rlx.serve.server_config import Limits, ServerConfig

TINY = {"requests": 4, "kv": "f32", "threads": 1}


class RunningServer:
    """A real server on a port of its own, in a thread; `client` speaks to it."""

    def __init__(self, config: ServerConfig) -> None:
        self.logged = io.StringIO()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._config = config
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 30
        while not (self._started.is_set() and self.server.started):
            assert self._thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.005)
        self.url = self.server.address
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def _run(self) -> None:
        async def main() -> None:
            log = Log(prompts=self._config.log_prompts, stream=self.logged)
            self.server = Server(self._config, context=ServerContext(self._config, log))
            self.loop = asyncio.get_running_loop()
            self._started.set()
            await self.server.serve()

        asyncio.run(main())

    @property
    def context(self) -> ServerContext:
        return self.server.context

    def engine(self, name: str = "tiny") -> Any:
        return next(m for m in self.context.pool.loaded() if m.name == name).engine

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def wait_idle(self, seconds: float = 10) -> None:
        """Until no request runs, waits or is leased."""
        deadline = time.monotonic() + seconds
        while True:
            stats = [m.engine.stats() for m in self.context.pool.loaded() if m.engine]
            users = sum(e.users for e in self.context.pool._entries.values())
            if not users and not any(s.running + s.waiting for s in stats):
                return
            assert time.monotonic() < deadline, (stats, users)
            time.sleep(0.01)

    def stop(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model of random weights whose tokens are bytes."""
    return write_tiny(tmp_path_factory.mktemp("serve") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def tiny_reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("reranker"), classifier=True)


@pytest.fixture(scope="session")
def server(tiny_model: Path, tiny_encoder: Path, tiny_reranker: Path) -> Iterator[RunningServer]:
    """A server with the tiny models: tiny, encoder, reranker."""
    specs = (
        ModelSpec("tiny", str(tiny_model), options=TINY),
        ModelSpec("encoder", str(tiny_encoder), options={"threads": 1}),
        ModelSpec("reranker", str(tiny_reranker), options={"threads": 1}),
    )
    running = RunningServer(ServerConfig(models=specs, port=0, shutdown_seconds=5))
    yield running
    running.stop()


TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
CLIENT_KEY = "secret-key-of-clients"


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model whose template shows tools and calls of them."""
    path = tmp_path_factory.mktemp("clients") / "tiny.gguf"
    return write_tiny(path, template=TOOL_TEMPLATE, more={"llama.context_length": 2048})


@pytest.fixture(scope="session")
def client_server(tool_model: Path, tiny_encoder: Path) -> Iterator[RunningServer]:
    """What clients of other makers talk to: tiny and encoder, with a key."""
    specs = (
        ModelSpec("tiny", str(tool_model), options=TINY),
        ModelSpec("encoder", str(tiny_encoder), options={"threads": 1}),
    )
    config = ServerConfig(models=specs, port=0, shutdown_seconds=5, keys=(CLIENT_KEY,))
    running = RunningServer(config)
    yield running
    running.stop()


@pytest.fixture
def start(tiny_model: Path) -> Iterator[StartServer]:
    """Starts servers with other settings; they end with the test."""
    running: list[RunningServer] = []

    def make(limits: dict[str, Any] | None = None, **settings: Any) -> RunningServer:
        tiny = ModelSpec("tiny", str(tiny_model), options=TINY)
        given: dict[str, Any] = {"models": (tiny,), "port": 0, "shutdown_seconds": 5} | settings
        running.append(RunningServer(ServerConfig(limits=Limits(**(limits or {})), **given)))
        return running[-1]

    yield make
    for one in running:
        one.stop()


@pytest.fixture(scope="session")
def smollm2_server() -> Iterator[RunningServer]:
    """A server with SmolLM2-135M, where it is in the cache."""
    if cached("smollm2-135m") is None:
        pytest.skip("SmolLM2-135M is not in the cache")
    spec = ModelSpec("smollm2-135m", "smollm2-135m", options={"context": 2048})
    running = RunningServer(ServerConfig(models=(spec,), port=0, shutdown_seconds=10))
    yield running
    running.stop()
