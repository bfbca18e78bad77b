"""QR factorisation of real matrices by Householder reflections, in f64, one matrix per work item.

Column j is reflected onto a multiple of the unit vector by I − τ·v·vᵀ; the numbers of v stay below
the diagonal. All rows are contiguous, so that w = vᵀ·a and a − τ·v·wᵀ run along whole vectors.
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
from rlx.ir.dim import upper_bound
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.llvm.builder import Function, Module, Value, f64, i64, vec
from rlx.llvm.storage import load, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_LARGE = 256  # rows or columns; LAPACK keeps larger matrices in cache by blocks


def padded(target: Target, n: int) -> int:
    """The length of a row of n numbers of whole vectors."""
    lanes = target.lanes(64)
    return -(-n // lanes) * lanes


@dataclass(frozen=True)
class Qr(KernelSpec):
    """args: x, q, r, scratch, scratch_bytes, matrices, m, n, k, steps

    x is [m, n], q [m, k] and r [k, n]; there are `steps` reflections. `scratch` holds
    `scratch_bytes` for each worker.
    """

    dtype: DType

    args = ("x", "q", "r", "scratch", "scratch_bytes", "matrices", "m", "n", "k", "steps")

    @staticmethod
    def scratch(target: Target, m: int, n: int) -> int:
        """Bytes each worker needs: both factors, w, v and the factors τ."""
        wide = padded(target, max(m, n))
        return 8 * (m * padded(target, n) + m * wide + 3 * wide)

    def emit(self, m: Module) -> None:
        _Qr(self, m.kernel()).emit()


class _Qr:
    def __init__(self, spec: Qr, f: Function) -> None:
        self.f, self.dtype = f, spec.dtype
        self.lanes = f.target.lanes(64)
        self.vector = vec(self.lanes, f64)
        self.o = Operands(f, spec.args, ("x", "q", "r", "scratch"))
        self.m, self.n, self.k = (self.o[name] for name in ("m", "n", "k"))

    def emit(self) -> None:
        f, o = self.f, self.o
        base = f.gep(o["scratch"], f["tid"].to(i64) * o["scratch_bytes"])
        pitch_a, pitch_q = self._padded(self.n), self._padded(self.k)
        wide = self._padded(f.max(self.m, self.n))
        a = (base, pitch_a)
        q = (f.gep(base, self.m * pitch_a, 8), pitch_q)
        self.w = f.gep(q[0], self.m * wide, 8)
        self.v = f.gep(self.w, wide, 8)
        self.factors = f.gep(self.v, wide, 8)
        lo, hi = f.split(o["matrices"])
        for matrix in f.range(lo, hi):
            self._load(matrix * (self.m * self.n), a)
            for j in f.range(0, o["steps"]):
                self._reflect_column(a, j)
            self._form(a, q)
            self._store(o["q"], matrix * (self.m * self.k), self.m, self.k, q)
            self._store(o["r"], matrix * (self.k * self.n), self.k, self.n, a, upper=True)

    def _padded(self, n: Value) -> Value:
        return self.f.ceil_div(n, self.lanes) * self.lanes

    def _at(self, a: tuple[Value, Value], row: Value, column: Value) -> Value:
        return self.f.gep(a[0], row * a[1] + column, 8)

    def _load(self, start: Value, a: tuple[Value, Value]) -> None:
        f, size = self.f, self.dtype.bytes
        for i in f.range(0, self.m):
            for j in f.range(0, self.n):
                source = f.gep(self.o["x"], start + i * self.n + j, size)
                f.store(load(f, source, self.dtype, 1, f64), self._at(a, i, j))
            for j in f.range(self.n, a[1]):
                f.store(f.const(0, f64), self._at(a, i, j))

    def _reflect_column(self, a: tuple[Value, Value], j: Value) -> None:
        """Find v and τ of column j, and reflect the columns from there on."""
        f, zero, one = self.f, self.f.const(0, f64), self.f.const(1.0, f64)

        def largest(i: Value, most: Value) -> Value:
            return f.max(most, f.abs(f.load(self._at(a, i, j), f64)))

        [tail] = f.loop(j + 1, self.m, 1, [zero], largest)
        alpha = f.load(self._at(a, j, j), f64)
        most = f.max(tail, f.abs(alpha))  # squares of numbers over this neither overflow nor vanish
        scale = f.select(most.eq(0.0), one, most)

        def add(i: Value, total: Value) -> Value:
            part = f.load(self._at(a, i, j), f64) / scale
            return f.fma(part, part, total)

        [squares] = f.loop(j, self.m, 1, [zero], add)
        beta = -f.copysign(f.sqrt(squares) * scale, alpha)
        flat = tail.eq(0.0)  # nothing to reflect
        beta = f.select(flat, alpha, beta)
        divisor = f.select(flat, one, alpha - beta)
        factor = f.select(flat, zero, (beta - alpha) / f.select(flat, one, beta))
        f.store(factor, f.gep(self.factors, j, 8))
        f.store(one, f.gep(self.v, j, 8))
        for i in f.range(j + 1, self.m):
            f.store(f.load(self._at(a, i, j), f64) / divisor, f.gep(self.v, i, 8))
        self._apply(a, j, j + 1, self.n, factor)
        f.store(beta, self._at(a, j, j))
        for i in f.range(j + 1, self.m):
            f.store(f.load(f.gep(self.v, i, 8), f64), self._at(a, i, j))

    def _apply(
        self, a: tuple[Value, Value], j: Value, first: Value, end: Value, factor: Value
    ) -> None:
        """a − τ·v·(vᵀ·a), for rows from j on and columns from `first` on, or some before them in
        the same vector, which are saved."""
        f = self.f
        start = first & -self.lanes
        zero = f.const(0, self.vector)
        scale = f.splat(factor, self.lanes)
        keep = f.iota(vec(self.lanes, i64)) + f.splat(start, self.lanes) < f.splat(
            first, self.lanes
        )
        for column in f.range(start, self._padded(end), self.lanes):

            def add(i: Value, total: Value, column: Value = column) -> Value:
                row = f.load(self._at(a, i, column), self.vector)
                return f.fma(f.broadcast_load(f.gep(self.v, i, 8), f64, self.lanes), row, total)

            [w] = f.loop(j, self.m, 1, [zero], add)
            w = w * scale
            w = f.select(keep & f.splat(column.eq(start), self.lanes), zero, w)
            for i in f.range(j, self.m):
                at = self._at(a, i, column)
                v = f.broadcast_load(f.gep(self.v, i, 8), f64, self.lanes)
                f.store(f.fma(-v, w, f.load(at, self.vector)), at)

    def _form(self, a: tuple[Value, Value], q: tuple[Value, Value]) -> None:
        """q: the reflections of the unit matrix, the last one first."""
        f, o = self.f, self.o
        for i in f.range(0, self.m):
            for j in f.range(0, q[1]):
                f.store(f.select(i.eq(j), f.const(1.0, f64), 0.0), self._at(q, i, j))
        for step in f.range(0, o["steps"]):
            j = o["steps"] - 1 - step
            f.store(f.const(1.0, f64), f.gep(self.v, j, 8))
            for i in f.range(j + 1, self.m):
                f.store(f.load(self._at(a, i, j), f64), f.gep(self.v, i, 8))
            self._apply(q, j, f.i64(0) + j, self.k, f.load(f.gep(self.factors, j, 8), f64))

    def _store(
        self, base: Value, start: Value, rows: Value, columns: Value, a: tuple[Value, Value],
        upper: bool = False,
    ) -> None:  # fmt: skip
        f = self.f
        for i in f.range(0, rows):
            for j in f.range(0, columns):
                value = f.load(self._at(a, i, j), f64)
                value = f.select(j < i, 0.0, value) if upper else value
                store(f, value, f.gep(base, start + i * columns + j, self.dtype.bytes), self.dtype)


def _bounds(node: Node) -> tuple[int, int]:
    rows, columns = node.inputs[0].shape.dims[-2:]
    return upper_bound(rows, node.graph.live), upper_bound(columns, node.graph.live)


def _scratch(node: Node, target: Target, threads: int) -> int:
    return threads * max(Qr.scratch(target, *_bounds(node)), 64)


@lowers("qr", scratch=_scratch)
def lower_qr(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, (q, r) = node.inputs[0], node.outputs
    m, n = x.shape.dims[-2:]
    large = any(isinstance(d, int) and d > _LARGE for d in (m, n))
    if x.dtype.is_complex or large:
        return lower_custom(node, ctx)
    args: list[KernelArg] = [Pointer(x), Pointer(q), Pointer(r), Scratch(node)]
    args += [_scratch(node, ctx.target, 1), prod(x.shape.dims[:-2], start=1), m, n]
    args += [q.shape.dims[-1], n if op.tall else m]
    cost = node.op.cost([x.shape], [q.shape, r.shape])
    return [
        KernelLaunch(
            Qr(x.dtype), args, [x], [q, r], uses_scratch=True, flops=cost.flops, bytes=cost.bytes
        )
    ]
