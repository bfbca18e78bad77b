"""Two hundred chats with two models at once, some cancelled midway, some through asyncio."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))
from cli_support import write_tiny

import rlx

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads memory from /proc")
def test_two_hundred_chats_leave_memory_flat(tmp_path: Path) -> None:
    models = [write_tiny(tmp_path / f"{n}.gguf") for n in "ab"]
    bars = tmp_path / "bars.json"
    # in a process of its own, where the C library keeps one heap: heaps that each thread fills for
    # a while come and go by megabytes
    done = subprocess.run(
        [sys.executable, "-m", "bench", "soak", "--json", str(bars), "--chats", "200"]
        + [word for path in models for word in ("--model", str(path))],
        cwd=ROOT,
        env=os.environ | {"MALLOC_ARENA_MAX": "1", "RLX_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # answers stayed what they were
    (bar,) = json.loads(bars.read_text())
    # 10 kB kept per chat would add 0.7 MB between the second third of the chats and the last
    assert bar["value"] < 0.7


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    with rlx.load(write_tiny(tmp_path / "tiny.gguf"), context=128) as model:
        yield model


def greedy(model: Any) -> list[int]:
    tokens: list[int] = model.generate("abc", stream=False, temperature=0.0, max_tokens=8).tokens
    return tokens


def test_a_cancelled_task_frees_the_model(model: Any) -> None:
    wanted = greedy(model)

    async def give_up() -> int:
        pieces = model.agenerate("xyz", max_tokens=100, temperature=0.0, logit_bias={1: 50.0})
        begun = asyncio.Event()
        task = asyncio.ensure_future(collect(pieces, begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(await collect(model.agenerate("abc", max_tokens=8, temperature=0.0)))

    async def collect(pieces: Any, begun: asyncio.Event | None = None) -> list[str]:
        found = []
        async for piece in pieces:
            found.append(piece)
            if begun is not None:
                begun.set()
        return found

    assert asyncio.run(give_up()) > 0
    assert greedy(model) == wanted


def test_chats_come_through_asyncio_too(model: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    wanted = model.chat(messages, stream=False, temperature=0.0, max_tokens=8).text

    async def collect() -> str:
        return "".join([p async for p in model.achat(messages, temperature=0.0, max_tokens=8)])

    assert asyncio.run(collect()) == wanted


def test_a_stream_that_nobody_finishes_frees_the_model(model: Any) -> None:
    wanted = greedy(model)
    stream = model.generate("xyz", max_tokens=100, temperature=0)
    next(stream)
    assert greedy(model) == wanted  # though the stream is still there


def test_streams_read_in_turn_are_those_read_alone(model: Any) -> None:
    """Each runs again what the other's tokens took the place of."""
    options = {"temperature": 0.0, "max_tokens": 4, "logit_bias": {0: 1.0}}
    alone = ["".join(model.generate(p, **options)) for p in ("abc", "xyz")]
    streams = [model.generate(p, **options) for p in ("abc", "xyz")]
    texts = ["", ""]
    for _ in range(4):
        for i, stream in enumerate(streams):
            texts[i] += next(stream, "")
    assert texts == alone
    model.logits([1, 2, 3])


def test_the_event_loop_stays_free_while_decoding(model: Any) -> None:
    async def both() -> tuple[int, int]:
        ticks, pieces = 0, 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(tick())
        async for _ in model.agenerate("abc", max_tokens=20, temperature=0.0):
            pieces += 1
        task.cancel()
        return ticks, pieces

    ticks, pieces = asyncio.run(both())
    assert pieces and ticks > pieces
