"""GEMMs run natively, and what they must be: sums in f64 with the room that rounding takes.

A sum of k terms, each rounded at 2^-24 of the partial sum, is off by √k·2^-24 of the sum of
magnitudes for typical signs; four times that is asked for, and 1.2 more because activations used
here change a difference by that factor at most. Results in 16 bits are rounded once more.
"""

from __future__ import annotations

import math

import numpy as np
from program_support import SETUPS, Native

from rlx.backends.cpu.kernels.gemm.pack_weights import pack_weights
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.passes.prepare import split_prepare

UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
UNIT |= {"f8e4m3": 2.0**-4, "f8e5m2": 2.0**-3}


def draw(seed, *dims, dtype="f32"):
    rng = np.random.default_rng(seed)
    kind = DType.of(dtype)
    if kind.kind == "complex":
        parts = rng.standard_normal((2, *dims))
        return (parts[0] + 1j * parts[1]).astype(kind.numpy)
    if kind.is_float:
        return rng.standard_normal(dims).astype(kind.numpy)
    return rng.integers(0 if kind.kind == "uint" else -100, 100, dims).astype(kind.numpy)


def native(graph, arrays, target, workers, sizes=None, bounds=None, packed=True):
    """Results of the graph's kernels; work on params runs beforehand, as `prepare` does."""
    graph = graph.copy()
    if packed:
        graph = pack_weights(graph, target)
        assert any(n.op.name.startswith("pack") for n in graph.nodes)
    main, prepare = split_prepare(graph)
    params = {n.name for n in prepare.sources("param")}
    made = evaluate(prepare, {k: v for k, v in arrays.items() if k in params})
    given = arrays | dict(zip(prepare.output_names, made, strict=True))
    names = {n.name for kind in ("input", "param") for n in main.sources(kind)}
    program = Native(main, target, workers, bounds or sizes or {})
    return program.run({k: v for k, v in given.items() if k in names}, sizes)


def close(got, want, magnitude, terms):
    """got is want, up to the rounding of sums of `terms` terms of that magnitude."""
    assert got.shape == want.shape
    assert not np.isnan(got.astype(np.float64)).any()
    dtype = DType.of(got.dtype)
    sums = UNIT["f64" if dtype.name == "f64" else "f32"]
    room = 4.8 * math.sqrt(terms + 4) * sums * magnitude
    if dtype.bytes < 4:
        room = room + UNIT[dtype.name] * 1.01 * np.abs(want) + 1e-7
    assert (np.abs(got.astype(np.float64) - want) <= room).all()


def check(graph, arrays, want, magnitude, terms, setups=SETUPS, **options):
    for target, workers in setups:
        (got,) = native(graph, arrays, target, workers, **options)
        close(got, want, magnitude, terms)


def wide(*arrays):
    return [a.astype(np.float64) for a in arrays]


def gemm(x, w, param=True):
    """A graph of x·w with the arrays, and the exact product with its magnitude."""
    g = Graph()
    arrays = {"x": x, "w": w}
    source = g.param if param else g.input
    left = g.input("x", x.shape, DType.of(x.dtype))
    g.set_outputs(g.matmul(left, source("w", w.shape, DType.of(w.dtype))))
    a, b = wide(x, w)
    return g, arrays, a @ b, np.abs(a) @ np.abs(b), x.shape[-1]
