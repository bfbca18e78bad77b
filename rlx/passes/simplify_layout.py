"""Algebra of shapes: views of views, and pieces put together again."""

from __future__ import annotations

from rlx.ir.dim import Dim, same
from rlx.ir.node import Value
from rlx.ir.shape import normalize_axis
from rlx.passes.pattern import Match, op
from rlx.passes.rewrite import Result, Rule


def _same(m: Match) -> Result:
    """The operand, where the op does nothing to it."""
    return m.if_same(m.x)


def _reshape(m: Match) -> Result:
    dims = m.root.output.shape.dims
    alike = m.if_same(m.x)
    return m.g.reshape(m.x, shape=dims) if alike is None else alike


def _identity_transpose(m: Match) -> Result:
    return m.x if m.op().axes == tuple(range(m.x.shape.rank)) else None


def _transpose(m: Match) -> Result:
    inner, outer = m.op("y").axes, m.op().axes
    perm = tuple([inner[p] for p in outer])
    if perm == tuple(range(len(perm))):
        return m.x
    return m.g.transpose(m.x, axes=perm)


def _expand(m: Match) -> Result:
    return m.g.expand(m.x, shape=m.root.output.shape.dims)


def _narrow(m: Match) -> Result:
    outer, inner = m.op(), m.op("y")
    rank = m.x.shape.rank
    if normalize_axis(outer.axis, rank) != normalize_axis(inner.axis, rank):
        return None
    start = inner.start + outer.start
    return m.g.narrow(m.x, axis=inner.axis, start=start, length=outer.length)


def _narrow_of_concat(m: Match) -> Result:
    """A piece that lies inside one of the parts."""
    joined = m.root.inputs[0]
    record, rank = m.op(), joined.shape.rank
    axis = normalize_axis(record.axis, rank)
    if normalize_axis(joined.node.op.axis, rank) != axis:  # type: ignore[attr-defined]
        return None
    offset: Dim = 0
    for part in joined.node.inputs:
        size = part.shape.dims[axis]
        start = record.start - offset
        if _inside(start, record.length, size):
            if part.shape.dtype is not joined.shape.dtype:
                return None
            if same(start, 0) and same(record.length, size):
                return m.if_same(part)
            return m.g.narrow(part, axis=axis, start=start, length=record.length)
        offset = offset + size
    return None


def _inside(start: Dim, length: Dim, size: Dim) -> bool:
    end = size - start - length  # what is left behind the piece
    if isinstance(start, int) and isinstance(end, int):
        return start >= 0 and end >= 0 and not same(length, 0)
    return False


def _concat(m: Match) -> Result:
    """One part alone; or pieces of one tensor, one behind the other."""
    parts = m.root.inputs
    if len(parts) == 1:
        return m.if_same(parts[0])
    whole = parts[0].node.inputs[0] if parts[0].node.op.name == "narrow" else None
    if whole is None or any(p.node.op.name != "narrow" for p in parts):
        return None
    if any(p.node.inputs[0] is not whole for p in parts):
        return None
    axis = normalize_axis(m.op().axis, whole.shape.rank)
    first = parts[0].node.op.start  # type: ignore[attr-defined]
    at: Dim = first
    for part in parts:
        piece: object = part.node.op
        if normalize_axis(piece.axis, whole.shape.rank) != axis or not same(piece.start, at):  # type: ignore[attr-defined]
            return None
        at = at + part.shape.dims[axis]
    alike = m.if_same(whole)
    if alike is not None:
        return alike
    return m.g.narrow(whole, axis=axis, start=first, length=at - first)


def _flat_concat(m: Match) -> Result:
    """concat(concat(a, b), c) = concat(a, b, c), where the inner one has no other user."""
    rank = m.root.output.shape.rank
    axis = normalize_axis(m.op().axis, rank)
    parts: list[Value] = []
    for part in m.root.inputs:
        inner = part.node
        flat = (
            inner.op.name == "concat"
            and normalize_axis(inner.op.axis, rank) == axis  # type: ignore[attr-defined]
            and m.editor.uses(part) == 1
        )
        parts.extend(inner.inputs if flat else [part])
    if len(parts) == len(m.root.inputs):
        return None
    return m.g.concat(*parts, axis=axis)


def _reduced_ones(m: Match) -> Result:
    """A sum over axes of size 1 is the element itself."""
    source, result = m.x.shape, m.root.output.shape
    if source.dtype is not result.dtype or source.dtype.kind not in ("float", "int", "uint"):
        return None
    axes = m.op().axis
    reduced = range(source.rank) if axes is None else [a % source.rank for a in axes]
    if not all(same(source.dims[a], 1) for a in reduced):
        return None
    alike = m.if_same(m.x)
    return m.g.reshape(m.x, shape=result.dims) if alike is None else alike


def _no_padding(m: Match) -> Result:
    nothing = not any((*m.op().low, *m.op().high))
    return m.if_same(m.x) if nothing else None


def _same_axes(m: Match) -> Result:
    rank = m.x.shape.rank
    once, again = ({a % rank for a in record.axis} for record in (m.op("y"), m.op()))
    return m.x if once == again else None


LAYOUT: tuple[Rule, ...] = (
    Rule("reshape to itself", op("reshape", "x"), _same),
    Rule("expand to itself", op("expand", "x"), _same),
    Rule("narrow to all", op("narrow", "x"), _same),
    Rule("slice of all", op("slice", "x", when=lambda o: all(s == 1 for s in o.steps)), _same),
    Rule("transpose to itself", op("transpose", "x"), _identity_transpose),
    Rule("reshape of reshape", op("reshape", op("reshape", "x")), _reshape),
    Rule("transpose of transpose", op("transpose", op("transpose", "x", name="y")), _transpose),
    Rule("expand of expand", op("expand", op("expand", "x")), _expand),
    Rule("narrow of narrow", op("narrow", op("narrow", "x", name="y")), _narrow),
    Rule("narrow of concat", op("narrow", having="concat"), _narrow_of_concat),
    Rule("concat of pieces", op("concat"), _concat),
    Rule("concat of concat", op("concat", having="concat"), _flat_concat),
    Rule("reduction of one", op(("sum", "mean", "max", "min", "prod"), "x"), _reduced_ones),
    Rule("pad by nothing", op("pad", "x"), _no_padding),
    Rule("flip of flip", op("flip", op("flip", "x", name="y")), _same_axes),
)
