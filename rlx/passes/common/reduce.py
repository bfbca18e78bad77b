"""Means, softmax and running sums from sums and maxima."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.blocks._parts import cast
from rlx.ir.dim import Dim
from rlx.ir.dtype import f32, i32
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import normalize_axes
from rlx.ir.ops.control import make_body
from rlx.ir.shape import normalize_axis
from rlx.passes.common.elementwise import as_real
from rlx.passes.common.registry import common


def size_value(g: Graph, size: Dim, like: Value) -> Value:
    """A size as a number of the element type of `like`, known now or at run time."""
    if isinstance(size, int):
        return g.constant(size, like.shape.dtype)
    return g.dim_value(dim=size, dtype=like.shape.dtype)


@common("mean")
def mean(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (x,) = inputs
    if x.shape.dtype.kind == "complex":
        parts = [g.mean(p, axis=op.axis, keepdims=op.keepdims) for p in (g.real(x), g.imag(x))]
        return g.complex(*parts)
    real = as_real(g, x)
    axes = normalize_axes(op.axis, x.shape.rank)
    count = x.shape.with_dims([x.shape.dims[a] for a in axes]).num_elements
    total = g.sum(real, axis=op.axis, keepdims=op.keepdims)
    result = x.shape.dtype if x.shape.dtype.is_float else f32
    return cast(g, g.div(total, size_value(g, count, total)), result)


@common("softmax")
def softmax(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    low = _shifted(g, inputs[0], op.axis)
    e = g.exp(low)
    # one division a row: the sum is 1 or more, so its reciprocal is as good as it is
    share = g.reciprocal(g.sum(e, axis=(op.axis,), keepdims=True))
    return _as(g, g.mul(e, share), inputs[0])


@common("log_softmax")
def log_softmax(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    low = _shifted(g, inputs[0], op.axis)
    return _as(g, g.sub(low, g.log(g.sum(g.exp(low), axis=(op.axis,), keepdims=True))), inputs[0])


def _shifted(g: Graph, x: Value, axis: int) -> Any:
    """x − max x, so that exp cannot overflow."""
    real = as_real(g, x)
    return g.sub(real, g.max(real, axis=(axis,), keepdims=True))


def _as(g: Graph, y: Value, x: Value) -> Value:
    return cast(g, y, x.shape.dtype if x.shape.dtype.is_float else f32)


@common("cumsum")
def cumsum(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    """A loop along the axis that carries the sum so far."""
    (x,) = inputs
    if x.shape.dtype.kind == "complex":
        parts = [g.append(op, [p]) for p in (g.real(x), g.imag(x))]
        return g.complex(*parts)
    result = i32 if x.shape.dtype.kind == "bool" else x.shape.dtype
    x = cast(g, x, i32) if result is i32 else as_real(g, x) if result.is_float else x
    rank = x.shape.rank
    axis = normalize_axis(op.axis, rank)
    perm = (axis, *(i for i in range(rank) if i != axis))
    rows = g.transpose(x, axes=perm)
    row = rows.shape.with_dims(rows.shape.dims[1:])
    start = g.expand(g.constant(0, row.dtype), shape=row.dims)

    def step(b: Graph, total: Value, part: Value) -> list[Value]:
        new = b.add(total, part)
        return [new, total if op.exclusive else new]

    body = make_body(step, row, row, name="cumsum_step")
    _, sums = g.scan(start, rows, body=body, n_carry=1, n_xs=1, reverse=op.reverse)
    back = tuple(perm.index(i) for i in range(rank))
    return cast(g, g.transpose(sums, axes=back), result)
