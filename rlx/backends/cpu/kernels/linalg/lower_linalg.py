"""Lowering of Fourier transforms and linear systems, and the kernel of the latter.

A work item is one matrix with some of its right-hand sides, as an augmented matrix in scratch
memory, so that elimination updates both at once.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cpu.kernels.linalg.elimination import PIVOTS, Elimination
from rlx.backends.cpu.kernels.linalg.fft import Dft, Fft
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.dtype import DType
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node
from rlx.ir.shape import Shape, normalize_axis
from rlx.llvm.builder import Function, Module, Value, f32, f64, i64
from rlx.llvm.storage import load, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Solve(KernelSpec):
    """args: a, b, x, scratch, scratch_bytes, n, m, splits, then per batch axis its size and the
    batch strides of a and b in elements

    x with a·x = b, NaN where a is singular. The right-hand sides are split into `splits` work
    items; `scratch` holds `scratch_bytes` for each worker. A complex system is a real one of twice
    the size: [[re a, −im a], [im a, re a]]·[re x; im x] = [re b; im b].
    """

    a: DType
    b: DType
    x: DType
    axes: int

    @property
    def args(self) -> list[str]:
        names = ["a", "b", "x", "scratch", "scratch_bytes", "n", "m", "splits"]
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


class _Solve(Elimination):
    def __init__(self, spec: Solve, f: Function) -> None:
        super().__init__(f)
        self.spec, self.o = spec, Operands(f, spec.args, ("a", "b", "x", "scratch"))
        self.order, self.m = self.o["n"], self.o["m"]
        self.n = self.order * 2 if spec.x.is_complex else self.order  # rows of the real system

    def emit(self) -> None:
        f, o = self.f, self.o
        self.rows = f.gep(o["scratch"], f["tid"].to(i64) * o["scratch_bytes"])
        matrices = f.i64(1)
        for i in range(self.spec.axes):
            matrices = matrices * o[f"size{i}"]
        lo, hi = f.split(matrices * o["splits"])
        for unit in f.range(lo, hi):
            matrix, split = unit.udiv(o["splits"]), unit.urem(o["splits"])
            first = (split * self.m).udiv(o["splits"])
            last = ((split + 1) * self.m).udiv(o["splits"])
            self._system(matrix, first, last - first)

    def _system(self, matrix: Value, first: Value, count: Value) -> None:
        f = self.f
        self.width = self.n + count
        self.pitch = (f.ceil_div(self.width, self.lanes) + 1) * self.lanes
        self._load_system(matrix, first, count)
        nonsingular = self.triangulate()
        self._substitute()
        nan = f.const(float("nan"), f64)
        x = self.spec.x
        target = matrix * (self.order * self.m) + first
        for i in f.range(0, self.order):
            for j in f.range(0, count):
                address = f.gep(self.o["x"], target + i * self.m + j, x.bytes)
                for k in range(2 if x.is_complex else 1):
                    found = f.load(self.at(i + self.order * k, self.n + j), f64)
                    value = f.select(nonsingular.ne(0), found, nan)
                    value = value if x.bits > 8 else value.to(f32)
                    store(f, value, f.gep(address, k * x.part.bytes), x.part)

    def _load_system(self, matrix: Value, first: Value, count: Value) -> None:
        f, o, n = self.f, self.o, self.order
        a = b = f.i64(0)
        rest = matrix
        for i in reversed(range(self.spec.axes)):
            index = rest.urem(o[f"size{i}"])
            rest = rest.udiv(o[f"size{i}"])
            a, b = a + index * o[f"a{i}"], b + index * o[f"b{i}"]
        for row in f.range(0, n):
            at_a, at_b = a + row * n, b + row * self.m + first
            self._copy("a", at_a, n, self.at(row, f.i64(0)))
            self._copy("b", at_b, count, self.at(row, self.n))
            if self.spec.x.is_complex:
                self._copy("a", at_a, n, self.at(row, n), part=1, sign=-1.0)
                self._copy("a", at_a, n, self.at(row + n, f.i64(0)), part=1)
                self._copy("a", at_a, n, self.at(row + n, n))
                self._copy("b", at_b, count, self.at(row + n, self.n), part=1)

    def _copy(
        self, name: str, at: Value, count: Value, to: Value, part: int = 0, sign: float = 1.0
    ) -> None:
        """Copy real (0) or imaginary parts (1) from an operand to a row."""
        f, dtype = self.f, getattr(self.spec, name)
        source = f.gep(self.o[name], at, dtype.bytes)
        for i in f.range(0, count):
            if part and not dtype.is_complex:
                value = f.const(0, f64)
            else:
                address = f.gep(f.gep(source, i, dtype.bytes), part * dtype.part.bytes)
                value = load(f, address, dtype.part, 1, f64)
            f.store(value if sign == 1.0 else -value, f.gep(to, i, 8))

    def _substitute(self) -> None:
        """Back substitution."""
        f = self.f
        for step in f.range(0, self.n):
            row = self.n - 1 - step
            whole = self.n - (self.n - 1 - row).urem(PIVOTS)
            for solved in f.range(row + 1, whole, PIVOTS):
                self.eliminate_row(row, self.n, [solved + i for i in range(PIVOTS)])
            for solved in f.range(whole, self.n):
                self.eliminate_row(row, self.n, [solved])
            pivot = f.splat(f.load(self.at(row, row), f64), self.lanes)
            for j in f.range(self.n, self.width, self.lanes):
                address = self.at(row, j)
                f.store(f.load(address, self.vector) / pivot, address)


def _axes(node: Node) -> tuple[Dim, Dim, Dim]:
    """The shape as [outer, n, inner] around the axis."""
    op: Any = node.op
    whole = node.output.shape if op.name == "irfft" else node.inputs[0].shape
    axis = normalize_axis(op.axis, whole.rank)
    outer, inner = prod(whole.dims[:axis], start=1), prod(whole.dims[axis + 1 :], start=1)
    return outer, whole.dims[axis], inner


def _kind(node: Node) -> tuple[str, bool]:
    op: Any = node.op
    if op.name == "irfft":
        return "irfft", True
    if op.name == "rfft":
        return "rfft", False
    return "complex" if node.inputs[0].shape.dtype.kind == "complex" else "real", op.inverse


def _fft(node: Node, target: Target) -> Fft | None:
    """The FFT kernel, if the length is constant."""
    outer, n, inner = _axes(node)
    if not isinstance(n, int):
        return None
    kind, inverse = _kind(node)
    signals = upper_bound(outer * inner, node.graph.live)
    dtype = node.inputs[0].shape.dtype
    return Fft.make(kind, n, dtype, inverse, target, signals, single_inner=inner == 1)


def _scratch(node: Node, target: Target, threads: int) -> int:
    spec = _fft(node, target)
    return 0 if spec is None else spec.scratch * threads


@lowers("fft", "rfft", "irfft", scratch=_scratch)
def lower_fft(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, y = node.inputs[0], node.output
    outer, n, inner = _axes(node)
    cost = node.op.cost([x.shape], [y.shape])
    spec = _fft(node, ctx.target)
    if spec is None:
        args: list[KernelArg] = [Pointer(x), Pointer(y), outer, n, inner]
        kind, inverse = _kind(node)
        dft = Dft(kind, x.shape.dtype, inverse)
        return [KernelLaunch(dft, args, [x], [y], flops=cost.flops, bytes=cost.bytes)]
    args = [Pointer(x), Pointer(y), Scratch(node), spec.scratch, outer, inner]
    return [
        KernelLaunch(spec, args, [x], [y], uses_scratch=True, flops=cost.flops, bytes=cost.bytes)
    ]


def _solve_sizes(node: Node) -> tuple[int, int]:
    """Upper bounds of the rows and right-hand sides of the real systems."""
    n, m = node.output.shape.dims[-2:]
    order = upper_bound(n, node.graph.live)
    return order * 2 if node.output.dtype.is_complex else order, upper_bound(m, node.graph.live)


def _rhs_splits(node: Node, threads: int) -> int:
    """Splits of the right-hand sides; each repeats the elimination, so there must be many."""
    n, m = _solve_sizes(node)
    matrices = prod(node.output.shape.dims[:-2], start=1)
    if not isinstance(matrices, int) or matrices == 0 or n == 0:
        return 1
    return max(1, min(threads // matrices, m // n))


def _solve_scratch(node: Node, target: Target, threads: int) -> int:
    return threads * max(Solve.scratch(target, *_solve_sizes(node)), 64)


@lowers("solve", scratch=_solve_scratch)
def lower_solve(node: Node, ctx: Context) -> list[KernelLaunch]:
    a, b = node.inputs
    x = node.output
    n, m = x.shape.dims[-2:]
    batch = x.shape.dims[:-2]
    spec = Solve(a.shape.dtype, b.shape.dtype, x.shape.dtype, len(batch))
    args: list[KernelArg] = [Pointer(a), Pointer(b), Pointer(x), Scratch(node)]
    args += [Solve.scratch(ctx.target, *_solve_sizes(node)), n, m, _rhs_splits(node, ctx.threads)]
    for axis, size in enumerate(batch):
        args += [size, *[_batch_stride(v.shape, axis - len(batch) - 2) for v in (a, b)]]
    cost = node.op.cost([a.shape, b.shape], [x.shape])
    return [
        KernelLaunch(spec, args, [a, b], [x], uses_scratch=True, flops=cost.flops, bytes=cost.bytes)
    ]


def _batch_stride(shape: Shape, axis: int) -> Dim:
    """Stride along a batch axis (counted from the end), in elements."""
    if -axis > shape.rank or shape.dims[axis] == 1:
        return 0
    return contiguous_strides(shape)[axis]
