"""LU decomposition with partial pivoting, in f64, of a matrix in scratch memory.

Pivots are blocked by four: within a block only its own columns are updated, and the rest of each
row then takes all four in one pass.
"""

from __future__ import annotations

from functools import partial

from rlx.llvm.builder import Function, Value, f64, vec

PIVOTS = 4


class Elimination:
    """Rows of `pitch` numbers at `rows`: `n` of them, `width` numbers in each."""

    rows: Value
    pitch: Value
    n: Value
    width: Value

    def __init__(self, f: Function) -> None:
        self.f = f
        self.lanes = f.target.lanes(64)
        self.vector = vec(self.lanes, f64)

    def at(self, row: Value, column: Value) -> Value:
        """The address of an element."""
        return self.f.gep(self.rows, row * self.pitch + column, 8)

    def triangulate(self) -> Value:
        """Eliminate below the diagonal. Returns whether the matrix is nonsingular."""
        f = self.f
        [nonsingular] = f.loop(0, self.n, PIVOTS, [f.i64(1)], self.eliminate)
        return nonsingular

    def eliminate(self, k: Value, nonsingular: Value) -> Value:
        """Eliminate with pivots k … k + 3. Returns whether the matrix is nonsingular so far."""
        f = self.f
        end = f.min(k + PIVOTS, self.n)
        [nonsingular] = f.loop(k, end, 1, [nonsingular], lambda p, ok: self._pivot(p, end, ok))
        for row in f.range(k + 1, end):
            for pivot in f.range(k, row):
                self.eliminate_row(row, end, [pivot])
        is_full = (end - k).eq(PIVOTS)
        f.if_(
            is_full, partial(self._update_below, k, end)
        )  # a smaller block is the last: no rows below
        return nonsingular

    def _update_below(self, k: Value, end: Value) -> None:
        for row in self.f.range(end, self.n):
            self.eliminate_row(row, end, [k + i for i in range(PIVOTS)])

    def eliminate_row(self, row: Value, first: Value, pivots: list[Value]) -> None:
        """Subtract the pivot rows, times their factors in `row`, from `row` beyond `first`."""
        f = self.f
        factors = [f.splat(f.load(self.at(row, p), f64), self.lanes) for p in pivots]
        zero = f.i64(0)
        own, others = self.at(row, zero), [self.at(p, zero) for p in pivots]
        for j in f.range(first, self.width, self.lanes):
            value = f.load(f.gep(own, j, 8), self.vector)
            for factor, row_b in zip(factors, others, strict=True):
                value = f.fma(-factor, f.load(f.gep(row_b, j, 8), self.vector), value)
            f.store(value, f.gep(own, j, 8))

    def _pivot(self, k: Value, end: Value, nonsingular: Value) -> Value:
        """Swap the largest element of column k up; update the columns up to `end`."""
        f = self.f

        def larger(i: Value, best: Value, size: Value) -> list[Value]:
            found = f.abs(f.load(self.at(i, k), f64))
            more = found > size
            return [f.select(more, i, best), f.select(more, found, size)]

        best, size = f.loop(k + 1, self.n, 1, [k, f.abs(f.load(self.at(k, k), f64))], larger)
        f.if_(best.ne(k), lambda: self.swap_rows(k, best))
        pivot = f.load(self.at(k, k), f64)
        for i in f.range(k + 1, self.n):
            factor = f.load(self.at(i, k), f64) / pivot
            f.store(factor, self.at(i, k))
            for j in f.range(k + 1, end):
                value = f.load(self.at(i, j), f64)
                f.store(f.fma(-factor, f.load(self.at(k, j), f64), value), self.at(i, j))
        return f.select(size.eq(0.0), 0, nonsingular)

    def swap_rows(self, a: Value, b: Value) -> None:
        f, zero = self.f, self.f.i64(0)
        row_a, row_b = self.at(a, zero), self.at(b, zero)
        for j in f.range(0, self.width, self.lanes):
            x, y = f.gep(row_a, j, 8), f.gep(row_b, j, 8)
            saved = f.load(x, self.vector)
            f.store(f.load(y, self.vector), x)
            f.store(saved, y)
