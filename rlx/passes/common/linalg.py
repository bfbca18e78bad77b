"""Fourier transforms as products with the matrix of the transform."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlx.ir.blocks._parts import cast, wide
from rlx.ir.dim import Dim
from rlx.ir.dtype import c64, f32, f64, i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.shape import normalize_axis
from rlx.passes.common.reduce import size_value
from rlx.passes.common.registry import common


def _waves(g: Graph, rows: Dim, columns: Dim, n: Dim) -> tuple[Value, Value]:
    """cos and sin of 2π·jk/n for j in rows and k in columns; f64, rounded to f32 at the end."""
    j = g.iota(shape=(rows, columns), axis=0, dtype=i64)
    k = g.iota(shape=(rows, columns), axis=1, dtype=i64)
    turn = cast(g, g.mod(g.mul(j, k), size_value(g, n, j)), f64)
    angle = g.mul(turn, g.div(g.constant(2 * math.pi, f64), size_value(g, n, turn)))
    return cast(g, g.cos(angle), f32), cast(g, g.sin(angle), f32)


def _moved(g: Graph, x: Value, axis: int) -> Value:
    """`axis` exchanged with the last one; doing it again undoes it."""
    rank = x.shape.rank
    axis = normalize_axis(axis, rank)
    perm = list(range(rank))
    perm[axis], perm[-1] = perm[-1], perm[axis]
    return g.transpose(x, axes=tuple(perm)) if axis != rank - 1 else x


def _spectrum(g: Graph, x: Value, axis: int, terms: Dim, sign: float) -> tuple[Value, Value]:
    """(re, im) of Σ x·exp(sign·2πi·jk/n), the axis last."""
    parts = [g.real(x), g.imag(x)] if x.shape.dtype is c64 else [wide(g, x)]
    parts = [_moved(g, p, axis) for p in parts]
    n = parts[0].shape.dims[-1]
    cos, sin = _waves(g, n, terms, n)
    re, im = g.matmul(parts[0], cos), g.mul(g.matmul(parts[0], sin), sign)
    if len(parts) == 2:
        re = g.sub(re, g.mul(g.matmul(parts[1], sin), sign))
        im = g.add(im, g.matmul(parts[1], cos))
    return re, im


@common("fft")
def fft(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (x,) = inputs
    n = x.shape.dims[op.axis]
    re, im = _spectrum(g, x, op.axis, n, 1.0 if op.inverse else -1.0)
    if op.inverse:
        re, im = (g.div(v, size_value(g, n, v)) for v in (re, im))
    return _moved(g, g.complex(re, im), op.axis)


@common("rfft")
def rfft(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (x,) = inputs
    re, im = _spectrum(g, x, op.axis, x.shape.dims[op.axis] // 2 + 1, -1.0)
    return _moved(g, g.complex(re, im), op.axis)


@common("irfft")
def irfft(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    """x[j] = (Σ_k w_k (re_k·cos − im_k·sin)) / n, w = 2 for the terms that have a mirror image"""
    (x,) = inputs
    re, im = (_moved(g, p, op.axis) for p in (g.real(x), g.imag(x)))
    terms = re.shape.dims[-1]
    cos, sin = _waves(g, terms, op.n, op.n)
    k = g.iota(shape=(terms,), dtype=i64)
    twice = g.mul(k, g.constant(2, i64))
    alone = g.logical_or(g.eq(k, g.constant(0, i64)), g.eq(twice, size_value(g, op.n, twice)))
    weight = g.where(alone, g.constant(1.0), g.constant(2.0))
    y = g.sub(g.matmul(g.mul(re, weight), cos), g.matmul(g.mul(im, weight), sin))
    return _moved(g, g.div(y, size_value(g, op.n, y)), op.axis)
