"""Online softmax: scores of a KV block become probabilities; running max and sum are updated.

Prefill holds scores transposed, [keys][rows], and works along the lanes; decode holds [rows][keys].
Probabilities are exp(score - running max), not yet divided by the running sum.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.attention.problem import (
    GROUP,
    KV_BLOCK,
    Args,
    Problem,
    Rows,
    finite_max,
    halve,
    softmax_exp,
)
from rlx.backends.cpu.kernels.attention.tiles import Tiling, interleave_bf16, split_bf16, to_bf16
from rlx.ir.attrs import MaskKind
from rlx.llvm import math
from rlx.llvm.builder import Function, Type, Value, i32, i64, vec
from rlx.llvm.storage import memory_type, widen
from rlx.support.records import dataclass


def capped(score: Value, cap: float) -> Value:
    """c · tanh(score) for a softcap c: queries were divided by it already."""
    if not cap:
        return score
    with score.fn.exact():
        return math.tanh(score) * cap


def masked(score: Value, raw: Value, problem: Problem) -> Value:
    """Scores with elements of the mask tensor applied."""
    assert problem.mask is not None
    if problem.kind == MaskKind.BIAS:
        with score.fn.exact():
            return score + widen(score.fn, raw, problem.mask, problem.acc)
    return score.fn.select(raw.ne(0), score, float("-inf"))


@dataclass(frozen=True)
class PanelSoftmax:
    """A query panel's scores against a KV block, inside a function that has `args`.

    Per row of the panel: `ends` and `starts` (i32) bound the keys that it sees, `masks` (i64) is
    its first mask element.
    """

    f: Function
    problem: Problem
    tiling: Tiling
    scores: Value
    key: Value
    """The KV block's first key; other keys are relative to it."""
    ends: Value
    starts: Value
    masks: Value

    def row(self, key: Value) -> Value:
        return self.f.gep(self.scores, key, self.tiling.score_row_bytes)

    @property
    def masks_keys_only(self) -> bool:
        """Whether scores change only by a mask tensor over keys, the same for every row."""
        p = self.problem
        return p.mask is not None and not p.mask_rows and not p.softcap

    def mask_key(self, scores: list[Value], key: Value) -> list[Value]:
        """A key's scores with such a mask."""
        raw = self._mask(key, 0)
        return [masked(score, raw, self.problem) for score in scores]

    def adjust(self, first: Value, last: Value) -> None:
        """Softcap and mask tensor, for keys [first, last)."""
        if self.masks_keys_only or (not self.problem.softcap and self.problem.mask is None):
            return
        f, t = self.f, self.tiling
        for key in f.range(first, last):
            for j in range(t.vectors):
                at = j * t.vector.bytes
                score = capped(f.load(self.row(key), t.vector, at), self.problem.softcap)
                f.store(self._with_mask(score, key, j), self.row(key), at)

    def _with_mask(self, score: Value, key: Value, vector: int) -> Value:
        if self.problem.mask is None:
            return score
        return masked(score, self._mask(key, vector), self.problem)

    def _mask(self, key: Value, vector: int) -> Value:
        """The mask's elements for a key and a vector of rows."""
        f, t, args = self.f, self.tiling, Args(self.f)
        assert self.problem.mask is not None
        element = memory_type(self.problem.mask)
        at = (self.key + key) * args["mask_step"]
        if not self.problem.mask_rows:
            first = f.load(self.masks, i64)
            return f.splat(f.load(f.gep(args["mask"], first + at, element), element), t.lanes)
        rows = f.load(self.masks, vec(t.lanes, i64), vector * t.lanes * 8)
        return f.gather(args["mask"], rows + f.splat(at, t.lanes), vec(t.lanes, element))

    def mask_invisible(self, first: Value, last: Value) -> None:
        """-inf where a row does not see a key of [first, last): causal or window mask."""
        f, t = self.f, self.tiling
        for key in f.range(first, last):
            position = f.splat((self.key + key).to(i32), t.lanes)
            for j in range(t.vectors):
                at, table = j * t.vector.bytes, j * t.lanes * 4
                keep = position < f.load(self.ends, position.type, table)
                if self.problem.left_bounded:
                    keep = keep & (position >= f.load(self.starts, position.type, table))
                score = f.load(self.row(key), t.vector, at)
                f.store(f.select(keep, score, float("-inf")), self.row(key), at)

    @property
    def offsets(self) -> list[int]:
        """Byte offsets of the vectors of a row of scores."""
        return [j * self.tiling.vector.bytes for j in range(self.tiling.vectors)]

    def row_max(self, first: Value, last: Value, before: list[Value]) -> list[Value]:
        """The maxima of `before` and of the scores of keys [first, last)."""
        f, t = self.f, self.tiling
        found = f.carry(before)
        for key in found.range(first, last):
            row = self.row(key)
            both = zip(found.values, self.offsets, strict=True)
            found.values = [f.max_fast(m, f.load(row, t.vector, at)) for m, at in both]
        return found.values

    def exponentiate(
        self, first: Value, last: Value, maxima: list[Value], start: list[Value]
    ) -> list[Value]:
        """Scores of keys [first, last) become probabilities; returns `start` plus their sums.

        A NaN score makes its row NaN, as it should. A group of keys at a time: `first` is the first
        of a group, and missing keys count as masked. With the bf16 dot product the probabilities of
        key pairs are interleaved, from row `first` on.
        """
        f, t, offsets = self.f, self.tiling, self.offsets
        end = f.ceil_div(last, GROUP) * GROUP
        for key in f.range(last, end):
            for at in offsets:
                f.store(f.const(float("-inf"), t.vector), self.row(key), at)
        sums = f.carry(start)
        for key in sums.range(first, end, GROUP):
            out = []
            for total, row_max, at in zip(sums.values, maxima, offsets, strict=True):
                group = self._exponentiate_group(key, first, row_max, at)
                with f.exact():
                    out.append(total + group)
            sums.values = out
        return sums.values

    def _exponentiate_group(self, key: Value, first: Value, row_max: Value, at: int) -> Value:
        """One vector of rows of a group; returns its sum. The tree is walked depth first."""
        f, t = self.f, self.tiling
        pairs: list[tuple[int, Value]] = []

        def stored(number: int) -> list[Value]:
            """The probabilities of a key, or of a pair, as PV will read them."""
            rows = [self.row(key + (number + i)) for i in range(t.pair)]
            found = [softmax_exp(f.load(row, t.vector, at) - row_max) for row in rows]
            if t.pair == 1:
                f.store(found[0], rows[0], at)
                return found
            both = interleave_bf16(f, *found)
            pairs.append((number // 2, both))
            return split_bf16(both)

        def tree(number: int, step: int) -> list[Value]:
            """Sums of keys `number`, `number` + `step`, …, of one key or of a pair."""
            if step == GROUP:
                return stored(number)
            a, b = tree(number, 2 * step), tree(number + step, 2 * step)
            with f.exact():
                return [x + y for x, y in zip(a, b, strict=True)]

        found = tree(0, t.pair)
        for number, both in pairs:  # now that all scores of the group were read
            f.store(both, self.row((first + key).udiv(2) + number), at)
        return found[0] if t.pair == 1 else halve(found)[0]


@dataclass(frozen=True)
class RowSoftmax:
    """The scores of `rows` rows of a KV head against keys [begin, count) of a KV block.

    Inside a function that has `args`, `batch` and `row` (the first row); `visible` bounds the keys
    that a row sees.
    """

    f: Function
    problem: Problem
    rows: int
    scores: Value
    head: Value
    key: Value
    """The KV block's first key; other keys are relative to it."""
    begin: Value
    count: Value
    visible: Rows

    @property
    def type(self) -> Type:
        return self.problem.acc

    @property
    def lanes(self) -> int:
        return self.problem.lanes(self.f.target)

    @property
    def step(self) -> int:
        """Keys that become probabilities at once: a group, or vectors for pairs."""
        return max(GROUP, self.lanes * self.problem.pair)

    def exponentiate(self, running_max: Value, running_sum: Value, factors: Value) -> None:
        """Scores become probabilities; the rows' running max and sum are updated.

        `factors` receives exp(old max - new max), which rescales the accumulators.
        """
        f = self.f
        for r in f.range(0, self.rows):
            row_scores = f.gep(self.scores, r, KV_BLOCK * self.type.bytes)
            found = self._adjust(row_scores, f["row"] + r)
            place = f.gep(running_max, r, self.type)
            before = f.load(place, self.type)
            after = f.max(before, f.reduce("max", found))
            row_max = finite_max(after)
            factor = softmax_exp(before - row_max)
            f.store(after, place)
            f.store(factor, f.gep(factors, r, self.type))
            total = f.gep(running_sum, r, self.type)
            with f.exact():
                start = f.load(total, self.type) * factor
            f.store(self._exponentiate_row(row_scores, row_max, start), total)

    def _adjust(self, row_scores: Value, row: Value) -> Value:
        """Softcap and masks on a row of scores; returns the maximum in each lane."""
        f, p, rows = self.f, self.problem, self.visible
        wide = vec(self.lanes, self.type)
        numbers = f.iota(vec(self.lanes, i32))
        end = f.min(rows.kv_end(row) - self.key, self.count).to(i32)
        first = (rows.kv_start(row) - self.key).to(i32) if p.left_bounded else None
        mask = rows.mask_offset(f["batch"], self.head, row) if p.mask is not None else None

        def masked(j: Value) -> Value:
            place = f.gep(row_scores, j, self.type)
            score = capped(f.load(place, wide), p.softcap)
            if mask is not None:
                score = self._with_mask(score, mask, j)
            at = numbers + f.splat(j.to(i32), self.lanes)
            keep = at < f.splat(end, self.lanes)
            if first is not None:
                keep = keep & (at >= f.splat(first, self.lanes))
            score = f.select(keep, score, float("-inf"))
            f.store(score, place)
            return score

        lowest = f.const(float("-inf"), wide)
        last = f.ceil_div(self.count, self.step) * self.step
        whole = last.to(i32) <= end
        if first is not None:
            whole = whole & (first <= self.begin.to(i32))
        if p.softcap or mask is not None:
            whole = f.i64(0).ne(0)
        result = f.carry()
        for all_visible in f.either(whole, result):
            largest = f.carry([lowest])
            for j in largest.range(self.begin, last, self.lanes, guard=False):
                if all_visible:
                    score = f.load(f.gep(row_scores, j, self.type), wide)
                else:
                    score = masked(j)
                largest.values = [f.max_fast(largest.values[0], score)]
            result.values = largest.values
        return result.values[0]

    def _with_mask(self, score: Value, mask: Value, j: Value) -> Value:
        f, p, lanes, args = self.f, self.problem, self.lanes, Args(self.f)
        assert p.mask is not None
        # lanes beyond the last key read its entry again
        numbers = f.iota(vec(lanes, i64)) + f.splat(j, lanes)
        numbers = f.min(numbers, f.splat(self.count - 1, lanes)) + f.splat(self.key, lanes)
        at = numbers * f.splat(args["mask_step"], lanes) + f.splat(mask, lanes)
        raw = f.gather(args["mask"], at, vec(lanes, memory_type(p.mask)))
        return masked(score, raw, p)

    def _exponentiate_row(self, row_scores: Value, row_max: Value, start: Value) -> Value:
        """A row's scores to probabilities (rounded to bf16 for the bf16 dot product); returns
        `start` plus their sum."""
        f, wide, pair = self.f, vec(self.lanes, self.type), self.problem.pair
        shift = f.splat(row_max, self.lanes)
        sums = f.carry([start])
        for j in sums.range(self.begin, self.count, self.step, guard=False):
            [total] = sums.values
            first = f.gep(row_scores, j, self.type)
            count = self.step // self.lanes
            found = [softmax_exp(f.load(first, wide, i * wide.bytes) - shift) for i in range(count)]
            if pair == 2:
                both = to_bf16(f, *found)
                # pairs of keys are lanes of the first half of the memory
                f.store(both, f.gep(row_scores, (self.begin + j).udiv(2), self.type))
                found = [
                    (f.slice(both, i, self.lanes).to(i32) << 16).bits(wide) for i in (0, self.lanes)
                ]
            else:
                for i, p in enumerate(found):
                    f.store(p, first, i * wide.bytes)
            size = GROUP // self.lanes
            with f.exact():
                for i in range(0, count, size):
                    total = total + _group_sum(found[i : i + size])
            sums.values = [total]
        return sums.values[0]


def _group_sum(vectors: list[Value]) -> Value:
    """The sum of a group's probabilities, which lie in the lanes of the vectors in order."""
    f = vectors[0].fn
    while len(vectors) > 1:
        vectors = halve(vectors)
    [sums] = vectors
    while sums.type.lanes > 1:
        half = sums.type.lanes // 2
        [sums] = halve([f.slice(sums, 0, half), f.slice(sums, half, half)])
    return sums
