"""`rlx serve` under load, against llama.cpp's `llama-server` with the same file, in turns.

1, 8 and 32 clients ask with prompts of 32 to 512 tokens, half of which begin with a shared prefix;
requests arrive as a Poisson process. Bars: output tokens per second, the 95th percentile of the
time to the first token and of the time between parts of an answer; and what HTTP costs against
`rlx.Engine` in a program of its own, with the same requests.

    python -m bench serve --model model.gguf --llama-server path/to/llama-server
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench.common import Bar, arguments, finish
from bench.peers.http_load import (
    Ask,
    Seen,
    drive,
    http_answer,
    p95,
    until_ready,
    workload,
)

CLIENTS = (1, 8, 32)
CONTEXT = 1024  # tokens of a request
RATE_GOAL, OVERHEAD_GOAL = 1.5, 0.97


class Figures:
    """Rounds of one server with one number of clients."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.seen: list[Seen] = []

    def add(self, seen: list[Seen], seconds: float) -> None:
        self.rates.append(sum(s.tokens for s in seen) / seconds)
        self.seen += seen

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def first(self) -> float:
        return p95([s.first for s in self.seen])

    @property
    def gap(self) -> float:
        return p95([gap for s in self.seen for gap in s.gaps])

    def __str__(self) -> str:
        return (
            f"{self.rate:7.1f} tok/s, first token p95 {self.first * 1e3:7.0f} ms, "
            f"between parts p95 {self.gap * 1e3:6.1f} ms"
        )


class Served:
    """A server in a process of its own."""

    def __init__(self, command: list[str], port: int, model: str, banned: list[int]) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.port, self.answer = port, http_answer(port, model, banned)

    async def ready(self) -> None:
        try:
            await until_ready(self.port)
        except RuntimeError:
            self.log.seek(0)
            raise RuntimeError(self.log.read().decode(errors="replace")[-2000:]) from None

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)
        self.log.close()


class Direct:
    """`rlx.Engine` in a process of its own: told a workload on a line, answers with what it saw."""

    def __init__(self, options: Any, clients: int) -> None:
        command = [sys.executable, "-m", "bench.serve", "--direct", "--model", options.model]
        command += ["--threads", str(options.threads), "--clients", str(clients)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def run(self, order: dict[str, int]) -> tuple[list[Seen], float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        told = json.loads(self.process.stdout.readline())
        return [Seen(**one) for one in told["seen"]], told["seconds"]

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def be_direct(options: Any) -> int:
    """The other end of Direct."""
    from rlx import Engine

    with Engine(options.model, requests=options.clients[0], context=CONTEXT,
                threads=options.threads) as engine:  # fmt: skip
        ends = dict.fromkeys(engine.tokenizer.end_ids, -100.0)

        async def answer(ask: Ask) -> AsyncIterator[int]:
            reply = engine.submit(ask.prompt, max_tokens=ask.tokens, temperature=0, logit_bias=ends)
            async for chunk in reply.chunks():
                if chunk.tokens:
                    yield len(chunk.tokens)

        for line in sys.stdin:
            plan = workload(**json.loads(line))
            seen, seconds = asyncio.run(drive(plan, answer))
            print(json.dumps({"seen": [vars(s) for s in seen], "seconds": seconds}), flush=True)
    return 0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_command(
    model: str, name: str, port: int, requests: int, context: int, threads: int
) -> list[str]:
    """`rlx serve`, with the Python that runs this."""
    command = [sys.executable, "-m", "rlx", "serve", f"{name}={model}", "--preload"]
    command += ["--port", str(port), "--requests", str(requests), "--context", str(context)]
    return [*command, "--threads", str(threads)]


def start_rlx(options: Any, clients: int, banned: list[int]) -> Served:
    port = free_port()
    command = start_command(options.model, "bench", port, clients, CONTEXT, options.threads)
    return Served(command, port, "bench", banned)


def start_llama(options: Any, clients: int, banned: list[int]) -> Served:
    port = free_port()
    threads = str(options.threads)
    command = [options.llama_server, "-m", options.model, "-np", str(clients), "--port", str(port)]
    command += ["-c", str(CONTEXT * clients), "-t", threads, "-tb", threads]
    return Served([*command, "--host", "127.0.0.1", "--no-webui"], port, "bench", banned)


async def compare(options: Any, clients: int) -> dict[str, Figures]:
    """All servers under one number of clients, in turns."""
    banned, vocab = end_ids(options.model)
    servers = {"rlx serve": start_rlx(options, clients, banned)}
    if options.llama_server:
        servers["llama-server"] = start_llama(options, clients, banned)
    direct = Direct(options, clients)
    found = {name: Figures() for name in (*servers, "rlx.Engine")}
    each = max(2, options.requests // clients)
    try:
        for server in servers.values():
            await server.ready()
        for number in range(-1, options.rounds):  # the first round warms up
            order = {"clients": clients, "each": 1 if number < 0 else each, "vocab": vocab,
                     "seed": 1000 * clients + number}  # fmt: skip
            for name, server in servers.items():
                seen, seconds = await drive(workload(**order), server.answer)
                if number >= 0:
                    found[name].add(seen, seconds)
            seen, seconds = direct.run(order)
            if number >= 0:
                found["rlx.Engine"].add(seen, seconds)
    finally:
        direct.stop()
        for server in servers.values():
            server.stop()
    return found


def end_ids(path: str) -> tuple[list[int], int]:
    """Tokens that end an answer, which are kept from coming, and the size of the vocabulary."""
    from rlx.models.model_file import ModelFile

    file = ModelFile.open(Path(path))
    return sorted(file.tokenizer().end_ids), file.config.vocab


def bars_of(clients: int, found: dict[str, Figures]) -> list[Bar]:
    ours, bars = found["rlx serve"], []
    if (peer := found.get("llama-server")) is not None:
        goal = RATE_GOAL if clients > 1 else 1.0
        bars = [
            Bar(f"serve_{clients}", ours.rate, "tok/s", "llama-server", peer.rate, goal),
            Bar(f"first_token_p95_{clients}", ours.first, "s", "llama-server", peer.first, 1.0,
                higher_is_better=False),
            Bar(f"between_p95_{clients}", ours.gap, "s", "llama-server", peer.gap, 1.0,
                higher_is_better=False),
        ]  # fmt: skip
    engine = found["rlx.Engine"]
    bars.append(
        Bar(f"http_{clients}", ours.rate, "tok/s", "rlx.Engine", engine.rate, OVERHEAD_GOAL)
    )
    return bars


def main(argv: list[str]) -> int:
    parser = arguments("serve", __doc__ or "")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--llama-server", help="llama.cpp's server, built for this CPU")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--requests", type=int, default=64, help="requests of a round, about")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--direct", action="store_true", help="be the engine without HTTP")
    options = parser.parse_args(argv)
    if options.direct:
        return be_direct(options)
    options.rounds = options.rounds or (1 if options.quick else 3)
    bars: list[Bar] = []
    for clients in options.clients:
        found = asyncio.run(compare(options, clients))
        for name, figures in found.items():
            print(f"{clients:3d} clients, {name:12s} {figures}", flush=True)
        bars += bars_of(clients, found)
    return finish(bars, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
