"""Draws a token of each row: temperature, top-k, top-p, min-p, as the `sample` op defines them.

A block has a row. With a top-k of up to 256, candidates are collected from the parts of the row
that hold them; they are few, and every thread compares one with all. Otherwise thresholds are found
by radix selection, over counts for top-k and over weights for top-p.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.sampling.part_maxima import (
    AHEAD,
    PARTS,
    better_of,
    logit,
    order_key,
    part_range,
)
from rlx.backends.cuda.kernels.sampling.philox_code import emit_uniform
from rlx.llvm.builder import Value, f32, f64, i32, i64, vec
from rlx.support.records import dataclass

_THREADS = PARTS
_CANDIDATES = 1024
_FEW = 256  # the largest top-k that is found among the maxima of parts
# shared memory: a few words, then tables
_TOKEN, _COUNT, _BOUND, _TOTAL = 0, 4, 8, 16
_TABLE = 64
_TABLE_BYTES = 16 * _CANDIDATES
_ONE = float(1 << 40)  # a weight of 1 as an integer


@dataclass(frozen=True)
class DrawToken(BlockKernel):
    """args: logits [rows, vocab] (f32), maxima of parts, rng, settings (else 0), tokens, next rng,
    rows

    `settings` are those of the op, where none are given at run time. `each`: rows have an rng and
    settings of their own, and draw as if they were alone.
    """

    vocab: int
    settings: tuple[float, ...] | None
    each: bool = False

    @property
    def label(self) -> str:
        return "sample(draw)"

    @property
    def threads(self) -> int:
        return _THREADS

    @property
    def shared(self) -> int:
        return _TABLE + 2 * _TABLE_BYTES

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared), self).emit()


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: DrawToken) -> None:
        self.f, self.vocab, self.kernel = f, kernel.vocab, kernel
        args = f["args"]
        self.logits, self.maxima, self.rng, self.given, self.tokens, self.following = (
            f.arg(args, i) for i in range(6)
        )
        self.row, self.thread = f.block_number(), f.thread()
        self.base = f.gep(self.logits, self.row.to(i64) * self.vocab, 4)
        self.number = self.row  # which random number of its rng
        if kernel.each:
            row = self.row.to(i64)
            self.rng, self.following = (f.gep(b, row, 16) for b in (self.rng, self.following))
            self.given, self.number = f.gep(self.given, row, 16), f.i32(0)

    def emit(self) -> None:
        f = self.f
        f.let_next_start()
        f.wait_for_previous()
        f.if_(self.row < f.arg(f["args"], 6, i32), self._emit_row)

    def _emit_row(self) -> None:
        f = self.f
        self.temperature, k, self.top_p, self.min_p = self._settings()
        self.top_k = f.select(k > 0.0, f.min_fast(k, float(1 << 30)), 0.0).to(i32)
        top, at = self._maximum()
        self.top = top
        f.if_(self.thread.eq(0), lambda: self._advance(f.select(at < self.vocab, at, 0)))
        f.barrier()
        draws = (self.temperature > 0.0) & (top > float("-inf"))
        f.if_(draws, self._draw)
        f.barrier()

        def write() -> None:
            token = f.load_shared(f.i32(_TOKEN), i32)
            f.store(token, f.gep(self.tokens, self.row.to(i64), 4))

        f.if_(self.thread.eq(0), write)

    def _settings(self) -> list[Value]:
        f, fixed = self.f, self.kernel.settings
        if fixed is not None:
            return [f.const(v, f32) for v in fixed]
        return [f.load(self.given, f32, 4 * i) for i in range(4)]

    def _advance(self, token: Value) -> None:
        """The token of the largest logit, until another is drawn; the next rng."""
        f = self.f
        f.store_shared(token, f.i32(_TOKEN))
        f.store_shared(f.i32(0), f.i32(_COUNT))

        def following() -> None:
            f.store(f.load(self.rng, i64), self.following)
            f.store(f.load(self.rng, i64, 8) + 1, self.following, 8)

        f.if_(self.number.eq(0), following)

    def _maximum(self) -> tuple[Value, Value]:
        """The largest logit of the row and its index; the maxima of parts are kept in shared
        memory as (key, index)."""
        f = self.f
        of = f.gep(self.maxima, self.row.to(i64), 8 * PARTS)
        mine = f.gep(of, self.thread.to(i64), 4)
        x, at = f.load(mine, f32), f.load(mine, i32, 4 * PARTS)
        f.store_shared(order_key(f, x), self.thread * 4 + _TABLE)
        distance = WARP // 2
        while distance:
            x, at = better_of(f, (x, at), (f.exchange(x, distance), f.exchange(at, distance)))
            distance //= 2
        place = (self.thread >> 5) * 8 + (_TABLE + _TABLE_BYTES)

        def keep() -> None:
            f.store_shared(x, place)
            f.store_shared(at, place, 4)

        f.if_((self.thread & WARP - 1).eq(0), keep)
        f.barrier()
        whole = (f.const(float("-inf"), f32), f.i32(self.vocab))
        for i in range(_THREADS // WARP):
            there = f.i32(_TABLE + _TABLE_BYTES + 8 * i)
            whole = better_of(f, whole, (f.load_shared(there, f32), f.load_shared(there, i32, 4)))
        f.barrier()
        return whole

    def _weight(self, x: Value) -> Value:
        f = self.f
        distance = f.select(x.eq(self.top), 0.0, x - self.top)
        return f.select(x > float("-inf"), f.activate("exp", distance / self.temperature), 0.0)

    def _point(self) -> Value:
        """The number in [0, 1) that decides."""
        return emit_uniform(self.f, self.rng, self.number)

    # -- a few candidates -------------------------------------------------------------------------

    def _draw(self) -> None:
        f = self.f
        few = (self.top_k > 0) & (self.top_k <= min(_FEW, self.vocab))
        f.if_(few, self._collect)
        count = f.load_shared(f.i32(_COUNT), i32)
        f.barrier()
        fits = few & (count <= _CANDIDATES)
        f.if_(fits, lambda: self._choose(count), self._draw_from_all)

    def _collect(self) -> None:
        """Candidates as (key, index): logits at least as large as the k-th largest maximum."""
        f = self.f
        mine = f.load_shared(self.thread * 4 + _TABLE, i32)

        def count(i: Value, rank: Value) -> Value:
            four = f.load_shared(i * 4 + _TABLE, vec(4, i32), align=16)
            for e in range(4):
                other = f.extract(four, e)
                ahead = mine.ult(other) | (mine.eq(other) & (i + e < self.thread))
                rank = rank + ahead.to(i32, signed=False)
            return rank

        [rank] = f.loop(f.i32(0), f.i32(PARTS), 4, [f.i32(0)], count)
        is_bound = rank.eq(self.top_k - 1)
        f.if_(is_bound, lambda: f.store_shared(mine, f.i32(_BOUND)))
        f.barrier()
        bound = f.load_shared(f.i32(_BOUND), i32)
        for part in f.range(self.thread >> 5, f.i32(PARTS), _THREADS // WARP):
            largest = f.load_shared(part * 4 + _TABLE, i32)
            f.if_(bound.ule(largest), partial(self._collect_part, part, bound))
        f.barrier()

    def _collect_part(self, part: Value, bound: Value) -> None:
        f = self.f
        low, high = part_range(f, part, self.vocab)
        for first in f.range(low + f.lane32(), high, WARP * AHEAD):
            places = [first + WARP * i for i in range(AHEAD)]
            keys = [order_key(f, logit(f, self.base, f.min(i, high - 1))) for i in places]
            for i, key in zip(places, keys, strict=True):
                f.if_((i < high) & bound.ule(key), partial(self._add_candidate, i, key))

    def _add_candidate(self, i: Value, key: Value) -> None:
        f = self.f
        place = f.add_shared(f.i32(_COUNT), f.i32(1))

        def keep() -> None:
            at = place * 8 + (_TABLE + _TABLE_BYTES)
            f.store_shared(key, at)
            f.store_shared(i, at, 4)

        f.if_(place < _CANDIDATES, keep)

    def _choose(self, count: Value) -> None:
        """Draw among the candidates: in the first table they are sorted by index, with weights."""
        f = self.f
        unsorted, table = _TABLE + _TABLE_BYTES, _TABLE
        for i in f.range(self.thread, count, _THREADS):
            key, index = (f.load_shared(i * 8 + unsorted, i32, 4 * e) for e in range(2))

            def tally(j: Value, rank: Value, place: Value, key=key, index=index) -> list[Value]:  # type: ignore[no-untyped-def]
                other, there = (f.load_shared(j * 8 + unsorted, i32, 4 * e) for e in range(2))
                first = there < index
                ahead = key.ult(other) | (key.eq(other) & first)
                return [rank + ahead.to(i32, False), place + first.to(i32, False)]

            rank, place = f.loop(f.i32(0), count, 1, [f.i32(0)] * 2, tally)
            weight = f.select(rank < self.top_k, self._weight(logit(f, self.base, index)), 0.0)
            at = place * 16 + table
            f.store_shared(weight, at)
            f.store_shared(rank, at, 4)
            f.store_shared(index, at, 8)
        f.barrier()
        self._keep(count)
        f.barrier()
        self._pick(count)

    def _keep(self, count: Value) -> None:
        """Mark the candidates inside top-p and min-p."""
        f, table, zero = self.f, _TABLE, self.f.const(0.0, f64)
        for i in f.range(self.thread, count, _THREADS):
            weight, rank = f.load_shared(i * 16 + table, f32), f.load_shared(i * 16 + table, i32, 4)

            def add(j: Value, whole: Value, mass: Value, rank: Value = rank) -> list[Value]:
                ahead = f.load_shared(j * 16 + table, i32, 4) < rank
                other = f.load_shared(j * 16 + table, f32).to(f64)
                return [whole + other, mass + f.select(ahead, other, 0.0)]

            whole, mass = f.loop(f.i32(0), count, 1, [zero, zero], add)
            inside = rank.eq(0) | (mass < self.top_p.to(f64) * whole) | (self.top_p >= 1.0)
            kept = inside & (rank < self.top_k) & (weight >= self.min_p)
            f.store_shared(kept.to(i32, signed=False), i * 16 + table, 12)

    def _pick(self, count: Value) -> None:
        """The kept candidate at which the running sum exceeds the point; each thread sums up to its
        own."""
        f, zero = self.f, self.f.const(0.0, f64)

        def kept_weight(j: Value) -> Value:
            keeps = f.load_shared(j * 16 + _TABLE, i32, 12).ne(0)
            return f.select(keeps, f.load_shared(j * 16 + _TABLE, f32).to(f64), 0.0)

        for i in f.range(self.thread, count, _THREADS):

            def add(j: Value, total: Value, before: Value, i: Value = i) -> list[Value]:
                other = kept_weight(j)
                return [total + other, before + f.select(j < i, other, 0.0)]

            total, before = f.loop(f.i32(0), count, 1, [zero, zero], add)
            goal = self._point() * total
            found = (before <= goal) & (before + kept_weight(i) > goal)
            token = f.load_shared(i * 16 + _TABLE, i32, 8)
            f.if_(found, partial(f.store_shared, token, f.i32(_TOKEN)))

    # -- all of them ------------------------------------------------------------------------------

    def _own(self) -> tuple[Value, Value]:
        """The logits of this thread."""
        return part_range(self.f, self.thread, self.vocab)

    def _draw_from_all(self) -> None:
        f = self.f
        everything = [f.i32(0), f.i32(1 << 30)]  # of keys equal to the first, so many are kept
        by_count = f.if_(
            self.top_k > 0, lambda: self._select(everything, None, self.top_k.to(i64)),
            lambda: everything,
        )  # fmt: skip
        total = self._mass(by_count)
        wanted = (self.top_p.to(f64) * total.to(f64)).to(i64)
        goal = f.max(wanted, 1)
        kept = f.if_(
            self.top_p < 1.0, lambda: self._select(by_count, by_count, goal), lambda: by_count
        )
        self._draw_kept(kept)

    def _visit(
        self, kept: list[Value], start: list[Value], body: Callable[..., list[Value]]
    ) -> list[Value]:
        """`body(index, key, x, *carried)` for this thread's logits inside `kept`, in order."""
        f = self.f
        bound, most = kept
        before = self._equal_before(bound)
        low, high = self._own()

        def visit(i: Value, seen: Value, *carried: Value) -> list[Value]:
            x = logit(f, self.base, i)
            key = order_key(f, x)
            same = key.eq(bound)
            inside = bound.ult(key) | (same & (seen < most))
            new = f.if_(inside, lambda: body(i, key, x, *carried), lambda: list(carried))
            return [seen + same.to(i32, signed=False), *new]

        return f.loop(low, high, 1, [before, *start], visit)[1:]

    def _equal_before(self, bound: Value) -> Value:
        """How many keys of earlier threads are equal to the bound."""
        f = self.f
        low, high = self._own()

        def count(i: Value, seen: Value) -> Value:
            key = order_key(f, logit(f, self.base, i))
            return seen + key.eq(bound).to(i32, signed=False)

        [mine] = f.loop(low, high, 1, [f.i32(0)], count)
        return self._scan(mine, f.i32(0))

    def _scan(self, mine: Value, zero: Value) -> Value:
        """The sum over the threads before this one."""
        f, size = self.f, mine.type.bytes
        f.barrier()
        f.store_shared(mine, self.thread * size + _TABLE)
        f.barrier()

        def add(j: Value, total: Value) -> Value:
            return total + f.load_shared(j * size + _TABLE, mine.type)

        [found] = f.loop(f.i32(0), self.thread, 1, [zero], add)
        f.barrier()
        return found

    def _mass(self, kept: list[Value]) -> Value:
        """The weight of all that is kept, as an integer: sums are exact in any order."""
        f = self.f

        def add(i: Value, key: Value, x: Value, total: Value) -> list[Value]:
            return [total + self._whole(x)]

        [mine] = self._visit(kept, [f.i64(0)], add)
        before = self._scan(mine, f.i64(0))
        last = self.thread.eq(_THREADS - 1)
        f.if_(last, lambda: f.store_shared(before + mine, f.i32(_TOTAL)))
        f.barrier()
        found = f.load_shared(f.i32(_TOTAL), i64)
        f.barrier()
        return found

    def _whole(self, x: Value) -> Value:
        return (self._weight(x).to(f64) * _ONE).to(i64)

    def _select(self, kept: list[Value], by_weight: object, goal: Value) -> list[Value]:
        """The key at which the largest ones reach the goal, and how many equal to it are kept."""
        f = self.f

        def digit(i: Value, prefix: Value, left: Value) -> list[Value]:
            shift = f.i32(24) - i * 8
            for j in f.range(self.thread, f.i32(256), _THREADS):
                f.store_shared(f.i64(0), j * 8 + (_TABLE + _TABLE_BYTES))
            f.barrier()

            def tally(_: Value, key: Value, x: Value) -> list[Value]:
                same = f.select(i.eq(0), f.i32(0), (key ^ prefix) >> f.min(shift + 8, 31))
                exact = same.eq(0) | i.eq(0)
                amount = f.i64(1) if by_weight is None else self._whole(x)
                at = (key >> shift & 255) * 8 + (_TABLE + _TABLE_BYTES)
                f.if_(exact, lambda: drop(f.add_shared(at, amount)))
                return []

            self._visit(kept, [], tally)
            f.barrier()

            def walk(j: Value, found: Value, rest: Value) -> list[Value]:
                number = f.i32(255) - j
                here = f.load_shared(number * 8 + (_TABLE + _TABLE_BYTES), i64)
                open_ = found < 0
                reaches = open_ & ((here >= rest) | number.eq(0))
                passes = open_ & (here < rest) & number.ne(0)
                return [f.select(reaches, number, found), f.select(passes, rest - here, rest)]

            found, rest = f.loop(f.i32(0), f.i32(256), 1, [f.i32(-1), left], walk)
            f.barrier()
            return [prefix | (found << shift), rest]

        bound, rest = f.loop(f.i32(0), f.i32(4), 1, [f.i32(0), goal], digit)
        if by_weight is None:
            return [bound, rest.to(i32)]
        each = f.max(self._whole(unkeyed(f, bound)), 1)
        return [bound, f.min((rest + each - 1).udiv(each), 1 << 30).to(i32)]

    def _draw_kept(self, kept: list[Value]) -> None:
        f = self.f

        def weight(x: Value) -> Value:
            w = self._weight(x)
            return f.select(w >= self.min_p, w.to(f64), 0.0)

        zero = f.const(0.0, f64)
        [mine] = self._visit(kept, [zero], lambda i, key, x, total: [total + weight(x)])
        before = self._scan(mine, zero)
        last = self.thread.eq(_THREADS - 1)
        f.if_(last, lambda: f.store_shared(before + mine, f.i32(_TOTAL)))
        f.barrier()
        goal = self._point() * f.load_shared(f.i32(_TOTAL), f64)
        here = (before <= goal) & (before + mine > goal)

        def step(i: Value, key: Value, x: Value, running: Value, token: Value) -> list[Value]:
            after = running + weight(x)
            return [after, f.select((running <= goal) & (after > goal), i, token)]

        _, token = self._visit(kept, [before, f.i32(-1)], step)
        f.if_(here & (token >= 0), lambda: f.store_shared(token, f.i32(_TOKEN)))
        f.barrier()


def drop(value: Value) -> None:
    """Use a result for its effect alone."""


def unkeyed(f: BlockFunction, key: Value) -> Value:
    """The float of a key."""
    return f.select(key < 0, key ^ -(1 << 31), key ^ -1).bits(f32)
