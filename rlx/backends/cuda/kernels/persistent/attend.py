"""Attention of one query by the blocks of a key head: each has some positions of the KV cache.

A warp keeps its own largest score, sum of weights and weighted sum of values. Warps are combined in
shared memory, blocks by whoever needs the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cuda.builder import WARP, Place
from rlx.backends.cuda.kernels.persistent.product import Products
from rlx.backends.cuda.kernels.persistent.ring import Slot
from rlx.backends.cuda.kernels.persistent.shape import (
    ARGS,
    MAXIMA,
    NEW_KV,
    QUERIES,
    SUMS,
    THREADS,
    WARPS,
)
from rlx.llvm.builder import Value, f32, i32, i64, vec
from rlx.support.records import dataclass

LOWEST = -1e30
_MOST_KEPT = 2  # queries that registers hold
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Heads:
    """What rotates and keeps the heads of a layer: addresses."""

    query_gain: Value
    key_gain: Value
    keys: Value  # of this layer and key head
    values: Value


@dataclass(frozen=True)
class Exchange:
    """Where values are handed over, and this layer's tag."""

    base: Value
    tag: Value
    group: Value  # this block's key head
    rank: Value  # and its number among those that share it


class Attention:
    def __init__(self, products: Products, cos: Value, sin: Value, position: Value) -> None:
        self.products, self.position = products, position
        self.f, self.shape, self.ring = products.f, products.shape, products.ring
        self.warp, self.lane = products.warp, products.lane
        self._each = self.shape.piece // WARPS  # positions of a piece that a warp has
        self._lanes = WARP // self._each  # that have scores of one position
        self._tables = [cos, sin]
        self._keeps_angles = self.shape.own <= _MOST_KEPT
        if self._keeps_angles:
            self._cos, self._sin = self._angles()

    def _angles(self) -> list[list[Value]]:
        """The lane's cosines and sines."""
        f = self.f
        row = (self.position * (self.shape.head_dim // 2) + self.lane * 2).to(i64)
        pairs = [f.load(f.gep(table, row, 4), vec(2, f32), align=8) for table in self._tables]
        return [[f.extract(p, i) for i in range(2)] for p in pairs]

    def emit(self, heads: Heads, exchange: Exchange, place: Slot) -> Slot:
        """Receive the query, hand over this block's part."""
        f, shape = self.f, self.shape
        self.position = f.load_shared(f.i32(shape.at_position), i32)
        if not self._keeps_angles:  # registers are few
            self._tables = [f.load_shared_pointer(f.i32(shape.place(ARGS)), 8 * i) for i in (4, 5)]
            self._cos, self._sin = self._angles()
        pieces = shape.pieces(self.position)
        # The new position belongs to the block whose turn it would be: no other has fewer pieces.
        owns = exchange.rank.eq(pieces & shape.ranks - 1)
        self._receive(heads, exchange, owns)
        f.barrier(THREADS)
        queries = self._queries()
        found = self._new_position(queries, owns)
        kept = queries if shape.group <= _MOST_KEPT else None  # or they are read again

        def piece(number: Value, slot: Value, parity: Value, *state: Value) -> list[Value]:
            starts, slots = self.ring.wait_piece((slot, parity))
            made = self._piece(number, starts, kept or self._queries(), state)
            self.ring.free(*slots)
            return [*self.ring.next(slots[-1]), *made]

        slot, parity, *found = f.loop(
            exchange.rank, pieces, f.i32(shape.ranks), [*place, *found], piece
        )
        self._combine_warps(found, exchange)
        return slot, parity

    # -- the new query, key and value -------------------------------------------------------------

    def _receive(self, heads: Heads, exchange: Exchange, owns: Value) -> None:
        """Warps take a head of the query each, the next two the new key and value."""
        f, shape = self.f, self.shape
        for _ in f.when(self.warp < shape.group):
            head = exchange.group * shape.group + self.warp
            four = self._rotated(exchange, head * shape.head_dim, heads.query_gain)
            at = self.warp * (4 * shape.head_dim) + self.lane * 8 + shape.place(QUERIES)
            scaled = [v * (shape.scale * _LOG2_E) for v in four]
            f.store_shared(f.join(scaled[:2]), at, 0, align=8)
            f.store_shared(f.join(scaled[2:]), at, 256, align=8)
        for _ in f.when(self.warp.eq(shape.group) & owns):
            first = shape.heads * shape.head_dim + exchange.group * shape.head_dim
            self._keep(self._rotated(exchange, first, heads.key_gain), heads.keys, 0)
        for _ in f.when(self.warp.eq(shape.group + 1) & owns):
            behind = (shape.heads + shape.kv_heads) * shape.head_dim
            four = self._words(exchange, exchange.group * shape.head_dim + behind)
            self._keep(four, heads.values, 2 * shape.head_dim)

    def _words(self, exchange: Exchange, first: Value) -> list[Value]:
        """The lane's four numbers of a head: 2 lane, 2 lane + 1, and those 64 further."""
        f = self.f
        at = f.gep(exchange.base, (first + self.lane * 2).to(i64), 4)
        places = [(at, 4 * self.shape.at_qkv + 256 * i, 2) for i in range(2)]
        return f.receive(places, exchange.tag, f.look(places))

    def _rotated(self, exchange: Exchange, first: Value, gain: Value) -> list[Value]:
        f, shape = self.f, self.shape
        gains = []
        if shape.has_head_norms:
            at = f.gep(gain, (self.lane * 2).to(i64), 4)
            gains = [f.load(at, vec(2, f32), 256 * i, align=8) for i in range(2)]
        four = self._words(exchange, first)
        if gains:
            square = four[0] * four[0]
            for v in four[1:]:
                square = f.fma(v, v, square)
            whole = f.warp_sum(square)
            factor = f.rsqrt_fast(f.fma(whole, 1.0 / shape.head_dim, shape.head_eps))
            four = [v * factor * f.extract(gains[i // 2], i % 2) for i, v in enumerate(four)]
        low, high = four[:2], four[2:]
        c, s = self._cos, self._sin
        return [
            *[low[i] * c[i] - high[i] * s[i] for i in range(2)],
            *[f.fma(high[i], c[i], low[i] * s[i]) for i in range(2)],
        ]

    def _keep(self, four: list[Value], cache: Value, offset: int) -> None:
        """Write the new key or value to the cache, and for the warps of this block."""
        f, shape = self.f, self.shape
        row = f.gep(cache, self.position.to(i64), 2 * shape.head_dim)
        for i in range(2):
            word = f.pack_halves(four[2 * i], four[2 * i + 1], shape.kv)
            f.store(word, f.gep(row, self.lane.to(i64), 4), 128 * i)
            f.store_shared(word, self.lane * 4 + (shape.place(NEW_KV) + offset), 128 * i)

    def _queries(self) -> list[list[Value]]:
        f, shape = self.f, self.shape
        at = self.lane * 8 + shape.place(QUERIES)
        found = []
        for head in range(shape.group):
            pairs = [
                f.load_shared(at, vec(2, f32), 4 * shape.head_dim * head + 256 * i, align=8)
                for i in range(2)
            ]
            found.append([f.extract(p, i) for p in pairs for i in range(2)])
        return found

    def _numbers(self, at: Value, offset: int) -> list[Value]:
        """The lane's four numbers of a key or value in shared memory."""
        f = self.f
        words = [f.load_shared(at, i32, offset + 128 * i) for i in range(2)]
        return [v for w in words for v in f.unpack_halves(w, self.shape.kv)]

    # -- scores -----------------------------------------------------------------------------------
    # What a warp knows: the largest score and the sum of weights of the lane's head, then four
    # numbers of each head's weighted sum of values.

    def _new_position(self, queries: list[list[Value]], owns: Value) -> list[Value]:
        """The last warp of the block that owns the new position begins with it."""
        f, shape = self.f, self.shape
        zero = f.const(0.0, f32)
        nothing = [f.const(LOWEST, f32), zero, *[zero] * (4 * shape.group)]

        def begin() -> list[Value]:
            at = self.lane * 4 + shape.place(NEW_KV)
            key, value = (self._numbers(at, 2 * shape.head_dim * i) for i in range(2))
            scores = [self._dot(q, key) for q in queries]
            total = self._folded(scores * self._each)
            return [total, f.const(1.0, f32), *(value * shape.group)]

        return f.if_(owns & self.warp.eq(WARPS - 1), begin, lambda: nothing)

    def _dot(self, a: Sequence[Value], b: Sequence[Value]) -> Value:
        made = a[0] * b[0]
        for x, y in zip(a[1:], b[1:], strict=True):
            made = self.f.fma(x, y, made)
        return made

    def _folded(self, values: list[Value]) -> Value:
        """Sums over the warp: value i of n is in the lanes whose upper bits are i."""
        f, distance = self.f, WARP // 2
        while distance:
            if len(values) > 1:
                half = len(values) // 2
                upper = (self.lane & distance).ne(0)
                values = [
                    f.select(upper, b, a) + f.exchange(f.select(upper, a, b), distance)
                    for a, b in zip(values[:half], values[half:], strict=True)
                ]
            else:
                values = [values[0] + f.exchange(values[0], distance)]
            distance //= 2
        return values[0]

    def _over_positions(self, value: Value, join: Callable[[Value, Value], Value]) -> Value:
        """Join what the lanes know of the warp's positions."""
        distance = WARP // 2
        while distance >= self._lanes:
            value = join(value, self.f.exchange(value, distance))
            distance //= 2
        return value

    def _piece(
        self,
        number: Value,
        starts: Sequence[Value],
        queries: list[list[Value]],
        state: Sequence[Value],
    ) -> list[Value]:
        f, shape = self.f, self.shape
        largest, weights, *sums = state
        row = 2 * shape.head_dim
        keys_at, values_at = (s + self.warp * (self._each * row) + self.lane * 4 for s in starts)
        first = number * shape.piece + self.warp * self._each
        keys = [self._numbers(keys_at, row * i) for i in range(self._each)]
        score = self._folded([self._dot(q, key) for key in keys for q in queries])
        valid = first + self.lane.udiv(self._lanes) < self.position
        score = f.select(valid, score, LOWEST)
        above = f.larger(largest, self._over_positions(score, f.larger))
        weight = f.select(valid, f.exp2_fast(score - above), 0.0)
        shrink = f.exp2_fast(largest - above)
        weights = f.fma(weights, shrink, self._over_positions(weight, lambda a, b: a + b))
        lanes = WARP // (self._each * shape.group)  # that have the same score
        values = []
        for i in range(self._each):  # what is behind the position may be anything
            there = first + i < self.position
            words = [f.load_shared(values_at, i32, row * i + 128 * j) for j in range(2)]
            words = [f.select(there, w, f.i32(0)) for w in words]
            values.append([v for w in words for v in f.unpack_halves(w, shape.kv)])
        made: list[Value] = []
        for head in range(shape.group):
            factor = f.from_lane(shrink, head * lanes)
            four = [v * factor for v in sums[4 * head : 4 * head + 4]]
            for i in range(self._each):
                share = f.from_lane(weight, (i * shape.group + head) * lanes)
                four = [f.fma(share, v, o) for v, o in zip(values[i], four, strict=True)]
            made += four
        return [above, weights, *made]

    # -- combining --------------------------------------------------------------------------------

    def _combine_warps(self, state: Sequence[Value], exchange: Exchange) -> None:
        """Sums of values lie where those of rows were: all have read these before the first
        barrier, and the next are stored behind that of `combine_blocks`."""
        f, shape = self.f, self.shape
        largest, weights, *sums = state
        lanes = WARP // (self._each * shape.group)
        head = (self.lane & self._lanes - 1).udiv(lanes)
        at = head * (4 * WARPS) + self.warp * 4 + shape.place(MAXIMA)
        second = 4 * WARPS * shape.group
        for _ in f.when((self.lane & WARP - self._lanes + lanes - 1).eq(0)):
            f.store_shared(largest, at)
        f.barrier(THREADS)
        for i in range(shape.group):
            top = self._largest(f.i32(shape.place(MAXIMA) + 4 * WARPS * i))
            own = f.load_shared(self.warp * 4 + shape.place(MAXIMA), f32, 4 * WARPS * i)
            factor = f.exp2_fast(own - top)
            for _ in f.when(self.lane.eq(lanes * i)):  # one of those that know this head's weights
                f.store_shared(
                    weights * factor, self.warp * 4 + shape.place(MAXIMA), second + 64 * i
                )
            to = self.warp * (4 * shape.group_columns) + self.lane * 8 + shape.place(SUMS)
            scaled = [v * factor for v in sums[4 * i : 4 * i + 4]]
            for j in range(2):
                pair = f.join(scaled[2 * j : 2 * j + 2])
                f.store_shared(pair, to, 4 * shape.head_dim * i + 256 * j, align=8)
        f.barrier(THREADS)
        block = exchange.group * shape.ranks + exchange.rank
        for _ in f.when(self.products.thread < shape.group_columns):
            at = self.products.thread * 4 + shape.place(SUMS)
            found = [f.load_shared(at, f32, 4 * shape.group_columns * w) for w in range(WARPS)]
            while len(found) > 1:
                found = [a + b for a, b in zip(found[::2], found[1::2], strict=True)]
            to = block * shape.group_columns + self.products.thread + shape.at_parts
            f.hand_over(found[0], f.gep(exchange.base, to.to(i64), 4), exchange.tag)
        for _ in f.when(self.warp.eq(WARPS - 1) & (self.lane < shape.group)):
            self._send_weights(self.lane, block, exchange)

    def _send_weights(self, head: Value, block: Value, exchange: Exchange) -> None:
        f, shape = self.f, self.shape
        at = head * (4 * WARPS) + shape.place(MAXIMA)
        top = self._largest(at)
        total = self.products.add_up(at + 4 * WARPS * shape.group)
        to = f.gep(exchange.base, ((block * shape.group + head) * 2 + shape.at_weights).to(i64), 4)
        f.hand_over(top, to, exchange.tag)
        f.hand_over(total, f.gep(to, 4), exchange.tag)

    def _largest(self, at: Value) -> Value:
        f = self.f
        fours = [f.load_shared(at, vec(4, f32), 16 * i, align=16) for i in range(WARPS // 4)]
        found = [f.extract(v, e) for v in fours for e in range(4)]
        while len(found) > 1:
            found = [f.larger(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
        return found[0]

    def parts(self, exchange: Exchange) -> list[Place]:
        """Where the parts of all blocks of the key head are, of one column for each thread."""
        f, shape = self.f, self.shape
        column = self.products.thread & shape.group_columns - 1
        part = exchange.group * shape.ranks + (self.lane & shape.ranks - 1)
        about = (part * shape.group + (column >> 7)) * 2 + shape.at_weights
        places = [(f.gep(exchange.base, about.to(i64), 4), 0, 2)]
        first = exchange.group * (shape.ranks * shape.group_columns) + column
        at = f.gep(exchange.base, first.to(i64), 4)
        for i in range(shape.ranks):
            places.append((at, 4 * (shape.at_parts + i * shape.group_columns), 1))
        return places

    def combine_blocks(
        self, exchange: Exchange, places: list[Place], seen: list[Value] | None
    ) -> None:
        """Combine these parts, and split the result for products."""
        f, shape = self.f, self.shape
        thread = self.products.thread
        for _ in f.when(thread < shape.group_columns):
            found = f.look(places) if seen is None else seen
            top, total, *parts = f.receive(places, exchange.tag, found)
            share = f.exp2_fast(top - f.warp_max(top, shape.ranks))
            whole = f.warp_sum(share * total, shape.ranks)
            share = share * f.reciprocal_fast(whole)
            made = f.const(0.0, f32)
            for i, value in enumerate(parts):
                made = f.fma(f.from_lane(share, i), value, made)
            self.products.put_out(made, thread)
