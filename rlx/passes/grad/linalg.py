"""Linear systems, determinants and factorisations.

The rules are those of forward mode (M. Giles, "Collected matrix derivative results for forward and
reverse mode", 2008); the pullbacks are their transposes. `cholesky` and `eigh` are differentiated
as functions of (x + xᴴ) / 2: a gradient is symmetric, although one triangle is read. Eigenvectors
and singular vectors of equal values have no derivative: it is not finite there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.ir.dim import same
from rlx.ir.graph import Graph
from rlx.ir.node import UNKNOWN, Value
from rlx.ir.shape import Shape
from rlx.passes.grad.rules import (
    Grads,
    add_any,
    adjoint,
    conjugate,
    in_type,
    jvp,
    no_derivative,
    swapped,
    unbroadcast,
    vjp,
)

Values = Sequence[Value]


def _where(g: Graph, test: Callable[[Value, Value], Value], x: Value) -> Value:
    """The elements of matrices at which test(row, column) holds; 0 elsewhere."""
    rows, columns = x.shape.dims[-2:]
    keep = test(g.iota(shape=(rows, 1), axis=0), g.iota(shape=(1, columns), axis=1))
    return g.where(keep, x, g.constant(0, x.shape.dtype))


def _diagonal(g: Graph, x: Value) -> Value:
    return g.sum(_where(g, g.eq, x), axis=(-1,))


def _column(g: Graph, x: Value) -> Value:
    """Numbers of each matrix as a column of it."""
    return g.reshape(x, shape=(*x.shape.dims, 1))


def _row(g: Graph, x: Value) -> Value:
    return g.reshape(x, shape=(*x.shape.dims[:-1], 1, x.shape.dims[-1]))


def _real(g: Graph, x: Value) -> Value:
    return g.real(x) if x.shape.dtype.is_complex else x


def _divided(g: Graph, x: Value, y: Value) -> Value:
    """x · y⁻¹ for matrices"""
    return swapped(g, g.solve(swapped(g, y), swapped(g, x)))


def _symmetric(g: Graph, x: Value) -> Value:
    return g.mul(g.add(x, adjoint(g, x)), 0.5)


def _gaps(g: Graph, values: Value) -> Value:
    """1 / (v_j − v_i) in row i, column j, and 0 on the diagonal."""
    rows, columns = _column(g, values), _row(g, values)
    count = values.shape.dims[-1]
    same_one = g.eq(g.iota(shape=(count, 1), axis=0), g.iota(shape=(1, count), axis=1))
    one, zero = g.constant(1, values.shape.dtype), g.constant(0, values.shape.dtype)
    return g.where(same_one, zero, g.div(one, g.where(same_one, one, g.sub(columns, rows))))


# -- systems and determinants ---------------------------------------------------------------------


@vjp("solve")
def _solve(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    """db = a⁻ᵀ · ct, da = −db · xᵀ"""
    (a, b), (x,), (ct,) = inputs, outputs, grads
    db = g.solve(swapped(g, a), ct)
    da = g.neg(g.matmul(db, swapped(g, x)))
    return [unbroadcast(g, da, a.shape), unbroadcast(g, db, b.shape)]


@jvp("solve")
def _solve_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    """dx = a⁻¹ · (db − da · x)"""
    (a, _), (x,), (da, db) = inputs, outputs, tangents
    change: Any = add_any(g, db, None if da is None else g.neg(g.matmul(da, x)))
    dx = g.solve(a, change)
    if not dx.shape.same_dims(x.shape):
        dx = g.expand(dx, shape=x.shape.dims)
    return [in_type(g, dx, x.shape.dtype)]


@jvp("slogdet")
def _slogdet(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    """d ln det x = tr(x⁻¹ · dx), of which the imaginary part turns the sign."""
    (x,), (sign, size), (dx,) = inputs, outputs, tangents
    trace = g.sum(_diagonal(g, g.solve(x, dx)), axis=(-1,))
    if not x.shape.dtype.is_complex:
        return [None, trace]
    zero = g.constant(0, size.shape.dtype)
    return [g.mul(sign, g.complex(zero, g.imag(trace))), g.real(trace)]


# -- factorisations -------------------------------------------------------------------------------


@jvp("cholesky")
def _cholesky(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    """dl = l · Φ(l⁻¹ · dx · l⁻ᴴ); Φ takes the lower triangle and half of the diagonal."""
    (factor,), (dx,) = outputs, tangents
    lower = adjoint(g, factor) if op.upper else factor
    left = g.solve(lower, _symmetric(g, dx))
    inner = adjoint(g, g.solve(lower, adjoint(g, left)))
    half = g.mul(g.add(_where(g, g.ge, inner), _where(g, g.gt, inner)), 0.5)
    moved = g.matmul(lower, half)
    return [adjoint(g, moved) if op.upper else moved]


@jvp("qr")
def _qr(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    (x,), (q, r), (dx,) = inputs, outputs, tangents
    rows, columns = x.shape.dims[-2:]
    if op.tall and op.complete and not same(rows, columns):
        raise _more_than_determined(op, x.shape, "q", "complete=False")
    if op.tall:
        return _tall_qr(g, q, r, dx)
    # the first columns determine q; r has qᴴ · x in the others
    rest = columns - rows
    first, moved_first = (g.narrow(v, axis=-1, start=0, length=rows) for v in (r, dx))
    last, moved_last = (g.narrow(v, axis=-1, start=rows, length=rest) for v in (x, dx))
    dq, dr = _tall_qr(g, q, first, moved_first)
    behind = g.add(g.matmul(adjoint(g, dq), last), g.matmul(adjoint(g, q), moved_last))
    return [dq, g.concat([dr, behind], axis=-1)]


def _tall_qr(g: Graph, q: Value, r: Value, dx: Value) -> list[Value]:
    """dq = q · (s − p) + dx · r⁻¹ and dr = (p − s) · r with p = qᴴ · dx · r⁻¹; s is what of it
    turns q: skew-Hermitian, and such that the diagonal of r stays real."""
    scaled = _divided(g, dx, r)
    p = g.matmul(adjoint(g, q), scaled)
    below = _where(g, g.gt, p)
    turn = g.sub(below, adjoint(g, below))
    if p.shape.dtype.is_complex:
        on = _where(g, g.eq, p)
        turn = g.add(turn, g.mul(g.sub(on, conjugate(g, on)), 0.5))
    rest = g.sub(p, turn)
    return [g.sub(scaled, g.matmul(q, rest)), g.matmul(rest, r)]


@jvp("eigh")
def _eigh(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    """With p = vᴴ · dx · v: the diagonal of p, and v · (p / gaps)."""
    (dx,) = tangents
    values, v = outputs if op.vectors else g.eigh(inputs[0])
    p = g.matmul(adjoint(g, v), g.matmul(_symmetric(g, dx), v))
    moved = _real(g, _diagonal(g, p))
    return [moved, g.matmul(v, g.mul(p, _gaps(g, values)))] if op.vectors else [moved]


@jvp("eig")
def _eig(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    """With p = v⁻¹ · dx · v: the diagonal of p, and v · (p / gaps) less what would change the
    length of a vector. Its phase is free, and taken to stay."""
    (dx,) = tangents
    values, v = outputs if op.vectors else g.eig(inputs[0])
    p = g.solve(v, g.matmul(dx, v))
    moved = _diagonal(g, p)
    if not op.vectors:
        return [moved]
    turned = g.matmul(v, g.mul(p, _gaps(g, values)))
    longer = g.real(_diagonal(g, g.matmul(adjoint(g, v), turned)))
    return [moved, g.sub(turned, g.mul(v, _row(g, longer)))]


@jvp("svd")
def _svd(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    (x,), (dx,) = inputs, tangents
    rows, columns = x.shape.dims[-2:]
    if op.vectors and op.full and not same(rows, columns):
        raise _more_than_determined(op, x.shape, "u or vh", "full=False")
    u, s, vh = outputs if op.vectors else g.svd(x, tall=op.tall)
    uh, v = adjoint(g, u), adjoint(g, vh)
    p = g.matmul(uh, g.matmul(dx, v))
    moved = _real(g, _diagonal(g, p))
    if not op.vectors:
        return [moved]
    du, dv = _turned_vectors(g, u, s, v, p)
    inverse = g.div(g.constant(1, s.shape.dtype), _row(g, s))
    if op.tall and not same(rows, columns):  # what of dx leaves the span of u
        out = g.sub(g.matmul(dx, v), g.matmul(u, p))
        du = g.add(du, g.mul(out, inverse))
    elif not same(rows, columns):
        back = adjoint(g, dx)
        out = g.sub(g.matmul(back, u), g.matmul(v, adjoint(g, p)))
        dv = g.add(dv, g.mul(out, inverse))
    return [du, moved, adjoint(g, dv)]


def _turned_vectors(g: Graph, u: Value, s: Value, v: Value, p: Value) -> tuple[Value, Value]:
    """The turns of u and v in their own spans. Of complex ones the phases of a pair are free as
    long as they cancel: u takes all of it."""
    right, left = g.mul(p, _row(g, s)), g.mul(p, _column(g, s))  # p · s, s · p
    gaps = _gaps(g, g.mul(s, s))
    turn_u = g.mul(gaps, g.add(right, adjoint(g, right)))
    turn_v = g.mul(gaps, g.add(left, adjoint(g, left)))
    if p.shape.dtype.is_complex:
        on = _where(g, g.eq, p)
        phase = g.div(g.mul(g.sub(on, conjugate(g, on)), 0.5), _row(g, s))
        turn_u = g.add(turn_u, phase)
    return g.matmul(u, turn_u), g.matmul(v, turn_v)


def _more_than_determined(op: Any, x: Shape, what: str, instead: str) -> Exception:
    return no_derivative(
        op, UNKNOWN, f"x [{', '.join(map(str, x.dims[-2:]))}] does not determine all of {what}",
        f"use {instead}, whose derivative is defined",
    )  # fmt: skip
