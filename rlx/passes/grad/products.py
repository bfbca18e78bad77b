"""Matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.passes.grad.rules import (
    MULTILINEAR,
    Grads,
    in_type,
    product_of,
    swapped,
    unbroadcast,
    vjp,
)

Values = Sequence[Value]
MULTILINEAR |= {"matmul", "dot_general", "grouped_matmul"}


@vjp("matmul")
def _matmul(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    """da = ct · bᵀ, db = aᵀ · ct"""
    (a, b), (ct,) = inputs, grads
    left = a if a.shape.rank > 1 else g.reshape(a, shape=(1, *a.shape.dims))
    right = b if b.shape.rank > 1 else g.reshape(b, shape=(*b.shape.dims, 1))
    dims = list(ct.shape.dims)
    if b.shape.rank == 1:
        dims.append(1)
    if a.shape.rank == 1:
        dims.insert(len(dims) - 1, 1)
    ct = g.reshape(ct, shape=tuple(dims)) if len(dims) != ct.shape.rank else ct
    da = unbroadcast(g, g.matmul(ct, swapped(g, right)), left.shape)
    if right.shape.rank == 2 and left.shape.rank > 2:  # all rows at once: no sum over the batch
        rows = [
            g.reshape(v, shape=(product_of(v.shape.dims[:-1]), v.shape.dims[-1]))
            for v in (left, ct)
        ]
        db = unbroadcast(g, _of_right(g, right, *rows), right.shape)
    elif right.shape.rank == left.shape.rank == 2:
        db = _of_right(g, right, left, ct)
    else:
        db = unbroadcast(g, g.matmul(swapped(g, left), ct), right.shape)
    return [_fitted(g, d, v) for d, v in ((da, a), (db, b))]


def _fitted(g: Graph, ct: Value, like: Value) -> Value:
    """In the rank and the type of the operand: operands may differ in both."""
    if ct.shape.rank != like.shape.rank:
        ct = g.reshape(ct, shape=like.shape.dims)
    return in_type(g, ct, like.shape.dtype)


_FEW = 64  # rows of a product that are cheaper to have than as many columns


def _of_right(g: Graph, right: Value, left: Value, ct: Value) -> Value:
    """leftᵀ · ct, for a transposed matrix as (ctᵀ · left)ᵀ: what it is of has rows in memory. A
    narrow matrix, such as an adapter's, is made as a wide one: its transpose costs nothing."""
    rows, columns = right.shape.dims
    swap = right.node.op.name == "transpose"
    for few, other, turned in ((rows, columns, False), (columns, rows, True)):
        if isinstance(few, int) and few < _FEW and isinstance(other, int) and other > few:
            swap = turned
    if swap:
        return swapped(g, g.matmul(swapped(g, ct), left))
    return g.matmul(swapped(g, left), ct)


@vjp("grouped_matmul")
def _grouped(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    """dx by the transposed experts; dw sums over the rows of each expert."""
    (x, w, expert), (ct,) = inputs, grads
    dx = g.grouped_matmul(ct, swapped(g, w), expert)
    count, k, n = w.shape.dims
    tokens = x.shape.dims[0]
    chosen = g.eq(g.reshape(expert, shape=(tokens, 1)), g.iota(shape=(1, count), axis=1))
    rows = g.where(
        g.reshape(chosen, shape=(tokens, count, 1)),
        g.reshape(x, shape=(tokens, 1, k)),
        g.constant(0, x.shape.dtype),
    )
    flat = g.reshape(rows, shape=(tokens, count * k))
    dw = g.reshape(g.matmul(swapped(g, flat), ct), shape=(count, k, n))
    found = unbroadcast(g, dx, x.shape), unbroadcast(g, dw, w.shape)
    return [_fitted(g, d, v) for d, v in zip(found, (x, w), strict=True)] + [None]
