"""Cholesky factorisation, always in f64: one matrix per work item, row by row in scratch memory.

l[i, j] = (x[i, j] − Σ_k l[i, k]·l[j, k]) / l[j, j] has a dot product of two rows. A complex number
is the block [[re, −im], [im, re]] of a real matrix of twice the size, whose factor consists of such
blocks too. Large matrices are left to LAPACK, which keeps them in cache by blocks.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.lowering import (
    Context,
    KernelArg,
    KernelLaunch,
    Pointer,
    Scratch,
    lower_custom,
    lowers,
)
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.llvm.builder import Function, Module, Value, f64, i64, vec
from rlx.llvm.storage import load, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_LARGE = 256  # rows of real numbers
_UNROLL = 4  # vectors of a dot product that are summed apart


@dataclass(frozen=True)
class Cholesky(KernelSpec):
    """args: x, y, scratch, scratch_bytes, matrices, n

    `scratch` holds `scratch_bytes` for each worker.
    """

    dtype: DType
    upper: bool

    args = ("x", "y", "scratch", "scratch_bytes", "matrices", "n")

    @property
    def width(self) -> int:
        """Real numbers in a row per element."""
        return 2 if self.dtype.is_complex else 1

    def scratch(self, target: Target, n: int) -> int:
        """Bytes each worker needs for matrices of n by n."""
        step = target.lanes(64) * _UNROLL
        rows = n * self.width
        return rows * (-(-rows // step) * step) * 8

    def emit(self, m: Module) -> None:
        _Cholesky(self, m.kernel()).emit()


class _Cholesky:
    def __init__(self, spec: Cholesky, f: Function) -> None:
        self.spec, self.f = spec, f
        self.vector = vec(f.target.lanes(64), f64)
        self.step = self.vector.lanes * _UNROLL
        self.o = Operands(f, spec.args, ("x", "y", "scratch"))
        self.order, self.n = self.o["n"], self.o["n"] * spec.width
        self.pitch = f.ceil_div(self.n, self.step) * self.step

    def emit(self) -> None:
        f, o = self.f, self.o
        self.rows = f.gep(o["scratch"], f["tid"].to(i64) * o["scratch_bytes"])
        lo, hi = f.split(o["matrices"])
        for matrix in f.range(lo, hi):
            start = matrix * (self.order * self.order)
            for row in f.range(0, self.order):
                self._load(start, row)
                for i in range(self.spec.width):
                    self._factor(row * self.spec.width + i)
            self._store(start)

    def _row(self, row: Value) -> Value:
        return self.f.gep(self.rows, row * self.pitch, 8)

    def _place(self, base: Value, start: Value, row: Value, column: Value) -> Value:
        """The address of an element of the lower triangle, or its mirror image."""
        i, j = (column, row) if self.spec.upper else (row, column)
        return self.f.gep(base, start + i * self.order + j, self.spec.dtype.bytes)

    def _load(self, start: Value, row: Value) -> None:
        """A row of the lower triangle; of a complex matrix two rows of blocks."""
        f, dtype, part = self.f, self.spec.dtype, self.spec.dtype.part
        for column in f.range(0, row + 1):
            at = self._place(self.o["x"], start, row, column)
            re = load(f, at, part, 1, f64)
            if not dtype.is_complex:
                f.store(re, f.gep(self._row(row), column, 8))
                continue
            im = load(f, f.gep(at, part.bytes), part, 1, f64)
            im = f.select(column.eq(row), 0.0, -im if self.spec.upper else im)
            first, second = (f.gep(self._row(row * 2 + i), column * 2, 8) for i in (0, 1))
            for to, a, b in ((first, re, -im), (second, im, re)):
                f.store(a, to)
                f.store(b, to, 8)

    def _factor(self, i: Value) -> None:
        """The factor's row i, from the matrix's."""
        f, own = self.f, self._row(i)
        for j in f.range(0, i):
            at = f.gep(own, j, 8)
            value = f.load(at, f64) - self._dot(own, self._row(j), j)
            f.store(value / f.load(f.gep(self._row(j), j, 8), f64), at)
        at = f.gep(own, i, 8)
        rest = f.load(at, f64) - self._dot(own, own, i)
        nan = f.const(float("nan"), f64)
        f.store(f.select(rest > 0.0, f.sqrt(rest), nan), at)

    def _dot(self, a: Value, b: Value, count: Value) -> Value:
        """The dot product of the first `count` elements of two rows."""
        f = self.f
        whole = count & -self.step
        zero = f.const(0, self.vector)

        def add(k: Value, *sums: Value) -> list[Value]:
            found = []
            for u, total in enumerate(sums):
                x, y = (f.load(f.gep(r, k + u * self.vector.lanes, 8), self.vector) for r in (a, b))
                found.append(f.fma(x, y, total))
            return found

        sums = f.loop(0, whole, self.step, [zero] * _UNROLL, add)
        while len(sums) > 1:
            sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]

        def one(k: Value, total: Value) -> Value:
            x, y = (f.load(f.gep(r, k, 8), f64) for r in (a, b))
            return f.fma(x, y, total)

        [total] = f.loop(whole, count, 1, [f.reduce("add", sums[0])], one)
        return total

    def _store(self, start: Value) -> None:
        f, part, width = self.f, self.spec.dtype.part, self.spec.width
        for row in f.range(0, self.order):
            for column in f.range(0, self.order):
                at = self._place(self.o["y"], start, row, column)
                inside = column <= row
                source = f.gep(self._row(row * width), column * width, 8)
                for k in range(width):
                    value = f.load(source, f64, 8 * k)
                    # the block's second number is −im, and the upper factor is conjugated
                    value = value if k == 0 or self.spec.upper else -value
                    zero = column.eq(row) if k else ~inside
                    kept = f.select(zero | ~inside, 0.0, value)
                    store(f, kept, f.gep(at, k * part.bytes), part)


def _spec(node: Node) -> Cholesky:
    op: Any = node.op
    return Cholesky(node.output.dtype, op.upper)


def _worker_bytes(node: Node, target: Target) -> int:
    n = upper_bound(node.output.shape.dims[-1], node.graph.live)
    return max(_spec(node).scratch(target, n), 64)


def _scratch(node: Node, target: Target, threads: int) -> int:
    return threads * _worker_bytes(node, target)


@lowers("cholesky", scratch=_scratch)
def lower_cholesky(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, y = node.inputs[0], node.output
    if 0 in x.shape.dims:
        return []
    spec, n = _spec(node), x.shape.dims[-1]
    if isinstance(n, int) and n * spec.width > _LARGE:
        return lower_custom(node, ctx)
    matrices: Dim = prod(x.shape.dims[:-2], start=1)
    args: list[KernelArg] = [Pointer(x), Pointer(y), Scratch(node)]
    args += [_worker_bytes(node, ctx.target), matrices, n]
    cost = node.op.cost([x.shape], [y.shape])
    return [
        KernelLaunch(spec, args, [x], [y], uses_scratch=True, flops=cost.flops, bytes=cost.bytes)
    ]
