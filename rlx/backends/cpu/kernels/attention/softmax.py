"""Online softmax: scores of a KV block become probabilities; running max and sum are updated.

Prefill holds scores transposed, [keys][rows], and works along the lanes; decode holds [rows][keys].
Probabilities are exp(score - running max), not yet divided by the running sum.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.attention.problem import Args, Problem, Rows, finite_max, softmax_exp
from rlx.backends.cpu.kernels.attention.tiles import Tiling, interleave_bf16, split_bf16
from rlx.ir.attrs import MaskKind
from rlx.llvm import math
from rlx.llvm.builder import Function, Type, Value, i32, i64, vec
from rlx.llvm.storage import memory_type, widen
from rlx.support.records import dataclass


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
        return [self._apply_mask(score, raw) for score in scores]

    def adjust(self, first: Value, last: Value) -> None:
        """Softcap and mask tensor, for keys [first, last)."""
        if self.masks_keys_only or (not self.problem.softcap and self.problem.mask is None):
            return
        f, t = self.f, self.tiling
        for key in f.range(first, last):
            for j in range(t.vectors):
                at = j * t.vector.bytes
                score = self._capped(f.load(self.row(key), t.vector, at))
                f.store(self._with_mask(score, key, j), self.row(key), at)

    def _capped(self, score: Value) -> Value:
        """c · tanh(score): queries were divided by c already."""
        cap = self.problem.softcap
        return math.tanh(score) * cap if cap else score

    def _with_mask(self, score: Value, key: Value, vector: int) -> Value:
        return (
            score if self.problem.mask is None else self._apply_mask(score, self._mask(key, vector))
        )

    def _apply_mask(self, score: Value, raw: Value) -> Value:
        """Scores with their mask elements applied."""
        assert self.problem.mask is not None
        if self.problem.kind == MaskKind.BIAS:
            return score + widen(self.f, raw, self.problem.mask, self.problem.acc)
        return self.f.select(raw.ne(0), score, float("-inf"))

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

        def larger(key: Value, *found: Value) -> list[Value]:
            row = self.row(key)
            both = zip(found, self.offsets, strict=True)
            return [f.max_fast(m, f.load(row, t.vector, at)) for m, at in both]

        return f.loop(first, last, 1, before, larger)

    def exponentiate(
        self, first: Value, last: Value, maxima: list[Value], start: list[Value]
    ) -> list[Value]:
        """Scores of keys [first, last) become probabilities; returns `start` plus their sums.

        A NaN score makes its row NaN, as it should. With the bf16 dot product the probabilities of
        key pairs are interleaved, from row `first` on; an odd last key is paired with 0.
        """
        f, t, offsets = self.f, self.tiling, self.offsets
        if t.pair == 2:
            for at in offsets:
                f.store(f.const(float("-inf"), t.vector), self.row(last), at)

        def add(key: Value, *sums: Value) -> list[Value]:
            rows, out = [self.row(key + i) for i in range(t.pair)], []
            to = self.row((first + key).udiv(2)) if t.pair == 2 else rows[0]
            for total, row_max, at in zip(sums, maxima, offsets, strict=True):
                found = [softmax_exp(f.load(row, t.vector, at) - row_max) for row in rows]
                if t.pair == 2:
                    both = interleave_bf16(f, *found)
                    found = split_bf16(both)  # the running sum adds what PV will read
                f.store(found[0] if t.pair == 1 else both, to, at)
                out.append(sum(found, start=total))
            return out

        return f.loop(first, last, t.pair, start, add)


@dataclass(frozen=True)
class RowSoftmax:
    """The scores of `rows` rows of a KV head against a KV block.

    Inside a function that has `args`, `batch` and `row` (the first row); `visible` bounds the keys
    that a row sees.
    """

    f: Function
    problem: Problem
    rows: int
    block: int
    scores: Value
    head: Value
    key: Value
    """The KV block's first key; other keys are relative to it."""
    count: Value
    visible: Rows

    @property
    def type(self) -> Type:
        return self.problem.acc

    @property
    def lanes(self) -> int:
        return self.problem.lanes(self.f.target)

    def exponentiate(self, running_max: Value, running_sum: Value, factors: Value) -> None:
        """Scores become probabilities; the rows' running max and sum are updated.

        `factors` receives exp(old max - new max), which rescales the accumulators.
        """
        f = self.f
        for r in f.range(0, self.rows):
            row_scores = f.gep(self.scores, r, self.block * self.type.bytes)
            found = self._adjust(row_scores, f["row"] + r)
            place = f.gep(running_max, r, self.type)
            before = f.load(place, self.type)
            after = f.max(before, f.reduce("max", found))
            row_max = finite_max(after)
            factor = softmax_exp(before - row_max)
            f.store(after, place)
            f.store(factor, f.gep(factors, r, self.type))
            total = f.gep(running_sum, r, self.type)
            scaled = f.load(total, self.type), factor
            f.store(f.fma(*scaled, self._exponentiate_row(row_scores, row_max)), total)

    def _adjust(self, row_scores: Value, row: Value) -> Value:
        """Softcap and masks on a row of scores; returns the maximum in each lane."""
        f, p, rows = self.f, self.problem, self.visible
        wide = vec(self.lanes, self.type)
        numbers = f.iota(vec(self.lanes, i32))
        end = f.min(rows.kv_end(row) - self.key, self.count).to(i32)
        first = (rows.kv_start(row) - self.key).to(i32) if p.left_bounded else None
        mask = rows.mask_offset(f["batch"], self.head, row) if p.mask is not None else None

        def step(j: Value, found: Value) -> Value:
            place = f.gep(row_scores, j, self.type)
            score = f.load(place, wide)
            if p.softcap:
                score = math.tanh(score) * p.softcap
            if mask is not None:
                score = self._with_mask(score, mask, j)
            at = numbers + f.splat(j.to(i32), self.lanes)
            keep = at < f.splat(end, self.lanes)
            if first is not None:
                keep = keep & (at >= f.splat(first, self.lanes))
            score = f.select(keep, score, float("-inf"))
            f.store(score, place)
            return f.max_fast(found, score)

        lowest = f.const(float("-inf"), wide)
        return f.loop(0, self.count, self.lanes, [lowest], step, guard=False)[0]

    def _with_mask(self, score: Value, mask: Value, j: Value) -> Value:
        f, p, lanes, args = self.f, self.problem, self.lanes, Args(self.f)
        assert p.mask is not None
        # lanes beyond the last key read its entry again
        numbers = f.iota(vec(lanes, i64)) + f.splat(j, lanes)
        numbers = f.min(numbers, f.splat(self.count - 1, lanes)) + f.splat(self.key, lanes)
        at = numbers * f.splat(args["mask_step"], lanes) + f.splat(mask, lanes)
        raw = f.gather(args["mask"], at, vec(lanes, memory_type(p.mask)))
        if p.kind == MaskKind.BIAS:
            return score + widen(f, raw, p.mask, self.type)
        return f.select(raw.ne(0), score, float("-inf"))

    def _exponentiate_row(self, row_scores: Value, row_max: Value) -> Value:
        """A row's scores to probabilities; returns their sum."""
        f, wide = self.f, vec(self.lanes, self.type)
        shift = f.splat(row_max, self.lanes)

        def step(j: Value, total: Value) -> Value:
            place = f.gep(row_scores, j, self.type)
            w = softmax_exp(f.load(place, wide) - shift)
            f.store(w, place)
            return total + w

        start = [f.const(0.0, wide)]
        return f.reduce("add", f.loop(0, self.count, self.lanes, start, step, guard=False)[0])
