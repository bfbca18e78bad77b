"""Elementwise ops. The derivatives of most stand in their rows of the op table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.op import on_register
from rlx.ir.ops._common import wide
from rlx.ir.ops.binary import Binary
from rlx.ir.ops.elementwise import Unary
from rlx.passes.grad.rules import (
    JVP,
    LINEAR,
    VJP,
    Grads,
    add_any,
    in_type,
    jvp,
    unbroadcast,
    vjp,
    zeros,
)

# -- of one tensor: t · f'(x) ------------------------------------------------------------------


def _scaled(op: Any, g: Graph, x: Value, y: Value, t: Value) -> Value:
    slope = op.derivative(g, wide(g, x), wide(g, y))
    return g.mul(wide(g, t), slope)


def _unary_vjp(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    (x,), (y,), (ct,) = inputs, outputs, grads
    return [in_type(g, _scaled(op, g, x, y, ct), x.shape.dtype)]


def _unary_jvp(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], tangents: Grads
) -> Grads:
    (x,), (y,), (t,) = inputs, outputs, tangents
    return [in_type(g, _scaled(op, g, x, y, t), y.shape.dtype)]


# -- of two tensors: ta · ∂f/∂a + tb · ∂f/∂b ---------------------------------------------------


def _moved(op: Any, g: Graph, i: int, values: Sequence[Value], t: Value) -> Value | None:
    """The i-th partial derivative times t."""
    common = op.common_type(values[0].shape.dtype, values[1].shape.dtype)
    a, b, y = (wide(g, in_type(g, v, common)) for v in values)
    found: Value | None = op.partials[i](g, wide(g, in_type(g, t, common)), a, b, y)
    return found


def _binary_vjp(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    (ct,), found = grads, list[Value | None]()
    for i, x in enumerate(inputs):
        moved = _moved(op, g, i, (*inputs, *outputs), ct) if _floats(x) else None
        found.append(None if moved is None else unbroadcast(g, moved, x.shape))
    return found


def _binary_jvp(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], tangents: Grads
) -> Grads:
    total: Value | None = None
    for i, t in enumerate(tangents):
        if t is not None:
            total = add_any(g, total, _moved(op, g, i, (*inputs, *outputs), t))
    y = outputs[0].shape
    if total is None:
        return [None]
    if not total.shape.same_dims(y):  # `add` of a tangent that broadcasts
        total = g.expand(total, shape=y.dims)
    return [in_type(g, total, y.dtype)]


def _floats(x: Value) -> bool:
    return x.shape.dtype.is_float or x.shape.dtype.is_complex


def _enter(cls: Any) -> None:
    """The rules of an op that has its derivative in its row."""
    if issubclass(cls, Unary) and cls.derivative is not Unary.derivative:
        VJP.setdefault(cls.name, _unary_vjp)
        JVP.setdefault(cls.name, _unary_jvp)
    elif issubclass(cls, Binary) and cls.partials is not None:
        VJP.setdefault(cls.name, _binary_vjp)
        JVP.setdefault(cls.name, _binary_jvp)


on_register(_enter)


# -- others -------------------------------------------------------------------------------------


@vjp("where")
def _where(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    condition, a, b = inputs
    (ct,) = grads
    zero = g.constant(0, ct.shape.dtype)
    kept = [g.where(condition, ct, zero), g.where(condition, zero, ct)]
    return [None, *[unbroadcast(g, t, x.shape) for t, x in zip(kept, (a, b), strict=True)]]


@jvp("where")
def _where_jvp(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], tangents: Grads
) -> Grads:
    y = outputs[0].shape
    zero = g.constant(0, y.dtype)
    a, b = (zero if t is None else t for t in tangents[1:])
    moved = g.where(inputs[0], a, b)
    return [in_type(g, moved, y.dtype)]


@vjp("cast")
def _cast(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    return [in_type(g, grads[0], inputs[0].shape.dtype)]


@vjp("abs")
def _abs(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    (x,), (y,), (ct,) = inputs, outputs, grads
    if not x.shape.dtype.is_complex:
        return [g.mul(ct, g.sign(x))]
    # d|z| = Re(z̄ dz) / |z|
    share = g.div(ct, g.where(g.eq(y, 0.0), g.constant(1.0, y.shape.dtype), y))
    return [g.complex(g.mul(share, g.real(x)), g.neg(g.mul(share, g.imag(x))))]


@vjp("sign")
def _sign(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    """Of a complex number z / |z|: the part of dz across z, divided by |z|."""
    (x,), (y,), (ct,) = inputs, outputs, grads
    if not x.shape.dtype.is_complex:
        return [None]
    size = g.abs(x)
    size = g.where(g.eq(size, 0.0), g.constant(1.0, size.shape.dtype), size)
    # dy = i y Im(ȳ dz) / |z|; the transpose of that
    turned = g.neg(g.imag(g.mul(ct, y)))
    share = g.div(turned, size)
    return [g.complex(g.neg(g.mul(share, g.imag(y))), g.neg(g.mul(share, g.real(y))))]


@vjp("real")
def _real(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    (ct,) = grads
    return [g.complex(ct, zeros(g, ct.shape))]


@vjp("imag")
def _imag(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    (ct,) = grads
    return [g.complex(zeros(g, ct.shape), g.neg(ct))]


@vjp("complex")
def _complex(
    op: Any, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    (ct,) = grads
    parts = (g.real(ct), g.neg(g.imag(ct)))
    return [unbroadcast(g, t, x.shape) for t, x in zip(parts, inputs, strict=True)]


LINEAR |= {"cast", "real", "imag", "complex"}
