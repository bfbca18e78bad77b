"""A panel of rows and a block of keys: scores, their softmax, and the weighted values."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING

from rlx.codegen.attention import Args, Rows, or_zero, weight
from rlx.codegen.attention_blocks import Q8_0
from rlx.codegen.attention_finish import inverse
from rlx.codegen.attention_softmax import PanelScores
from rlx.codegen.attention_tiles import Places, emit_scores, emit_values
from rlx.codegen.emit import Function, Module, Value, i32, i64, ptr
from rlx.codegen.storage import LINE, memory_type, store

if TYPE_CHECKING:
    from rlx.codegen.attention_prefill import Prefill


def emit_panel(m: Module, kernel: Prefill) -> Function:
    """void panel(args, space, sums, batch, head, row, p, key, count, fresh, ends, q, k, v)

    Adds the block of `count` keys from `key` on to the sums of panel p of an item. Where results
    are written directly, `fresh` says that there are no sums yet, `ends` that these are the last
    keys. Rows at `q`, `k` and `v` come next, and are fetched into the second cache.
    """
    params = [("args", ptr), ("space", ptr), ("sums", ptr)]
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
        self.row_bytes = {n: Args(f).row_bytes(n, self.problem) for n in "qkv"}

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
