"""Attention for a few rows: keys and values stream by at the speed of memory.

All rows of a key head are in registers together, so that every key and value is read once. Vectors
run along the head. There are two ways to have the next bytes in time:

- in order: each key, then each value of a block is read from its first byte to its last, and the
  hardware sees it coming. That takes sums for all columns in registers.
- fetching: several keys, and part of the columns of each value, are read at once. While the keys
  of a block are multiplied, its values are fetched into the second cache, and while those are, the
  next block's keys. (The first cache can wait for too few lines at a time.) Where the heads of one
  token lie side by side, all of them are done before the next block of keys, and each fetches a
  part of that block that lies in one piece.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.attention import Args, AttentionKernel, Rows
from rlx.codegen.attention_blocks import load_packed
from rlx.codegen.attention_finish import emit_finish, sums_of_piece, working_memory
from rlx.codegen.attention_fold import fold
from rlx.codegen.attention_rows import RowScores
from rlx.codegen.attention_schedule import Piece, Schedule
from rlx.codegen.emit import Function, Module, Type, Value, i64, ptr, vec
from rlx.codegen.storage import load, memory_type
from rlx.codegen.target import Target
from rlx.support.records import dataclass

MOST_ROWS = 8
_BLOCK = 64  # keys of one head
_FETCHED = 32 << 10  # bytes of keys, and as many of values, fetched ahead of all heads together


@dataclass(frozen=True)
class Decode(AttentionKernel):
    """args: attention.ARGS. `rows` is the number of rows of a key head, at most MOST_ROWS;
    `heads`, 1 or all of them, the number of key heads that pass by together."""

    rows: int = 1
    heads: int = 1

    @property
    def together(self) -> int:
        return self.heads

    @property
    def unit(self) -> int:
        return 16 if self.heads == 1 else 4

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
        part = emit_part(m, self)
        finish = emit_finish(m, self)
        f = m.kernel()
        schedule = Schedule(f, self)
        first, _ = schedule.span(f.i64(0))

        def work(piece: Piece) -> None:
            sums, item = sums_of_piece(f, self, piece), (piece.batch, piece.head, piece.row)
            space = working_memory(f, self)
            following = _next_item(f, self, piece, first)
            arguments = (*item, piece.first, piece.last, following)
            f.call(part, f["args"], space, sums, *arguments)
            f.if_(piece.whole, lambda: _drop(f.call(finish, f["args"], *item, sums)))

        schedule.each_piece(work)


def _drop(*_: object) -> None:
    """A body that gives nothing."""


def _next_item(f: Function, kernel: Decode, piece: Piece, first: Value) -> Value:
    """Where the keys of the item after this one begin, for prefetching; it need not exist."""
    args, problem = Args(f), kernel.problem
    head = piece.head + kernel.together
    wraps = head.eq(problem.kv_heads)
    batch, head = piece.batch + wraps.to(i64), f.select(wraps, f.i64(0), head)
    return f.gep(args.head("k", problem, batch, head), first * args.row_bytes("k", problem))


def emit_part(m: Module, kernel: Decode, body: type[Part] | None = None) -> Function:
    """void part(args, space, sums, batch, head, row, first, last, following)

    The sums of all rows over keys [first, last). `following` are the keys that come after them.
    """
    item = [("batch", i64), ("head", i64), ("row", i64), ("first", i64), ("last", i64)]
    params = [("args", ptr), ("space", ptr), ("sums", ptr), *item, ("following", ptr)]
    f = m.function("part", params, internal=True)
    (body or Part)(f, kernel).emit()
    return f


class Part:
    """The body of `part`. Where the first row of a block lies, what is fetched ahead of it, and
    what a row sees (`where`) may be another kernel's own."""

    def __init__(self, f: Function, kernel: Decode) -> None:
        self.f, self.kernel, self.problem, self.rows = f, kernel, kernel.problem, kernel.rows
        self.args, self.type, self.block = Args(f), kernel.problem.sums, kernel.block
        self.where = Rows(f, kernel.problem)
        size = self.type.bytes
        self.head_bytes = self.rows * self.problem.head_dim * size
        self.scores = f.gep(f["space"], kernel.heads * self.head_bytes)
        self.factors = f.gep(self.scores, self.rows * self.block * size)
        self.bases = {n: self.args.head(n, self.problem, f["batch"], f["head"]) for n in "kv"}
        self.row_bytes = {n: self.args.row_bytes(n, self.problem) for n in "kv"}
        self.step_bytes = {n: self.args.row_bytes(n, self.problem, "head") for n in "kv"}
        self.lanes = {n: self.problem.chunk(n, f.target) for n in "kv"}
        self.width = self._width()
        whole = self.width * self.lanes["v"] == self.problem.head_dim
        self.in_order = whole and kernel.heads == 1

    def vector(self, name: str) -> Type:
        return vec(self.lanes[name], self.type)

    def _width(self) -> int:
        """How many vectors of columns are summed at once."""
        room = 24 if self.f.target.num_vector_registers >= 32 else 10
        columns = self.problem.head_dim // self.lanes["v"]
        widths = [w for w in range(1, columns + 1) if columns % w == 0]
        return max(w for w in widths if w == 1 or w * self.rows <= room)

    def emit(self) -> None:
        f = self.f
        for h in f.range(0, self.kernel.heads):
            self._enter(h)
            self._prepare()
        for key in f.range(f["first"], f["last"], self.block):
            count = f.min(f["last"] - key, self.block)
            for h in f.range(0, self.kernel.heads):
                self._enter(h)
                k, v = self.first_row("k", key), self.first_row("v", key)
                if not self.in_order:
                    self.look_ahead(key, v)
                self._scores(k, count)
                parts = (self.scores, self.head, key, count, self.where)
                scores = RowScores(f, self.problem, self.rows, self.block, *parts)
                scores.weigh(self.maxima, self.totals, self.factors)
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

    def first_row(self, name: str, key: Value) -> Value:
        at = key * self.row_bytes[name] + self.h * self.step_bytes[name]
        return self.f.gep(self.bases[name], at)

    def look_ahead(self, key: Value, v: Value) -> None:
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
        lanes = p.chunk("q", f.target)
        step = self.args.row_bytes("q", p, "step")
        for r in f.range(0, self.rows):
            row = self.where.address("q", f["batch"], self.head, f["row"] + r)
            for d in f.range(0, p.head_dim, lanes):
                at = f.gep(row, d * step) if "q" in p.gaps else f.gep(row, d, memory_type(p.q))
                value = load(f, at, p.q, lanes, self.type) * p.query_factor
                place = r * p.head_dim + d
                f.store(value, f.gep(self.queries, place, self.type))
                f.store(f.const(0.0, value.type), f.gep(self.sums, place, self.type))
            f.store(f.const(float("-inf"), self.type), f.gep(self.maxima, r, self.type))
            f.store(f.const(0.0, self.type), f.gep(self.totals, r, self.type))

    def _load(self, name: str, row: Value, at: Value, offset: int = 0) -> Value:
        """A vector of a key or value, from dimension `at` + `offset` on."""
        f, dtype, lanes = self.f, self.problem.dtype(name), self.lanes[name]
        if self.problem.packed:
            return load_packed(f, row, at + offset, lanes, self.type)
        if name in self.problem.gaps:
            step = self.args.row_bytes(name, self.problem, "step")
            return load(f, f.gep(row, (at + offset) * step), dtype, lanes, self.type)
        size = memory_type(dtype).bytes
        return load(f, f.gep(row, at, size), dtype, lanes, self.type, offset * size)

    def _query(self, row: int, d: Value, offset: int) -> Value:
        at = (row * self.problem.head_dim + offset) * self.type.bytes
        return self.f.load(self.f.gep(self.queries, d, self.type), self.vector("k"), at)

    def _scores(self, k: Value, count: Value) -> None:
        """scores[row][key] = query · key, several keys together; the last of them may repeat."""
        f = self.f
        together = max(1, min(8, self.lanes["k"] // _power_of_two(self.rows)))
        products = self._products_in_order if self.in_order else self._products_fetching
        for j in f.range(0, count, together, guard=False):
            sums = products(k, j, count - 1, together)
            for r, row in enumerate(fold(f, sums, together)):
                f.store(row, f.gep(self.scores, j + r * self.block, self.type))

    def _products_in_order(self, k: Value, j: Value, last: Value, together: int) -> list[Value]:
        """Products of each row with keys j, j + 1, …, one key after the other."""
        f, lanes, type_ = self.f, self.lanes["k"], self.vector("k")
        kept = f.alloca(self.rows * together * type_.bytes)
        starts = range(0, self.problem.head_dim, lanes)
        queries = [[self._query(r, f.i64(0), d) for d in starts] for r in range(self.rows)]
        for u in f.range(0, together):
            key = f.gep(k, f.min(j + u, last) * self.row_bytes["k"])
            sums = [[f.const(0.0, type_)] * 2 for _ in range(self.rows)]
            for i, d in enumerate(starts):
                x = self._load("k", key, f.i64(0), d)
                for total, query in zip(sums, queries, strict=True):
                    total[i % 2] = f.fma(x, query[i], total[i % 2])
            for r, (even, odd) in enumerate(sums):
                f.store(even + odd, f.gep(kept, u + r * together, type_.bytes))
        return [f.load(kept, type_, i * type_.bytes) for i in range(self.rows * together)]

    def _products_fetching(self, k: Value, j: Value, last: Value, together: int) -> list[Value]:
        """The same with all keys at once, piece by piece."""
        f, lanes, dim = self.f, self.lanes["k"], self.problem.head_dim
        numbers = [f.min(j + u, last) for u in range(together)]
        keys = [f.gep(k, n * self.row_bytes["k"]) for n in numbers]
        ahead = [self._fetch_place(0, n) for n in numbers]
        unroll = max(1, 64 // (lanes * memory_type(self.problem.k).bytes))  # a cache line
        while dim // lanes % unroll:
            unroll //= 2

        def step(d: Value, *sums: Value) -> list[Value]:
            total = list(sums)
            for place in ahead:
                self._fetch(0, place, d, lanes * unroll)
            for i in range(unroll):
                queries = [self._query(r, d, i * lanes) for r in range(self.rows)]
                for u, key in enumerate(keys):
                    x = self._load("k", key, d, i * lanes)
                    for r, q in enumerate(queries):
                        total[r * together + u] = f.fma(x, q, total[r * together + u])
            return total

        start = [f.const(0.0, self.vector("k"))] * (self.rows * together)
        return f.loop(0, dim, lanes * unroll, start, step)

    def _values(self, v: Value, count: Value) -> None:
        """sums = sums * factors + weights · values, as many columns at once as registers allow."""
        f, lanes, width = self.f, self.lanes["v"], self.width
        size, dim = self.type.bytes, self.problem.head_dim
        rows = range(self.rows)
        factors = [f.broadcast_load(self.factors, self.type, lanes, r * size) for r in rows]
        places = [(r, (r * dim + i * lanes) * size) for r in rows for i in range(width)]
        for d in f.range(0, dim, width * lanes):
            sums = f.gep(self.sums, d, self.type)
            start = [f.load(sums, self.vector("v"), at) * factors[r] for r, at in places]
            done = f.loop(0, count, 1, start, self._value_step(v, d), guard=False)
            for total, (_, at) in zip(done, places, strict=True):
                f.store(total, sums, at)

    def _value_step(self, v: Value, d: Value) -> Callable[..., list[Value]]:
        f, lanes, width = self.f, self.lanes["v"], self.width

        def step(j: Value, *total: Value) -> list[Value]:
            row = f.gep(v, j * self.row_bytes["v"])
            if not self.in_order:
                self._fetch(1, self._fetch_place(1, j), d, width * lanes)
            values = [self._load("v", row, d, i * lanes) for i in range(width)]
            out = []
            for r in range(self.rows):
                place = f.gep(self.scores, j + r * self.block, self.type)
                w = f.broadcast_load(place, self.type, lanes)
                out += [f.fma(w, x, total[r * width + i]) for i, x in enumerate(values)]
            return out

        return step


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()
