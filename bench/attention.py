"""Attention: many queries against the f32 peak, one query over a long KV cache against bandwidth.

The shape is that of Qwen3-0.6B: 16 query heads on 8 KV heads of 128. Prefill counts only the flops
that a causal mask leaves. Decode reads the KV cache of 28 layers, 470 MB in f16, so that no CPU
cache helps. Limits are measured in turn with the kernels, and results checked before. Results are
left in the arena (`run_slots`): fresh memory for them would cost page faults. Bars name the
instruction set: RLX_TARGET=x86-64-v3 holds it to AVX2.
"""

from __future__ import annotations

import numpy as np

from bench.common import Bar, arguments, finish, interleaved
from bench.instruction_set import instruction_set
from rlx import Graph, Session
from rlx.backends.cpu.peaks import FmaProbe, ReadProbe
from rlx.ir.op import Array
from rlx.runtime.compiled import CompiledGraph
from rlx.support.machine import worker_count

HEADS, KV_HEADS, DIM = 16, 8, 128
LENGTH, CACHED, LAYERS = 512, 4096, 28


def _attention(g: Graph, q: object, k: object, v: object, layout: str = "bshd") -> object:
    return g.attention(
        q, k, v, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, mask_kind="causal",
        kv_layout=layout,
    )  # fmt: skip


def _draw(seed: int, *dims: int) -> Array:
    return np.random.default_rng(seed).standard_normal(dims, np.float32)


def _expected(q: Array, k: Array, v: Array) -> Array:
    """One head in f64: q [Sq, D], k and v [Sk, D]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.T / np.sqrt(DIM)
    hidden = np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]
    weights = np.exp(np.where(hidden, -np.inf, scores))
    return weights @ v / weights.sum(1, keepdims=True)


def _require(name: str, got: Array, want: Array) -> None:
    worst = float(np.abs(got - want).max())
    if not worst < 1e-5:
        raise SystemExit(f"attention: the result of {name} is wrong: off by {worst:.2g}")


class Prefill:
    flops = 4.0 * HEADS * DIM * (LENGTH * (LENGTH + 1) / 2)

    def __init__(self, threads: int) -> None:
        g = Graph("prefill")
        shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        values = [g.input(n, [1, LENGTH, h, DIM]) for n, h in shapes.items()]
        g.set_outputs(_attention(g, *values))
        self.compiled: CompiledGraph = Session("cpu").compile(g, {"threads": threads})
        self.arrays = {n: _draw(h, 1, LENGTH, h, DIM) for n, h in shapes.items()}

    def run(self) -> None:
        self.compiled.run_slots(*self.arrays.values())

    def check(self) -> None:
        out = self.compiled.run(self.arrays)[0]
        for head in (0, HEADS - 1):
            kv = head * KV_HEADS // HEADS
            k, v = (self.arrays[n][0, :, kv] for n in "kv")
            _require("prefill", out[0, :, head], _expected(self.arrays["q"][0, :, head], k, v))


class Decode:
    """One step over `CACHED` positions of every layer; the states are filled beforehand."""

    bytes = 2.0 * LAYERS * KV_HEADS * CACHED * DIM * 2

    def __init__(self, layout: str, threads: int) -> None:
        dims = [1, CACHED, KV_HEADS, DIM] if layout == "bshd" else [1, KV_HEADS, CACHED, DIM]
        g = Graph("decode")
        q = g.input("q", [1, 1, HEADS, DIM])
        states = [[g.state(f"{n}{i}", dims, dtype="f16") for n in "kv"] for i in range(LAYERS)]
        g.set_outputs(*[_attention(g, q, k, v, layout) for k, v in states])
        self.compiled: CompiledGraph = Session("cpu").compile(g, {"threads": threads})
        self.q = _draw(1, 1, 1, HEADS, DIM)
        self.layout = layout
        first = [_draw(seed, *dims).astype(np.float16) for seed in (2, 3)]
        self.states = [[_shifted(x, i) for x in first] for i in range(LAYERS)]
        for i, pair in enumerate(self.states):
            for name, state in zip("kv", pair, strict=True):
                self.compiled.bind_state(f"{name}{i}", state)

    def run(self) -> None:
        self.compiled.run_slots(self.q)

    def check(self) -> None:
        outs = self.compiled.run(q=self.q)
        for layer, head in ((0, 0), (LAYERS - 1, HEADS - 1)):
            kv = head * KV_HEADS // HEADS
            place = (0, slice(None), kv) if self.layout == "bshd" else (0, kv)
            k, v = (state[place] for state in self.states[layer])
            want = _expected(self.q[0, :, head], k, v)
            _require("decode", outs[layer][0, :, head], want)


def _shifted(x: Array, places: int) -> Array:
    """Other numbers in other memory, without drawing them anew."""
    return np.ascontiguousarray(np.roll(x, places, axis=-1))


def prefill_bar(threads: int, repeat: int) -> Bar:
    bench, probe = Prefill(threads), FmaProbe(threads)
    bench.check()
    ours, peak = interleaved([bench.run, probe.run], repeat, inner=3)
    return Bar(
        f"attention prefill {LENGTH}, {threads} threads, {instruction_set()}",
        bench.flops / ours / 1e9, "GFLOP/s", "f32 peak", probe.flops / peak / 1e9, goal=0.60,
    )  # fmt: skip


def decode_bar(layout: str, threads: int, repeat: int) -> Bar:
    bench, probe = Decode(layout, threads), ReadProbe(threads)
    bench.check()
    ours, reading = interleaved([bench.run, probe.run], repeat)
    return Bar(
        f"attention decode {CACHED}, KV cache {layout}, {threads} threads, {instruction_set()}",
        bench.bytes / ours / 1e9, "GB/s", "read bandwidth", probe.bytes / reading / 1e9, goal=0.70,
    )  # fmt: skip


def main(argv: list[str]) -> int:
    options = arguments("attention", __doc__ or "").parse_args(argv)
    threads = worker_count()
    repeat = 5 if options.quick else 15
    bars = [prefill_bar(n, repeat) for n in sorted({1, threads})]
    bars += [decode_bar(layout, threads, repeat) for layout in ("bshd", "bhsd")]
    return finish(bars, options.json)
