"""Linear systems by elimination with row pivoting, in f64 whatever the operands are.

A unit of work is one matrix with some of its right-hand sides, laid out side by side as rows of
working memory, so that eliminating acts on both at once. Pivots are taken four at a time: only
their own columns are kept up to date between them, and the rest of a row then meets all four in one
pass.
"""

from __future__ import annotations

from functools import partial

from rlx.codegen.emit import Function, Module, Value, f32, f64, i64, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.operands import Operands
from rlx.codegen.storage import load, memory_type, store
from rlx.codegen.target import Target
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

_PIVOTS = 4


@dataclass(frozen=True)
class Solve(KernelSpec):
    """args: a, b, x, scratch, stride, n, m, parts, then per batch axis its size and the elements
    from one matrix of a, and of b, to the next

    x with a·x = b, NaN where a is singular. Each of `parts` parts of the right-hand sides is a unit
    of its own; `scratch` holds `stride` bytes for each worker.
    """

    a: DType
    b: DType
    x: DType
    axes: int

    @property
    def args(self) -> list[str]:
        names = ["a", "b", "x", "scratch", "stride", "n", "m", "parts"]
        for i in range(self.axes):
            names += [f"size{i}", f"a{i}", f"b{i}"]
        return names

    @staticmethod
    def scratch(target: Target, n: int, m: int) -> int:
        """Bytes each worker needs for a matrix and `m` right-hand sides."""
        lanes = target.lanes(64)
        return n * (-(-(n + m) // lanes) + 1) * lanes * 8

    def emit(self, m: Module) -> None:
        _Solve(self, m.kernel()).emit()


class _Solve:
    def __init__(self, spec: Solve, f: Function) -> None:
        self.spec, self.f = spec, f
        self.lanes = f.target.lanes(64)
        self.vector = vec(self.lanes, f64)
        self.o = Operands(f, spec.args, ("a", "b", "x", "scratch"))
        self.n, self.m = self.o["n"], self.o["m"]

    def emit(self) -> None:
        f, o = self.f, self.o
        self.rows = f.gep(o["scratch"], f["tid"].to(i64) * o["stride"])
        matrices = f.i64(1)
        for i in range(self.spec.axes):
            matrices = matrices * o[f"size{i}"]
        lo, hi = f.split(matrices * o["parts"])
        for unit in f.range(lo, hi):
            matrix, part = unit.udiv(o["parts"]), unit.urem(o["parts"])
            first = (part * self.m).udiv(o["parts"])
            last = ((part + 1) * self.m).udiv(o["parts"])
            self._system(matrix, first, last - first)

    def _system(self, matrix: Value, first: Value, count: Value) -> None:
        f = self.f
        self.width = self.n + count
        self.pitch = (f.ceil_div(self.width, self.lanes) + 1) * self.lanes
        self._bring_in(matrix, first, count)
        [regular] = f.loop(0, self.n, _PIVOTS, [f.i64(1)], self._eliminate)
        self._substitute()
        nan = f.const(float("nan"), f64)
        target = matrix * (self.n * self.m) + first
        for i in f.range(0, self.n):
            for j in f.range(0, count):
                found = f.load(self._at(i, self.n + j), f64)
                value = f.select(regular.ne(0), found, nan)
                place = f.gep(self.o["x"], target + i * self.m + j, memory_type(self.spec.x))
                store(f, value if self.spec.x.bits > 8 else value.to(f32), place, self.spec.x)

    def _at(self, row: Value, column: Value) -> Value:
        return self.f.gep(self.rows, row * self.pitch + column, 8)

    def _bring_in(self, matrix: Value, first: Value, count: Value) -> None:
        f, o, n = self.f, self.o, self.n
        a = b = f.i64(0)
        rest = matrix
        for i in reversed(range(self.spec.axes)):
            index = rest.urem(o[f"size{i}"])
            rest = rest.udiv(o[f"size{i}"])
            a, b = a + index * o[f"a{i}"], b + index * o[f"b{i}"]
        for row in f.range(0, n):
            self._copy("a", a + row * n, n, self._at(row, f.i64(0)))
            self._copy("b", b + row * self.m + first, count, self._at(row, n))

    def _copy(self, name: str, at: Value, count: Value, to: Value) -> None:
        f, dtype = self.f, getattr(self.spec, name)
        source = f.gep(self.o[name], at, memory_type(dtype))
        for i in f.range(0, count):
            value = load(f, f.gep(source, i, memory_type(dtype)), dtype, 1, f64)
            f.store(value, f.gep(to, i, 8))

    # -- elimination ------------------------------------------------------------------------------

    def _eliminate(self, k: Value, regular: Value) -> Value:
        """Pivots k … k + 3; gives whether the matrix is regular so far."""
        f = self.f
        end = f.min(k + _PIVOTS, self.n)
        [regular] = f.loop(k, end, 1, [regular], lambda p, ok: self._pivot(p, end, ok))
        for row in f.range(k + 1, end):
            for pivot in f.range(k, row):
                self._reduce(row, end, [pivot])
        whole = (end - k).eq(_PIVOTS)
        f.if_(whole, partial(self._rest, k, end))  # fewer are the last: no row is left below them
        return regular

    def _rest(self, k: Value, end: Value) -> None:
        for row in self.f.range(end, self.n):
            self._reduce(row, end, [k + i for i in range(_PIVOTS)])

    def _reduce(self, row: Value, first: Value, pivots: list[Value]) -> None:
        """Rows of pivots, times what stands for them in `row`, taken from it beyond `first`."""
        f = self.f
        shares = [f.splat(f.load(self._at(row, p), f64), self.lanes) for p in pivots]
        zero = f.i64(0)
        own, others = self._at(row, zero), [self._at(p, zero) for p in pivots]
        for j in f.range(first, self.width, self.lanes):
            value = f.load(f.gep(own, j, 8), self.vector)
            for share, other in zip(shares, others, strict=True):
                value = f.fma(-share, f.load(f.gep(other, j, 8), self.vector), value)
            f.store(value, f.gep(own, j, 8))

    def _pivot(self, k: Value, end: Value, regular: Value) -> Value:
        """The largest of column k comes up; the columns to `end` are kept up to date."""
        f = self.f

        def larger(i: Value, best: Value, size: Value) -> list[Value]:
            found = f.abs(f.load(self._at(i, k), f64))
            more = found > size
            return [f.select(more, i, best), f.select(more, found, size)]

        best, size = f.loop(k + 1, self.n, 1, [k, f.abs(f.load(self._at(k, k), f64))], larger)
        f.if_(best.ne(k), lambda: self._exchange(k, best))
        pivot = f.load(self._at(k, k), f64)
        for i in f.range(k + 1, self.n):
            share = f.load(self._at(i, k), f64) / pivot
            f.store(share, self._at(i, k))
            for j in f.range(k + 1, end):
                value = f.load(self._at(i, j), f64)
                f.store(f.fma(-share, f.load(self._at(k, j), f64), value), self._at(i, j))
        return f.select(size.eq(0.0), 0, regular)

    def _exchange(self, a: Value, b: Value) -> None:
        f, zero = self.f, self.f.i64(0)
        one, other = self._at(a, zero), self._at(b, zero)
        for j in f.range(0, self.width, self.lanes):
            x, y = f.gep(one, j, 8), f.gep(other, j, 8)
            kept = f.load(x, self.vector)
            f.store(f.load(y, self.vector), x)
            f.store(kept, y)

    def _substitute(self) -> None:
        """From the last row up: what is known is taken away, then the pivot divides."""
        f = self.f
        for step in f.range(0, self.n):
            row = self.n - 1 - step
            whole = self.n - (self.n - 1 - row).urem(_PIVOTS)
            for known in f.range(row + 1, whole, _PIVOTS):
                self._reduce(row, self.n, [known + i for i in range(_PIVOTS)])
            for known in f.range(whole, self.n):
                self._reduce(row, self.n, [known])
            pivot = f.splat(f.load(self._at(row, row), f64), self.lanes)
            for j in f.range(self.n, self.width, self.lanes):
                place = self._at(row, j)
                f.store(f.load(place, self.vector) / pivot, place)
