"""Long contexts against llama.cpp, each in a process of its own, in turn.

Behind 8k and 32k tokens: a chunk of 512 more tokens of a prompt, and decode, with a KV cache of f16
and of q8_0; and what is resident, against file + KV cache + 150 MB. llama.cpp runs with flash
attention and, where the KV cache allows it, without: the faster one counts.

`--model FILE.gguf` (may be given several times). A prefill of 32k tokens takes minutes, so a model
with the first `--layers` layers is made of it, and as much of its vocabulary: a step takes that
part of a step of the whole model. The context is filled with the keys and values of one chunk,
again and again, which takes seconds; what is timed sees all of them.

RLX_TARGET=x86-64-v3 holds RLX to AVX2; then `--peer-python` should have a llama.cpp built for it,
and bars say what each of the two was built for.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.common import Bar, arguments, finish
from bench.instruction_set import instruction_set
from bench.peers.pipe import Peer, PeerMissing
from bench.shallow_model import write_shallow_model
from rlx.cli.peers import start_llama_cpp
from rlx.errors import InputError

PASTS = {"8k": 8 << 10, "32k": 32 << 10}
CHUNK, STEPS, GOAL, ALLOWED = 512, 16, 1.5, 150e6


class Sides:
    """RLX and llama.cpp on a file, with room for the longest context."""

    def __init__(self, stack: ExitStack, path: Path, kv: str, options: Any) -> None:
        context = max(PASTS[n] for n in options.context) + 2 * CHUNK
        given = (path, options.threads, context)

        def ours() -> Peer:
            needs = "requirements-llm.txt"
            return Peer(sys.executable, "rlx_server.py", *given, kv, requirements=needs)

        with ours() as first:  # fills the caches on disk: the compiler's memory is not the model's
            first.ask("prefill", tokens=CHUNK)
            first.ask("decode", past=CHUNK, steps=1)
        self.rlx = stack.enter_context(ours())
        self.llama: dict[str, Peer] = {}
        for words in [("flash", kv), *([(kv,)] if kv == "f16" else [])]:
            peer = stack.enter_context(start_llama_cpp(options.peer_python, *given, *words))
            used = " with flash attention" if "flash" in words else ""
            self.llama[f"llama.cpp {peer.hello['instructions']}{used}"] = peer

    def speed(self, past: int, rounds: int) -> dict[str, tuple[float, str, float]]:
        """Tokens per second of RLX behind so many tokens, the name of the best peer and its tokens
        per second: medians of rounds in turn."""
        sides = {"rlx": self.rlx, **self.llama}
        rates: dict[str, dict[str, list[float]]] = {n: {} for n in sides}
        for peer in sides.values():
            peer.ask("fill", past=past)
            peer.ask("decode", past=past, steps=2)
        for _ in range(rounds):
            for name, peer in sides.items():
                taken = peer.ask("decode", past=past, steps=STEPS)["seconds"]
                rates[name].setdefault("decode", []).append(STEPS / taken)
                if self._is_slow(rates[name].get("prefill", [])):
                    continue
                taken = peer.ask("prefill", past=past, tokens=CHUNK)["seconds"]
                rates[name].setdefault("prefill", []).append(CHUNK / taken)
        found = {}
        for use in ("prefill", "decode"):
            middle = {n: statistics.median(r[use]) for n, r in rates.items()}
            mine = middle.pop("rlx")
            best = max(middle, key=lambda n: middle[n])
            found[use] = (mine, best, middle[best])
        return found

    def _is_slow(self, rates: list[float]) -> bool:
        """Whether chunks took half a minute by now: then there are no more of them."""
        return sum(CHUNK / rate for rate in rates) > 30


def measure(name: str, path: Path, kv: str, options: Any) -> list[Bar]:
    bars, size = [], path.stat().st_size
    with ExitStack() as stack:
        sides = Sides(stack, path, kv, options)
        for length in options.context:
            found = sides.speed(PASTS[length], 2 if options.quick else 5)
            for use, (mine, peer, theirs) in found.items():
                label = f"{use}_{length}_{name}, KV cache {kv}, {instruction_set()}"
                bars.append(Bar(label, mine, "tok/s", peer, theirs, GOAL))
                print(bars[-1], flush=True)
        resident = sides.rlx.ask("memory")
    limit = size + resident["cache"] + ALLOWED
    label, peer = f"memory_{name}, KV cache {kv}", "file + cache + 150 MB"
    bars.append(Bar(label, resident["bytes"] / 1e6, "MB", peer, limit / 1e6, 1.0, False))
    return bars


def main(argv: list[str]) -> int:
    parser = arguments("long", __doc__ or "")
    parser.add_argument("--model", action="append", required=True, metavar="FILE.gguf")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--context", action="append", choices=[*PASTS], help="both by default")
    parser.add_argument("--kv", action="append", choices=["f16", "q8_0"], help="both by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    options = parser.parse_args(argv)
    options.context = options.context or [*PASTS]
    bars: list[Bar] = []
    try:
        for model in map(Path, options.model):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / model.name
                write_shallow_model(model, path, options.layers)
                print(f"{model.stem}: {options.layers} layers, {instruction_set()}", flush=True)
                for kv in options.kv or ("f16", "q8_0"):
                    bars += measure(model.stem, path, kv, options)
    except (InputError, PeerMissing) as e:
        print(e, file=sys.stderr)
        return 2
    return finish(bars, options.json)
