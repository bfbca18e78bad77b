"""Drawing a token from each row of logits, in the order that `rlx.ir.ops.sample` states.

Weights are summed in blocks, and the block that holds the drawn point is searched; before that,
top_p clears those outside the nucleus. With top_k the best tokens are selected by a heap instead.
"""

from __future__ import annotations

import math as numbers
from collections.abc import Callable
from functools import cached_property, reduce
from operator import or_

from rlx.codegen import math
from rlx.codegen.emit import Function, Module, Value, f32, f64, i32, i64, ptr, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.nucleus import Nucleus
from rlx.codegen.philox import uniform
from rlx.codegen.ranking import Ascending, Heaps, Ranking
from rlx.codegen.region.registers import from_memory, raw_type, register_type
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

VECTORS = 8  # looked at together in the search for the largest
BLOCK = 512  # weights that are summed together
LEAST = 1e-300  # weight that is always kept: that of the first token

_PARAMS = [("row", ptr), ("n", i64), ("top", f64), ("heat", f64)]
_SPAN = [("start", i64), ("stop", i64), ("least", f64)]


@dataclass(frozen=True)
class Sample(KernelSpec):
    """args: logits, rng, tokens, next rng, rows, n, scratch, step, then either the address of
    settings, or temperature, top_k, top_p and min_p as bits of f32

    Each worker has `step` bytes of scratch memory, enough for n entries.
    """

    dtype: DType
    given: bool

    def entry_bytes(self) -> int:
        return self.ranking.bytes

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.dtype, nan_first=False)

    @property
    def real(self) -> DType:
        return DType.of("f64" if self.dtype.bits == 64 else "f32")

    def emit(self, m: Module) -> None:
        _Emitter(self, m).emit()


