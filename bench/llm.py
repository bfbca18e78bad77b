"""Language models against llama.cpp in the same run: prefill and decode, tokens and bytes.

`--model FILE.gguf` (may be given several times). Goals follow the type of the weights.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Bar, arguments, finish
from bench.peers.pipe import PeerMissing
from rlx import load
from rlx.backends.cpu.limits import read_bandwidth
from rlx.cli.peers.llama import start_llama_cpp
from rlx.formats.gguf import GgufFile

# ratio to llama.cpp by weight type: decode, prefill; share of read bandwidth in decode
GOALS = {
    "Q8_0": (1.5, 1.8, 0.85),
    "F16": (1.2, 1.2, 0.85),
    "Q4_K": (1.3, 2.5, 0.75),
    "Q4_0": (1.3, 2.5, 0.75),
}
PREFILL, STEPS, CONTEXT = 512, 32, 1024


def weight_type(path: str) -> str:
    """The scheme that most bytes of the layers have."""
    with GgufFile(path) as file:
        sizes: dict[str, int] = {}
        for name, info in file.tensors.items():
            if name.startswith("blk.") and info.scheme is not None:
                kind = info.scheme.name
                sizes[kind] = sizes.get(kind, 0) + info.nbytes
    return max(sizes, key=lambda k: sizes[k])


def read_bytes(path: str) -> int:
    """Bytes of weights that one decoded token reads: all but the rows of an untied embedding."""
    with GgufFile(path) as file:
        total = sum(t.nbytes for t in file.tensors.values())
        if "output.weight" in file.tensors:
            total -= file.tensors["token_embd.weight"].nbytes
    return total


class Ours:
    def __init__(self, path: str, threads: int) -> None:
        start = time.perf_counter()
        self.model = load(path, context=CONTEXT, threads=threads)
        self.engine = self.model.engine
        self.settings = np.array([0, 0, 1, 0], np.float32)
        self.rng = np.array([1, 0], np.uint64)
        self._feed([1, 2])
        self._feed([3])
        self.ready = time.perf_counter() - start

    def _feed(self, tokens: list[int]) -> None:
        self.engine.feed(tokens, self.rng, self.settings)

    def prefill(self) -> float:
        self.engine.tokens = []
        start = time.perf_counter()
        self._feed([100 + i % 1000 for i in range(PREFILL)])
        return time.perf_counter() - start

    def decode(self, past: int) -> float:
        if len(self.engine.tokens) < past:
            self.engine.tokens = []
            self._feed([100 + i % 1000 for i in range(past)])
        del self.engine.tokens[past:]
        start = time.perf_counter()
        for i in range(STEPS):
            self._feed([100 + i % 1000])
        return time.perf_counter() - start


def measure(path: str, options: Any) -> list[Bar]:
    kind = weight_type(path)
    decode_goal, prefill_goal, share_goal = GOALS.get(kind, (1.0, 1.0, 0.75))
    ours = Ours(path, options.threads)
    name = f"{Path(path).stem}"
    with start_llama_cpp(options.peer_python, path, options.threads, CONTEXT) as peer:
        rounds = 3 if options.quick else 7
        fast: dict[str, list[float]] = {"prefill": [], "decode": []}
        slow: dict[str, list[float]] = {"prefill": [], "decode": []}
        band = []
        for _ in range(rounds):  # in turn, so that a noisy minute hits both
            fast["prefill"].append(PREFILL / ours.prefill())
            slow["prefill"].append(PREFILL / peer.ask("prefill", tokens=PREFILL)["seconds"])
            fast["decode"].append(STEPS / ours.decode(64))
            slow["decode"].append(STEPS / peer.ask("decode", past=64, steps=STEPS)["seconds"])
            band.append(read_bandwidth(options.threads))
    rates = {k: statistics.median(v) for k, v in fast.items()}
    peers = {k: statistics.median(v) for k, v in slow.items()}
    size, limit = read_bytes(path), statistics.median(band)
    speed = rates["decode"] * size / 1e9
    print(
        f"{name} ({kind}, {size / 1e9:.2f} GB): ready in {ours.ready:.2f} s, "
        f"decode {speed:.1f} GB/s of {limit:.1f} GB/s, resident {_resident() / 1e6:.0f} MB"
    )
    ours.model.close()
    return [
        Bar(f"decode_{name}", rates["decode"], "tok/s", "llama.cpp", peers["decode"], decode_goal),
        Bar(
            f"prefill_{name}", rates["prefill"], "tok/s", "llama.cpp", peers["prefill"],
            prefill_goal,
        ),
        Bar(f"bandwidth_{name}", speed, "GB/s", "read bandwidth", limit, share_goal),
    ]  # fmt: skip


def _resident() -> int:
    with open(f"/proc/{os.getpid()}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def main(argv: list[str]) -> int:
    parser = arguments("llm", __doc__ or "")
    parser.add_argument("--model", action="append", required=True, metavar="FILE.gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    options = parser.parse_args(argv)
    bars: list[Bar] = []
    try:
        for path in options.model:
            bars += measure(path, options)
    except PeerMissing as e:
        print(e, file=sys.stderr)
        return 2
    return finish(bars, options.json)
