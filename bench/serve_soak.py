"""Soak test of `rlx serve`: thousands of requests, many of them bad, cut off or read slowly.

Clients of all manners ask at once. Every answer that is read to its end must be the answer to the
same request alone; the memory of the server stays flat; no slot stays taken; and SIGTERM under load
loses no request that was accepted.

    python -m bench serve_soak                  # 10,000 requests
    python -m bench serve_soak --requests 500
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from bench.common import Bar, arguments, finish
from bench.peers.http_load import exchange, until_ready
from bench.serve import Served, free_port
from bench.serve import start_command as rlx_command

CLIENTS, SLOTS, CONTEXT = 24, 8, 512
QUESTIONS = 48  # different requests
PATH = "/v1/completions"
MANNERS = {  # of a client, and how often it comes
    "reads": 60, "streams": 14, "leaves": 10, "slow": 2,
    "malformed": 5, "oversize": 4, "unknown": 3, "wrong type": 2,
}  # fmt: skip


def questions(model: str) -> list[dict[str, Any]]:
    """Requests whose answers differ: greedy or by seed, short or long, some with a prefix."""
    rng = random.Random(5)
    prefix = "You are a guide in a museum of clocks. Visitors ask; be brief. "
    found = []
    for number in range(QUESTIONS):
        text = f"Tell visitor {number} about {rng.choice(('gold', 'rust', 'time', 'springs'))}:"
        sampling = {"temperature": 0.0} if number % 3 else {"temperature": 0.8, "seed": number}
        found.append({
            "model": model, "prompt": (prefix if number % 2 else "") + text,
            "max_tokens": rng.randrange(2, 14), **sampling,
        })  # fmt: skip
    return found


async def read_all(port: int, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of an answer that comes as one."""
    async with exchange(port, PATH, json.dumps(body).encode()) as (status, reader):
        data = (await reader.read()).split(b"\r\n\r\n", 1)[-1]
    told = json.loads(data[data.index(b"{") : data.rindex(b"}") + 1])
    return status, told["choices"][0]["text"] if status == 200 else told["error"]["message"]


async def read_stream(port: int, body: dict[str, Any], pause: float = 0, most: int = 0) -> str:
    """Text of a streamed answer; `most` parts of it, then the client hangs up."""
    text, parts, whole = "", 0, False
    data = json.dumps(body | {"stream": True}).encode()
    async with exchange(port, PATH, data, window=1 << 10) as (status, reader):
        if status != 200:
            raise RuntimeError(f"status {status}")
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                text += event["choices"][0]["text"] if event["choices"] else ""
                parts += 1
                if parts == most:
                    return text
                await asyncio.sleep(pause)
            whole = whole or line.startswith(b"data: [DONE]")
    if not whole:
        raise RuntimeError("a stream ended before its end")
    return text


BAD = {
    "malformed": lambda body, rng: json.dumps(body).encode()[: rng.randrange(1, 60)],
    "oversize": lambda body, _: json.dumps(body | {"prompt": "clock " * 2000}).encode(),
    "unknown": lambda body, _: json.dumps(body | {"temprature": 1}).encode(),
    "wrong type": lambda body, _: json.dumps(body | {"max_tokens": "ten"}).encode(),
}


