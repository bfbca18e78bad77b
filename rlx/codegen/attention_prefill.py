"""Attention for many rows: blocks of keys pass by blocks of rows, with the softmax kept running."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rlx.codegen.attention import AttentionKernel, Problem, Rows, Words
from rlx.codegen.attention_copy import emit_copy, emit_pack
from rlx.codegen.attention_finish import emit_finish, sums_of_piece, working_memory
from rlx.codegen.attention_schedule import Piece, Schedule
from rlx.codegen.attention_softmax import PanelScores
from rlx.codegen.attention_tiles import Tiling, emit_scores, emit_values
from rlx.codegen.emit import Function, Module, Value, i32, i64, ptr
from rlx.codegen.target import Target

_ITEM = [("batch", i64), ("head", i64), ("row", i64)]


@dataclass(frozen=True)
class Prefill(AttentionKernel):
    """words: attention.WORDS. `rows` is the most rows a key head has (0: not known)."""

    rows: int = 0

    def tiling(self, target: Target) -> Tiling:
        return _tiling(target, self.problem, self.rows)

    def block_rows(self, target: Target) -> int:
        t = self.tiling(target)
        return t.panels * t.panel

    def value_columns(self, target: Target) -> int:
        return self.tiling(target).columns

    def working_bytes(self, target: Target) -> int:
        return _Places.of(self.tiling(target)).size

    def emit(self, m: Module) -> None:
        part = _emit_part(m, self)
        finish = emit_finish(m, self)
        f = m.kernel()

        def work(piece: Piece) -> None:
            sums, item = sums_of_piece(f, self, piece), (piece.batch, piece.head, piece.row)
            space = working_memory(f, self)
            f.call(part, f["words"], space, sums, *item, piece.first, piece.last)
            f.if_(piece.whole, lambda: _drop(f.call(finish, f["words"], *item, sums)))

        Schedule(f, self).each_piece(work)


def _drop(*_: object) -> None:
    """A body that gives nothing."""


_tiling = lru_cache(maxsize=None)(Tiling.of)


@dataclass(frozen=True)
class _Places:
    """Byte offsets in a worker's working memory."""

    keys: int
    values: int
    scores: int
    queries: int
    factors: int
    rows: int
    masks: int
    ends: int
    starts: int
    size: int

    @staticmethod
    def of(t: Tiling) -> _Places:
        count = t.panels * t.panel
        sizes = [
            t.block * t.key_bytes,
            t.slabs * t.slab_block_bytes,
            (t.block + t.pair - 1) * t.panel_bytes,
            t.panels * t.query_bytes,
            t.panel_bytes,
            count * 8,
            count * 8,
            count * 4,
            count * 4,
        ]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // 64) * 64)
        return _Places(*offsets)


def _emit_part(m: Module, kernel: Prefill) -> Function:
    """void part(words, space, sums, batch, head, row, first, last)

    The sums of a block of rows over keys [first, last).
    """
    problem, t = kernel.problem, kernel.tiling(m.target)
    copies = {name: emit_copy(m, name, problem, t) for name in "kv"}
    prepare = _emit_prepare(m, kernel)
    panel = _emit_panel(m, kernel)
    spaces = [("space", ptr), ("sums", ptr)]
    params = [("words", ptr), *spaces, *_ITEM, ("first", i64), ("last", i64)]
    f = m.function("part", params, internal=True)
    words, places = Words(f), _Places.of(t)
    left = Rows(f, problem).count - f["row"]
    panels = f.min(f.ceil_div(left, t.panel), t.panels)
    f.call(prepare, f["words"], f["space"], f["sums"], *(f[n] for n, _ in _ITEM), panels)
    for key in f.range(f["first"], f["last"], t.block):
        count = f.min(f["last"] - key, t.block)
        for name, place in (("k", places.keys), ("v", places.values)):
            row = words.row_bytes(name, problem)
            src = f.gep(words.head(name, problem, f["batch"], f["head"]), key * row)
            step = words.row_bytes(name, problem, "step")
            f.call(copies[name], src, row, step, count, f.gep(f["space"], place))
        for p in f.range(0, panels, guard=False):
            f.call(panel, f["words"], f["space"], f["sums"], p, key, count)
    return f


def _emit_prepare(m: Module, kernel: Prefill) -> Function:
    """void prepare(words, space, sums, batch, head, row, panels): tables, queries, empty sums."""
    problem, t = kernel.problem, kernel.tiling(m.target)
    pack = emit_pack(m, problem, t)
    spaces = [("space", ptr), ("sums", ptr)]
    f = m.function("prepare", [("words", ptr), *spaces, *_ITEM, ("panels", i64)], internal=True)
    rows, places, space = Rows(f, problem), _Places.of(t), f["space"]
    size = t.sums.bytes
    for r in f.range(0, f["panels"] * t.panel):
        row = f.min(f["row"] + r, rows.count - 1)  # rows beyond the last repeat it
        address = rows.address("q", f["batch"], f["head"], row)
        f.store(address, f.gep(f.gep(space, places.rows), r, 8))
        if problem.mask is not None:
            offset = rows.mask_offset(f["batch"], f["head"], row)
            f.store(offset, f.gep(f.gep(space, places.masks), r, 8))
        f.store(rows.end(row).to(i32), f.gep(f.gep(space, places.ends), r, 4))
        f.store(rows.start(row).to(i32), f.gep(f.gep(space, places.starts), r, 4))
    step = rows.words.row_bytes("q", problem, "step")
    for p in f.range(0, f["panels"]):
        table = f.gep(f.gep(space, places.rows), p, t.panel * 8)
        packed = f.gep(f.gep(space, places.queries), p, t.query_bytes)
        f.call(pack, table, step, packed)
    _fill(f, t, f["sums"], f["panels"] * (t.panel * t.columns * size), 0.0)
    line = f["panels"] * t.panel_bytes
    _fill(f, t, f.gep(f["sums"], kernel.maxima(m.target)), line, float("-inf"))
    _fill(f, t, f.gep(f["sums"], kernel.totals(m.target)), line, 0.0)
    return f


