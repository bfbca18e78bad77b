"""Reads and writes at indices. Where each element of the batch has a table of its own, the tables
lie one behind the other, and the indices of an element count from the start of its table."""

from __future__ import annotations

from typing import Any

from rlx.ir.dim import Dim
from rlx.ir.dtype import i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import cast, size_value
from rlx.ir.shape import normalize_axis
from rlx.passes.batching.rules import (
    Flags,
    MappedAxis,
    Values,
    aligned,
    batched,
    element,
    folded,
    moved,
    one,
    spread,
    spread_all,
    unfolded,
)


def shifted(g: Graph, at: Value, n: Dim, over: MappedAxis) -> Value:
    """Mapped indices into tables of n entries as indices into all tables."""
    at = cast(g, at, i64)
    size = size_value(g, n, at)
    at = g.where(g.lt(at, 0), g.add(at, size), at)
    rank = at.shape.rank
    table = g.iota(shape=(over.size, *[1] * (rank - 1)), axis=0, dtype=i64)
    return g.add(at, g.mul(table, size))


@batched("gather")
def _gather(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    (x, at), (tables, indices) = inputs, mapped
    axis = normalize_axis(op.axis, element(x, tables).rank)
    if not indices:
        return [g.gather(x, at, axis=axis + 1)]
    if not tables:
        return [moved(g, g.gather(x, at, axis=axis), axis, 0)]
    n = one(x).dims[axis]
    flat = folded(g, x, True, over, axis)  # […, S·n, …]
    found = g.gather(flat, shifted(g, at, n, over), axis=axis)
    return [moved(g, found, axis, 0)]


@batched("take_along")
def _take_along(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    rank = element(inputs[0], mapped[0]).rank
    axis = normalize_axis(op.axis, rank)
    x, at = (
        aligned(g, v, m, rank) if m else g.reshape(v, shape=(1, *v.shape.dims))
        for v, m in zip(inputs, mapped, strict=True)
    )
    return [g.take_along(x, at, axis=axis + 1)]


@batched("scatter", "scatter_add", "scatter_reduce")
def _scatter(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    x, at, updates = inputs
    axis = normalize_axis(op.axis, element(x, mapped[0]).rank)
    if not mapped[1]:
        x, updates = (spread(g, v, m, over) for v, m in ((x, mapped[0]), (updates, mapped[2])))
        return g.append_node(op.replace(axis=axis + 1), [x, at, updates]).outputs
    n = element(x, mapped[0]).dims[axis]
    rows = shifted(g, at, n, over)
    into = folded(g, x, mapped[0], over, axis)
    given = folded(g, updates, mapped[2], over, axis)
    flat = [into, g.reshape(rows, shape=given.shape.dims[axis : axis + 1]), given]
    made = g.append_node(op.replace(axis=axis), flat).output
    return [unfolded(g, made, n, over, axis)]


# -- rows that choose a weight ----------------------------------------------------------------


@batched("grouped_matmul", "dequant_grouped_matmul")
def _grouped(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    """Rows of all elements together; experts of all elements too, where they differ."""
    x, w, expert, *sides = inputs
    tokens = element(x, mapped[0]).dims[0]
    parts, chosen = _chosen(g, [w, expert, *sides], mapped[1:], over)
    rows = folded(g, x, mapped[0], over)
    made = g.append_node(op, [rows, parts[0], chosen, *parts[1:]]).output
    return [unfolded(g, made, tokens, over)]


@batched("dequant_moe_weights")
def _moe_weights(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    tokens = element(inputs[1], mapped[1]).dims[0]
    parts, chosen = _chosen(g, inputs, mapped, over)
    made = g.append_node(op, [parts[0], chosen, *parts[1:]]).output
    return [unfolded(g, made, tokens, over)]


@batched("dequant_gather")
def _dequant_gather(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    table, ids, *sides = inputs
    if not (mapped[0] or any(mapped[2:])):
        return g.append_node(op, inputs).outputs
    at = shifted(g, spread(g, ids, mapped[1], over), element(table, mapped[0]).dims[0], over)
    flags = (mapped[0], *mapped[2:])
    parts = [folded(g, v, m, over) for v, m in zip((table, *sides), flags, strict=True)]
    return g.append_node(op, [parts[0], at, *parts[1:]]).outputs


def _chosen(g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> tuple[list[Value], Value]:
    """Operands (w, expert, scale, …) as the parts of a weight [E, …], and a list of experts."""
    w, expert, *sides = inputs
    parts, flags = [w, *sides], [mapped[0], *mapped[2:]]
    at = spread(g, expert, mapped[1], over)
    if any(flags):
        at = shifted(g, at, element(w, mapped[0]).dims[0], over)
        parts = [folded(g, v, m, over) for v, m in zip(parts, flags, strict=True)]
    return parts, g.reshape(at, shape=(over.size * at.shape.dims[1],))


@batched("sample")
def _sample(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values | None:
    """Rows with an rng each. Rows that share one draw by their number, which is not known in a
    larger batch: they are drawn one element after the other, unless there is a single row."""
    logits, rng = (element(x, m) for x, m in zip(inputs[:2], mapped[:2], strict=True))
    if rng.rank == 1 and logits.rank > 1:
        return None
    return g.append_node(op, spread_all(g, inputs, mapped, over)).outputs
