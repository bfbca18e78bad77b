"""Views and copies: linear ops, whose cotangents go back to where the elements came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import size_value
from rlx.ir.shape import normalize_axis
from rlx.passes.grad.rules import LINEAR, Grads, unbroadcast, vjp, zeros

LINEAR |= {
    "reshape", "transpose", "narrow", "slice", "expand", "concat", "flip", "contiguous",
}  # fmt: skip

Values = Sequence[Value]


@vjp("reshape")
def _reshape(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    return [g.reshape(grads[0], shape=inputs[0].shape.dims)]


@vjp("transpose")
def _transpose(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    rank = inputs[0].shape.rank
    back = [0] * rank
    for i, axis in enumerate(op.axes):
        back[axis] = i
    return [g.transpose(grads[0], axes=tuple(back))]


@vjp("expand")
def _expand(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    return [unbroadcast(g, grads[0], inputs[0].shape)]


@vjp("contiguous")
def _contiguous(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    return grads


@vjp("flip")
def _flip(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    return [g.flip(grads[0], axis=op.axis)]


@vjp("narrow")
def _narrow(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,), (ct,) = inputs, grads
    axis = normalize_axis(op.axis, x.shape.rank)
    rest = x.shape.dims[axis] - op.start - op.length
    return [padded(g, ct, axis, op.start, rest)]


def padded(g: Graph, ct: Value, axis: int, low: Dim, high: Dim) -> Value:
    """`ct` with zeros around it along an axis; the sizes may be symbolic."""
    if isinstance(low, int) and isinstance(high, int):
        sides = [[n if i == axis else 0 for i in range(ct.shape.rank)] for n in (low, high)]
        return g.pad(ct, low=tuple(sides[0]), high=tuple(sides[1]))
    dims = ct.shape.dims

    def block(size: Dim) -> list[Value]:
        if size == 0:
            return []
        return [zeros(g, ct.shape.with_dims((*dims[:axis], size, *dims[axis + 1 :])))]

    return g.concat([*block(low), ct, *block(high)], axis=axis)


@vjp("slice")
def _slice(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,), (ct,) = inputs, grads
    dims = x.shape.dims
    for axis, (first, count, step) in enumerate(op.bounds(dims)):
        if step == 1:
            if not (first == 0 and count == dims[axis]):
                ct = padded(g, ct, axis, first, dims[axis] - first - count)
            continue
        at = g.mul(g.iota(shape=(count,), axis=0), step)
        at = g.add(at, size_value(g, first, at))
        whole = ct.shape.dims
        into = zeros(g, ct.shape.with_dims((*whole[:axis], dims[axis], *whole[axis + 1 :])))
        ct = g.scatter_add(into, at, ct, axis=axis)
    return [ct]


@vjp("concat")
def _concat(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (ct,) = grads
    axis = normalize_axis(op.axis, ct.shape.rank)
    start: Dim = 0
    found = []
    for x in inputs:
        size = x.shape.dims[axis]
        part = g.narrow(ct, axis=axis, start=start, length=size)
        found.append(unbroadcast(g, part, x.shape))
        start = start + size
    return found


@vjp("pad")
def _pad(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,), (ct,) = inputs, grads
    if op.mode != "constant":
        return _pad_copies(op, g, x, ct)
    for axis, low in enumerate(op.low):
        size = x.shape.dims[axis]
        if low or op.high[axis]:
            ct = g.narrow(ct, axis=axis, start=low, length=size)
    return [ct]


def _pad_copies(op: Any, g: Graph, x: Value, ct: Value) -> Grads:
    """The border's cotangents added to those of the elements that it repeats."""
    for axis, (low, high) in enumerate(zip(op.low, op.high, strict=True)):
        if not (low or high):
            continue
        n = x.shape.dims[axis]
        at = g.sub(g.iota(shape=(ct.shape.dims[axis],), axis=0), low)
        last = g.sub(size_value(g, n, at), 1)
        if op.mode == "reflect":
            at = g.sub(last, g.abs(g.sub(last, g.abs(at))))
        else:
            at = g.maximum(g.minimum(at, last), g.constant(0, at.shape.dtype))
        whole = ct.shape.dims
        into = zeros(g, ct.shape.with_dims((*whole[:axis], n, *whole[axis + 1 :])))
        ct = g.scatter_add(into, at, ct, axis=axis)
    return [ct]
