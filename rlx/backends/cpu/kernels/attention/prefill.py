"""Attention for many rows: blocks of keys pass by blocks of rows, with the softmax kept running.

A panel of rows and a block of keys: scores, their softmax, and the weighted values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce

from rlx.backends.cpu.kernels.attention.combine import (
    emit_finish,
    inverse,
    sums_of_piece,
    working_memory,
)
from rlx.backends.cpu.kernels.attention.pack_operands import emit_copy, emit_pack
from rlx.backends.cpu.kernels.attention.problem import (
    AttentionKernel,
    Problem,
    Rows,
    Words,
    or_zero,
    weight,
)
from rlx.backends.cpu.kernels.attention.q8_cache import Q8_0
from rlx.backends.cpu.kernels.attention.softmax import PanelScores
from rlx.backends.cpu.kernels.attention.tiles import Places, Tiling, emit_scores, emit_values
from rlx.backends.cpu.kernels.attention.work_split import Piece, Schedule
from rlx.llvm.builder import Function, Module, Value, i32, i64, ptr
from rlx.llvm.storage import LINE, memory_type, store
from rlx.llvm.target import Target
from rlx.records import dataclass


def emit_panel(m: Module, kernel: Prefill) -> Function:
    """void panel(words, space, sums, batch, head, row, p, key, count, fresh, ends, q, k, v)

    Adds the block of `count` keys from `key` on to the sums of panel p of an item. Where results
    are written directly, `fresh` says that there are no sums yet, `ends` that these are the last
    keys. Rows at `q`, `k` and `v` come next, and are fetched into the second cache.
    """
    params = [("words", ptr), ("space", ptr), ("sums", ptr)]
    numbers = ("batch", "head", "row", "p", "key", "count", "fresh", "ends")
    params += [(name, i64) for name in numbers]
    f = m.function("panel", [*params, *((name, ptr) for name in "qkv")], internal=True)
    _Panel(f, kernel).emit()
    return f


class _Panel:
    def __init__(self, f: Function, kernel: Prefill) -> None:
        self.f, self.kernel, self.problem = f, kernel, kernel.problem
        self.tiling, self.places = kernel.tiling(f.target), Places.of(kernel.tiling(f.target))
        self.direct = kernel.direct(f.target)
        tables = (self._table(offset, size) for offset, size in (
            (self.places.ends, 4), (self.places.starts, 4), (self.places.masks, 8)
        ))  # fmt: skip
        scores = self.space(self.places.scores)
        self.scores = PanelScores(f, self.problem, self.tiling, scores, f["key"], *tables)
        p, by_key = self.problem, self.scores.masks_keys
        self.plain = not (p.ends or p.softcap or p.mask) or (by_key and not p.ends)
        self.maxima, self.totals = (
            f.gep(f.gep(f["sums"], at), f["p"], self.tiling.panel_bytes)
            for at in (kernel.maxima(f.target), kernel.totals(f.target))
        )
        self.result = Rows(f, self.problem).addresses("out", f["batch"], f["head"])
        self.row_bytes = {n: Words(f).row_bytes(n, self.problem) for n in "qkv"}

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
        if self.problem.ends:
            last = self._limit(tables.ends, t.panel - 1)
        if self.problem.starts:
            start = self._limit(tables.starts, 0)
            first = start - start.urem(t.keys)
        f.if_(first < last, lambda: self._work(first, last))

    def _work(self, first: Value, last: Value) -> None:
        f, t = self.f, self.tiling
        before = self._kept([f.const(float("-inf"), t.vector)] * t.vectors, self._load(self.maxima))
        found = self._scores(first, last, before)
        self.scores.adjust(first, last)
        if self.problem.ends:
            seen = self._limit(self.scores.ends, 0)
            self.scores.hide(f.max(seen, first), last)
        if self.problem.starts:
            self.scores.hide(first, f.min(self._limit(self.scores.starts, t.panel - 1), last))
        if not self.plain:
            found = self.scores.largest(first, last, before)
        self._weigh(first, last, before, found)
        self._values(first, last)

    def _scores(self, first: Value, last: Value, before: list[Value]) -> list[Value]:
        """All scores; gives the largest of each row, which are of use where nothing changes them
        any more."""
        f, t = self.f, self.tiling
        queries = f.gep(self.space(self.places.queries), f["p"], t.query_bytes)
        keys = self.space(self.places.keys)

        def tile(k: Value, *found: Value) -> list[Value]:
            self._fetch(k)
            scores = emit_scores(f, t, queries, f.gep(keys, k, t.key_bytes))
            if self.scores.masks_keys:
                scores = self._masked(scores, k)
            for i, score in enumerate(scores):
                f.store(score, self.scores.row(k), i * t.vector.bytes)
            if not self.plain:
                return list(found)
            columns = [scores[j :: t.vectors] for j in range(t.vectors)]
            return [reduce(f.max_fast, c, m) for c, m in zip(columns, found, strict=True)]

        return f.loop(first, last, t.keys, before, tile, guard=False)

    def _masked(self, scores: list[Value], k: Value) -> list[Value]:
        """A tile's scores with a mask of keys; keys beyond the last repeat it."""
        f, n = self.f, self.tiling.vectors
        numbers = [f.min(k + i, f["count"] - 1) for i in range(self.tiling.keys)]
        found = [
            self.scores.mask_key(scores[i * n : (i + 1) * n], key) for i, key in enumerate(numbers)
        ]
        return [score for row in found for score in row]

    def _fetch(self, k: Value) -> None:
        """Rows that come next are fetched evenly, a few while each tile of keys is multiplied (as
        many come next as there are keys in a block), and so is the memory of this item's results.
        """
        f, t, p = self.f, self.tiling, self.problem
        first = (f["p"] * t.block + k).udiv(t.panels)
        names = [n for n in "qkv" if n not in p.gaps and (n != "q" or p.group == 1)]
        for row in f.range(first, first + -(-t.keys // t.panels), guard=False):
            for name in names:
                self._ask(name, f.gep(f[name], row * self.row_bytes[name]))
            if self.direct:
                self._ask("out", self.result(f["row"] + row))

    def _ask(self, name: str, row: Value) -> None:
        for line in range(0, self._bytes(name), LINE):
            # what is written soon can wait in the first cache
            self.f.prefetch(row, line, locality=3 if name == "out" else 2, writes=name == "out")

    def _bytes(self, name: str) -> int:
        """What a row of a head takes."""
        p = self.problem
        if p.packed and name in "kv":
            return p.head_dim // Q8_0.block_size * Q8_0.bytes_per_block
        return p.head_dim * memory_type(p.dtype(name)).bytes

    def _weigh(self, first: Value, last: Value, before: list[Value], maxima: list[Value]) -> None:
        """Scores to weights; maxima, totals and factors of the panel's rows to memory."""
        f, t = self.f, self.tiling
        totals = self._kept([f.const(0.0, t.vector)] * t.vectors, self._load(self.totals))
        tops = [or_zero(m) for m in maxima]
        factors = [weight(was - top) for was, top in zip(before, tops, strict=True)]
        start = [total * factor for total, factor in zip(totals, factors, strict=True)]
        totals = self.scores.weigh(first, last, tops, start)
        self._store(self.maxima, maxima)
        self._store(self.totals, totals)
        self._store(self.factors, factors)
        if self.direct:
            self._store(self.space(self.places.inverses), [inverse(total) for total in totals])

    def _load(self, line: Value) -> Callable[[], list[Value]]:
        f, t = self.f, self.tiling
        return lambda: [f.load(line, t.vector, at) for at in self.scores.places]

    def _store(self, line: Value, numbers: list[Value]) -> None:
        for number, at in zip(numbers, self.scores.places, strict=True):
            self.f.store(number, line, at)

    @property
    def factors(self) -> Value:
        return self.space(self.places.factors)

    def _kept(self, empty: list[Value], load: Callable[[], list[Value]]) -> list[Value]:
        """What earlier blocks of keys left, or what belongs to none."""
        f = self.f
        return f.if_(f["fresh"].ne(0), lambda: empty, load) if self.direct else load()

    def _values(self, first: Value, last: Value) -> None:
        f, t = self.f, self.tiling
        weights = self.scores.row(first)
        slabs = f.gep(self.space(self.places.values), first.udiv(t.pair), t.slab_bytes)
        for slab in f.range(0, t.slabs):
            values = f.gep(slabs, slab, t.slab_block_bytes)
            for row in f.range(0, t.panel, t.rows):
                end = last
                if self.problem.ends:
                    end = f.min(self._limit(self.scores.ends, row + (t.rows - 1)), last)
                at = f.gep(weights, row * t.sums.bytes)
                self._tile(row, slab, at, values, end - first)

    def _tile(self, row: Value, slab: Value, weights: Value, values: Value, count: Value) -> None:
        """Rows from `row` on and the columns of a slab."""
        f, t = self.f, self.tiling
        size, line = t.sums.bytes, t.columns * t.sums.bytes
        places = [(i, j * t.vector.bytes) for i in range(t.rows) for j in range(t.width)]
        sums = f.gep(f.gep(f["sums"], f["p"] * t.panel + row, line), slab, t.slab_bytes)

        def each_row(table: Value) -> list[Value]:
            first = f.gep(table, row * size)
            return [f.broadcast_load(first, t.sums, t.lanes, i * size) for i in range(t.rows)]

        def load() -> list[Value]:
            scale = each_row(self.factors)
            return [f.load(sums, t.vector, i * line + at) * scale[i] for i, at in places]

        start = self._kept([f.const(0.0, t.vector)] * len(places), load)
        done = emit_values(f, t, weights, values, count, start)

        def keep() -> None:
            for value, (i, at) in zip(done, places, strict=True):
                f.store(value, sums, i * line + at)

        def write() -> None:
            dtype = self.problem.dtype("out")
            scale = each_row(self.space(self.places.inverses))
            first, last = f["row"] + f["p"] * t.panel + row, Rows(f, self.problem).count - 1
            column = slab * (t.width * t.lanes)
            for i in range(t.rows):
                # rows beyond the last repeat it
                to = f.gep(self.result(f.min(first + i, last)), column, memory_type(dtype))
                for j in range(t.width):
                    at = f.gep(to, j * t.lanes * memory_type(dtype).bytes)
                    store(f, done[i * t.width + j] * scale[i], at, dtype)

        if self.direct:
            f.if_(f["ends"].ne(0), write, keep)
        else:
            keep()


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
            f.call(part, f["words"], space, sums, *item, *keys)
            if self.direct(m.target):
                whole = whole & (piece.first >= piece.last)  # no key, and so no last block
            f.if_(whole, lambda: _drop(f.call(finish, f["words"], *item, sums)))

        Schedule(f, self).each_piece(work)


def _drop(*_: object) -> None:
    """A body that gives nothing."""


_tiling = lru_cache(maxsize=None)(Tiling.of)


def _emit_part(m: Module, kernel: Prefill) -> Function:
    """void part(words, space, sums, batch, head, row, first, last, whole)

    The sums of a block of rows over keys [first, last); their results where these are all keys.
    """
    problem, t = kernel.problem, kernel.tiling(m.target)
    copies = {name: emit_copy(m, name, problem, t) for name in "kv"}
    prepare = _emit_prepare(m, kernel)
    panel = emit_panel(m, kernel)
    spaces = [("space", ptr), ("sums", ptr)]
    keys = [("first", i64), ("last", i64), ("whole", i64)]
    f = m.function("part", [("words", ptr), *spaces, *_ITEM, *keys], internal=True)
    words, places = Words(f), Places.of(t)
    left = Rows(f, problem).count - f["row"]
    panels = f.min(f.ceil_div(left, t.panel), t.panels)
    item = [f[name] for name, _ in _ITEM]
    f.call(prepare, f["words"], f["space"], *item, panels)
    if kernel.direct(m.target):
        f.if_(f["first"] >= f["last"], lambda: _empty(f, kernel, panels))
    else:
        _empty(f, kernel, panels)
    for key in f.range(f["first"], f["last"], t.block):
        count = f.min(f["last"] - key, t.block)
        for name, place in (("k", places.keys), ("v", places.values)):
            row = words.row_bytes(name, problem)
            src = f.gep(words.head(name, problem, f["batch"], f["head"]), key * row)
            step = words.row_bytes(name, problem, "step")
            f.call(copies[name], src, row, step, count, f.gep(f["space"], place))
        fresh, ends = key.eq(f["first"]).to(i64), (key + t.block >= f["last"]).to(i64)
        block = (key, count, fresh, ends & f["whole"], *_following(f, kernel, key))
        for p in f.range(0, panels, guard=False):
            f.call(panel, f["words"], f["space"], f["sums"], *item, p, *block)
    return f


def _following(f: Function, kernel: Prefill, key: Value) -> list[Value]:
    """Where the rows of q, k and v begin that come after a block of keys, to be fetched meanwhile:
    the next block's, or those of the item after this one. They need not exist."""
    problem, rows, words = kernel.problem, Rows(f, kernel.problem), Words(f)
    row = f["row"] + kernel.block_rows(f.target)
    ends = row >= rows.count
    row, head = f.select(ends, f.i64(0), row), f["head"] + ends.to(i64)
    wraps = head.eq(problem.kv_heads)
    head, batch = f.select(wraps, f.i64(0), head), f["batch"] + wraps.to(i64)
    after, found = key + kernel.tiling(f.target).block, []
    for name in "kv":
        size = words.row_bytes(name, problem)
        here = f.gep(words.head(name, problem, f["batch"], f["head"]), after * size)
        there = f.gep(words.head(name, problem, batch, head), rows.start(row) * size)
        found.append(f.select(after < f["last"], here, there))
    return [rows.address("q", batch, head, row), *found]


def _emit_prepare(m: Module, kernel: Prefill) -> Function:
    """void prepare(words, space, batch, head, row, panels): tables and queries."""
    problem, t = kernel.problem, kernel.tiling(m.target)
    pack = emit_pack(m, problem, t)
    params = [("words", ptr), ("space", ptr), *_ITEM, ("panels", i64)]
    f = m.function("prepare", params, internal=True)
    places, space, item = Places.of(t), f["space"], (f["batch"], f["head"])
    if problem.mask is not None or problem.ends:
        for r in f.range(0, f["panels"] * t.panel):
            _enter(f, problem, places, r)
    for p in f.range(0, f["panels"]):
        packed = f.gep(f.gep(space, places.queries), p, t.query_bytes)
        f.call(pack, f["words"], *item, f["row"] + p * t.panel, packed)
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
