"""Quantisation with gradients: products with packed weights, and the straight-through estimator of
`fake_quantize`.

A product with a packed weight has a derivative by x: the product with the weight the other way
round, which stays packed. The weight itself has none.

Rounding has a derivative of zero, which would teach nothing. It counts as the identity, and only
the limits of the range stop the gradient, as in torch. `quantize` itself gives integers, and no
gradient passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.dtype import DType, i32
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.op import lookup
from rlx.ir.ops._common import wide
from rlx.ir.ops.quantize import LARGEST, along_value
from rlx.passes.grad.rules import Grads, filled, in_type, jvp, unbroadcast, vjp

_OTHER_WAY = {
    "dequant_matmul": "dequant_matmul_transposed", "dequant_matmul_transposed": "dequant_matmul",
}  # fmt: skip


@vjp(*_OTHER_WAY)
def _product(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    """dx = ct · W of x · Wᵀ, and the reverse."""
    back = lookup(_OTHER_WAY[op.name])(scheme=op.scheme)
    dx = g.append_node(back, [grads[0], *inputs[1:]]).output
    return [dx, *[None] * (len(inputs) - 1)]


@vjp("dequant_grouped_matmul")
def _grouped_product(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    """By the experts, unpacked for this one product."""
    _, w, expert, *sides = inputs
    count, n, _ = w.shape.dims
    flat = [g.reshape(v, shape=(count * n, *v.shape.dims[2:])) for v in (w, *sides)]
    every = g.iota((count * n,), dtype=i32)
    rows = g.dequant_gather(flat[0], every, *flat[1:], scheme=op.scheme)
    experts = g.reshape(rows, shape=(count, n, rows.shape.dims[1]))
    dx = g.grouped_matmul(wide(g, grads[0]), experts, expert)
    return [in_type(g, dx, inputs[0].shape.dtype), *[None] * (len(inputs) - 1)]


@jvp(*_OTHER_WAY, "dequant_grouped_matmul")
def _product_jvp(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], tangents: Grads
) -> Grads:
    """Linear in x."""
    return [g.append_node(op, [tangents[0], *inputs[1:]]).output]


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
