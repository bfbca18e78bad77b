"""Sampling a token from each row of logits, with the filters in the order of `rlx.ir.ops.sample`.

Inverse transform sampling: weights are summed in blocks, and the block that holds the random point
is searched; before that, top_p zeroes those outside the nucleus. With top_k a heap selects the
tokens.

Random numbers are Philox4x32-10, the same as in `rlx.ir.philox`.
"""

from __future__ import annotations

import math as numbers
from collections.abc import Callable
from functools import cached_property, reduce
from operator import or_

from rlx.backends.cpu.kernels.sampling.top_k import Ascending, Heaps, NucleusFilter, Ranking
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType
from rlx.ir.philox import ROUNDS
from rlx.llvm import math
from rlx.llvm.builder import Function, Module, Value, f32, f64, i32, i64, ptr, vec
from rlx.llvm.nest.registers import from_memory, raw_type, register_type
from rlx.support.records import dataclass

_LOW = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def uniform(f: Function, seed: Value, counter: Value, row: Value) -> Value:
    """An f64 in [0, 1) from word 0 with key `seed` at counter (counter, row); all are i64."""
    start = [counter & _LOW, counter >> 32, row & _LOW, row >> 32, seed & _LOW, seed >> 32]
    state = f.carry(start)
    for _ in state.range(0, ROUNDS):
        c0, c1, c2, c3, k0, k1 = state.values
        a, b = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        mixed = [(b >> 32) ^ c1 ^ k0, b & _LOW, (a >> 32) ^ c3 ^ k1, a & _LOW]
        state.values = [*mixed, k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW]
    return state.values[0].to(f64) * 2.0**-32


VECTORS = 8  # per iteration of the search for the maximum
BLOCK = 512  # weights per partial sum
MIN_MASS = 1e-300  # of the nucleus: the best token is always kept

_RNG, _SETTINGS = 16, 16  # bytes of one

_PARAMS = [("row", ptr), ("n", i64), ("max_logit", f64), ("temperature", f64)]
_RANGE = [("start", i64), ("stop", i64), ("least", f64)]


