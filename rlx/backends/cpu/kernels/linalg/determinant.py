"""The determinant of real matrices, from the pivots of an elimination."""

from __future__ import annotations

from math import inf, prod

from rlx.backends.cpu.kernels.linalg.elimination import Elimination
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
from rlx.llvm.builder import Function, Module, Value, f64, i64
from rlx.llvm.math import log
from rlx.llvm.storage import load, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_LARGE = 256  # rows; LAPACK keeps larger matrices in cache by blocks
_CELL = 64  # bytes before the rows: the sign of the permutation


@dataclass(frozen=True)
class SlogDet(KernelSpec):
    """args: x, sign, size, scratch, scratch_bytes, matrices, n

    `scratch` holds `scratch_bytes` for each worker.
    """

    dtype: DType

    args = ("x", "sign", "size", "scratch", "scratch_bytes", "matrices", "n")

    @staticmethod
    def scratch(target: Target, n: int) -> int:
        """Bytes each worker needs for a matrix."""
        lanes = target.lanes(64)
        return _CELL + n * (-(-n // lanes) + 1) * lanes * 8

    def emit(self, m: Module) -> None:
        _SlogDet(self, m.kernel()).emit()


class _SlogDet(Elimination):
    def __init__(self, spec: SlogDet, f: Function) -> None:
        super().__init__(f)
        self.dtype, self.o = spec.dtype, Operands(f, spec.args, ("x", "sign", "size", "scratch"))
        self.n = self.width = self.o["n"]
        self.pitch = (f.ceil_div(self.n, self.lanes) + 1) * self.lanes

    def emit(self) -> None:
        f, o = self.f, self.o
        self.cell = f.gep(o["scratch"], f["tid"].to(i64) * o["scratch_bytes"])
        self.rows = f.gep(self.cell, _CELL)
        lo, hi = f.split(o["matrices"])
        for matrix in f.range(lo, hi):
            f.store(f.const(1.0, f64), self.cell)
            for row in f.range(0, self.n):
                for column in f.range(0, self.n):
                    start = (matrix * self.n + row) * self.n + column
                    value = load(f, f.gep(o["x"], start, self.dtype.bytes), self.dtype, 1, f64)
                    f.store(value, self.at(row, column))
            nonsingular = self.triangulate().ne(0)
            sign, size = f.loop(0, self.n, 1, [f.load(self.cell, f64), f.const(0, f64)], self._add)
            for name, value, other in (("sign", sign, 0.0), ("size", size, -inf)):
                to = f.gep(o[name], matrix, self.dtype.bytes)
                store(f, f.select(nonsingular, value, other), to, self.dtype)

    def _add(self, k: Value, sign: Value, size: Value) -> list[Value]:
        f = self.f
        pivot = f.load(self.at(k, k), f64)
        return [f.select(pivot < 0.0, -sign, sign), size + log(f.abs(pivot))]

    def swap_rows(self, a: Value, b: Value) -> None:
        self.f.store(-self.f.load(self.cell, f64), self.cell)
        super().swap_rows(a, b)


def _scratch(node: Node, target: Target, threads: int) -> int:
    n = upper_bound(node.inputs[0].shape.dims[-1], node.graph.live)
    return threads * SlogDet.scratch(target, n)


@lowers("slogdet", scratch=_scratch)
def lower_slogdet(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, (sign, size) = node.inputs[0], node.outputs
    n = x.shape.dims[-1]
    if x.dtype.is_complex or (isinstance(n, int) and n > _LARGE):
        return lower_custom(node, ctx)
    args: list[KernelArg] = [Pointer(x), Pointer(sign), Pointer(size), Scratch(node)]
    args += [_scratch(node, ctx.target, 1), prod(x.shape.dims[:-2], start=1), n]
    cost = node.op.cost([x.shape], [v.shape for v in node.outputs])
    return [
        KernelLaunch(
            SlogDet(x.dtype), args, [x], node.outputs, uses_scratch=True, flops=cost.flops,
            bytes=cost.bytes,
        )
    ]  # fmt: skip
