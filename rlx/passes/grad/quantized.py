"""Quantisation with gradients: the straight-through estimator of `fake_quantize`.

Rounding has a derivative of zero, which would teach nothing. It counts as the identity, and only
the limits of the range stop the gradient, as in torch. `quantize` itself gives integers, and no
gradient passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import wide
from rlx.ir.ops.quantize import LARGEST, along_value
from rlx.passes.grad.rules import Grads, filled, in_type, unbroadcast, vjp


@vjp("fake_quantize")
def _fake_quantize(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    """With q = x / scale rounded and limited: dx is ct inside the range and 0 outside, dscale is
    Σ ct · (q − x / scale) inside and Σ ct · q outside, as of learned step sizes."""
    x, scale, *zp = inputs
    ct, rank = wide(g, grads[0]), x.shape.rank
    scaled = g.div(wide(g, x), along_value(g, wide(g, scale), op.axis, rank))
    stored = g.quantize(x, scale, *zp, dtype=op.dtype, axis=op.axis)
    one = filled(g, 1, scale.shape.with_dtype(scaled.shape.dtype))
    q = g.dequantize(stored, one, *zp, axis=op.axis)
    inside = _is_inside(g, op.dtype, scaled, q)
    zero = g.constant(0, ct.shape.dtype)
    dx = g.where(inside, ct, zero)
    slope = g.where(inside, g.sub(q, scaled), q)
    axis = None if op.axis is None else op.axis % rank
    outer = tuple(i for i in range(rank) if i != axis)
    dscale = g.mul(ct, in_type(g, slope, ct.shape.dtype))
    dscale = g.reshape(g.sum(dscale, axis=outer) if outer else dscale, shape=scale.shape.dims)
    found = [in_type(g, dx, x.shape.dtype), unbroadcast(g, dscale, scale.shape)]
    return [*found, *[None] * len(zp)]


def _is_inside(g: Graph, stored: DType, scaled: Value, q: Value) -> Value:
    """Whether x was not limited; NaN counts as outside."""
    if stored.is_float:
        return g.le(g.abs(scaled), g.constant(float(LARGEST[stored]), scaled.shape.dtype))
    return g.eq(g.round(scaled), q)
