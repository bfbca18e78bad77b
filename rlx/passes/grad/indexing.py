"""Gather and scatter: a read is the transpose of an addition to the same places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.dtype import i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import cast, size_value
from rlx.ir.shape import Shape, normalize_axis
from rlx.passes.grad.rules import Grads, jvp, product_of, unbroadcast, vjp, zeros

Values = Sequence[Value]


@vjp("gather")
def _gather(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x, at), (ct,) = inputs, grads
    axis = normalize_axis(op.axis, x.shape.rank)
    return [g.gather_backward(ct, at, size=x.shape.dims[axis], axis=axis), None]


@vjp("take_along")
def _take_along(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x, at), (ct,) = inputs, grads
    axis = normalize_axis(op.axis, x.shape.rank)
    sizes = zip(outputs[0].shape.dims, x.shape.dims, strict=True)
    into = [n if i == axis else d for i, (d, n) in enumerate(sizes)]
    made = put_along(g, g.expand(at, shape=ct.shape.dims), ct, x.shape.with_dims(into), axis)
    return [unbroadcast(g, made, x.shape), None]


def put_along(g: Graph, at: Value, updates: Value, into: Shape, axis: int) -> Value:
    """Zeros of shape `into` with each element of `updates` added at its index along an axis."""
    n, dims = into.dims[axis], updates.shape.dims
    at = cast(g, at, i64)
    size = size_value(g, n, at)
    at = g.where(g.lt(at, 0), g.add(at, size), at)
    flat: Value | None = None
    for i in range(into.rank):  # row-major positions in `into`
        here = at if i == axis else g.iota(shape=dims, axis=i, dtype=i64)
        step = size_value(g, into.dims[i], at)
        flat = here if flat is None else g.add(g.mul(flat, step), here)
    assert flat is not None
    count, whole = product_of(dims), product_of(into.dims)
    target = zeros(g, Shape((whole,), updates.shape.dtype))
    rows, given = g.reshape(flat, shape=(count,)), g.reshape(updates, shape=(count,))
    return g.reshape(g.scatter_add(target, rows, given, axis=0), shape=into.dims)


@vjp("scatter")
def _scatter(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x, at, updates), (ct,) = inputs, grads
    kept = g.scatter(ct, at, zeros(g, updates.shape), axis=op.axis)
    found = g.gather(ct, at, axis=op.axis)
    return [kept, None, g.where(_wins(op, g, x, at), found, g.constant(0, ct.shape.dtype))]


def _wins(op: Any, g: Graph, x: Value, at: Value) -> Value:
    """Which slices of the updates are in the result: the last of those with equal indices."""
    axis = normalize_axis(op.axis, x.shape.rank)
    count, n = at.shape.dims[0], x.shape.dims[axis]
    order = g.iota(shape=(count,), axis=0)
    owner = g.scatter(zeros(g, Shape((n,), order.shape.dtype)), at, order, axis=0)
    wins = g.eq(g.gather(owner, at, axis=0), order)
    return g.reshape(wins, shape=tuple(count if i == axis else 1 for i in range(x.shape.rank)))


@jvp("scatter")
def _scatter_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    x, at, updates = inputs
    tx, _, tu = tangents
    tx = zeros(g, x.shape) if tx is None else tx
    return [g.scatter(tx, at, zeros(g, updates.shape) if tu is None else tu, axis=op.axis)]


@vjp("scatter_add")
def _scatter_add(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    return [grads[0], None, g.gather(grads[0], inputs[1], axis=op.axis)]


@jvp("scatter_add")
def _scatter_add_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    x, at, _ = inputs
    tx, _, tu = tangents
    tx = zeros(g, x.shape) if tx is None else tx
    return [tx if tu is None else g.scatter_add(tx, at, tu, axis=op.axis)]


@jvp("gather", "take_along")
def _read_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    return [g.append_node(op, [tangents[0], inputs[1]]).output]


@vjp("sort")
def _sort(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,) = inputs
    order = g.argsort(x, axis=op.axis, descending=op.descending)
    return [g.take_along(grads[0], g.argsort(order, axis=op.axis), axis=op.axis)]


@jvp("sort")
def _sort_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    order = g.argsort(inputs[0], axis=op.axis, descending=op.descending)
    return [g.take_along(tangents[0], order, axis=op.axis)]


@vjp("top_k")
def _top_k(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,), ct = inputs, grads[0]
    if ct is None:
        return [None]
    axis = normalize_axis(op.axis, x.shape.rank)
    return [put_along(g, outputs[1], ct, x.shape, axis)]


@jvp("top_k")
def _top_k_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    return [g.take_along(tangents[0], outputs[1], axis=op.axis), None]