def _fill(f: Function, t: Tiling, base: Value, size: Value, number: float) -> None:
    for at in f.range(0, size, t.vector.bytes):
        f.store(f.const(number, t.vector), f.gep(base, at))


def _emit_panel(m: Module, kernel: Prefill) -> Function:
    """void panel(words, space, sums, p, key, count)

    Adds the block of `count` keys from `key` on to the sums of panel p.
    """
    params = [("words", ptr), ("space", ptr), ("sums", ptr)]
    f = m.function("panel", [*params, ("p", i64), ("key", i64), ("count", i64)], internal=True)
    _Panel(f, kernel).emit()
    return f


class _Panel:
    def __init__(self, f: Function, kernel: Prefill) -> None:
        self.f, self.kernel, self.problem = f, kernel, kernel.problem
        self.tiling, self.places = kernel.tiling(f.target), _Places.of(kernel.tiling(f.target))
        t = self.tiling
        tables = (self._table(offset, size) for offset, size in (
            (self.places.ends, 4), (self.places.starts, 4), (self.places.masks, 8)
        ))  # fmt: skip
        scores = self.space(self.places.scores)
        self.scores = PanelScores(f, self.problem, t, scores, f["key"], *tables)

    def space(self, offset: int) -> Value:
        return self.f.gep(self.f["space"], offset)

    def _table(self, offset: int, size: int) -> Value:
        """The panel's part of a table with `size` bytes for each row."""
        return self.f.gep(self.space(offset), self.f["p"], self.tiling.panel * size)

    def _limit(self, table: Value, row: int | Value) -> Value:
        """A row's entry of `ends` or `starts`, counted from the block's first key."""
        entry = self.f.load(self.f.gep(table, row, 4), i32)
        return self.f.max(self.f.min(entry.to(i64) - self.f["key"], self.f["count"]), 0)

    def emit(self) -> None:
        """Keys outside what the first and the last row see are left out altogether."""
        f, t, tables = self.f, self.tiling, self.scores
        first, last = f.i64(0), f["count"]
        if self.problem.causal:
            last = self._limit(tables.ends, t.panel - 1)
        if self.problem.window:
            start = self._limit(tables.starts, 0)
            first = start - start.urem(t.keys)
        f.if_(first < last, lambda: self._work(first, last))

    def _work(self, first: Value, last: Value) -> None:
        f, t = self.f, self.tiling
        queries = f.gep(self.space(self.places.queries), f["p"], t.query_bytes)
        keys = self.space(self.places.keys)
        for k in f.range(first, last, t.keys, guard=False):
            emit_scores(f, t, queries, f.gep(keys, k, t.key_bytes), self.scores.row(k))
        self.scores.adjust(first, last)
        if self.problem.causal:
            seen = self._limit(self.scores.ends, 0)
            self.scores.hide(f.max(seen, first), last)
        if self.problem.window:
            self.scores.hide(first, f.min(self._limit(self.scores.starts, t.panel - 1), last))
        factors = self.space(self.places.factors)
        target = f.target
        maxima = f.gep(f["sums"], self.kernel.maxima(target))
        totals = f.gep(f["sums"], self.kernel.totals(target))
        line = t.panel_bytes
        self.scores.weigh(
            first, last, f.gep(maxima, f["p"], line), f.gep(totals, f["p"], line), factors
        )
        self._values(first, last, factors)

    def _values(self, first: Value, last: Value, factors: Value) -> None:
        f, t = self.f, self.tiling
        row_bytes = t.columns * t.sums.bytes
        sums = f.gep(f["sums"], f["p"], t.panel * row_bytes)
        weights = self.scores.row(first)
        slabs = f.gep(self.space(self.places.values), first.udiv(t.pair), t.slab_bytes)
        for slab in f.range(0, t.slabs):
            values = f.gep(slabs, slab, t.slab_block_bytes)
            columns = f.gep(sums, slab, t.slab_bytes)
            for row in f.range(0, t.panel, t.rows):
                end = last
                if self.problem.causal:
                    end = f.min(self._limit(self.scores.ends, row + (t.rows - 1)), last)
                at = row * t.sums.bytes
                emit_values(
                    f,
                    t,
                    f.gep(weights, at),
                    values,
                    end - first,
                    f.gep(factors, at),
                    f.gep(columns, row, row_bytes),
                )


__all__ = ["Prefill", "Problem"]
