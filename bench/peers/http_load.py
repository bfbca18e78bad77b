"""Load for a server of language models: requests, clients that send them, and what they saw.

A client is a person: it waits for an answer, pauses for a random time and asks again, so requests
of many clients arrive as a Poisson process and never more at once than there are clients. The HTTP
client is a few lines over asyncio, since on a small machine a client takes time from the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PAUSE = 0.2  # mean seconds between an answer and the client's next request
SHORTEST, LONGEST = 32, 512  # tokens of a prompt
PREFIXES = 4  # shared by half of the prompts


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    tokens: int  # of the answer
    pause: float


@dataclass
class Seen:
    """What a client saw of one answer: when each part of it came."""

    first: float = 0.0  # seconds to the first token
    gaps: list[float] = field(default_factory=list)  # between parts
    tokens: int = 0


def workload(clients: int, each: int, vocab: int, seed: int) -> list[list[Ask]]:
    """The requests of every client. Lengths are log-uniform; half begin with a shared prefix."""
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        return [rng.randrange(100, vocab // 2) for _ in range(count)]

    prefixes = [some(rng.choice((64, 96, 128, 192))) for _ in range(PREFIXES)]
    plan: list[list[Ask]] = []
    for _ in range(clients):
        asks = []
        for _ in range(each):
            length = round(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
            prefix = rng.choice(prefixes) if rng.random() < 0.5 else []
            prompt = (prefix + some(length))[: max(length, len(prefix) + 8)]
            asks.append(Ask(prompt[:LONGEST], rng.randrange(32, 97), rng.expovariate(1 / PAUSE)))
        plan.append(asks)
    return plan


Answer = Callable[[Ask], AsyncIterator[int]]
"""Sends a request; yields the number of new tokens whenever some arrive."""


async def drive(plan: Sequence[Sequence[Ask]], answer: Answer) -> tuple[list[Seen], float]:
    """Run all clients; what they saw, and the seconds from the first request to the last token."""
    seen: list[Seen] = []
    begin, last = float("inf"), 0.0

    async def client(asks: Sequence[Ask]) -> None:
        nonlocal begin, last
        for ask in asks:
            await asyncio.sleep(ask.pause)
            found = Seen()
            before = start = time.perf_counter()
            begin = min(begin, start)
            async for count in answer(ask):
                now = time.perf_counter()
                if found.tokens:
                    found.gaps.append(now - before)
                else:
                    found.first = now - start
                before, found.tokens = now, found.tokens + count
            last = max(last, before)
            if found.tokens != ask.tokens:
                raise RuntimeError(f"asked for {ask.tokens} tokens, got {found.tokens}")
            seen.append(found)

    await asyncio.gather(*(client(asks) for asks in plan))
    return seen, last - begin


def http_answer(port: int, model: str, banned: Sequence[int]) -> Answer:
    """Answers of `/v1/completions` on this machine, streamed; `banned` tokens never come."""

    async def answer(ask: Ask) -> AsyncIterator[int]:
        body = {
            "model": model, "prompt": ask.prompt, "max_tokens": ask.tokens, "stream": True,
            "temperature": 0, "logit_bias": {str(token): -100 for token in banned},
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        counted = 0
        async for event in _post(port, "/v1/completions", body):
            new = 1 if event.get("choices") and event["choices"][0].get("text") else 0
            usage = event.get("usage")
            if usage:  # tokens without text of their own, and several in a part
                new = usage["completion_tokens"] - counted
            if new:
                counted += new
                yield new

    return answer


async def _post(port: int, path: str, body: dict[str, object]) -> AsyncIterator[dict[str, object]]:
    """POST, and the events of the answer."""
    async with exchange(port, path, json.dumps(body).encode()) as (status, reader):
        if status != 200:
            rest = await reader.read(2000)
            raise RuntimeError(f"status {status}: {rest.decode(errors='replace')}")
        async for line in reader:  # chunk sizes and headers are lines too, and not events
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


@asynccontextmanager
async def exchange(
    port: int, path: str, data: bytes, method: str = "POST", window: int = 1 << 16
) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """Send a request: the status of its answer, and what is left to read, headers first. Leaving
    the block closes the connection, whatever is left. `window` bounds what waits here unread."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=window)
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode())
        writer.write(data)
        words = (await reader.readline()).split()
        yield (int(words[1]) if len(words) > 1 else 0), reader
    finally:
        writer.close()


async def until_ready(port: int, seconds: float = 120.0) -> None:
    """Wait until `/health` says that the server is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            async with exchange(port, "/health", b"", "GET") as (status, _):
                if status == 200:
                    return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError(f"no server answers on port {port} after {seconds:.0f} s")


def p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]
