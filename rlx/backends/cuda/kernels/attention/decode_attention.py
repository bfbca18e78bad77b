"""Attention query by query: blocks divide the keys, the last one combines.

Groups of lanes have a key each, a lane 16 bytes of it. Every group keeps a maximum, a sum and a
weighted sum of values; groups, warps and blocks are combined in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.attention.attention_problem import (
    LOG2_E,
    LOWEST,
    AttentionForm,
    power_above,
)
from rlx.backends.cuda.kernels.gemm.weight_rows import floats_of, load_run, words
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i8, i64
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass

_WARPS = 8
_AHEAD = 4  # keys that a group loads at a time
_PARTS = 16  # partial results that a thread loads at a time


@dataclass(frozen=True)
class DecodeAttention(BlockKernel):
    """args: q, k, v, result, mask, sinks, partial results, counters, batch · key heads, queries,
    keys, strides of q, k, v and the result (batch, head, token), of the mask (batch, head, query,
    key)

    A block has a query of the heads of one key head, and one of `splits` parts of the keys.
    """

    form: AttentionForm
    splits: int

    @property
    def label(self) -> str:
        return "attention(decode)"

    @property
    def threads(self) -> int:
        return _WARPS * WARP

    @property
    def shared(self) -> int:
        return 16 + 4 * _WARPS * self.form.group * (self.form.dim + 2)

    @property
    def partial_bytes(self) -> int:
        """Scratch for one key head of one sequence."""
        return 4 * self.splits * self.form.group * (self.form.dim + 2)

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared), self).emit()


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: DecodeAttention) -> None:
        self.f, self.kernel, self.form = f, kernel, kernel.form
        args = f["args"]
        self.q, self.k, self.v, self.out, self.mask, self.sinks, self.partial = (
            f.arg(args, i) for i in range(7)
        )
        self.counters = f.arg(args, 7)
        pairs, self.rows, self.keys = (f.arg(args, i, i64) for i in (8, 9, 10))
        numbers = [f.arg(args, i, i64) for i in range(11, 27)]
        self.q_strides, self.k_strides, self.v_strides, self.out_strides = (
            numbers[3 * i : 3 * i + 3] for i in range(4)
        )
        self.mask_strides = numbers[12:16]
        form = self.form
        self.per = 16 // form.kv.bytes  # numbers of a load
        pieces = form.dim // self.per
        self.team = min(WARP, power_above(pieces))  # lanes of a key
        self.pieces = -(-pieces // self.team)  # loads of a lane for a key
        self.total_pieces = pieces
        block = f.block_number()
        whole = block.udiv(kernel.splits)
        self.split = block - whole * kernel.splits
        self.item = whole.to(i64)  # number of query, sequence and key head together
        self.row = self.item.udiv(pairs)
        pair = self.item - self.row * pairs
        self.sequence = pair.udiv(form.kv_heads)
        self.head = pair - self.sequence * form.kv_heads
        self.lane, self.warp_number = f.lane32(), f.thread() >> 5
        self.member = self.lane & self.team - 1

    def emit(self) -> None:
        f = self.f
        f.if_(self.row < self.rows, self._prefetch)
        f.let_next_start()
        f.wait_for_previous()
        f.if_(self.row < self.rows, self._emit_query)

    def _prefetch(self) -> None:
        """Bring the first keys and values near: all but the last were there before."""
        f = self.f
        low, high = self._range()
        for i in range(_AHEAD):
            key = f.max(f.min(self._first(low) + i * self._steps, high - 1), 0)
            for base, strides in ((self.k, self.k_strides), (self.v, self.v_strides)):
                f.bring_near(self._row_at(base, strides, key))

    @property
    def _steps(self) -> int:
        """Keys of all groups."""
        return WARP // self.team * _WARPS

    def _first(self, low: Value) -> Value:
        """The first key of this group."""
        group = self.warp_number * (WARP // self.team) + self.lane.udiv(self.team)
        return low + group.to(i64)

    def _emit_query(self) -> None:
        f, form = self.f, self.form
        queries = [self._query(g) for g in range(form.group)]
        low, high = self._range()
        steps, first = self._steps, self._first(low)
        width = len(queries[0])
        start: list[Value] = []
        for _ in range(form.group):
            start += [f.const(LOWEST, f32), f.const(0.0, f32), *[f.const(0.0, f32)] * width]
        count = f.ceil_div(f.max(high - low, 0), steps * _AHEAD)

        def body(i: Value, *state: Value) -> list[Value]:
            return self._keys(first + i * (steps * _AHEAD), high, steps, queries, state)

        state = f.loop(f.i64(0), count, 1, start, body)
        self._combine_warp(list(state), width)

    # -- keys -------------------------------------------------------------------------------------

    def _range(self) -> tuple[Value, Value]:
        """The keys of this block."""
        f, form = self.f, self.form
        low, high = f.i64(0), self.keys
        own = self.keys - self.rows + self.row
        if form.behind is not None:
            low = f.max(own - form.behind, 0)
        if form.ahead is not None:
            high = f.max(f.min(own + (form.ahead + 1), self.keys), low)
        each = f.ceil_div(high - low, self.kernel.splits)
        begin = low + self.split.to(i64) * each
        return begin, f.min(begin + each, high)

    def _query(self, g: int) -> list[Value]:
        """The numbers of a query that this lane multiplies with its part of a key."""
        f, form = self.f, self.form
        base = f.gep(self.q, self._at(self.q_strides, self.head * form.group + g), form.q.bytes)
        found: list[Value] = []
        for p in range(self.pieces):
            piece = self.member + p * self.team
            at = f.min(piece, self.total_pieces - 1).to(i64) * self.per
            numbers = load_run(f, base, at, self.per, form.q)
            factor = form.scale if form.softcap else form.scale * LOG2_E
            scaled = [v * factor for v in numbers]
            if self.total_pieces % self.team:
                scaled = [f.select(piece < self.total_pieces, v, 0.0) for v in scaled]
            found += scaled
        return found

    def _at(self, strides: Sequence[Value], head: Value) -> Value:
        """Where this query is."""
        return self.sequence * strides[0] + head * strides[1] + self.row * strides[2]

    def _row(self, base: Value, strides: Sequence[Value], key: Value) -> list[Value]:
        """This lane's part of a key or value, as values of 32 bits."""
        f, found = self.f, list[Value]()
        for p in range(self.pieces):
            found += words(f, self._row_at(base, strides, key, p), 4)
        return found

    def _row_at(self, base: Value, strides: Sequence[Value], key: Value, p: int = 0) -> Value:
        """Where the p-th piece of a key or value of this lane is."""
        f, form = self.f, self.form
        at = self.sequence * strides[0] + self.head * strides[1] + key * strides[2]
        row = f.gep(base, at, form.kv.bytes)
        piece = f.min(self.member + p * self.team, self.total_pieces - 1)
        return f.gep(row, piece.to(i64), 16)

    def _keys(
        self, first: Value, high: Value, steps: int, queries: list[list[Value]],
        state: Sequence[Value],
    ) -> list[Value]:  # fmt: skip
        """Take some keys into account."""
        f, form = self.f, self.form
        wanted = [first + i * steps for i in range(_AHEAD)]
        inside = [key < high for key in wanted]
        there = [f.max(f.min(key, high - 1), 0) for key in wanted]
        keys = [self._row(self.k, self.k_strides, key) for key in there]
        values = [self._row(self.v, self.v_strides, key) for key in there]
        new: list[Value] = []
        size = len(state) // form.group
        for g in range(form.group):
            most, total, *sums = state[g * size : (g + 1) * size]
            scores = [
                f.select(ok, self._score(raw, queries[g], key, g), LOWEST)
                for raw, key, ok in zip(keys, there, inside, strict=True)
            ]
            top = most
            for s in scores:
                top = f.max_fast(top, s)
            weights = [
                f.select(ok, f.exp2_fast(s - top), 0.0)
                for s, ok in zip(scores, inside, strict=True)
            ]
            shrink = f.exp2_fast(most - top)
            total = total * shrink
            sums = [s * shrink for s in sums]
            for w, raw in zip(weights, values, strict=True):
                total = total + w
                sums = [
                    f.fma(w, v, s) for v, s in zip(floats_of(f, raw, form.kv), sums, strict=True)
                ]
            new += [top, total, *sums]
        return new

    def _score(self, raw: list[Value], query: list[Value], key: Value, g: int) -> Value:
        f, form = self.f, self.form
        score = f.const(0.0, f32)
        for a, b in zip(query, floats_of(f, raw, form.kv), strict=True):
            score = f.fma(a, b, score)
        score = f.warp_sum(score, self.team)
        if form.softcap:
            score = f.activate("tanh", score * (1 / form.softcap)) * (form.softcap * LOG2_E)
        return self._masked(score, key, g)

    def _masked(self, score: Value, key: Value, g: int) -> Value:
        f, form = self.f, self.form
        if not form.mask:
            return score
        column = self.mask_strides[3]
        at = self._at(self.mask_strides, self.head * form.group + g) + key * column
        if form.mask == "bool":
            keeps = f.load(f.gep(self.mask, at), i8).ne(0)
            return f.select(keeps, score, float("-inf"))
        dtype = DType.of(form.mask)
        added = load(f, f.gep(self.mask, at, memory_type(dtype).bytes), dtype, 1, f32)
        return score + added * LOG2_E

    # -- combining --------------------------------------------------------------------------------

    def _combine_warp(self, state: list[Value], width: int) -> None:
        """Combine the groups of a warp, then the warps of the block."""
        f, form, size = self.f, self.form, width + 2
        distance = self.team
        while distance < WARP:
            new: list[Value] = []
            for g in range(form.group):
                mine = state[g * size : (g + 1) * size]
                other = [f.exchange(v, distance) for v in mine]
                new += merge(f, mine, other)
            state, distance = new, distance * 2
        place = 16 + self.warp_number * (4 * form.group * (form.dim + 2))
        for g in range(form.group):
            most, total, *sums = state[g * size : (g + 1) * size]
            row = place + g * 4 * (form.dim + 2)
            self._store_part(row, most, total, sums)
        f.barrier()
        if self.kernel.splits == 1:
            self._reduce(_WARPS, self._shared_part, self._write)
        else:
            self._reduce(_WARPS, self._shared_part, self._write_partial)
            last = f.is_last_block(f.gep(self.counters, self.item, 8), f.i32(self.kernel.splits))
            f.if_(
                last,
                lambda: self._reduce(self.kernel.splits, self._global_part, self._write),
            )

    def _store_part(self, row: Value, most: Value, total: Value, sums: Sequence[Value]) -> None:
        f = self.f

        def store_all() -> None:
            for p in range(self.pieces):
                piece = self.member + p * self.team
                own = sums[p * self.per : (p + 1) * self.per]

                def store_piece(piece: Value = piece, own: Sequence[Value] = own) -> None:
                    at = row + piece * (4 * self.per)
                    for i, v in enumerate(own):
                        f.store_shared(v, at, 4 * i)

                f.if_(piece < self.total_pieces, store_piece)

            def store_ends() -> None:
                f.store_shared(most, row, 4 * self.form.dim)
                f.store_shared(total, row, 4 * self.form.dim + 4)

            f.if_(self.member.eq(0), store_ends)

        f.if_(self.lane < self.team, store_all)

    def _reduce(self, count: int, part: object, write: object) -> None:
        """Combine `count` parts for all heads of the group, an element a thread at a time."""
        f, form = self.f, self.form
        assert callable(part) and callable(write)
        for item in f.range(f.thread(), f.i32(form.group * form.dim), self.kernel.threads):
            g = item.udiv(form.dim)
            d = item - g * form.dim

            made: list[Value] | None = None
            for first in range(0, count, _PARTS):
                numbers = range(first, min(first + _PARTS, count))
                whole = merge_all(f, [part(f.i32(i), g, d) for i in numbers])
                made = whole if made is None else merge(f, made, whole)
            assert made is not None
            write(g, d, *made)

    def _shared_part(self, i: Value, g: Value, d: Value) -> list[Value]:
        f, form = self.f, self.form
        row = (i * form.group + g) * (4 * (form.dim + 2)) + 16
        ends = [f.load_shared(row, f32, 4 * form.dim + 4 * e) for e in range(2)]
        return [*ends, f.load_shared(row + d * 4, f32)]

    def _partial_row(self, i: Value, g: Value) -> Value:
        f, form = self.f, self.form
        number = (self.item * self.kernel.splits + i.to(i64)) * form.group + g.to(i64)
        return f.gep(self.partial, number, 4 * (form.dim + 2))

    def _global_part(self, i: Value, g: Value, d: Value) -> list[Value]:
        f, form = self.f, self.form
        row = self._partial_row(i, g)
        ends = [f.load(row, f32, 4 * form.dim + 4 * e) for e in range(2)]
        return [*ends, f.load(f.gep(row, d.to(i64), 4), f32)]

    def _write_partial(self, g: Value, d: Value, most: Value, total: Value, one: Value) -> None:
        f, form = self.f, self.form
        row = self._partial_row(self.split, g)
        f.store(one, f.gep(row, d.to(i64), 4))

        def ends() -> None:
            f.store(most, row, 4 * form.dim)
            f.store(total, row, 4 * form.dim + 4)

        f.if_(d.eq(0), ends)

    def _write(self, g: Value, d: Value, most: Value, total: Value, one: Value) -> None:
        f, form = self.f, self.form
        head = self.head * form.group + g.to(i64)
        if form.sinks is not None:
            there = f.gep(self.sinks, head, memory_type(form.sinks).bytes)
            sink = load(f, there, form.sinks, 1, f32) * LOG2_E
            zero = f.const(0.0, f32)
            most, total, one = merge(f, [most, total, one], [sink, zero + 1.0, zero])
        made = f.select(total > 0.0, one / f.select(total > 0.0, total, 1.0), 0.0)
        number = self._at(self.out_strides, head) + d.to(i64)
        store(f, made, f.gep(self.out, number, form.out.bytes), form.out)


def merge(f: BlockFunction, a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """Two parts of a softmax as one: maximum (base 2), sum, weighted sums."""
    top = f.max_fast(a[0], b[0])
    left, right = f.exp2_fast(a[0] - top), f.exp2_fast(b[0] - top)
    return [top, *(f.fma(x, left, y * right) for x, y in zip(a[1:], b[1:], strict=True))]


def merge_all(f: BlockFunction, parts: Sequence[Sequence[Value]]) -> list[Value]:
    """Several parts of a softmax as one; all are loaded before the first is used."""
    top = parts[0][0]
    for part in parts[1:]:
        top = f.max_fast(top, part[0])
    sums = [f.const(0.0, f32)] * (len(parts[0]) - 1)
    for most, *numbers in parts:
        weight = f.exp2_fast(most - top)
        sums = [f.fma(x, weight, total) for x, total in zip(numbers, sums, strict=True)]
    return [top, *sums]
