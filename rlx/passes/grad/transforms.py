"""Fourier transforms: the transform of all points is its own transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.dtype import i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import size_value
from rlx.ir.shape import normalize_axis
from rlx.passes.grad.layouts import padded
from rlx.passes.grad.rules import LINEAR, Grads, in_type, vjp

Values = Sequence[Value]
LINEAR |= {"fft", "rfft", "irfft"}


@vjp("fft")
def _fft(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    return [in_type(g, g.append_node(op, [grads[0]]).output, inputs[0].shape.dtype)]


@vjp("rfft")
def _rfft(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,), (ct,) = inputs, grads
    axis = normalize_axis(op.axis, x.shape.rank)
    missing = x.shape.dims[axis] - ct.shape.dims[axis]
    return [in_type(g, g.real(g.fft(padded(g, ct, axis, 0, missing), axis=axis)), x.shape.dtype)]


@vjp("irfft")
def _irfft(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    """w_k / n times the conjugate spectrum of ct; w = 2 for terms that have a mirror image."""
    (x,), (ct,) = inputs, grads
    axis = normalize_axis(op.axis, x.shape.rank)
    found = g.rfft(ct, axis=axis)
    terms, part = x.shape.dims[axis], ct.shape.dtype
    k = g.iota(shape=(terms,), dtype=i64)
    twice = g.mul(k, g.constant(2, i64))
    alone = g.logical_or(g.eq(k, g.constant(0, i64)), g.eq(twice, size_value(g, op.n, twice)))
    weight = g.where(alone, g.constant(1.0, part), g.constant(2.0, part))
    weight = g.div(weight, size_value(g, op.n, ct))
    weight = g.reshape(weight, shape=tuple(terms if i == axis else 1 for i in range(x.shape.rank)))
    re, im = g.mul(g.real(found), weight), g.neg(g.mul(g.imag(found), weight))
    return [in_type(g, g.complex(re, im), x.shape.dtype)]
