"""Arrays and `rlx.jit` beside NumPy, JAX (`jit`) and torch (eager and `torch.compile`).

Calls that take and return arrays of the library's own, allocated as it does by default. The peers
run in one process (`--peer-python`), timed in turns with us, 2 threads each; results are compared.
A row's peer is the fastest of them. First calls are of new processes, importing left out.
RLX_TARGET=x86-64-v3 holds us and the peers to AVX2.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import rlx
import rlx.numpy as rnp
from bench.common import Bar, arguments, finish, median_time
from bench.instruction_set import held, instruction_set
from bench.peers import array_functions as rows
from bench.peers.pipe import Peer, PeerMissing
from rlx.nn import functional as F

PEERS = ("numpy", "jax", "torch", "torch.compile")
TURN = 0.04  # seconds, at least
COLD, CACHED = 0.3, 0.05  # seconds of a first call
EAGER = 15.0  # µs


def kmeans(points: rlx.Array, centroids: rlx.Array) -> rlx.Array:
    ids = rows.nearest(rnp, points, centroids)
    sums = rnp.zeros(centroids.shape).at[ids].add(points)
    counts = rnp.zeros(centroids.shape[:1]).at[ids].add(rnp.ones(points.shape[:1]))
    return sums / rnp.maximum(counts, 1.0)[:, None]


def conv(x: rlx.Array, w: rlx.Array) -> rlx.Array:
    return F.conv2d(x, w, padding=1)


def attention(q: rlx.Array, k: rlx.Array, v: rlx.Array) -> rlx.Array:
    return rnp.softmax(q @ k.mT * rows.HEAD_DIM**-0.5) @ v


OURS: dict[str, Callable[..., Any]] = {
    "chain_5": functools.partial(rows.chain_5, rnp),
    "chain_20": functools.partial(rows.chain_20, rnp),
    "sum": rnp.sum,
    "softmax": rnp.softmax,
    "layer_norm": functools.partial(rows.layer_norm, rnp),
    "mlp": functools.partial(rows.mlp, rnp),
    "attention": attention,
    "kmeans": kmeans,
    "conv": conv,
    "tiny": rows.tiny,
}

GEMMS = ("mlp", "attention", "kmeans", "conv")  # JAX's cannot be held to AVX2: no peer then

# -- rows -----------------------------------------------------------------------------------------


class Row:
    """A function here and in the peers, ready to be timed."""

    def __init__(self, name: str, peer: Peer, folder: Path, cpu: bool = False) -> None:
        self.name, self.peer, self.cpu = name, peer, cpu
        given = [rnp.array(x) for x in rows.arguments(name)]
        function = rlx.jit(OURS[name])
        self.run = lambda: function(*given)
        expected = self._prepare_peers(folder)
        # f32 sums in another order: k-means moves a point between two equally near centroids at
        # worst, which shifts a mean of 1,500 points by less than 1 %
        tolerance = 1e-2 if name == "kmeans" else 1e-3
        ours = np.asarray(self.run())
        for theirs, found in expected.items():
            scale = max(float(np.abs(found).max()), 1.0)
            if not np.allclose(ours, found, rtol=tolerance, atol=tolerance * scale):
                worst = float(np.abs(ours - found).max())
                raise SystemExit(f"bench: {name} differs from {theirs} by {worst}")

    def _prepare_peers(self, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
        found = {}
        for theirs in PEERS:
            file = folder / f"{self.name}-{theirs}.npy"
            self.peer.ask("prepare", row=self.name, peer=theirs, save=str(file))
            found[theirs] = np.load(file)
            file.unlink()
        return found

    def measure(self, rounds: int, calls: int = 1) -> dict[str, float]:
        """Median seconds a call of each, in turns of many; `least` has the minima. With more
        `calls` than one, a sample is the mean of so many."""
        samplers: dict[str, Callable[[int], list[float]]] = {
            "rlx": functools.partial(self._ours, calls)
        }
        for theirs in PEERS:
            samplers[theirs] = functools.partial(self._theirs, theirs, calls)
        count = {}
        for name, sample in samplers.items():
            sample(1)
            count[name] = max(1, math.ceil(TURN / (sample(1)[0] * calls)))
        samples: dict[str, list[float]] = {name: [] for name in samplers}
        for _ in range(rounds):
            for name, sample in samplers.items():
                samples[name] += sample(count[name])
        self.least = {name: min(found) for name, found in samples.items()}
        return {name: statistics.median(found) for name, found in samples.items()}

    def _ours(self, calls: int, samples: int) -> list[float]:
        run, found = self.run, []
        clock = time.process_time if self.cpu else time.perf_counter
        for _ in range(samples):
            start = clock()
            for _ in range(calls):
                run()
            found.append((clock() - start) / calls)
        return found

    def _theirs(self, theirs: str, calls: int, samples: int) -> list[float]:
        asked = {"row": self.name, "peer": theirs, "samples": samples, "calls": calls}
        found: list[float] = self.peer.ask("time", **asked, cpu=self.cpu)["seconds"]
        return found


def row_bars(
    chosen: list[str], peer: Peer, folder: Path, rounds: int, used: str, cpu: bool
) -> list[Bar]:
    bars, unit = [], "ms of CPU" if cpu else "ms"
    for name in chosen:
        row = Row(name, peer, folder, cpu)
        seconds = row.measure(rounds)
        shown = [f"{n} {s * 1e3:.3g} ({row.least[n] * 1e3:.3g})" for n, s in seconds.items()]
        print(f"{name}, ms (least): {', '.join(shown)}", flush=True)
        ours = seconds.pop("rlx")
        if held() == "avx2" and name in GEMMS:
            del seconds["jax"]
        best = min(seconds, key=lambda theirs: seconds[theirs])
        bars.append(Bar(f"{name}, {used}", ours * 1e3, unit, best, seconds[best] * 1e3, 1.0, False))
        gc.collect()
    ratio = statistics.geometric_mean([b.ratio for b in bars])
    bars.append(Bar(f"geometric_mean, {used}", ratio, "×", "the best of each", 1.0, 1.3))
    return bars


# -- overheads ------------------------------------------------------------------------------------


def call_bar(peer: Peer, folder: Path, rounds: int, used: str) -> Bar:
    """A jitted function of three small arrays."""
    seconds = Row("tiny", peer, folder).measure(rounds, 1000)
    shown = ", ".join(f"{name} {s * 1e6:.3g}" for name, s in seconds.items())
    print(f"call of x * y + z on 16 numbers, µs: {shown}", flush=True)
    return Bar(f"call, {used}", seconds["rlx"] * 1e6, "µs", "jax", seconds["jax"] * 1e6, 1.0, False)


def eager_bar(rounds: int, used: str) -> Bar:
    """`x + y` on 16 numbers, outside of `rlx.jit`."""
    x, y = (rnp.array(a) for a in rows.arguments("tiny")[:2])
    ours = median_time(lambda: x + y, 3 * rounds, 1000)
    return Bar(f"eager, {used}", ours * 1e6, "µs", "budget", EAGER, 1.0, False)


_FIRST = """
import json, sys, time
start = time.perf_counter()
import numpy as np
numpy = time.perf_counter()
import rlx, rlx.numpy as rnp
from bench.peers import array_functions as rows
imported = time.perf_counter()
given = [rnp.array(x) for x in rows.mlp_arguments(32)]
f = rlx.jit(lambda *args: rows.mlp(rnp, *args))
begin = time.perf_counter()
f(*given)
print(json.dumps({"import": imported - numpy, "first": time.perf_counter() - begin}))
"""


def first_call_bars(rounds: int, used: str) -> list[Bar]:
    """The first call in new processes: with an empty cache, and with what that one left there."""
    found: dict[str, list[float]] = {"cold": [], "cached": [], "import": []}
    with tempfile.TemporaryDirectory() as folder:
        _first_call(Path(folder, "bytecode"), Path(folder, "warm"))  # the bytecode
        for turn in range(rounds):
            cache = Path(folder, f"cache-{turn}")
            for kind in ("cold", "cached"):
                seconds = _first_call(Path(folder, "bytecode"), cache)
                found[kind].append(seconds["first"])
                found["import"].append(seconds["import"])
    median = {kind: statistics.median(samples) for kind, samples in found.items()}
    print(f"import of rlx.numpy, over NumPy's: {median['import']:.3f} s", flush=True)
    return [
        Bar(f"first_call_{kind}, {used}", median[kind], "s", "budget", goal, 1.0, False)
        for kind, goal in (("cold", COLD), ("cached", CACHED))
    ]


def _first_call(bytecode: Path, cache: Path) -> dict[str, float]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": str(bytecode), "RLX_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", _FIRST]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"bench: a first call failed:\n{done.stderr[-2000:]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def new_shapes_bar(peer: Peer, used: str) -> Bar:
    """20 new shapes in a row: the MLP with other numbers of rows. Mean time of a call."""
    function = rlx.jit(functools.partial(rows.mlp, rnp))
    given = [rnp.array(x) for x in rows.mlp_arguments(32)]
    for _ in range(3):
        function(*given)
    samples = []
    for n in rows.NEW_SHAPES:
        given[0] = rnp.array(rows.mlp_arguments(n)[0])
        start = time.perf_counter()
        function(*given)
        samples.append(time.perf_counter() - start)
    found = {"rlx": samples}
    for theirs in PEERS:
        found[theirs] = peer.ask("new_shapes", peer=theirs)["seconds"]
    print(f"{len(samples)} new shapes in a row, ms each:")
    for name, each in found.items():
        print(f"  {name}: {' '.join(f'{s * 1e3:.3g}' for s in each)}", flush=True)
    mean = {name: statistics.mean(each) * 1e3 for name, each in found.items()}
    best = min(("jax", "torch.compile"), key=lambda name: mean[name])
    return Bar(f"new_shapes, {used}", mean["rlx"], "ms", best, mean[best], 1.0, False)


def main(argv: list[str]) -> int:
    parser = arguments("arrays", __doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--row", action="append", default=[], choices=rows.ROWS, help="only these")
    parser.add_argument(
        "--cpu", action="store_true",
        help="the rows in seconds of CPU on 1 thread, for a machine that has other work too",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if options.cpu:
        options.threads = 1
    os.environ["RLX_NUM_THREADS"] = str(options.threads)
    used, rounds = instruction_set(), 5 if options.quick else 15
    bars: list[Bar] = []
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            Peer(
                options.peer_python, "array_server.py", options.threads,
                requirements="requirements-arrays.txt",
            ) as peer,
        ):  # fmt: skip
            print(", ".join(f"{k} {v}" for k, v in peer.hello["versions"].items()), flush=True)
            if not (options.row or options.cpu):
                bars += [call_bar(peer, Path(folder), rounds, used), eager_bar(rounds, used)]
                bars += first_call_bars(3 if options.quick else 7, used)
                bars.append(new_shapes_bar(peer, used))
            chosen = options.row or list(rows.ROWS)
            bars += row_bars(chosen, peer, Path(folder), rounds, used, options.cpu)
    except PeerMissing as e:
        print(e, file=sys.stderr)
        return 2
    return finish(bars, options.json)
