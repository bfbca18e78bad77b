"""Padding and mirroring as joins and lookups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.dim import Dim
from rlx.ir.dtype import i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import normalize_axes
from rlx.passes.common.reduce import size_value
from rlx.passes.common.registry import common


@common("pad")
def pad(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x = inputs[0]
    for axis, (low, high) in enumerate(zip(op.low, op.high, strict=True)):
        if low or high:
            take = _with_constant if op.mode == "constant" else _with_own
            x = take(g, op, x, axis, low, high)
    return x


def _with_constant(g: Graph, op: Any, x: Value, axis: int, low: int, high: int) -> Any:
    filler = g.constant(op.value, x.shape.dtype)

    def block(size: int) -> list[Value]:
        dims = [size if i == axis else d for i, d in enumerate(x.shape.dims)]
        return [g.expand(filler, shape=tuple(dims))] if size else []

    return g.concat(*block(low), x, *block(high), axis=axis)


def _with_own(g: Graph, op: Any, x: Value, axis: int, low: int, high: int) -> Any:
    """Rows of x at indices that stop at the border, or turn round there."""
    n = x.shape.dims[axis]
    at = g.sub(g.iota(shape=(n + low + high,), dtype=i64), g.constant(low, i64))
    last = g.sub(size_value(g, n, at), g.constant(1, i64))
    if op.mode == "edge":
        at = g.minimum(g.maximum(at, g.constant(0, i64)), last)
    else:
        at = g.sub(last, g.abs(g.sub(last, g.abs(at))))
    return g.gather(x, at, axis=axis)


@common("flip")
def flip(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x = inputs[0]
    for axis in normalize_axes(op.axis, x.shape.rank):
        n: Dim = x.shape.dims[axis]
        count = g.iota(shape=(n,), dtype=i64)
        last = g.sub(size_value(g, n, count), g.constant(1, i64))
        x = g.gather(x, g.sub(last, count), axis=axis)
    return x
