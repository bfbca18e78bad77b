"""Latency of convolutional networks at batch 1 and 8: ONNX Runtime, OpenVINO, torch.compile.

The networks are those of `peers/convnets.py`, with the same random weights on every side; results
are compared before anything is timed.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.common import Bar, arguments, finish
from bench.peers.convnets import NETS, Weights
from bench.peers.pipe import Peer, PeerMissing
from rlx import GraphModule, Session

ENGINES = ("onnxruntime", "openvino", "torch")
_ACTIVATIONS = {"hardswish": "hard_swish", "hardsigmoid": "hard_sigmoid"}
_REST = 0.1  # seconds between two sides: idle threads of a peer spin for a while


class Builder:
    """Layers as ops of a graph, weights as params."""

    def __init__(self, g: Any) -> None:
        self.g, self.weights = g, Weights()
        self.params: dict[str, np.ndarray] = {}

    def param(self, array: np.ndarray) -> Any:
        name = f"w{len(self.params)}"
        self.params[name] = array
        return self.g.param(name, list(array.shape))

    def conv(
        self, x: Any, given: int, out: int, k: int, stride: Any = 1, groups: int = 1,
        act: str = "", gain: float = 1.0,
    ) -> Any:  # fmt: skip
        w = self.weights.draw(out, given // groups, k, k) * np.float32(gain)
        stride = (stride,) if isinstance(stride, int) else stride
        given_ = {"stride": stride, "padding": (k // 2,), "groups": groups}
        return self.act(
            self.g.conv(x, self.param(w), self.param(self.weights.draw(out)), **given_), act
        )

    def conv_transpose(self, x: Any, given: int, out: int, k: int) -> Any:
        w, bias = self.weights.draw(given, out, k, k), self.weights.draw(out)
        return self.g.conv_transpose(x, self.param(w), self.param(bias), stride=(k,))

    def act(self, x: Any, act: str) -> Any:
        return self.g.apply(_ACTIVATIONS.get(act, act), x) if act else x

    def add(self, x: Any, y: Any) -> Any:
        return self.g.add(x, y)

    def mul(self, x: Any, y: Any) -> Any:
        return self.g.mul(x, y)

    def mean(self, x: Any, keep: bool = False) -> Any:
        return self.g.mean(x, axis=(2, 3), keepdims=keep)

    def pool(self, x: Any, k: Any, stride: Any, padding: int = 1) -> Any:
        return self.g.max_pool(x, kernel=k, stride=stride, padding=(padding,))

    def upsample(self, x: Any, factor: int) -> Any:
        _, _, height, width = x.shape.dims
        return x if factor == 1 else self.g.resize(x, sizes=(height * factor, width * factor))

    def concat(self, parts: list[Any]) -> Any:
        return self.g.concat(*parts, axis=1)

    def linear(self, x: Any, given: int, out: int) -> Any:
        w, bias = self.weights.draw(out, given), self.weights.draw(out)
        return self.g.add(self.g.matmul(x, self.param(np.ascontiguousarray(w.T))), self.param(bias))

    def sequence(self, x: Any) -> Any:
        batch, channels, _, width = x.shape.dims
        return self.g.transpose(self.g.reshape(x, (batch, channels, width)), axes=(0, 2, 1))

    def lstm(self, x: Any, given: int, hidden: int) -> Any:
        w, r = self.weights.draw(2, 4 * hidden, given), self.weights.draw(2, 4 * hidden, hidden)
        bias = self.weights.draw(2, 8 * hidden)
        y, *_ = self.g.lstm(x, *map(self.param, (w, r, bias)), direction="bidirectional")
        batch, seq, _, _ = y.shape.dims
        return self.g.reshape(y, (batch, seq, 2 * hidden))


def compiled(net: str, batch: int, threads: int = 2) -> Callable[[], Any]:
    function, dims = NETS[net]
    builders = []

    def build(g: Any) -> Any:
        builders.append(Builder(g))
        return function(builders[-1], g.input("x", ["batch", *dims]))

    module = GraphModule.define(net, build)
    f = Session("cpu").compile(module, {"threads": threads})
    f.set_params(builders[-1].params)
    x = np.random.default_rng(1).normal(size=(batch, *dims)).astype(np.float32)
    run = lambda: f.run(x=x)[0]  # noqa: E731
    run.graph, run.x = f, x  # type: ignore[attr-defined]
    return run


def _seconds(run: Callable[[], Any], repeat: int) -> float:
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def check(run: Callable[[], Any], peer: Peer, net: str, batch: int) -> None:
    """Sums of thousands of terms in another order differ by some 1e-5 of the largest result."""
    step = 97
    ours = np.asarray(run(), np.float64).ravel()[::step]
    asked = {"engine": "onnxruntime", "net": net, "batch": batch, "step": step}
    theirs = np.array(peer.ask("result", **asked)["result"])
    worst = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not worst <= 1e-4:
        raise SystemExit(f"convnets: {net} differs from ONNX Runtime by {worst:.1e}")


def race(run: Callable[[], Any], peer: Peer, net: str, batch: int, rounds: int) -> list[float]:
    """Median seconds of ours and of each engine, in turn."""
    repeat = 5 if batch == 1 else 2
    times: list[list[float]] = [[] for _ in range(1 + len(ENGINES))]
    for _ in range(rounds):
        time.sleep(_REST)
        times[0].append(_seconds(run, repeat))
        for kept, engine in zip(times[1:], ENGINES, strict=True):
            time.sleep(_REST)
            asked = {"engine": engine, "net": net, "batch": batch, "repeat": repeat}
            kept.append(peer.ask("time", **asked)["seconds"])
    return [statistics.median(t) for t in times]


def main(argv: list[str]) -> int:
    parser = arguments("convnets", __doc__ or "")
    parser.add_argument("--peer-python", default="python", help="a Python that has the peers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--nets", default=",".join(NETS), help="which networks, by name")
    options = parser.parse_args(argv)
    bars = []
    with tempfile.TemporaryDirectory() as work:
        try:
            peer = Peer(
                options.peer_python, "convnets_server.py", options.threads, work,
                requirements="requirements-convnets.txt",
            )  # fmt: skip
        except PeerMissing as e:
            print(e, file=sys.stderr)
            return 2
        with peer:
            for net in options.nets.split(","):
                for batch in (1, 8):
                    run = compiled(net, batch, options.threads)
                    check(run, peer, net, batch)
                    ours, *theirs = race(run, peer, net, batch, 3 if options.quick else 7)
                    shown = zip(ENGINES, theirs, strict=True)
                    print(f"  {net} {batch}: " + ", ".join(f"{e} {t * 1e3:.2f}" for e, t in shown))
                    best = min(theirs)
                    winner = ENGINES[theirs.index(best)]
                    name = f"convnet_{net}_{batch}"
                    bars.append(Bar(name, ours * 1e3, "ms", winner, best * 1e3, 1.0, False))
    mean = math.exp(statistics.fmean(math.log(b.ratio) for b in bars))
    bars.append(Bar("convnets_mean", mean, "×", "best of three", 1.0, 1.15))
    return finish(bars, options.json)
