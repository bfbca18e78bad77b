"""Flash decoding: attention for a few rows, which streams keys and values at memory speed.

It sums in the order of prefill, so that a token's result does not depend on how many ran with it.
A vector has the dimensions of one step of all chains of a score, of one key or two. All rows of a
KV head are in registers together, so that every key and value is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from operator import add

from rlx.backends.cpu.kernels.attention.combine import (
    Combine,
    WorkSplit,
    each_block,
    partials_of_span,
    workspace_of,
)
from rlx.backends.cpu.kernels.attention.problem import (
    GROUP,
    KV_BLOCK,
    Q8_0,
    RUN,
    SPLITS,
    Args,
    AttentionKernel,
    PartialLayout,
    Problem,
    Rows,
    load_q8,
)
from rlx.backends.cpu.kernels.attention.softmax import RowSoftmax
from rlx.backends.cpu.kernels.attention.tiles import interleave_bf16, multiply_add, to_bf16
from rlx.llvm.builder import Function, Module, Value, i16, i64, ptr, vec
from rlx.llvm.horizontal import transpose_squares
from rlx.llvm.storage import LINE, load, memory_type, widen
from rlx.llvm.target import Target
from rlx.support.records import dataclass


class KeyParts:
    """Reads parts of keys in a function; `step` is the stride of elements in bytes."""

    def __init__(self, f: Function, problem: Problem, step: Value) -> None:
        self.f, self.problem, self.step = f, problem, step
        self.dims = problem.score_parts(f.target) * problem.pair

    def read(self, keys: Sequence[Value], d: Value) -> Value:
        """Dimensions d … d + dims of each key, as one vector of numbers or of bf16 pairs."""
        f, p = self.f, self.problem
        if p.bf16_pairs and p.k.name == "bf16":
            halves = [f.load(f.gep(key, d, 2), vec(self.dims, i16)) for key in keys]
            return joined(f, halves).bits(vec(self.dims, p.acc))
        if p.bf16_pairs:
            return to_bf16(f, *(self._wide(key, d) for key in keys)).bits(vec(self.dims, p.acc))
        if p.q8_kv:
            return joined(f, [self._wide(key, d) for key in keys])
        element = memory_type(p.k)
        if "k" in p.strided:
            at = [(d + i) * self.step for i in range(self.dims)]
            raw = [f.load(f.gep(key, i), element) for key in keys for i in at]
        else:
            raw = [f.load(f.gep(key, d, element), vec(self.dims, element)) for key in keys]
        return widen(f, joined(f, raw), p.k, p.acc)

    def _wide(self, key: Value, d: Value) -> Value:
        f, p = self.f, self.problem
        if p.q8_kv:
            return load_q8(f, key, d, self.dims, p.acc)
        return load(f, f.gep(key, d, memory_type(p.k)), p.k, self.dims, p.acc)


def joined(f: Function, vectors: Sequence[Value]) -> Value:
    """Vectors, a power of two in number, one after the other."""
    found = list(vectors)
    while len(found) > 1:
        found = [f.concat(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    return found[0]


_AHEAD = 64 << 10  # most bytes from the row that is read to the one that is prefetched
MAX_ROWS = 8  # of a KV head: queries times GQA group


@dataclass(frozen=True)
class Decode(AttentionKernel):
    """args: problem.ARGS. `rows` is the number of rows of a KV head, at most MAX_ROWS."""

    rows: int = 1

    def query_bytes(self, target: Target) -> int:
        """A packed query: a vector for each step of a chain."""
        p = self.problem
        steps = p.head_dim // (p.score_parts(target) * p.pair)
        return steps * p.lanes(target) * p.acc.bytes

    def layout(self, target: Target) -> PartialLayout:
        p = self.problem
        scores = (KV_BLOCK + 1) * p.acc.bytes
        workspace = self.rows * (self.query_bytes(target) + scores)
        return PartialLayout(p, self.queries, self.rows, p.head_dim, workspace)

    def emit(self, m: Module) -> None:
        attend = emit_attend(m, self)
        f, layout = m.kernel(), self.layout(m.target)
        combine, split = Combine(f, layout), WorkSplit(f, layout)
        for span in split.each_span():
            partials, item = partials_of_span(f, layout, span), (span.batch, span.head, span.row)
            keys = (span.first, span.last)
            spans = (*keys, span.begin, span.end)
            f.call(attend, f["args"], workspace_of(f, layout), partials, *item, *spans)
            for _ in f.when(span.whole):
                combine.own(item, *keys, partials)


def emit_attend(m: Module, kernel: Decode, body: type[DecodeAttend] | None = None) -> Function:
    """void attend(args, workspace, partials, batch, head, row, first, last, begin, end)

    The partial results of splits begin … end of all rows over keys [first, last).
    """
    numbers = ("batch", "head", "row", "first", "last", "begin", "end")
    params = [("args", ptr), ("workspace", ptr), ("partials", ptr), *((n, i64) for n in numbers)]
    f = m.function("attend", params, internal=True)
    (body or DecodeAttend)(f, kernel).emit()
    return f


class DecodeAttend:
    """The body of `attend`. A kernel over a paged KV cache overrides where keys lie, and which keys
    a row sees (`row_map`)."""

    def __init__(self, f: Function, kernel: Decode) -> None:
        self.f, self.kernel, self.problem, self.rows = f, kernel, kernel.problem, kernel.rows
        self.args, self.type, self.pair = Args(f), kernel.problem.acc, kernel.problem.pair
        self.row_map = Rows(f, kernel.problem)
        size = self.type.bytes
        self.parts = self.problem.score_parts(f.target)
        self.query_bytes = kernel.query_bytes(f.target)
        self.head, self.partials = f["head"], f["partials"]
        self.queries = f["workspace"]
        self.scores = f.gep(self.queries, self.rows * self.query_bytes)
        self.factors = f.gep(self.scores, self.rows * KV_BLOCK * size)
        self.bases = {n: self.args.head(n, self.problem, f["batch"], f["head"]) for n in "kv"}
        self.row_bytes = {n: self.args.row_bytes(n, self.problem) for n in "kv"}
        self.lanes = self.problem.lanes(f.target)
        self.v_lanes = self.problem.vector_width("v", f.target)
        self.keys = KeyParts(f, self.problem, self.args.row_bytes("k", self.problem, "step"))

    def emit(self) -> None:
        f = self.f
        self.pack_queries()
        for number in f.range(f["begin"], f["end"]):
            run = f["first"].udiv(RUN) + number
            self.select_split(run.urem(SPLITS))
            self.clear()
            for key, count in each_block(f, run, f["first"], f["last"]):
                begin = self.first_of_block(key)
                k, v = (self.rows_from(name, key) for name in "kv")
                self.key = key
                self._qk(k, begin, count)
                self.softmax(begin, count)
                self._pv(v, begin, count)

    def first_of_block(self, key: Value) -> Value:
        """The first key of a KV block to read: the first visible one, or one shortly before."""
        begin = self.f.max(self.f["first"] - key, 0)
        return begin - begin.urem(max(GROUP, self.lanes * self.pair))

    def softmax(self, begin: Value, count: Value) -> None:
        parts = (self.scores, self.head, self.key, begin, count, self.row_map)
        scores = RowSoftmax(self.f, self.problem, self.rows, *parts)
        scores.exponentiate(self.running_max, self.running_sum, self.factors)

    def select_split(self, split: Value) -> None:
        """Point at the partial result of a split."""
        f, layout = self.f, self.kernel.layout(self.f.target)
        self.acc = f.gep(self.partials, split, layout.partial_bytes)
        self.running_max = f.gep(self.acc, layout.max_offset)
        self.running_sum = f.gep(self.acc, layout.sum_offset)

    def clear(self) -> None:
        """Begin the partial result of a split."""
        f, vector = self.f, vec(self.v_lanes, self.type)
        for d in f.range(0, self.rows * self.problem.head_dim, self.v_lanes):
            f.store(f.const(0.0, vector), f.gep(self.acc, d, self.type))
        for r in range(self.rows):
            f.store(f.const(float("-inf"), self.type), self.running_max, r * self.type.bytes)
            f.store(f.const(0.0, self.type), self.running_sum, r * self.type.bytes)

    def rows_from(self, name: str, key: Value) -> Callable[[Value], Value]:
        """Where row j of the KV block that begins with `key` lies in k or v."""
        base = self.f.gep(self.bases[name], key * self.row_bytes[name])
        return lambda j: self.f.gep(base, j * self.row_bytes[name])

    def row_ahead(self, name: str, key: Value, j: Value) -> Value:
        """The row to prefetch while row j of a KV block is read, of this run or of the next one of
        the split; it need not exist."""
        f, rows = self.f, self.rows_ahead(name)
        if rows == KV_BLOCK:  # the same row of the next block: one base for all of a block
            leaves = key.urem(RUN) + KV_BLOCK >= RUN
            block = key + KV_BLOCK + f.select(leaves, f.i64((SPLITS - 1) * RUN), f.i64(0))
            base = f.gep(self.bases[name], block * self.row_bytes[name])
            return f.gep(base, j * self.row_bytes[name])
        after = key + j + rows
        leaves = key.urem(RUN) + j + rows >= RUN
        after = f.select(leaves, after + (SPLITS - 1) * RUN, after)
        return f.gep(self.bases[name], after * self.row_bytes[name])

    def rows_ahead(self, name: str) -> int:
        """Rows from the one that is read to the one that is prefetched."""
        ahead = self.f.module.tunable("kv_read_ahead", _AHEAD, _AHEAD // 2, 2 * _AHEAD)
        return max(16, min(ahead // self.row_size(name), KV_BLOCK))

    def pack_queries(self) -> None:
        """Scaled queries, [rows][steps][lanes]: what the lanes of a step multiply with."""
        f, p = self.f, self.problem
        size = self.type.bytes
        dims, repeats = self.keys.dims, self.lanes // self.parts
        step = self.args.row_bytes("q", p, "step")
        strided = "q" in p.strided

        def read(row: Value, d: Value) -> Value:
            if strided:
                numbers = [load(f, f.gep(row, (d + i) * step), p.q, 1, self.type)
                           for i in range(dims)]  # fmt: skip
                return joined(f, numbers)
            return load(f, f.gep(row, d, memory_type(p.q)), p.q, dims, self.type)

        for r in f.range(0, self.rows):
            row = self.row_map.address("q", f["batch"], self.head, f["row"] + r)
            to = f.gep(self.queries, r, self.query_bytes)
            for d in f.range(0, p.head_dim, dims):
                value = read(row, d) * p.query_factor
                if self.pair == 2:
                    value = to_bf16(f, value, value).bits(vec(self.lanes, self.type))
                else:
                    value = joined(f, [value] * repeats)
                f.store(value, f.gep(to, d.udiv(dims), self.lanes * size))

    def _qk(self, key: Callable[[Value], Value], begin: Value, count: Value) -> None:
        """QKᵀ of a KV block."""
        last = count - 1
        for j in self.f.range(begin, count, self.lanes, guard=False):
            self.score_keys(key, j, last)

    def score_keys(self, key: Callable[[Value], Value], j: Value, last: Value) -> None:
        """scores[row][key] of a vector of keys, j and the next; beyond the last one it repeats."""
        f, lanes, parts = self.f, self.lanes, self.parts
        vector, near = vec(lanes, self.type), lanes // parts
        sums = f.alloca(self.rows * parts * vector.bytes)
        most = 8 if near == 1 else 6  # chains: enough to hide the latency of multiply-adds
        at_once = max(n for n in (1, 2, 4) if n <= parts and (n == 1 or n * self.rows <= most))
        # a vector has neighbouring keys, and the chains of each lie side by side
        order = [i // near + i % near * parts for i in range(lanes)]
        for part in f.range(0, parts, at_once):
            first = j + part * near
            keys = [key(f.min(first + i, last)) for i in range(at_once * near)]
            done = self._chains(keys, first)
            for n, total in enumerate(done):
                i, r = divmod(n, self.rows)
                f.store(total, f.gep(sums, part + (r * parts + i), vector.bytes))
        for number in f.range(0, self.rows):
            row = f.gep(sums, number, parts * vector.bytes)
            chains = [f.load(row, vector, i * vector.bytes) for i in range(parts)]
            score = f.shuffle(reduce(add, transpose_squares(f, chains)), None, order)
            f.store(score, f.gep(self.scores, j + number * KV_BLOCK, self.type))

    def _chains(self, keys: list[Value], first: Value) -> list[Value]:
        """The chains of some keys with each row; `first` is the number of the first key."""
        f, dims, near = self.f, self.keys.dims, self.lanes // self.parts
        vector = vec(self.lanes, self.type)
        groups = [keys[i : i + near] for i in range(0, len(keys), near)]
        steps = self.problem.head_dim // dims
        unroll = next(n for n in (4, 2, 1) if steps % n == 0)
        ahead = [self.row_ahead("k", self.key, first + i) for i in range(len(keys))]
        size = -(-self.row_size("k") * unroll // steps)
        sums = f.carry([f.const(0.0, vector)] * (len(groups) * self.rows))
        for d in sums.range(0, self.problem.head_dim, dims * unroll):
            total = list(sums.values)
            queries = f.gep(self.queries, d.udiv(dims), vector.bytes)
            for row in ahead:
                self._prefetch(f.gep(row, d.udiv(dims * unroll) * size), size)
            for u, (i, group) in product(range(unroll), enumerate(groups)):
                x = self.keys.read(group, d + u * dims)
                for r in range(self.rows):
                    q = f.load(queries, vector, r * self.query_bytes + u * vector.bytes)
                    n = i * self.rows + r
                    total[n] = multiply_add(f, self.pair, q, x, total[n])
            sums.values = total
        return sums.values

    def _prefetch(self, at: Value, size: int) -> None:
        for line in range(0, size, LINE):
            self.f.prefetch(at, line, locality=2)

    def row_size(self, name: str) -> int:
        """Bytes of a row of k or v."""
        p = self.problem
        if p.q8_kv:
            return p.head_dim // Q8_0.block_size * Q8_0.bytes_per_block
        return p.head_dim * memory_type(p.dtype(name)).bytes

    @property
    def width(self) -> int:
        """Vectors of columns that PV accumulates at once."""
        room = 24 if self.f.target.num_vector_registers >= 32 else 10
        columns = self.problem.head_dim // self.v_lanes
        widths = [w for w in range(1, columns + 1) if columns % w == 0]
        return max(w for w in widths if w == 1 or w * self.rows <= room)

    def _pv(self, row: Callable[[Value], Value], begin: Value, count: Value) -> None:
        """PV: acc = acc * factors + P·V, as many columns at once as registers allow."""
        f, step = self.f, self.width * self.v_lanes
        factors = self.load_factors()
        for d in f.range(0, self.problem.head_dim, step):
            self.add_values(row, d, (begin, begin, count, count), factors)

    def load_factors(self) -> list[Value]:
        """What rescales the accumulators of each row."""
        f, size = self.f, self.type.bytes
        return [
            f.broadcast_load(self.factors, self.type, self.v_lanes, r * size)
            for r in range(self.rows)
        ]

    def add_values(
        self, row: Callable[[Value], Value], d: Value, keys: tuple[Value, Value, Value, Value],
        factors: list[Value] | None,
    ) -> None:  # fmt: skip
        """Columns d and the next of P·V of some keys, added to the accumulators (rescaled by
        `factors`): `keys` are the first of the KV block, the first and the end of these, and the
        end of the block."""
        f, lanes, size = self.f, self.v_lanes, self.type.bytes
        dim, vector = self.problem.head_dim, vec(lanes, self.type)
        begin, first, end, count = keys
        places = [
            (r, (r * dim + i * lanes) * size) for r in range(self.rows) for i in range(self.width)
        ]
        acc = f.gep(self.acc, d, self.type)

        def loaded(r: int, at: int) -> Value:
            x = f.load(acc, vector, at)
            return x if factors is None else x * factors[r]

        sums, last = f.carry([loaded(*place) for place in places]), count - 1
        for j in sums.range(first, end, self.pair, guard=False):
            found = [row(j), row(f.min(j + 1, last))][: self.pair]
            sums.values = self._pv_step(found, d, begin, j, sums.values)
        for total, (_, at) in zip(sums.values, places, strict=True):
            f.store(total, acc, at)

    def _pv_step(
        self, rows: list[Value], d: Value, begin: Value, j: Value, total: list[Value]
    ) -> list[Value]:
        """`total` plus the values of key j, and of the next where keys are taken in pairs."""
        f, lanes, width = self.f, self.v_lanes, self.width
        columns = []
        share = self.row_size("v") * width * lanes // self.problem.head_dim
        ahead = f.gep(self.row_ahead("v", self.key, j), d.udiv(width * lanes) * share)
        self._prefetch(ahead, share)
        for i in range(width):
            values = [self._value(at, d, i * lanes) for at in rows]
            columns.append(values[0] if self.pair == 1 else interleave_bf16(f, *values))
        # pairs of probabilities lie in the first half of the memory
        first = j if self.pair == 1 else (begin + j).udiv(2)
        out = []
        for r in range(self.rows):
            place = f.gep(self.scores, first + r * KV_BLOCK, self.type)
            w = f.broadcast_load(place, self.type, lanes)
            out += [
                multiply_add(f, self.pair, w, x, total[r * width + i])
                for i, x in enumerate(columns)
            ]
        return out

    def _value(self, row: Value, at: Value, offset: int) -> Value:
        """A vector of a value, from column `at` + `offset` on."""
        f, p, dtype, lanes = self.f, self.problem, self.problem.v, self.v_lanes
        if p.q8_kv:
            return load_q8(f, row, at + offset, lanes, self.type)
        if "v" in p.strided:
            step = self.args.row_bytes("v", p, "step")
            return load(f, f.gep(row, (at + offset) * step), dtype, lanes, self.type)
        size = memory_type(dtype).bytes
        return load(f, f.gep(row, at, size), dtype, lanes, self.type, offset * size)
