"""Attention of one query of a group of heads: a block attends to a part of its keys.

Groups of lanes have a key each, a lane a piece of it. Every group keeps a maximum, a sum and a
weighted sum of values; groups, warps and blocks are combined in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cuda.builder import WARP, BlockFunction
from rlx.backends.cuda.kernels.attention.attention_problem import (
    LOG2_E,
    LOWEST,
    AttentionForm,
    power_above,
)
from rlx.backends.cuda.kernels.attention.key_pieces import load_piece, numbers_of, piece_numbers
from rlx.backends.cuda.kernels.gemm.weight_rows import Raw, load_run
from rlx.llvm.builder import Value, f32, i32, i64
from rlx.llvm.storage import load, memory_type, store

WARPS = 8  # of a block
AHEAD = 4  # keys that a group loads at a time
_PARTS = 16  # partial results that a thread loads at a time

Part = Callable[[Value, Value, Value], list[Value]]  # (number, head, element) → a part of a softmax
Write = Callable[[Value, Value, Value, Value, Value], None]  # (head, element, *part)


class QueryEmitter:
    """A block has a query of the heads of one key head, and a part of the keys. Who derives from it
    says where queries, keys and results are."""

    splits: int | Value  # parts of the keys; i32 if only a run knows
    split: Value  # the part of this block
    item: Value  # numbers of query and key head together
    k: Value
    v: Value
    sinks: Value
    head: Value  # of keys
    partial: Value
    counters: Value

    def __init__(self, f: BlockFunction, form: AttentionForm) -> None:
        self.f, self.form = f, form
        self.per = piece_numbers(form)
        pieces = form.dim // self.per
        self.team = min(WARP, power_above(pieces))  # lanes of a key
        self.pieces = -(-pieces // self.team)  # loads of a lane for a key
        self.total_pieces = pieces
        self.lane, self.warp_number = f.lane32(), f.thread() >> 5
        self.member = self.lane & self.team - 1

    def query_at(self, g: int) -> Value:
        """Where the query of head `g` of the group is."""
        raise NotImplementedError

    def row_at(self, base: Value, key: Value) -> Value:
        """Where a key or value of the sequence is; `base` is `k` or `v`."""
        raise NotImplementedError

    def result_at(self, g: Value) -> Value:
        """Where the result of head `g` (i64) of the group goes."""
        raise NotImplementedError

    def masked(self, score: Value, key: Value, g: int) -> Value:
        """A score with the mask of the node, if it has one."""
        return score

    @property
    def steps(self) -> int:
        """Keys of all groups."""
        return WARP // self.team * WARPS

    def first(self, low: Value) -> Value:
        """The first key of this group."""
        group = self.warp_number * (WARP // self.team) + self.lane.udiv(self.team)
        return low + group.to(i64)

    def part_of(self, low: Value, high: Value) -> tuple[Value, Value]:
        """The keys of this block, of those from `low` to `high`."""
        f = self.f
        splits = f.const(self.splits, i32).to(i64)
        each = (high - low + splits - 1).udiv(splits)
        begin = low + self.split.to(i64) * each
        return begin, f.min(begin + each, high)

    def emit_query(self, low: Value, high: Value) -> None:
        """Attend to the keys from `low` to `high` (i64)."""
        f, form = self.f, self.form
        queries = [self._query(g) for g in range(form.group)]
        steps, first = self.steps, self.first(low)
        width = len(queries[0])
        start: list[Value] = []
        for _ in range(form.group):
            start += [f.const(LOWEST, f32), f.const(0.0, f32), *[f.const(0.0, f32)] * width]
        count = f.ceil_div(f.max(high - low, 0), steps * AHEAD)

        def body(i: Value, *state: Value) -> list[Value]:
            return self._keys(first + i * (steps * AHEAD), high, steps, queries, state)

        state = f.loop(f.i64(0), count, 1, start, body)
        self._combine_warp(list(state), width)

    # -- keys -------------------------------------------------------------------------------------

    def _query(self, g: int) -> list[Value]:
        """The numbers of a query that this lane multiplies with its part of a key."""
        f, form = self.f, self.form
        base = self.query_at(g)
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

    def piece(self, p: int) -> Value:
        """The p-th piece of this lane."""
        return self.f.min(self.member + p * self.team, self.total_pieces - 1)

    def _row(self, base: Value, key: Value) -> list[Raw]:
        """This lane's pieces of a key or value."""
        row = self.row_at(base, key)
        return [load_piece(self.f, self.form, row, self.piece(p)) for p in range(self.pieces)]

    def _keys(
        self, first: Value, high: Value, steps: int, queries: list[list[Value]],
        state: Sequence[Value],
    ) -> list[Value]:  # fmt: skip
        """Take some keys into account."""
        f, form = self.f, self.form
        wanted = [first + i * steps for i in range(AHEAD)]
        inside = [key < high for key in wanted]
        there = [f.max(f.min(key, high - 1), 0) for key in wanted]
        keys = [self._row(self.k, key) for key in there]
        values = [self._row(self.v, key) for key in there]
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
                sums = self._add(sums, w, raw)
            new += [top, total, *sums]
        return new

    def _add(self, sums: list[Value], weight: Value, raw: Sequence[Raw]) -> list[Value]:
        """Sums with the pieces of one more value."""
        f, made = self.f, list[Value]()
        for p, piece in enumerate(raw):
            numbers, scale = numbers_of(f, self.form, piece)
            w = weight if scale is None else weight * scale
            own = sums[p * self.per : (p + 1) * self.per]
            made += [f.fma(w, v, s) for v, s in zip(numbers, own, strict=True)]
        return made

    def _score(self, raw: Sequence[Raw], query: list[Value], key: Value, g: int) -> Value:
        f, form = self.f, self.form
        score = f.const(0.0, f32)
        for p, piece in enumerate(raw):
            numbers, scale = numbers_of(f, form, piece)
            own = score if scale is None else f.const(0.0, f32)
            part = query[p * self.per : (p + 1) * self.per]
            for a, b in zip(part, numbers, strict=True):
                own = f.fma(a, b, own)
            score = own if scale is None else f.fma(own, scale, score)
        score = f.warp_sum(score, self.team)
        if form.softcap:
            score = f.activate("tanh", score * (1 / form.softcap)) * (form.softcap * LOG2_E)
        return self.masked(score, key, g)

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
        if isinstance(self.splits, int):
            self._combine_blocks() if self.splits > 1 else self._reduce_warps(self._write)
        else:
            whole = lambda: self._reduce_warps(self._write)  # noqa: E731
            f.if_(self.splits > 1, self._combine_blocks, whole)

    def _reduce_warps(self, write: Write) -> None:
        self._reduce(WARPS, self._shared_part, write)

    def _combine_blocks(self) -> None:
        """The last block of a query combines the parts of all."""
        f, splits = self.f, self.splits
        self._reduce_warps(self._write_partial)
        last = f.is_last_block(f.gep(self.counters, self.item, 8), f.const(splits, i32))
        f.if_(last, lambda: self._reduce(splits, self._global_part, self._write))

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

    def _reduce(self, count: int | Value, part: Part, write: Write) -> None:
        """Combine `count` parts for all heads of the group, an element a thread at a time."""
        f, form = self.f, self.form
        for item in f.range(f.thread(), f.i32(form.group * form.dim), WARPS * WARP):
            g = item.udiv(form.dim)
            d = item - g * form.dim

            made: list[Value] | None = None
            if isinstance(count, int):
                for first in range(0, count, _PARTS):
                    numbers = range(first, min(first + _PARTS, count))
                    whole = merge_all(f, [part(f.i32(i), g, d) for i in numbers])
                    made = whole if made is None else merge(f, made, whole)
                assert made is not None
            else:
                made = self._reduced(count, part, g, d)
            write(g, d, *made)

    def _reduced(self, count: Value, part: Part, g: Value, d: Value) -> list[Value]:
        """The whole of as many parts as a run has."""
        f = self.f

        def add(first: Value, *state: Value) -> list[Value]:
            found = []
            for i in range(_PARTS):
                most, *sums = part(f.min(first + i, count - 1), g, d)
                inside = first + i < count
                kept = [f.select(inside, v, 0.0) for v in sums]
                found.append([f.select(inside, most, LOWEST), *kept])
            return merge(f, state, merge_all(f, found))

        start = [f.const(LOWEST, f32), f.const(0.0, f32), f.const(0.0, f32)]
        return list(f.loop(f.i32(0), count, _PARTS, start, add))

    def _shared_part(self, i: Value, g: Value, d: Value) -> list[Value]:
        f, form = self.f, self.form
        row = (i * form.group + g) * (4 * (form.dim + 2)) + 16
        ends = [f.load_shared(row, f32, 4 * form.dim + 4 * e) for e in range(2)]
        return [*ends, f.load_shared(row + d * 4, f32)]

    def _partial_row(self, i: Value, g: Value) -> Value:
        f, form = self.f, self.form
        splits = f.const(self.splits, i32).to(i64)
        number = (self.item * splits + i.to(i64)) * form.group + g.to(i64)
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
        store(f, made, f.gep(self.result_at(g.to(i64)), d.to(i64), form.out.bytes), form.out)


def shared_bytes(form: AttentionForm) -> int:
    """Shared memory of a block: what its warps have found."""
    return 16 + 4 * WARPS * form.group * (form.dim + 2)


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