class _Emitter:
    def __init__(self, spec: Sample, m: Module) -> None:
        self.spec, self.m = spec, m
        self.type = register_type(spec.real)
        self.lanes = m.target.lanes(self.type.bits)
        heaps = Heaps(m, spec.ranking)
        self.select = heaps.emit_select()
        self.by_index = Heaps(m, Ascending(), "indices")
        self.weight = self._emit_weight()
        self.weigh = self._emit_weigh()
        self.sift = self._emit_sift()
        self.nucleus = Nucleus(m, spec.ranking, self.type)
        self.draw_any = self._emit_draw_any()
        self.draw_best = self._emit_draw_best()

    # -- elements -----------------------------------------------------------------------------

    def logits(self, f: Function, row: Value, at: Value, lanes: int) -> Value:
        """Logits in compute precision, NaN as -inf."""
        x = self.stored(f, row, at, lanes)
        return f.select(x.is_nan(), -numbers.inf, x)

    def stored(self, f: Function, row: Value, at: Value, lanes: int) -> Value:
        """The same with NaN as it is."""
        raw = f.load(f.gep(row, at, self.spec.dtype.bytes), vec(lanes, raw_type(self.spec.dtype)))
        return from_memory(f, raw, self.spec.dtype)

    def weights(self, f: Function, x: Value) -> Value:
        """exp((x - top) / temperature); 1 at the top, 0 of -inf."""
        lanes = x.type.lanes
        top, heat = (f.splat(f[name].to(self.type), lanes) for name in ("top", "heat"))
        with f.exact():
            distance = f.select(x.eq(top), 0.0, x - top)
        weight = math.exp(distance / heat)
        return f.select(x.eq(-numbers.inf), 0.0, weight)

    def _emit_weight(self) -> Function:
        """f64 weight(row, index, top, heat): the weight of one token."""
        params = [("row", ptr), ("index", i64), ("top", f64), ("heat", f64)]
        f = self.m.function("weight", params, f64, internal=True)
        f.ret(self.weights(f, self.logits(f, f["row"], f["index"], 1)).to(f64))
        return f

    def weight_of(self, f: Function, index: Value) -> Value:
        return f.call(self.weight, f["row"], index, f["top"], f["heat"])

    # -- one row ------------------------------------------------------------------------------

    def emit(self) -> None:
        f = self.f
        logits, rng, tokens, following = (f.arg(f["args"], at) for at in range(4))
        rows, n, step = (f.arg(f["args"], at, i64) for at in (4, 5, 7))
        memory = f.gep(f.arg(f["args"], 6), f["tid"].to(i64) * step)
        seed, counter = f.load(rng, i64), f.load(rng, i64, 8)
        heat, best, top_p, min_p = self._settings(n)

        def count_on() -> None:
            f.store(seed, following)
            f.store(counter + 1, following, 8)

        f.if_(f["tid"].eq(0), count_on)
        lo, hi = f.split(rows)
        for r in f.range(lo, hi):
            row = f.gep(logits, r * n, self.spec.dtype.bytes)
            top = self._top(row, n)
            point = uniform(f, seed, counter, r)
            common = [row, n, top.to(f64), heat, point, min_p, memory]
            [token] = self._token(common, top, best, top_p)
            f.store(token.to(i32), f.gep(tokens, r, 4))

    def _token(self, common: list[Value], top: Value, best: Value, top_p: Value) -> list[Value]:
        """The token of a row, by the way that its settings ask for."""
        f = self.f
        row, n, _, heat, *_ = common

        def draw() -> list[Value]:
            return f.if_(
                best < n,
                lambda: f.call(self.draw_best, *common, best, top_p),
                lambda: f.call(self.draw_any, *common, top_p),
            )

        def choose() -> list[Value]:
            return f.if_(heat > 0.0, draw, lambda: self._first(row, n, top))

        return f.if_(top.eq(-numbers.inf), lambda: f.i64(0), choose)

    @cached_property
    def f(self) -> Function:
        return self.m.kernel()

    def _settings(self, n: Value) -> tuple[Value, Value, Value, Value]:
        """temperature, top_k (n for all), top_p and min_p."""
        f = self.f
        if self.spec.given:
            address = f.arg(f["args"], 8)
            heat, best, top_p, min_p = (f.load(address, f32, 4 * k) for k in range(4))
        else:
            heat, best, top_p, min_p = (f.arg(f["args"], 8 + k, f32) for k in range(4))
        whole = f.min_fast(f.const(2.0**31, f32), best)
        some = best >= 1.0
        count = f.select(some, f.select(some, whole, 0.0).to(i64), n)
        return heat.to(f64), f.min(count, n), top_p.to(f64), min_p.to(f64)

    def _top(self, row: Value, n: Value) -> Value:
        """The largest logit; NaN is never the larger one."""
        f, wide = self.f, self.lanes * VECTORS
        whole = n & -wide
        start = [f.const(-numbers.inf, vec(self.lanes, self.type))] * VECTORS

        def look(i: Value, *tops: Value) -> list[Value]:
            return list(map(f.max_fast, self._vectors(row, i), tops))

        tops = f.loop(0, whole, wide, start, look)
        [top] = f.loop(
            whole,
            n,
            1,
            [f.reduce("max", reduce(f.max_fast, tops))],
            lambda i, top: f.max_fast(self.stored(f, row, i, 1), top),
        )
        return top

    def _vectors(self, row: Value, at: Value) -> list[Value]:
        """The logits of one round, NaN as it is."""
        lanes = self.lanes
        return [self.stored(self.f, row, at + lanes * k, lanes) for k in range(VECTORS)]

    def _first(self, row: Value, n: Value, top: Value) -> Value:
        """The first index of the largest logit."""
        f, wide = self.f, self.lanes * VECTORS
        tops, whole = f.splat(top, self.lanes), n & -wide

        def look(i: Value, here: Value) -> list[Value]:
            hits = reduce(or_, [x.eq(tops) for x in self._vectors(row, i)])
            here = f.any(hits)
            return [f.select(here, i, i + wide), here]

        def unseen(i: Value, here: Value) -> Value:
            return ~here & (i < whole)

        start, _ = f.while_([f.i64(0), n < 0], unseen, look)
        [at] = f.while_(
            [start],
            lambda i: self.stored(f, row, i, 1).ne(top) & (i < n - 1),
            lambda i: i + 1,
        )
        return at

    # -- drawing from all ---------------------------------------------------------------------

    def _emit_draw_any(self) -> Function:
        """i64 draw_any(row, n, top, heat, point, min_p, memory, top_p): all tokens, but for those
        that top_p and min_p leave out."""
        params = [*_PARAMS, ("point", f64), ("min_p", f64), ("memory", ptr), ("top_p", f64)]
        f = self.m.function("draw_any", params, i64, internal=True)
        n, memory = f["n"], f["memory"]
        given = [f[name] for name in ("row", "top", "heat", "memory")]
        limited = f["top_p"] < 1.0

        def limit() -> None:
            total = f.call(self.weigh, *given, f.i64(0), n, f.const(0.0, f64))
            target = f.max_fast(f["top_p"] * total, LEAST)
            f.call(self.nucleus.cut, f["row"], n, target, memory)

        f.if_(limited, limit)
        # behind the weights lie the sums of their blocks
        sums = f.gep(memory, n * self.type.bytes + 7 & -8)

        def block(start: Value, total: Value) -> Value:
            part_of = [start, f.min(start + BLOCK, n), f["min_p"]]
            [part] = f.if_(
                limited,
                lambda: f.call(self.sift, memory, *part_of),
                lambda: f.call(self.weigh, *given, *part_of),
            )
            f.store(part, f.gep(sums, start.udiv(BLOCK), 8))
            return total + part

        [total] = f.loop(0, n, BLOCK, [f.const(0.0, f64)], block)
        target = f["point"] * total

        def after(start: Value, passed: Value) -> Value:
            return passed + f.load(f.gep(sums, start.udiv(BLOCK), 8), f64)

        def is_before(start: Value, passed: Value) -> Value:
            """Whether the point lies behind this block, and there is another one."""
            return (after(start, passed) <= target) & (start + BLOCK < n)

        start, passed = f.while_(
            [f.i64(0), f.const(0.0, f64)],
            is_before,
            lambda start, passed: [start + BLOCK, after(start, passed)],
        )
        f.ret(self._search(f, start, f.min(start + BLOCK, n), passed, target, memory))
        return f

    def _emit_weigh(self) -> Function:
        """f64 weigh(row, top, heat, memory, start, stop, least): weights of tokens start … stop - 1
        written to memory, 0 below the least; gives their sum."""
        params = [("row", ptr), ("top", f64), ("heat", f64), ("memory", ptr), *_SPAN]
        f = self.m.function("weigh", params, f64, internal=True)
        return self._keep(f, lambda i, n: self.weights(f, self.logits(f, f["row"], i, n)))

    def _emit_sift(self) -> Function:
        """f64 sift(memory, start, stop, least): as weigh, of weights that are there already."""
        f = self.m.function("sift", [("memory", ptr), *_SPAN], f64, internal=True)
        at = f["memory"]
        return self._keep(f, lambda i, n: f.load(f.gep(at, i, self.type), vec(n, self.type)))

    def _keep(self, f: Function, weights: Callable[[Value, int], Value]) -> Function:
        """What `weights` gives for (index, lanes): whole vectors, then single ones."""
        lanes, start, stop = self.lanes, f["start"], f["stop"]
        whole = start + (stop - start & -lanes)
        least = f["least"].to(self.type)

        def some(i: Value, lanes: int) -> Value:
            w = weights(i, lanes)
            w = f.select(w >= f.splat(least, lanes), w, 0.0)
            f.store(w, f.gep(f["memory"], i, self.type))
            return w.to(f64)

        zero = f.const(0.0, vec(lanes, f64))
        [sums] = f.loop(start, whole, lanes, [zero], lambda i, s: s + some(i, lanes))
        one = f.reduce("add", sums)
        [total] = f.loop(whole, stop, 1, [one], lambda i, s: s + some(i, 1))
        f.ret(total)
        return f

    def _search(
        self, f: Function, start: Value, stop: Value, passed: Value, target: Value, memory: Value
    ) -> Value:
        """The first index at which the running sum exceeds the target; the last one with a weight
        when rounding lets none do so."""

        def weight(i: Value) -> Value:
            return f.load(f.gep(memory, i, self.type), self.type).to(f64)

        def look(i: Value, running: Value, found: Value, last: Value) -> list[Value]:
            w = weight(i)
            more = running + w
            hit = found.eq(-1) & (more > target)
            return [more, f.select(hit, i, found), f.select(w > 0.0, i, last)]

        _, found, last = f.loop(start, stop, 1, [passed, f.i64(-1), start], look)
        return f.select(found.eq(-1), last, found)

    # -- drawing from the best ----------------------------------------------------------------

    def _emit_draw_best(self) -> Function:
        """i64 draw_best(row, n, top, heat, point, min_p, memory, best, top_p)"""
        params = [*_PARAMS, ("point", f64), ("min_p", f64), ("memory", ptr)]
        f = self.m.function(
            "draw_best", [*params, ("best", i64), ("top_p", f64)], i64, internal=True
        )
        count = f["best"]
        f.call(self.select, f["row"], f["n"], count, f["memory"])
        kept = self._kept(f, count, f["top_p"], self._best_sum(f, count))
        f.ret(self._draw_of(f, self._compact(f, kept)))
        return f

    def _entry_weight(self, f: Function, entry: Value) -> Value:
        """The weight of the token of an entry in memory."""
        ranking = self.spec.ranking
        return self.weight_of(f, ranking.index(f, ranking.load(f, f["memory"], entry)))

    def _best_sum(self, f: Function, count: Value) -> Value:
        [total] = f.loop(
            0, count, 1, [f.const(0.0, f64)], lambda i, s: s + self._entry_weight(f, i)
        )
        return total

    def _kept(self, f: Function, count: Value, share: Value, total: Value) -> Value:
        """How many of the selected tokens top_p keeps: those before which too little has passed,
        and the first in any case."""

        def walk() -> Value:
            target = share * total

            def inside(i: Value, passed: Value) -> Value:
                return (i < count) & ((passed < target) | i.eq(0))

            def on(i: Value, passed: Value) -> list[Value]:
                return [i + 1, passed + self._entry_weight(f, i)]

            return f.while_([f.i64(0), f.const(0.0, f64)], inside, on)[0]

        [kept] = f.if_(share < 1.0, walk, lambda: count)
        return kept

    def _compact(self, f: Function, count: Value) -> Value:
        """Entries become indices of tokens whose weight min_p allows; gives their number."""
        ranking, memory = self.spec.ranking, f["memory"]
        least = f["min_p"].to(self.type)

        def look(i: Value, kept: Value) -> Value:
            index = ranking.index(f, ranking.load(f, memory, i))
            good = self.weight_of(f, index).to(self.type) >= least
            f.store(index, f.gep(memory, kept, 8))
            return kept + good.to(i64, signed=False)

        [kept] = f.loop(0, count, 1, [f.i64(0)], look)
        return f.max(kept, 1)

    def _draw_of(self, f: Function, count: Value) -> Value:
        """The token drawn from the indices in memory."""
        memory = f["memory"]
        f.call(self.by_index.sort, memory, count)

        def weight(i: Value) -> Value:
            return self.weight_of(f, f.load(f.gep(memory, i, 8), i64))

        [total] = f.loop(0, count, 1, [f.const(0.0, f64)], lambda i, s: s + weight(i))
        target = f["point"] * total

        def passed(i: Value, running: Value) -> Value:
            return (running <= target) & (i < count - 1)

        def on(i: Value, running: Value) -> list[Value]:
            return [i + 1, running + weight(i + 1)]

        at, _ = f.while_([f.i64(0), weight(f.i64(0))], passed, on)
        return f.load(f.gep(memory, at, 8), i64)