@dataclass(frozen=True)
class Sample(KernelSpec):
    """args: logits, rng, tokens, next rng, rows, n, scratch, step, then either the address of
    settings, or temperature, top_k, top_p and min_p as bits of f32

    Each worker has `step` bytes of scratch memory, enough for n entries. With `each` there are an
    rng and settings for every row.
    """

    dtype: DType
    settings_arg: bool
    each: bool = False

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
        self.softmax_weights = self._emit_softmax_weights()
        self.filter_weights = self._emit_filter_weights()
        self.nucleus = NucleusFilter(m, spec.ranking, self.type)
        self.sample_all = self._emit_sample_all()
        self.sample_top_k = self._emit_sample_top_k()

    # -- elements -----------------------------------------------------------------------------

    def logits(self, f: Function, row: Value, at: Value, lanes: int) -> Value:
        """Logits in the compute type, NaN as -inf."""
        x = self.stored(f, row, at, lanes)
        return f.select(x.is_nan(), -numbers.inf, x)

    def stored(self, f: Function, row: Value, at: Value, lanes: int) -> Value:
        """Logits in the compute type, with NaN."""
        raw = f.load(f.gep(row, at, self.spec.dtype.bytes), vec(lanes, raw_type(self.spec.dtype)))
        return from_memory(f, raw, self.spec.dtype)

    def weights(self, f: Function, x: Value) -> Value:
        """exp((x - max) / temperature); 1 for the maximum, 0 for -inf."""
        lanes = x.type.lanes
        max_logit, temperature = (
            f.splat(f[name].to(self.type), lanes) for name in ("max_logit", "temperature")
        )
        with f.exact():
            distance = f.select(x.eq(max_logit), 0.0, x - max_logit)
        weight = math.exp(distance / temperature)
        return f.select(x.eq(-numbers.inf), 0.0, weight)

    def _emit_weight(self) -> Function:
        """f64 weight(row, index, max_logit, temperature): the weight of one token."""
        params = [("row", ptr), ("index", i64), ("max_logit", f64), ("temperature", f64)]
        f = self.m.function("weight", params, f64, internal=True)
        f.ret(self.weights(f, self.logits(f, f["row"], f["index"], 1)).to(f64))
        return f

    def weight_of(self, f: Function, index: Value) -> Value:
        return f.call(self.weight, f["row"], index, f["max_logit"], f["temperature"])

    # -- one row ------------------------------------------------------------------------------

    def emit(self) -> None:
        f = self.f
        logits, rng, tokens, next_rng = (f.arg(f["args"], at) for at in range(4))
        rows, n, step = (f.arg(f["args"], at, i64) for at in (4, 5, 7))
        memory = f.gep(f.arg(f["args"], 6), f["tid"].to(i64) * step)
        none = f.i64(0)

        def advance_rng(at: Value) -> None:
            here, after = (f.gep(one, at, _RNG) for one in (rng, next_rng))
            f.store(f.load(here, i64), after)
            f.store(f.load(here, i64, 8) + 1, after, 8)

        if not self.spec.each:
            for _ in f.when(f["tid"].eq(0)):
                advance_rng(none)
            seed, counter, settings = f.load(rng, i64), f.load(rng, i64, 8), self._settings(n, none)
        lo, hi = f.split(rows)
        for r in f.range(lo, hi):
            if self.spec.each:
                here = f.gep(rng, r, _RNG)
                seed, counter, settings = (
                    f.load(here, i64),
                    f.load(here, i64, 8),
                    self._settings(n, r),
                )
                advance_rng(r)
            temperature, top_k, top_p, min_p = settings
            row = f.gep(logits, r * n, self.spec.dtype.bytes)
            max_logit = self._max_logit(row, n)
            u = uniform(f, seed, counter, none if self.spec.each else r)
            args_of_row = [row, n, max_logit.to(f64), temperature, u, min_p, memory]
            token = self._token(args_of_row, max_logit, top_k, top_p)
            f.store(token.to(i32), f.gep(tokens, r, 4))

    def _token(
        self, args_of_row: list[Value], max_logit: Value, top_k: Value, top_p: Value
    ) -> Value:
        """The token of a row: greedy, among the top k, or among all."""
        f = self.f
        row, n, _, temperature, *_ = args_of_row
        token, drawn, among = f.carry(), f.carry(), f.carry()
        for is_empty in f.either(max_logit.eq(-numbers.inf), token):
            if is_empty:
                token.values = [f.i64(0)]
                continue
            for is_random in f.either(temperature > 0.0, drawn):
                if not is_random:
                    drawn.values = [self._argmax(row, n, max_logit)]
                    continue
                for is_limited in f.either(top_k < n, among):
                    if is_limited:
                        among.values = [f.call(self.sample_top_k, *args_of_row, top_k, top_p)]
                    else:
                        among.values = [f.call(self.sample_all, *args_of_row, top_p)]
                drawn.values = among.values
            token.values = drawn.values
        return token.values[0]

    @cached_property
    def f(self) -> Function:
        return self.m.kernel()

    def _settings(self, n: Value, row: Value) -> tuple[Value, Value, Value, Value]:
        """temperature, top_k (n for all), top_p and min_p; `row` is that of the settings."""
        f = self.f
        if self.spec.settings_arg:
            address = f.gep(f.arg(f["args"], 8), row, _SETTINGS)
            temperature, top_k, top_p, min_p = (f.load(address, f32, 4 * k) for k in range(4))
        else:
            temperature, top_k, top_p, min_p = (f.arg(f["args"], 8 + k, f32) for k in range(4))
        whole = f.min_fast(f.const(2.0**31, f32), top_k)
        limited = top_k >= 1.0
        count = f.select(limited, f.select(limited, whole, 0.0).to(i64), n)
        return temperature.to(f64), f.min(count, n), top_p.to(f64), min_p.to(f64)

    def _max_logit(self, row: Value, n: Value) -> Value:
        """The largest logit, ignoring NaN."""
        f, wide = self.f, self.lanes * VECTORS
        whole = n & -wide
        tops = f.carry([f.const(-numbers.inf, vec(self.lanes, self.type))] * VECTORS)
        for i in tops.range(0, whole, wide):
            tops.values = list(map(f.max_fast, self._vectors(row, i), tops.values))
        top = f.carry([f.reduce("max", reduce(f.max_fast, tops.values))])
        for i in top.range(whole, n):
            top.values = [f.max_fast(self.stored(f, row, i, 1), top.values[0])]
        return top.values[0]

    def _vectors(self, row: Value, at: Value) -> list[Value]:
        """The logits of one iteration, with NaN."""
        lanes = self.lanes
        return [self.stored(self.f, row, at + lanes * k, lanes) for k in range(VECTORS)]

    def _argmax(self, row: Value, n: Value, max_logit: Value) -> Value:
        """The first index of the largest logit: greedy decoding."""
        f, wide = self.f, self.lanes * VECTORS
        tops, whole = f.splat(max_logit, self.lanes), n & -wide
        coarse = f.carry([f.i64(0), n < 0])
        for _ in coarse.forever():
            i, here = coarse.values
            coarse.break_unless(~here & (i < whole))
            here = f.any(reduce(or_, [x.eq(tops) for x in self._vectors(row, i)]))
            coarse.values = [f.select(here, i, i + wide), here]
        fine = f.carry(coarse.values[:1])
        for _ in fine.forever():
            [i] = fine.values
            fine.break_unless(self.stored(f, row, i, 1).ne(max_logit) & (i < n - 1))
            fine.values = [i + 1]
        return fine.values[0]

    # -- sampling from all tokens -------------------------------------------------------------

    def _emit_sample_all(self) -> Function:
        """i64 sample_all(row, n, max_logit, temperature, u, min_p, memory, top_p): from all tokens
        that top_p and min_p keep."""
        params = [*_PARAMS, ("u", f64), ("min_p", f64), ("memory", ptr), ("top_p", f64)]
        f = self.m.function("sample_all", params, i64, internal=True)
        n, memory = f["n"], f["memory"]
        args = [f[name] for name in ("row", "max_logit", "temperature", "memory")]
        limited = f["top_p"] < 1.0
        for _ in f.when(limited):
            whole = f.call(self.softmax_weights, *args, f.i64(0), n, f.const(0.0, f64))
            target = f.max_fast(f["top_p"] * whole, MIN_MASS)
            f.call(self.nucleus.keep_nucleus, f["row"], n, target, memory)
        # block sums follow the weights
        sums = f.gep(memory, n * self.type.bytes + 7 & -8)
        total, block_sum = f.carry([f.const(0.0, f64)]), f.carry()
        for start in total.range(0, n, BLOCK):
            range_ = [start, f.min(start + BLOCK, n), f["min_p"]]
            for is_limited in f.either(limited, block_sum):
                if is_limited:
                    block_sum.values = [f.call(self.filter_weights, memory, *range_)]
                else:
                    block_sum.values = [f.call(self.softmax_weights, *args, *range_)]
            f.store(block_sum.values[0], f.gep(sums, start.udiv(BLOCK), 8))
            total.values = [total.values[0] + block_sum.values[0]]
        target = f["u"] * total.values[0]
        start, mass = self._find_block(f, sums, target)
        f.ret(self._search(f, start, f.min(start + BLOCK, n), mass, target, memory))
        return f

    def _find_block(self, f: Function, sums: Value, target: Value) -> list[Value]:
        """The start of the block whose prefix sum exceeds the target, and the mass before it."""

        def after(start: Value, mass: Value) -> Value:
            return mass + f.load(f.gep(sums, start.udiv(BLOCK), 8), f64)

        block = f.carry([f.i64(0), f.const(0.0, f64)])
        for _ in block.forever():
            start, mass = block.values
            # the point is beyond this block, and there is another one
            block.break_unless((after(start, mass) <= target) & (start + BLOCK < f["n"]))
            block.values = [start + BLOCK, after(start, mass)]
        return block.values

    def _emit_softmax_weights(self) -> Function:
        """f64 softmax_weights(row, max_logit, temperature, memory, start, stop, least): store the
        weights of tokens start … stop - 1, 0 if below `least`. Returns their sum."""
        params = [("row", ptr), ("max_logit", f64), ("temperature", f64), ("memory", ptr), *_RANGE]
        f = self.m.function("softmax_weights", params, f64, internal=True)
        return self._store_weights(f, lambda i, n: self.weights(f, self.logits(f, f["row"], i, n)))

    def _emit_filter_weights(self) -> Function:
        """f64 filter_weights(memory, start, stop, least): the same for weights in memory."""
        f = self.m.function("filter_weights", [("memory", ptr), *_RANGE], f64, internal=True)
        at = f["memory"]
        return self._store_weights(
            f, lambda i, n: f.load(f.gep(at, i, self.type), vec(n, self.type))
        )

    def _store_weights(self, f: Function, weights: Callable[[Value, int], Value]) -> Function:
        """Store and sum `weights(index, lanes)`: full vectors, then single elements."""
        lanes, start, stop = self.lanes, f["start"], f["stop"]
        whole = start + (stop - start & -lanes)
        least = f["least"].to(self.type)

        def store_vector(i: Value, lanes: int) -> Value:
            w = weights(i, lanes)
            w = f.select(w >= f.splat(least, lanes), w, 0.0)
            f.store(w, f.gep(f["memory"], i, self.type))
            return w.to(f64)

        sums = f.carry([f.const(0.0, vec(lanes, f64))])
        for i in sums.range(start, whole, lanes):
            sums.values = [sums.values[0] + store_vector(i, lanes)]
        total = f.carry([f.reduce("add", sums.values[0])])
        for i in total.range(whole, stop):
            total.values = [total.values[0] + store_vector(i, 1)]
        f.ret(total.values[0])
        return f

    def _search(
        self, f: Function, start: Value, stop: Value, mass: Value, target: Value, memory: Value
    ) -> Value:
        """The first index whose prefix sum exceeds the target; the last one with a weight if
        rounding leaves none."""
        state = f.carry([mass, f.i64(-1), start])
        for i in state.range(start, stop):
            prefix, found, last = state.values
            w = f.load(f.gep(memory, i, self.type), self.type).to(f64)
            more = prefix + w
            hit = found.eq(-1) & (more > target)
            state.values = [more, f.select(hit, i, found), f.select(w > 0.0, i, last)]
        _, found, last = state.values
        return f.select(found.eq(-1), last, found)

    # -- sampling from the top k --------------------------------------------------------------

    def _emit_sample_top_k(self) -> Function:
        """i64 sample_top_k(row, n, max_logit, temperature, u, min_p, memory, top_k, top_p)"""
        params = [*_PARAMS, ("u", f64), ("min_p", f64), ("memory", ptr)]
        f = self.m.function(
            "sample_top_k", [*params, ("top_k", i64), ("top_p", f64)], i64, internal=True
        )
        count = f["top_k"]
        f.call(self.select, f["row"], f["n"], count, f["memory"])
        count_kept = self._nucleus_size(f, count, f["top_p"], self._total_weight(f, count))
        f.ret(self._sample_indices(f, self._filter_min_p(f, count_kept)))
        return f

    def _entry_weight(self, f: Function, entry: Value) -> Value:
        """The weight of the token of an entry in memory."""
        ranking = self.spec.ranking
        return self.weight_of(f, ranking.index(f, ranking.load(f, f["memory"], entry)))

    def _total_weight(self, f: Function, count: Value) -> Value:
        total = f.carry([f.const(0.0, f64)])
        for i in total.range(0, count):
            total.values = [total.values[0] + self._entry_weight(f, i)]
        return total.values[0]

    def _nucleus_size(self, f: Function, count: Value, share: Value, total: Value) -> Value:
        """How many of the selected tokens top_p keeps: those before the target mass is reached, and
        always the first."""
        count_kept = f.carry()
        for is_limited in f.either(share < 1.0, count_kept):
            if not is_limited:
                count_kept.values = [count]
                continue
            target, state = share * total, f.carry([f.i64(0), f.const(0.0, f64)])
            for _ in state.forever():
                i, mass = state.values
                state.break_unless((i < count) & ((mass < target) | i.eq(0)))
                state.values = [i + 1, mass + self._entry_weight(f, i)]
            count_kept.values = state.values[:1]
        return count_kept.values[0]

    def _filter_min_p(self, f: Function, count: Value) -> Value:
        """Replace the entries by the indices of tokens that min_p keeps. Returns their number."""
        ranking, memory = self.spec.ranking, f["memory"]
        least = f["min_p"].to(self.type)
        count_kept = f.carry([f.i64(0)])
        for i in count_kept.range(0, count):
            index = ranking.index(f, ranking.load(f, memory, i))
            good = self.weight_of(f, index).to(self.type) >= least
            f.store(index, f.gep(memory, count_kept.values[0], 8))
            count_kept.values = [count_kept.values[0] + good.to(i64, signed=False)]
        return f.max(count_kept.values[0], 1)

    def _sample_indices(self, f: Function, count: Value) -> Value:
        """Sample a token from the indices in memory."""
        memory = f["memory"]
        f.call(self.by_index.sort, memory, count)

        def weight(i: Value) -> Value:
            return self.weight_of(f, f.load(f.gep(memory, i, 8), i64))

        total = f.carry([f.const(0.0, f64)])
        for i in total.range(0, count):
            total.values = [total.values[0] + weight(i)]
        target, state = f["u"] * total.values[0], f.carry([f.i64(0), weight(f.i64(0))])
        for _ in state.forever():
            i, prefix = state.values
            state.break_unless((prefix <= target) & (i < count - 1))
            state.values = [i + 1, prefix + weight(i + 1)]
        return f.load(f.gep(memory, state.values[0], 8), i64)
