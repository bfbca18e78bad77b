"""Attention for a few rows: keys and values stream by at the speed of memory.

All rows of a key head are in registers together, so that every key and value is read once. Vectors
run along the head. While the keys of a block are multiplied, its values are fetched into the second
cache, and while those are, the next block's keys. (Fetching into the first cache is limited by the
few misses that it can have at a time.) Where the heads of one token lie side by side, all of them
are done before the next block of keys, so that memory is still read in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.codegen import math
from rlx.codegen.attention import AttentionKernel, Rows, Words, or_zero, weight
from rlx.codegen.attention_finish import emit_finish, sums_of_piece, working_memory
from rlx.codegen.attention_fold import fold
from rlx.codegen.attention_schedule import Piece, Schedule
from rlx.codegen.emit import Function, Module, Value, i32, i64, ptr, vec
from rlx.codegen.storage import load, memory_type, widen
from rlx.codegen.target import Target

MOST_ROWS = 8
_BLOCK = 64  # keys of one head
_FETCHED = 32 << 10  # bytes of keys, and as many of values, fetched ahead of all heads together


@dataclass(frozen=True)
class Decode(AttentionKernel):
    """words: attention.WORDS. `rows` is the number of rows of a key head, at most MOST_ROWS;
    `heads`, 1 or all of them, the number of key heads that pass by together."""

    rows: int = 1
    heads: int = 1

    @property
    def together(self) -> int:
        return self.heads

    @property
    def block(self) -> int:
        """Keys of a block, a multiple of every vector's lanes."""
        if self.heads == 1:
            return _BLOCK
        key = self.heads * self.problem.head_dim * self.problem.k.bytes
        return min(max(_FETCHED // key // 16, 1) * 16, _BLOCK)

    def block_rows(self, target: Target) -> int:
        return self.rows

    def value_columns(self, target: Target) -> int:
        return self.problem.head_dim

    def working_bytes(self, target: Target) -> int:
        queries = self.heads * self.rows * self.problem.head_dim
        return (queries + self.rows * (self.block + 1)) * self.problem.sums.bytes

    def emit(self, m: Module) -> None:
        part = _emit_part(m, self)
        finish = emit_finish(m, self)
        f = m.kernel()
        schedule = Schedule(f, self)
        first, _ = schedule.span(f.i64(0))

        def work(piece: Piece) -> None:
            sums, item = sums_of_piece(f, self, piece), (piece.batch, piece.head, piece.row)
            space = working_memory(f, self)
            following = _next_item(f, self, piece, first)
            arguments = (*item, piece.first, piece.last, following)
            f.call(part, f["words"], space, sums, *arguments)
            f.if_(piece.whole, lambda: _drop(f.call(finish, f["words"], *item, sums)))

        schedule.each_piece(work)


def _drop(*_: object) -> None:
    """A body that gives nothing."""


def _next_item(f: Function, kernel: Decode, piece: Piece, first: Value) -> Value:
    """Where the keys of the item after this one begin, for prefetching; it need not exist."""
    words, problem = Words(f), kernel.problem
    head = piece.head + kernel.together
    wraps = head.eq(problem.kv_heads)
    batch, head = piece.batch + wraps.to(i64), f.select(wraps, f.i64(0), head)
    return f.gep(words.head("k", problem, batch, head), first * words.row_bytes("k", problem))


def _emit_part(m: Module, kernel: Decode) -> Function:
    """void part(words, space, sums, batch, head, row, first, last, following)

    The sums of all rows over keys [first, last). `following` are the keys that come after them.
    """
    item = [("batch", i64), ("head", i64), ("row", i64), ("first", i64), ("last", i64)]
    params = [("words", ptr), ("space", ptr), ("sums", ptr), *item, ("following", ptr)]
    f = m.function("part", params, internal=True)
    _Part(f, kernel).emit()
    return f


class _Part:
    def __init__(self, f: Function, kernel: Decode) -> None:
        self.f, self.kernel, self.problem, self.rows = f, kernel, kernel.problem, kernel.rows
        self.words, self.type = Words(f), kernel.problem.sums
        self.wide, self.block = f.target.lanes(self.type.bits), kernel.block
        size = self.type.bytes
        self.head_bytes = self.rows * self.problem.head_dim * size
        self.scores = f.gep(f["space"], kernel.heads * self.head_bytes)
        self.factors = f.gep(self.scores, self.rows * self.block * size)
        self.bases = {n: self.words.head(n, self.problem, f["batch"], f["head"]) for n in "kv"}
        self.row_bytes = {n: self.words.row_bytes(n, self.problem) for n in "kv"}
        self.step_bytes = {n: self.words.row_bytes(n, self.problem, "head") for n in "kv"}

    def emit(self) -> None:
        f = self.f
        for h in f.range(0, self.kernel.heads):
            self._enter(h)
            self._prepare()
        for key in f.range(f["first"], f["last"], self.block):
            count = f.min(f["last"] - key, self.block)
            for h in f.range(0, self.kernel.heads):
                self._enter(h)
                k, v = self._first_row("k", key), self._first_row("v", key)
                self._look_ahead(key, v)
                self._scores(k, count)
                self._softmax(key, count)
                self._values(v, count)

    def _enter(self, h: Value) -> None:
        """What belongs to head h of the item."""
        f, target = self.f, self.f.target
        self.h = h
        self.head = f["head"] + h
        self.queries = f.gep(f["space"], h, self.head_bytes)
        self.sums = f.gep(f["sums"], h, self.head_bytes)
        line = self.rows * self.type.bytes
        self.maxima = f.gep(f.gep(f["sums"], self.kernel.maxima(target)), h, line)
        self.totals = f.gep(f.gep(f["sums"], self.kernel.totals(target)), h, line)

    def _first_row(self, name: str, key: Value) -> Value:
        at = key * self.row_bytes[name] + self.h * self.step_bytes[name]
        return self.f.gep(self.bases[name], at)

    def _look_ahead(self, key: Value, v: Value) -> None:
        """What to fetch during the two products of a block: (name, first row) for each.

        One head by itself: its values now, the next block's keys then. Heads together: the next
        block of both, of which each head fetches a part that lies in one piece.
        """
        f, after = self.f, key + self.block
        more = after < f["last"]
        nexts = {n: f.gep(self.bases[n], after * self.row_bytes[n]) for n in "kv"}
        if self.kernel.heads == 1:
            self.ahead = [("v", v), ("k", f.select(more, nexts["k"], f["following"]))]
        else:
            self.ahead = [(n, f.select(more, nexts[n], self.bases[n])) for n in "kv"]

    def _fetch_place(self, product: int, number: Value) -> Value:
        """Where the row lies that is to be fetched while key `number` is worked on."""
        f, (name, base) = self.f, self.ahead[product]
        heads = self.kernel.heads
        if heads == 1:
            return f.gep(base, number * self.row_bytes[name])
        piece = self.h * self.block + number
        row = piece.udiv(heads)
        at = row * self.row_bytes[name] + (piece - row * heads) * self.step_bytes[name]
        return f.gep(base, at)

    def _fetch(self, product: int, row: Value, d: Value, count: int) -> None:
        """Fetch the cache lines of dimensions d … d + count of a row."""
        element = memory_type(self.problem.dtype(self.ahead[product][0]))
        for at in range(0, count * element.bytes, 64):
            self.f.prefetch(self.f.gep(row, d, element), at, locality=2)

    def _prepare(self) -> None:
        """Queries scaled and widened; sums empty."""
        f, p = self.f, self.problem
        rows, lanes = Rows(f, p), p.chunk("q", f.target)
        step = self.words.row_bytes("q", p, "step")
        for r in f.range(0, self.rows):
            row = rows.address("q", f["batch"], self.head, f["row"] + r)
            for d in f.range(0, p.head_dim, lanes):
                at = f.gep(row, d * step) if "q" in p.gaps else f.gep(row, d, memory_type(p.q))
                value = load(f, at, p.q, lanes, self.type) * p.query_factor
                place = r * p.head_dim + d
                f.store(value, f.gep(self.queries, place, self.type))
                f.store(f.const(0.0, value.type), f.gep(self.sums, place, self.type))
            f.store(f.const(float("-inf"), self.type), f.gep(self.maxima, r, self.type))
            f.store(f.const(0.0, self.type), f.gep(self.totals, r, self.type))

    def _load(self, name: str, row: Value, at: Value, lanes: int, offset: int = 0) -> Value:
        """`lanes` numbers of a key or value from dimension `at` + `offset` on."""
        f, dtype = self.f, self.problem.dtype(name)
        if name in self.problem.gaps:
            step = self.words.row_bytes(name, self.problem, "step")
            return load(f, f.gep(row, (at + offset) * step), dtype, lanes, self.type)
        size = memory_type(dtype).bytes
        return load(f, f.gep(row, at, size), dtype, lanes, self.type, offset * size)

    def _unroll(self, name: str, lanes: int) -> int:
        """Vectors of a row that make a cache line, or as near to it as the head allows."""
        count = max(1, 64 // (lanes * memory_type(self.problem.dtype(name)).bytes))
        while (self.problem.head_dim // lanes) % count:
            count //= 2
        return count

    def _scores(self, k: Value, count: Value) -> None:
        """scores[row][key] = query · key, several keys at once; the last of them may repeat."""
        f, p = self.f, self.problem
        lanes = p.chunk("k", f.target)
        together = max(1, min(8, lanes // _power_of_two(self.rows)))
        unroll = self._unroll("k", lanes)
        last = count - 1
        for j in f.range(0, count, together, guard=False):
            numbers = [f.min(j + u, last) for u in range(together)]
            keys = [f.gep(k, n * self.row_bytes["k"]) for n in numbers]
            ahead = [self._fetch_place(0, n) for n in numbers]

            def step(
                d: Value, *sums: Value, keys: list[Value] = keys, ahead: list[Value] = ahead
            ) -> list[Value]:
                total = list(sums)
                for place in ahead:
                    self._fetch(0, place, d, lanes * unroll)
                for i in range(unroll):
                    queries = [self._query(r, d, i * lanes, lanes) for r in range(self.rows)]
                    for u, key in enumerate(keys):
                        x = self._load("k", key, d, lanes, i * lanes)
                        for r, q in enumerate(queries):
                            total[r * together + u] = f.fma(x, q, total[r * together + u])
                return total

            zero = f.const(0.0, vec(lanes, self.type))
            start = [zero] * (self.rows * together)
            sums = f.loop(0, p.head_dim, lanes * unroll, start, step)
            for r, row in enumerate(fold(f, sums, together)):
                f.store(row, f.gep(self.scores, j + r * self.block, self.type))

    def _query(self, row: int, d: Value, offset: int, lanes: int) -> Value:
        at = (row * self.problem.head_dim + offset) * self.type.bytes
        return self.f.load(self.f.gep(self.queries, d, self.type), vec(lanes, self.type), at)

    def _softmax(self, key: Value, count: Value) -> None:
        """Each row's scores become weights; its maximum and total are brought up to date."""
        f, rows = self.f, Rows(self.f, self.problem)
        for r in f.range(0, self.rows):
            row = f["row"] + r
            line = f.gep(self.scores, r, self.block * self.type.bytes)
            end = f.min(rows.end(row) - key, count).to(i32)
            start = (rows.start(row) - key).to(i32) if self.problem.window else None
            mask = rows.mask_offset(f["batch"], self.head, row) if self.problem.mask else None
            found = self._adjust(line, key, count, (start, end), mask)
            place = f.gep(self.maxima, r, self.type)
            before = f.load(place, self.type)
            after = f.max(before, f.reduce("max", found))
            top = or_zero(after)
            factor = weight(before - top)
            f.store(after, place)
            f.store(factor, f.gep(self.factors, r, self.type))
            total = f.gep(self.totals, r, self.type)
            f.store(f.fma(f.load(total, self.type), factor, self._weigh(line, top, count)), total)

    def _adjust(
        self,
        line: Value,
        key: Value,
        count: Value,
        seen: tuple[Value | None, Value],
        mask: Value | None,
    ) -> Value:
        """Softcap, mask and visibility on a row of scores; gives the largest in each lane."""
        f = self.f
        wide = vec(self.wide, self.type)
        numbers = f.iota(vec(self.wide, i32))
        first, end = seen

        def step(j: Value, found: Value) -> Value:
            place = f.gep(line, j, self.type)
            score = f.load(place, wide)
            if self.problem.softcap:
                score = math.tanh(score) * self.problem.softcap
            if mask is not None:
                score = self._with_mask(score, mask, key, j, count)
            at = numbers + f.splat(j.to(i32), self.wide)
            keep = at < f.splat(end, self.wide)
            if first is not None:
                keep = keep & (at >= f.splat(first, self.wide))
            score = f.select(keep, score, float("-inf"))
            f.store(score, place)
            return f.max_fast(found, score)

        lowest = f.const(float("-inf"), wide)
        return f.loop(0, count, self.wide, [lowest], step, guard=False)[0]

    def _with_mask(self, score: Value, mask: Value, key: Value, j: Value, count: Value) -> Value:
        f, lanes = self.f, self.wide
        assert self.problem.mask is not None
        # lanes beyond the last key read its entry again
        numbers = f.iota(vec(lanes, i64)) + f.splat(j, lanes)
        numbers = f.min(numbers, f.splat(count - 1, lanes)) + f.splat(key, lanes)
        at = numbers * f.splat(self.words["mask_step"], lanes) + f.splat(mask, lanes)
        element = vec(lanes, memory_type(self.problem.mask))
        raw = f.gather(self.words["mask"], at, element)
        if self.problem.kind.kind == "custom":
            return f.select(raw.ne(0), score, float("-inf"))
        return score + widen(f, raw, self.problem.mask, self.type)

    def _weigh(self, line: Value, top: Value, count: Value) -> Value:
        """Scores to weights; gives their total."""
        f, wide = self.f, vec(self.wide, self.type)
        shift = f.splat(top, self.wide)

        def step(j: Value, total: Value) -> Value:
            place = f.gep(line, j, self.type)
            w = weight(f.load(place, wide) - shift)
            f.store(w, place)
            return total + w

        start = [f.const(0.0, wide)]
        return f.reduce("add", f.loop(0, count, self.wide, start, step, guard=False)[0])

    def _values(self, v: Value, count: Value) -> None:
        """sums = sums * factors + weights · values, as many columns at once as registers allow."""
        f, p = self.f, self.problem
        lanes = p.chunk("v", f.target)
        room = 24 if f.target.num_vector_registers >= 32 else 10
        columns = p.head_dim // lanes
        width = max(
            w for w in range(1, columns + 1) if columns % w == 0 and _fits(w, self.rows, room)
        )
        factors = [
            f.broadcast_load(self.factors, self.type, lanes, r * self.type.bytes)
            for r in range(self.rows)
        ]
        type_ = vec(lanes, self.type)
        places = [
            (r, (r * p.head_dim + i * lanes) * self.type.bytes)
            for r in range(self.rows)
            for i in range(width)
        ]
        for d in f.range(0, p.head_dim, width * lanes):
            sums = f.gep(self.sums, d, self.type)

            def step(j: Value, *total: Value, d: Value = d) -> list[Value]:
                row = f.gep(v, j * self.row_bytes["v"])
                self._fetch(1, self._fetch_place(1, j), d, width * lanes)
                values = [self._load("v", row, d, lanes, i * lanes) for i in range(width)]
                out = []
                for r in range(self.rows):
                    place = f.gep(self.scores, j + r * self.block, self.type)
                    w = f.broadcast_load(place, self.type, lanes)
                    out += [f.fma(w, x, total[r * width + i]) for i, x in enumerate(values)]
                return out

            start = [f.load(sums, type_, at) * factors[r] for r, at in places]
            for total, (_, at) in zip(
                f.loop(0, count, 1, start, step, guard=False), places, strict=True
            ):
                f.store(total, sums, at)


def _fits(width: int, rows: int, room: int) -> bool:
    return width == 1 or width * rows <= room


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()
