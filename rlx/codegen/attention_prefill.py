"""Attention for many rows: blocks of keys pass by blocks of rows, with the softmax kept running."""

from __future__ import annotations

from functools import lru_cache

from rlx.codegen.attention import Args, AttentionKernel, Problem, Rows
from rlx.codegen.attention_copy import emit_copy, emit_pack
from rlx.codegen.attention_finish import emit_finish, sums_of_piece, working_memory
from rlx.codegen.attention_panel import emit_panel
from rlx.codegen.attention_schedule import Piece, Schedule
from rlx.codegen.attention_tiles import Places, Tiling
from rlx.codegen.emit import Function, Module, Value, i32, i64, ptr
from rlx.codegen.target import Target
from rlx.support.records import dataclass

_ITEM = [("batch", i64), ("head", i64), ("row", i64)]


@dataclass(frozen=True)
class Prefill(AttentionKernel):
    """args: attention.ARGS. `rows` is the most rows a key head has (0: not known)."""

    rows: int = 0

    def tiling(self, target: Target) -> Tiling:
        return _tiling(target, self.problem, self.rows)

    def block_rows(self, target: Target) -> int:
        t = self.tiling(target)
        return t.panels * t.panel

    def value_columns(self, target: Target) -> int:
        return self.tiling(target).columns

    def working_bytes(self, target: Target) -> int:
        return Places.of(self.tiling(target)).size

    def direct(self, target: Target) -> bool:
        """Whether every panel sees every block of keys, so that the first one finds no sums and the
        last one writes results."""
        p = self.problem
        whole = self.value_columns(target) == p.head_dim
        return whole and not p.ends and p.sinks is None

    def emit(self, m: Module) -> None:
        part = _emit_part(m, self)
        finish = emit_finish(m, self)
        f = m.kernel()

        def work(piece: Piece) -> None:
            sums, item = sums_of_piece(f, self, piece), (piece.batch, piece.head, piece.row)
            space = working_memory(f, self)
            whole = piece.whole
            keys = (piece.first, piece.last, whole.to(i64))
            f.call(part, f["args"], space, sums, *item, *keys)
            if self.direct(m.target):
                whole = whole & (piece.first >= piece.last)  # no key, and so no last block
            f.if_(whole, lambda: _drop(f.call(finish, f["args"], *item, sums)))

        Schedule(f, self).each_piece(work)


def _drop(*_: object) -> None:
    """A body that gives nothing."""


_tiling = lru_cache(maxsize=None)(Tiling.of)


def _emit_part(m: Module, kernel: Prefill) -> Function:
    """void part(args, space, sums, batch, head, row, first, last, whole)

    The sums of a block of rows over keys [first, last); their results where these are all keys.
    """
    problem, t = kernel.problem, kernel.tiling(m.target)
    copies = {name: emit_copy(m, name, problem, t) for name in "kv"}
    prepare = _emit_prepare(m, kernel)
    panel = emit_panel(m, kernel)
    spaces = [("space", ptr), ("sums", ptr)]
    keys = [("first", i64), ("last", i64), ("whole", i64)]
    f = m.function("part", [("args", ptr), *spaces, *_ITEM, *keys], internal=True)
    args, places = Args(f), Places.of(t)
    left = Rows(f, problem).count - f["row"]
    panels = f.min(f.ceil_div(left, t.panel), t.panels)
    item = [f[name] for name, _ in _ITEM]
    f.call(prepare, f["args"], f["space"], *item, panels)
    if kernel.direct(m.target):
        f.if_(f["first"] >= f["last"], lambda: _empty(f, kernel, panels))
    else:
        _empty(f, kernel, panels)
    for key in f.range(f["first"], f["last"], t.block):
        count = f.min(f["last"] - key, t.block)
        for name, place in (("k", places.keys), ("v", places.values)):
            row = args.row_bytes(name, problem)
            src = f.gep(args.head(name, problem, f["batch"], f["head"]), key * row)
            step = args.row_bytes(name, problem, "step")
            f.call(copies[name], src, row, step, count, f.gep(f["space"], place))
        fresh, ends = key.eq(f["first"]).to(i64), (key + t.block >= f["last"]).to(i64)
        block = (key, count, fresh, ends & f["whole"], *_following(f, kernel, key))
        for p in f.range(0, panels, guard=False):
            f.call(panel, f["args"], f["space"], f["sums"], *item, p, *block)
    return f


def _following(f: Function, kernel: Prefill, key: Value) -> list[Value]:
    """Where the rows of q, k and v begin that come after a block of keys, to be fetched meanwhile:
    the next block's, or those of the item after this one. They need not exist."""
    problem, rows, args = kernel.problem, Rows(f, kernel.problem), Args(f)
    row = f["row"] + kernel.block_rows(f.target)
    ends = row >= rows.count
    row, head = f.select(ends, f.i64(0), row), f["head"] + ends.to(i64)
    wraps = head.eq(problem.kv_heads)
    head, batch = f.select(wraps, f.i64(0), head), f["batch"] + wraps.to(i64)
    after, found = key + kernel.tiling(f.target).block, []
    for name in "kv":
        size = args.row_bytes(name, problem)
        here = f.gep(args.head(name, problem, f["batch"], f["head"]), after * size)
        there = f.gep(args.head(name, problem, batch, head), rows.start(row) * size)
        found.append(f.select(after < f["last"], here, there))
    return [rows.address("q", batch, head, row), *found]


def _emit_prepare(m: Module, kernel: Prefill) -> Function:
    """void prepare(args, space, batch, head, row, panels): tables and queries."""
    problem, t = kernel.problem, kernel.tiling(m.target)
    pack = emit_pack(m, problem, t)
    params = [("args", ptr), ("space", ptr), *_ITEM, ("panels", i64)]
    f = m.function("prepare", params, internal=True)
    places, space, item = Places.of(t), f["space"], (f["batch"], f["head"])
    if problem.mask is not None or problem.ends:
        for r in f.range(0, f["panels"] * t.panel):
            _enter(f, problem, places, r)
    for p in f.range(0, f["panels"]):
        packed = f.gep(f.gep(space, places.queries), p, t.query_bytes)
        f.call(pack, f["args"], *item, f["row"] + p * t.panel, packed)
    return f


def _enter(f: Function, problem: Problem, places: Places, number: Value) -> None:
    """A row's entries in the tables."""
    rows, space = Rows(f, problem), f["space"]
    row = f.min(f["row"] + number, rows.count - 1)  # rows beyond the last repeat it
    if problem.mask is not None:
        offset = rows.mask_offset(f["batch"], f["head"], row)
        f.store(offset, f.gep(f.gep(space, places.masks), number, 8))
    if problem.ends:
        f.store(rows.end(row).to(i32), f.gep(f.gep(space, places.ends), number, 4))
        f.store(rows.start(row).to(i32), f.gep(f.gep(space, places.starts), number, 4))


def _empty(f: Function, kernel: Prefill, panels: Value) -> None:
    """Sums of no keys."""
    t = kernel.tiling(f.target)
    line = panels * t.panel_bytes
    _fill(f, t, f["sums"], line * t.columns, 0.0)
    _fill(f, t, f.gep(f["sums"], kernel.maxima(f.target)), line, float("-inf"))
    _fill(f, t, f.gep(f["sums"], kernel.totals(f.target)), line, 0.0)


def _fill(f: Function, t: Tiling, base: Value, size: Value, number: float) -> None:
    for at in f.range(0, size, t.vector.bytes):
        f.store(f.const(number, t.vector), f.gep(base, at))


__all__ = ["Prefill", "Problem"]
