"""Softmax down the lanes: a panel's scores [keys][rows] become weights, beside running sums."""

from __future__ import annotations

from rlx.codegen import math
from rlx.codegen.attention import Args, Problem, weight
from rlx.codegen.attention_pairs import pairs, parts
from rlx.codegen.attention_tiles import Tiling
from rlx.codegen.emit import Function, Value, i32, i64, vec
from rlx.codegen.storage import memory_type, widen
from rlx.ir.attrs import MaskKind
from rlx.support.records import dataclass


@dataclass(frozen=True)
class PanelScores:
    """A panel's scores in a block of keys, inside a function that has `args`.

    Tables have an entry for each row of the panel: `ends` and `starts` (i32) say what it sees,
    `masks` (i64) where its part of the mask begins.
    """

    f: Function
    problem: Problem
    tiling: Tiling
    scores: Value
    key: Value
    """The block's first key; all other keys are counted from it."""
    ends: Value
    starts: Value
    masks: Value

    def row(self, key: Value) -> Value:
        return self.f.gep(self.scores, key, self.tiling.panel_bytes)

    @property
    def masks_keys(self) -> bool:
        """Whether all that happens to scores is a mask of keys, the same for every row."""
        p = self.problem
        return p.mask is not None and not p.mask_rows and not p.softcap

    def mask_key(self, scores: list[Value], key: Value) -> list[Value]:
        """A key's scores with a mask of keys."""
        raw = self._mask(key, 0)
        return [self._joined(score, raw) for score in scores]

    def adjust(self, first: Value, last: Value) -> None:
        """Softcap and mask tensor, for keys [first, last)."""
        if self.masks_keys or (not self.problem.softcap and self.problem.mask is None):
            return
        f, t = self.f, self.tiling
        for key in f.range(first, last):
            for j in range(t.vectors):
                at = j * t.vector.bytes
                score = self._capped(f.load(self.row(key), t.vector, at))
                f.store(self._with_mask(score, key, j), self.row(key), at)

    def _capped(self, score: Value) -> Value:
        """c · tanh(score); the division by c went into the queries."""
        cap = self.problem.softcap
        return math.tanh(score) * cap if cap else score

    def _with_mask(self, score: Value, key: Value, vector: int) -> Value:
        return score if self.problem.mask is None else self._joined(score, self._mask(key, vector))

    def _joined(self, score: Value, raw: Value) -> Value:
        """Scores, and the mask's elements that belong to them."""
        assert self.problem.mask is not None
        if self.problem.kind == MaskKind.BIAS:
            return score + widen(self.f, raw, self.problem.mask, self.problem.sums)
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

    def hide(self, first: Value, last: Value) -> None:
        """-inf where a row does not see a key of [first, last)."""
        f, t = self.f, self.tiling
        for key in f.range(first, last):
            position = f.splat((self.key + key).to(i32), t.lanes)
            for j in range(t.vectors):
                at, table = j * t.vector.bytes, j * t.lanes * 4
                keep = position < f.load(self.ends, position.type, table)
                if self.problem.starts:
                    keep = keep & (position >= f.load(self.starts, position.type, table))
                score = f.load(self.row(key), t.vector, at)
                f.store(f.select(keep, score, float("-inf")), self.row(key), at)

    @property
    def places(self) -> list[int]:
        """Byte offsets of the vectors of a row of scores."""
        return [j * self.tiling.vector.bytes for j in range(self.tiling.vectors)]

    def largest(self, first: Value, last: Value, before: list[Value]) -> list[Value]:
        """The maxima of the scores of keys [first, last) and of those before."""
        f, t = self.f, self.tiling

        def larger(key: Value, *found: Value) -> list[Value]:
            row = self.row(key)
            pairs = zip(found, self.places, strict=True)
            return [f.max_fast(m, f.load(row, t.vector, at)) for m, at in pairs]

        return f.loop(first, last, 1, before, larger)

    def weigh(
        self, first: Value, last: Value, tops: list[Value], start: list[Value]
    ) -> list[Value]:
        """Scores of keys [first, last) become weights; gives `start` and their sums.

        A NaN among the scores is one among the weights, and makes the row NaN as it should. Weights
        of pairs of keys lie side by side from row `first` on; an odd last key has 0 beside it.
        """
        f, t, places = self.f, self.tiling, self.places
        if t.pair == 2:
            for at in places:
                f.store(f.const(float("-inf"), t.vector), self.row(last), at)

        def add(key: Value, *sums: Value) -> list[Value]:
            rows, out = [self.row(key + i) for i in range(t.pair)], []
            to = self.row((first + key).udiv(2)) if t.pair == 2 else rows[0]
            for total, top, at in zip(sums, tops, places, strict=True):
                found = [weight(f.load(row, t.vector, at) - top) for row in rows]
                if t.pair == 2:
                    both = pairs(f, *found)
                    found = parts(both)  # so that weights sum up to the total
                f.store(found[0] if t.pair == 1 else both, to, at)
                out.append(sum(found, start=total))
            return out

        return f.loop(first, last, t.pair, start, add)