class Soak:
    """Clients that ask until all requests are done."""

    def __init__(self, server: Served, alone: list[tuple[dict[str, Any], str]]) -> None:
        self.server, self.alone = server, alone
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.resident: list[int] = []

    async def run(self, requests: int) -> None:
        numbers = iter(range(requests))
        every = max(1, requests // 200)

        async def client() -> None:
            for number in numbers:
                if number % every == 0:
                    self.resident.append(resident(self.server.process.pid))
                rng = random.Random(number)
                manner = rng.choices(list(MANNERS), list(MANNERS.values()))[0]
                try:
                    await asyncio.wait_for(self._ask(manner, rng), 120)
                    self.counts[manner] += 1
                except Exception as error:
                    self.wrong.append(f"request {number}, {manner}: {error!r}")

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _ask(self, manner: str, rng: random.Random) -> None:
        body, wanted = rng.choice(self.alone)
        port = self.server.port
        if manner in BAD:
            async with exchange(port, PATH, BAD[manner](body, rng)) as (status, reader):
                rest = await reader.read()
            if status != 400 or b'"error"' not in rest:
                raise RuntimeError(f"status {status} for a bad request")
        elif manner == "leaves":
            await read_stream(port, body, most=rng.randrange(1, 4))
        else:
            pause = 0.05 if manner == "slow" else 0.0
            status, found = (
                await read_all(port, body)
                if manner == "reads"
                else (200, await read_stream(port, body, pause))
            )
            if status != 200 or found != wanted:
                raise RuntimeError(f"status {status}, {found!r} instead of {wanted!r}")


def resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


async def taken(port: int) -> float:
    """Requests that run or wait, as `/metrics` has them, once they had time to end."""
    found = -1.0
    for _ in range(50):
        async with exchange(port, "/metrics", b"", "GET") as (_, reader):
            lines = (await reader.read()).decode().splitlines()
        names = ("rlx_engine_running{", "rlx_engine_waiting{", "rlx_kv_pages_used{")
        values = [float(line.split()[-1]) for line in lines if line.startswith(names)]
        found = sum(values) if len(values) == len(names) else -1.0
        if found == 0:
            break
        await asyncio.sleep(0.1)
    return found


async def end_under_load(soak: Soak) -> tuple[int, int]:
    """SIGTERM while requests run and wait: how many were accepted, and how many ended well."""
    begun, good = 0, 0
    started = asyncio.Event()

    async def ask(body: dict[str, Any], wanted: str) -> None:
        nonlocal begun, good
        data = json.dumps(body | {"stream": True}).encode()
        async with exchange(soak.server.port, PATH, data) as (status, reader):
            begun += status == 200
            if begun >= 2 * SLOTS:
                started.set()
            lines = [line async for line in reader if line.startswith(b"data: {")]
            choices = [c for line in lines for c in json.loads(line[6:])["choices"]]
            good += status == 200 and "".join(c["text"] for c in choices) == wanted

    tasks = [asyncio.create_task(ask(*pair)) for pair in soak.alone[: 3 * SLOTS]]
    await asyncio.wait_for(started.wait(), 60)
    soak.server.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks, return_exceptions=True)
    return begun, good


async def measure(options: Any) -> list[Bar]:
    port = free_port()
    command = rlx_command(options.model, "soak", port, SLOTS, CONTEXT, options.threads)
    server = Served(command, port, "soak", [])
    try:
        await server.ready()
        await until_ready(port)
        alone = []
        for body in questions("soak"):
            status, text = await read_all(port, body)
            if status != 200:
                raise RuntimeError(text)
            alone.append((body, text))
        soak = Soak(server, alone)
        await soak.run(options.requests)
        stuck = await taken(port)
        begun, good = await end_under_load(soak)
        code = server.process.wait(60)
    finally:
        server.stop()
    for line in soak.wrong[:10]:
        print(line)
    print(", ".join(f"{count} {manner}" for manner, count in soak.counts.items()))
    quarter = len(soak.resident) // 4
    before = statistics.median(soak.resident[quarter : 2 * quarter])
    after = statistics.median(soak.resident[-quarter:])
    print(f"memory {before / 1e6:.1f} → {after / 1e6:.1f} MB, exit status {code}")
    done = options.requests - len(soak.wrong)
    return [
        Bar("soak_answers", done, "requests", "all of them", options.requests, 1.0),
        Bar("soak_memory", after, "bytes", "second quarter", before, 0.98, higher_is_better=False),
        Bar("soak_free_slots", 1 + stuck, "1 + requests and pages", "none", 1, 1.0,
            higher_is_better=False),
        Bar("soak_sigterm", good, "answers", "accepted", begun, 1.0),
        Bar("soak_exit", 1 + abs(code), "1 + status", "none", 1, 1.0, higher_is_better=False),
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    parser = arguments("serve_soak", __doc__ or "")
    parser.add_argument("--model", default="smollm2-135m", help="a name, GGUF file or folder")
    parser.add_argument("--requests", type=int, default=0, help="10,000; 1,000 with --quick")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    options.requests = options.requests or (1000 if options.quick else 10_000)
    return finish(asyncio.run(measure(options)), options.json)
