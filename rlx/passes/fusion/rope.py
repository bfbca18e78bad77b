"""Recognises decomposed rotary embedding; fuses the per-head norm before it."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlx.ir.dim import Dim, same
from rlx.ir.node import Value
from rlx.passes.pattern import Match, op
from rlx.passes.rewrite import Result, Rule


class _Slice(NamedTuple):
    """A strided slice of the last axis of x."""

    x: Value
    start: int
    stride: int


def _slice(value: Value) -> _Slice | None:
    node = value.node
    record: Any = node.op
    if record.name == "narrow":
        source = node.inputs[0]
        last = record.axis % source.shape.rank == source.shape.rank - 1
        if last and isinstance(record.start, int):
            return _Slice(source, record.start, 1)
    if record.name == "reshape":  # [..., n, 2] -> one of the two -> [..., n]
        inner = node.inputs[0].node
        if inner.op.name != "narrow" or inner.inputs[0].node.op.name != "reshape":
            return None
        cut: Any = inner.op
        pairs = inner.inputs[0]
        source = pairs.node.inputs[0]
        rank = pairs.shape.rank
        fits = (
            cut.axis % rank == rank - 1
            and pairs.shape.dims[-1] == 2
            and cut.length == 1
            and rank == source.shape.rank + 1
            and all(map(same, pairs.shape.dims[:-2], source.shape.dims[:-1]))
        )
        if fits and isinstance(cut.start, int):
            return _Slice(source, cut.start, 2)
    return None


class _Angles(NamedTuple):
    table: Value
    positions: Value | None
    offset: Dim


def _angles(m: Match, value: Value, length: Dim) -> _Angles | None:
    """The table that was broadcast to [B or 1, S, 1, n] (bshd) or [B or 1, 1, S, n] (bhsd)."""
    rows = value
    if rows.node.op.name == "reshape":
        rows = rows.node.inputs[0]
    record: Any = rows.node.op
    if record.name == "gather" and record.axis % rows.node.inputs[0].shape.rank == 0:
        table, positions = rows.node.inputs
        return _Angles(table, positions, 0) if table.shape.rank == 2 else None
    if rows.shape.rank != 2 or not same(rows.shape.dims[0], length):
        return None
    if record.name == "narrow" and record.axis % 2 == 0:
        return _Angles(rows.node.inputs[0], None, record.start)
    return _Angles(rows, None, 0)


def _rotated(sub: Value, add: Value) -> tuple[Value, Value, Value, Value] | None:
    """(a, b, cos, sin) of a·cos − b·sin and b·cos + a·sin."""
    if sub.node.op.name != "sub" or add.node.op.name != "add":
        return None
    muls = [v.node for v in (*sub.node.inputs, *add.node.inputs)]
    if any(p.op.name != "mul" for p in muls):
        return None
    ac, bs, third, fourth = (p.inputs for p in muls)
    for a, cos in (ac, ac[::-1]):
        for b, sin in (bs, bs[::-1]):
            for bc, as_ in ((third, fourth), (fourth, third)):
                if set(bc) == {b, cos} and set(as_) == {a, sin}:
                    return a, b, cos, sin
    return None


def _rotation(m: Match, parts: tuple[Value, ...], interleaved: bool) -> Result:
    """rope of x, when the first two parts are the rotated halves (or evens and odds) of it."""
    rotated = _rotated(parts[0], parts[1])
    if rotated is None:
        return None
    first, second = _slice(rotated[0]), _slice(rotated[1])
    if first is None or second is None or first.x is not second.x or first.x.shape.rank != 4:
        return None
    if any(m.editor.uses(v) != 1 for v in parts[:2]):
        return m.miss("a rotated half has another user")
    x = first.x
    half, head_dim = rotated[0].shape.dims[-1], x.shape.dims[-1]
    wanted = (0, 1, 2, 2) if interleaved else (0, half, 1, 1)
    if (first.start, second.start, first.stride, second.stride) != wanted:
        return None
    if not isinstance(half, int) or not _passes_through(parts[2:], x, 2 * half, head_dim):
        return None
    for layout, axis in (("bshd", 1), ("bhsd", 2)):
        made = _build(m, x, rotated[2], rotated[3], (half, head_dim, interleaved, layout, axis))
        if made is not None:
            return made
    return None


def _passes_through(rest: tuple[Value, ...], x: Value, n_rot: int, head_dim: Dim) -> bool:
    """Whether the dims after the rotated ones are those of x, or there are none."""
    if not rest:
        return bool(n_rot == head_dim)
    tail = _slice(rest[0])
    if tail is None or tail.x is not x or tail[1:] != (n_rot, 1):
        return False
    return same(rest[0].shape.dims[-1] + n_rot, head_dim)


def _build(m: Match, x: Value, cos: Value, sin: Value, how: tuple[Any, ...]) -> Value | None:
    half, head_dim, interleaved, layout, axis = how
    for angles in (cos, sin):
        other = 3 - axis
        if angles.shape.rank != 4 or not same(angles.shape.dims[other], 1):
            return None
        if not same(angles.shape.dims[axis], x.shape.dims[axis]):
            return None
    c, s = (_angles(m, v, x.shape.dims[axis]) for v in (cos, sin))
    if c is None or s is None or c.positions is not s.positions or c.offset != s.offset:
        return None
    tokens = (x.shape.dims[0], x.shape.dims[axis])
    if c.positions is not None and c.positions.shape.dims not in (tokens, tokens[1:]):
        return None
    n_rot = 0 if 2 * half == head_dim else 2 * half
    operands = (x, c.table, s.table) + (() if c.positions is None else (c.positions,))
    made = m.g.rope(
        *operands, head_dim=head_dim, n_rot=n_rot, interleaved=interleaved, offset=c.offset,
        layout=layout,
    )  # fmt: skip
    return m.if_same(made)


def _halves(m: Match) -> Result:
    """concat(a·cos − b·sin, b·cos + a·sin[, rest])"""
    parts = m.root.inputs
    if m.root.output.shape.rank != 4 or m.op().axis % 4 != 3 or len(parts) not in (2, 3):
        return None
    return _rotation(m, parts, interleaved=False)


def _pairs(m: Match) -> Result:
    """The same with pairs (2i, 2i+1): concatenated on a new last axis, then flattened"""
    joined = m.y.node
    if m.y.shape.rank != 5 or m.op("y").axis % 5 != 4 or len(joined.inputs) != 2:
        return None
    parts = tuple([v.node.inputs[0] for v in joined.inputs if v.node.op.name == "reshape"])
    return _rotation(m, parts, interleaved=True) if len(parts) == 2 else None


def _part_of_head(m: Match) -> Result:
    """concat(rope(the first n dimensions), the others) -> rope with n_rot"""
    record: Any = m.op("y")
    rank = m.root.output.shape.rank
    if rank != 4 or m.op().axis % rank != 3 or record.n_rot:
        return None
    rotated, *rest = m.y.node.inputs
    start, end = _slice(rotated), _slice(m.rest)
    n_rot = record.head_dim
    if (
        start is None
        or end is None
        or start.x is not end.x
        or (start.start, start.stride) != (0, 1)
        or (end.start, end.stride) != (n_rot, 1)
    ):
        return None
    head_dim = n_rot + m.rest.shape.dims[-1]
    if not same(head_dim, end.x.shape.dims[-1]):
        return None
    attributes = {**record.attributes(), "head_dim": head_dim, "n_rot": n_rot}
    return m.if_same(m.g.rope(end.x, *rest, **attributes))


def _norm_before(m: Match) -> Result:
    """rope(rms_norm(x, gamma)), views between them allowed -> fused_qk_norm_rope"""
    record: Any = m.op()
    normed = m.root.inputs[0]
    views = []
    while normed.node.op.name in ("reshape", "transpose") and m.editor.uses(normed) == 1:
        views.append(normed.node.op)
        normed = normed.node.inputs[0]
    norm = normed.node
    if norm.op.name != "rms_norm":
        return None
    if m.editor.uses(normed) != 1:
        return m.miss("the rms_norm has another user")
    if len(norm.inputs) != 2 or norm.inputs[1].shape.dims != (record.head_dim,):
        return m.miss("the norm is not of each head")
    x, gamma = norm.inputs
    for view in reversed(views):
        x = m.g.append(view, [x])
    attributes = record.attributes()
    return m.if_same(
        m.g.fused_qk_norm_rope(
            x,
            gamma,
            *m.root.inputs[1:],
            **attributes,
            eps=norm.op.eps,  # type: ignore[attr-defined]
        )
    )


ROPE: tuple[Rule, ...] = (
    Rule("decomposed rope", op("concat", having="sub"), _halves),
    Rule("decomposed interleaved rope", op("reshape", op("concat", name="y")), _pairs),
    Rule("rope of a part", op("concat", op("rope", name="y"), "rest"), _part_of_head, owns=True),
    Rule("qk norm + rope", op("rope"), _norm_before),
)
