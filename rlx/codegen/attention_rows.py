"""Softmax along rows: a few rows' scores [rows][keys] become weights, beside running sums."""

from __future__ import annotations

from rlx.codegen import math
from rlx.codegen.attention import Args, Problem, Rows, or_zero, weight
from rlx.codegen.emit import Function, Type, Value, i32, i64, vec
from rlx.codegen.storage import memory_type, widen
from rlx.ir.attrs import MaskKind
from rlx.support.records import dataclass


@dataclass(frozen=True)
class RowScores:
    """The scores of `rows` rows of a key head in a block of keys.

    Inside a function that has `args`, `batch` and `row`, the first row's number; `seen` says which
    keys a row sees.
    """

    f: Function
    problem: Problem
    rows: int
    block: int
    scores: Value
    head: Value
    key: Value
    """The block's first key; all other keys are counted from it."""
    count: Value
    seen: Rows

    @property
    def type(self) -> Type:
        return self.problem.sums

    @property
    def lanes(self) -> int:
        return self.problem.lanes(self.f.target)

    def weigh(self, maxima: Value, totals: Value, old: Value) -> None:
        """Scores become weights; the rows' maxima and totals are brought up to date.

        `old` receives the factors by which sums made so far must be multiplied.
        """
        f = self.f
        for r in f.range(0, self.rows):
            line = f.gep(self.scores, r, self.block * self.type.bytes)
            found = self._adjust(line, f["row"] + r)
            place = f.gep(maxima, r, self.type)
            before = f.load(place, self.type)
            after = f.max(before, f.reduce("max", found))
            top = or_zero(after)
            factor = weight(before - top)
            f.store(after, place)
            f.store(factor, f.gep(old, r, self.type))
            total = f.gep(totals, r, self.type)
            f.store(f.fma(f.load(total, self.type), factor, self._exponentials(line, top)), total)

    def _adjust(self, line: Value, row: Value) -> Value:
        """Softcap, mask and visibility on a row of scores; gives the largest in each lane."""
        f, p, rows = self.f, self.problem, self.seen
        wide = vec(self.lanes, self.type)
        numbers = f.iota(vec(self.lanes, i32))
        end = f.min(rows.end(row) - self.key, self.count).to(i32)
        first = (rows.start(row) - self.key).to(i32) if p.starts else None
        mask = rows.mask_offset(f["batch"], self.head, row) if p.mask is not None else None

        def step(j: Value, found: Value) -> Value:
            place = f.gep(line, j, self.type)
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

    def _exponentials(self, line: Value, top: Value) -> Value:
        """A row's scores to weights; gives their total."""
        f, wide = self.f, vec(self.lanes, self.type)
        shift = f.splat(top, self.lanes)

        def step(j: Value, total: Value) -> Value:
            place = f.gep(line, j, self.type)
            w = weight(f.load(place, wide) - shift)
            f.store(w, place)
            return total + w

        start = [f.const(0.0, wide)]
        return f.reduce("add", f.loop(0, self.count, self.lanes, start, step, guard=False)[0])
