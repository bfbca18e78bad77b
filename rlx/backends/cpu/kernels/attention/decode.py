"""Flash decoding: attention for a few rows, which streams keys and values at memory speed.

All rows of a KV head are in registers together, so that every key and value is read once. Vectors
run along the head. Two ways to have the next bytes in time:

- streaming: each key, then each value of a KV block is read from its first byte to its last, which
  the hardware prefetcher follows. That takes accumulators for all columns in registers.
- prefetching: several keys, and some columns of each value, are read at once. While QKᵀ runs on a
  KV block, its values are prefetched into the L2 cache; while PV runs, the next block's keys. (The
  L1 cache can wait for too few lines at a time.) Where the heads of one token are contiguous, all
  heads go through a KV block before the next, and each prefetches a contiguous part of that.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.kernels.attention.combine import (
    discard,
    emit_normalize,
    partial_of_span,
    workspace_of,
)
from rlx.backends.cpu.kernels.attention.problem import Args, AttentionKernel, Rows
from rlx.backends.cpu.kernels.attention.q8_cache import load_q8
from rlx.backends.cpu.kernels.attention.softmax import RowSoftmax
from rlx.backends.cpu.kernels.attention.work_split import KVSpan, WorkSplit
from rlx.llvm.builder import Function, Module, Type, Value, i64, ptr, vec
from rlx.llvm.horizontal import reduce_lanes
from rlx.llvm.storage import load, memory_type
from rlx.llvm.target import Target
from rlx.support.records import dataclass

MAX_ROWS = 8  # of a KV head: queries times GQA group
_BLOCK = 64  # keys of a KV block of one head
_PREFETCHED = 32 << 10  # bytes of keys, and as many of values, prefetched for all heads


@dataclass(frozen=True)
class Decode(AttentionKernel):
    """args: problem.ARGS. `rows` is the number of rows of a KV head, at most MAX_ROWS; `heads`,
    1 or all of them, the number of KV heads of a work item."""

    rows: int = 1
    heads: int = 1

    @property
    def heads_per_item(self) -> int:
        return self.heads

    @property
    def unit(self) -> int:
        return 16 if self.heads == 1 else 4

    @property
    def block(self) -> int:
        """Keys of a KV block, a multiple of every vector's lanes."""
        if self.heads == 1:
            return _BLOCK
        key = self.heads * self.problem.head_dim * self.problem.k.bytes
        return min(max(_PREFETCHED // key // 16, 1) * 16, _BLOCK)

    def block_rows(self, target: Target) -> int:
        return self.rows

    def value_columns(self, target: Target) -> int:
        return self.problem.head_dim

    def workspace_bytes(self, target: Target) -> int:
        queries = self.heads * self.rows * self.problem.head_dim
        return (queries + self.rows * (self.block + 1)) * self.problem.acc.bytes

    def emit(self, m: Module) -> None:
        attend = emit_attend(m, self)
        normalize = emit_normalize(m, self)
        f = m.kernel()
        split = WorkSplit(f, self)
        first, _ = split.kv_range(f.i64(0))

        def work(span: KVSpan) -> None:
            partial, item = partial_of_span(f, self, span), (span.batch, span.head, span.row)
            workspace = workspace_of(f, self)
            following = _next_item(f, self, span, first)
            arguments = (*item, span.first, span.last, following)
            f.call(attend, f["args"], workspace, partial, *arguments)
            f.if_(span.whole, lambda: discard(f.call(normalize, f["args"], *item, partial)))

        split.each_span(work)


def _next_item(f: Function, kernel: Decode, span: KVSpan, first: Value) -> Value:
    """Where the keys of the next item begin, for prefetching; it need not exist."""
    args, problem = Args(f), kernel.problem
    head = span.head + kernel.heads_per_item
    wraps = head.eq(problem.kv_heads)
    batch, head = span.batch + wraps.to(i64), f.select(wraps, f.i64(0), head)
    return f.gep(args.head("k", problem, batch, head), first * args.row_bytes("k", problem))


def emit_attend(m: Module, kernel: Decode, body: type[DecodeAttend] | None = None) -> Function:
    """void attend(args, workspace, partial, batch, head, row, first, last, following)

    The partial result of all rows over keys [first, last). `following` are the keys to prefetch
    after them.
    """
    item = [("batch", i64), ("head", i64), ("row", i64), ("first", i64), ("last", i64)]
    params = [("args", ptr), ("workspace", ptr), ("partial", ptr), *item, ("following", ptr)]
    f = m.function("attend", params, internal=True)
    (body or DecodeAttend)(f, kernel).emit()
    return f


class DecodeAttend:
    """The body of `attend`. A kernel over a paged KV cache overrides where a KV block lies, what is
    prefetched, and which keys a row sees (`row_map`)."""

    def __init__(self, f: Function, kernel: Decode) -> None:
        self.f, self.kernel, self.problem, self.rows = f, kernel, kernel.problem, kernel.rows
        self.args, self.type, self.block = Args(f), kernel.problem.acc, kernel.block
        self.row_map = Rows(f, kernel.problem)
        size = self.type.bytes
        self.head_bytes = self.rows * self.problem.head_dim * size
        self.scores = f.gep(f["workspace"], kernel.heads * self.head_bytes)
        self.factors = f.gep(self.scores, self.rows * self.block * size)
        self.bases = {n: self.args.head(n, self.problem, f["batch"], f["head"]) for n in "kv"}
        self.row_bytes = {n: self.args.row_bytes(n, self.problem) for n in "kv"}
        self.head_stride_bytes = {n: self.args.row_bytes(n, self.problem, "head") for n in "kv"}
        self.lanes = {n: self.problem.vector_width(n, f.target) for n in "kv"}
        self.width = self._width()
        whole = self.width * self.lanes["v"] == self.problem.head_dim
        self.streams = whole and kernel.heads == 1

    def vector(self, name: str) -> Type:
        return vec(self.lanes[name], self.type)

    def _width(self) -> int:
        """Vectors of columns that PV accumulates at once."""
        room = 24 if self.f.target.num_vector_registers >= 32 else 10
        columns = self.problem.head_dim // self.lanes["v"]
        widths = [w for w in range(1, columns + 1) if columns % w == 0]
        return max(w for w in widths if w == 1 or w * self.rows <= room)

    def emit(self) -> None:
        f = self.f
        for h in f.range(0, self.kernel.heads):
            self._select_head(h)
            self._init_head()
        for key in f.range(f["first"], f["last"], self.block):
            count = f.min(f["last"] - key, self.block)
            for h in f.range(0, self.kernel.heads):
                self._select_head(h)
                k, v = self.first_row("k", key), self.first_row("v", key)
                if not self.streams:
                    self.plan_prefetch(key, v)
                self._qk(k, count)
                parts = (self.scores, self.head, key, count, self.row_map)
                scores = RowSoftmax(f, self.problem, self.rows, self.block, *parts)
                scores.exponentiate(self.running_max, self.running_sum, self.factors)
                self._pv(v, count)

    def _select_head(self, h: Value) -> None:
        """Point at the queries and the partial result of head h of the item."""
        f, target = self.f, self.f.target
        self.h = h
        self.head = f["head"] + h
        self.queries = f.gep(f["workspace"], h, self.head_bytes)
        self.acc = f.gep(f["partial"], h, self.head_bytes)
        row_bytes = self.rows * self.type.bytes
        self.running_max = f.gep(f.gep(f["partial"], self.kernel.max_offset(target)), h, row_bytes)
        self.running_sum = f.gep(f.gep(f["partial"], self.kernel.sum_offset(target)), h, row_bytes)

    def first_row(self, name: str, key: Value) -> Value:
        """Where the KV block that begins with `key` lies in k or v."""
        at = key * self.row_bytes[name] + self.h * self.head_stride_bytes[name]
        return self.f.gep(self.bases[name], at)

    def plan_prefetch(self, key: Value, v: Value) -> None:
        """What to prefetch during QKᵀ and during PV of a KV block: (name, first row) for each.

        One head: its values now, the next block's keys then. All heads: the next block of both, of
        which each head prefetches a contiguous part.
        """
        f, after = self.f, key + self.block
        more = after < f["last"]
        nexts = {n: f.gep(self.bases[n], after * self.row_bytes[n]) for n in "kv"}
        if self.kernel.heads == 1:
            self.ahead = [("v", v), ("k", f.select(more, nexts["k"], f["following"]))]
        else:
            self.ahead = [(n, f.select(more, nexts[n], self.bases[n])) for n in "kv"]

    def _prefetch_row(self, product: int, number: Value) -> Value:
        """The row to prefetch while key `number` is processed; `product` is 0 for QKᵀ, 1 for PV."""
        f, (name, base) = self.f, self.ahead[product]
        heads = self.kernel.heads
        if heads == 1:
            return f.gep(base, number * self.row_bytes[name])
        index = self.h * self.block + number
        row = index.udiv(heads)
        at = row * self.row_bytes[name] + (index - row * heads) * self.head_stride_bytes[name]
        return f.gep(base, at)

    def _prefetch(self, product: int, row: Value, d: Value, count: int) -> None:
        """Prefetch the cache lines of dimensions d … d + count of a row."""
        element = memory_type(self.problem.dtype(self.ahead[product][0]))
        for at in range(0, count * element.bytes, 64):
            self.f.prefetch(self.f.gep(row, d, element), at, locality=2)

    def _init_head(self) -> None:
        """Scale and widen the queries; clear the partial result."""
        f, p = self.f, self.problem
        lanes = p.vector_width("q", f.target)
        step = self.args.row_bytes("q", p, "step")
        for r in f.range(0, self.rows):
            row = self.row_map.address("q", f["batch"], self.head, f["row"] + r)
            for d in f.range(0, p.head_dim, lanes):
                at = f.gep(row, d * step) if "q" in p.strided else f.gep(row, d, memory_type(p.q))
                value = load(f, at, p.q, lanes, self.type) * p.query_factor
                place = r * p.head_dim + d
                f.store(value, f.gep(self.queries, place, self.type))
                f.store(f.const(0.0, value.type), f.gep(self.acc, place, self.type))
            f.store(f.const(float("-inf"), self.type), f.gep(self.running_max, r, self.type))
            f.store(f.const(0.0, self.type), f.gep(self.running_sum, r, self.type))

    def _load(self, name: str, row: Value, at: Value, offset: int = 0) -> Value:
        """A vector of a key or value, from dimension `at` + `offset` on."""
        f, dtype, lanes = self.f, self.problem.dtype(name), self.lanes[name]
        if self.problem.q8_kv:
            return load_q8(f, row, at + offset, lanes, self.type)
        if name in self.problem.strided:
            step = self.args.row_bytes(name, self.problem, "step")
            return load(f, f.gep(row, (at + offset) * step), dtype, lanes, self.type)
        size = memory_type(dtype).bytes
        return load(f, f.gep(row, at, size), dtype, lanes, self.type, offset * size)

    def _query(self, row: int, d: Value, offset: int) -> Value:
        at = (row * self.problem.head_dim + offset) * self.type.bytes
        return self.f.load(self.f.gep(self.queries, d, self.type), self.vector("k"), at)

    def _qk(self, k: Value, count: Value) -> None:
        """QKᵀ: scores[row][key], several keys at once; the last of them may repeat."""
        f = self.f
        keys_at_once = max(1, min(8, self.lanes["k"] // _power_of_two(self.rows)))
        qk = self._qk_streaming if self.streams else self._qk_prefetching
        for j in f.range(0, count, keys_at_once, guard=False):
            dots = qk(k, j, count - 1, keys_at_once)
            for r, row in enumerate(reduce_lanes(f, dots, keys_at_once)):
                f.store(row, f.gep(self.scores, j + r * self.block, self.type))

    def _qk_streaming(self, k: Value, j: Value, last: Value, keys_at_once: int) -> list[Value]:
        """Dot products of each row with keys j, j + 1, …, one key after the other."""
        f, lanes, type_ = self.f, self.lanes["k"], self.vector("k")
        dots = f.alloca(self.rows * keys_at_once * type_.bytes)
        starts = range(0, self.problem.head_dim, lanes)
        queries = [[self._query(r, f.i64(0), d) for d in starts] for r in range(self.rows)]
        for u in f.range(0, keys_at_once):
            key = f.gep(k, f.min(j + u, last) * self.row_bytes["k"])
            sums = [[f.const(0.0, type_)] * 2 for _ in range(self.rows)]
            for i, d in enumerate(starts):
                x = self._load("k", key, f.i64(0), d)
                for total, query in zip(sums, queries, strict=True):
                    total[i % 2] = f.fma(x, query[i], total[i % 2])
            for r, (even, odd) in enumerate(sums):
                f.store(even + odd, f.gep(dots, u + r * keys_at_once, type_.bytes))
        return [f.load(dots, type_, i * type_.bytes) for i in range(self.rows * keys_at_once)]

    def _qk_prefetching(self, k: Value, j: Value, last: Value, keys_at_once: int) -> list[Value]:
        """The same with all keys at once, a cache line of each at a time."""
        f, lanes, dim = self.f, self.lanes["k"], self.problem.head_dim
        numbers = [f.min(j + u, last) for u in range(keys_at_once)]
        keys = [f.gep(k, n * self.row_bytes["k"]) for n in numbers]
        ahead = [self._prefetch_row(0, n) for n in numbers]
        unroll = max(1, 64 // (lanes * memory_type(self.problem.k).bytes))  # a cache line
        while dim // lanes % unroll:
            unroll //= 2

        def step(d: Value, *sums: Value) -> list[Value]:
            total = list(sums)
            for place in ahead:
                self._prefetch(0, place, d, lanes * unroll)
            for i in range(unroll):
                queries = [self._query(r, d, i * lanes) for r in range(self.rows)]
                for u, key in enumerate(keys):
                    x = self._load("k", key, d, i * lanes)
                    for r, q in enumerate(queries):
                        total[r * keys_at_once + u] = f.fma(x, q, total[r * keys_at_once + u])
            return total

        start = [f.const(0.0, self.vector("k"))] * (self.rows * keys_at_once)
        return f.loop(0, dim, lanes * unroll, start, step)

    def _pv(self, v: Value, count: Value) -> None:
        """PV: acc = acc * factors + P·V, as many columns at once as registers allow."""
        f, lanes, width = self.f, self.lanes["v"], self.width
        size, dim = self.type.bytes, self.problem.head_dim
        rows = range(self.rows)
        factors = [f.broadcast_load(self.factors, self.type, lanes, r * size) for r in rows]
        places = [(r, (r * dim + i * lanes) * size) for r in rows for i in range(width)]
        for d in f.range(0, dim, width * lanes):
            acc = f.gep(self.acc, d, self.type)
            start = [f.load(acc, self.vector("v"), at) * factors[r] for r, at in places]
            done = f.loop(0, count, 1, start, self._pv_step(v, d), guard=False)
            for total, (_, at) in zip(done, places, strict=True):
                f.store(total, acc, at)

    def _pv_step(self, v: Value, d: Value) -> Callable[..., list[Value]]:
        f, lanes, width = self.f, self.lanes["v"], self.width

        def step(j: Value, *total: Value) -> list[Value]:
            row = f.gep(v, j * self.row_bytes["v"])
            if not self.streams:
                self._prefetch(1, self._prefetch_row(1, j), d, width * lanes)
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
