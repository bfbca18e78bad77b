"""Reductions, softmax and running sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import normalize_axes, wide
from rlx.ir.shape import normalize_axis
from rlx.passes.grad.rules import LINEAR, Grads, in_type, product_of, vjp

Values = Sequence[Value]
LINEAR |= {"sum", "cumsum"}


def _kept(op: Any, g: Graph, x: Value, y: Value) -> Value:
    """A result of a reduction with the reduced axes as size 1."""
    axes = normalize_axes(op.axis, x.shape.rank)
    dims = tuple(1 if i in axes else d for i, d in enumerate(x.shape.dims))
    return g.reshape(y, shape=dims)


@vjp("sum")
def _sum(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,), (ct,) = inputs, grads
    spread = g.expand(_kept(op, g, x, ct), shape=x.shape.dims)
    return [in_type(g, spread, x.shape.dtype)]


@vjp("max", "min")
def _extreme(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    """Equal extremes share the cotangent."""
    (x,), (y,), (ct,) = inputs, outputs, grads
    axes = normalize_axes(op.axis, x.shape.rank)
    at = wide(g, g.cast(g.eq(x, _kept(op, g, x, y)), x.shape.dtype))
    share = g.div(wide(g, _kept(op, g, x, ct)), g.sum(at, axis=axes, keepdims=True))
    return [in_type(g, g.mul(at, share), x.shape.dtype)]


@vjp("prod")
def _prod(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    """ct times the product of the others, those before and those behind: right for zeros too."""
    (x,), (ct,) = inputs, grads
    rank = x.shape.rank
    axes = normalize_axes(op.axis, rank)
    free = [i for i in range(rank) if i not in axes]
    order = (*free, *axes)
    dims = x.shape.dims
    flat = (*[dims[i] for i in free], product_of([dims[i] for i in axes]))
    rows = g.reshape(g.transpose(wide(g, x), axes=order), shape=flat)
    others = g.mul(
        g.cumprod(rows, axis=-1, exclusive=True),
        g.cumprod(rows, axis=-1, exclusive=True, reverse=True),
    )
    spread = g.reshape(wide(g, ct), shape=(*flat[:-1], 1))
    moved = g.reshape(g.mul(others, spread), shape=tuple(dims[i] for i in order))
    back = [0] * rank
    for i, axis in enumerate(order):
        back[axis] = i
    return [in_type(g, g.transpose(moved, axes=tuple(back)), x.shape.dtype)]


@vjp("cumsum")
def _cumsum(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    back = g.cumsum(grads[0], axis=op.axis, exclusive=op.exclusive, reverse=not op.reverse)
    return [in_type(g, back, inputs[0].shape.dtype)]


@vjp("softmax")
def _softmax(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,), (y,), (ct,) = inputs, outputs, grads
    axis = normalize_axis(op.axis, x.shape.rank)
    y, ct = wide(g, y), wide(g, ct)
    mean = g.sum(g.mul(ct, y), axis=(axis,), keepdims=True)
    return [in_type(g, g.mul(g.sub(ct, mean), y), x.shape.dtype)]


@vjp("log_softmax")
def _log_softmax(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,), (y,), (ct,) = inputs, outputs, grads
    axis = normalize_axis(op.axis, x.shape.rank)
    y, ct = wide(g, y), wide(g, ct)
    total = g.sum(ct, axis=(axis,), keepdims=True)
    return [in_type(g, g.sub(ct, g.mul(g.exp(y), total)), x.shape.dtype)]
