"""GEMM of complex numbers: plain loops, vectorised where columns of w are contiguous."""

from __future__ import annotations

from rlx.backends.cpu.kernels.gemm.gemm import batch_args, batch_count, batch_start
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType, c64
from rlx.llvm.builder import Function, Module, Value, i64, ptr, vec
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass


@dataclass(frozen=True)
class ComplexGemm(KernelSpec):
    """args: x, w, out, m, n, k, x_stride_m, x_stride_k, w_stride_n, w_stride_k, then size,
    x_batch, w_batch of each batch axis. x and w are of `dtype`; strides are bytes.
    """

    w_unit: bool  # columns of w are contiguous
    batch: int = 0
    dtype: DType = c64

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        names = [
            "x",
            "w",
            "out",
            "m",
            "n",
            "k",
            "x_stride_m",
            "x_stride_k",
            "w_stride_n",
            "w_stride_k",
        ]
        return names + batch_args(self.batch)

    def emit(self, m: Module) -> None:
        f = m.kernel()
        given = {
            name: f.arg(f["args"], i, ptr if i < 3 else i64) for i, name in enumerate(self.args)
        }
        lo, hi = f.split(batch_count(f, given, self.batch) * given["m"])
        for r in f.range(lo, hi):
            _Row(f, self, given, r).emit()


class _Row:
    """One row of the result."""

    def __init__(self, f: Function, spec: ComplexGemm, given: dict[str, Value], r: Value) -> None:
        self.f, self.spec, self.given = f, spec, given
        batch = r.udiv(given["m"])
        x, self.w = batch_start(f, given, spec.batch, batch)
        self.x = f.gep(x, (r - batch * given["m"]) * given["x_stride_m"])
        self.part = memory_type(spec.dtype.part)
        self.out = f.gep(given["out"], r * given["n"], spec.dtype.bytes)

    def emit(self) -> None:
        f, n = self.f, self.given["n"]
        wide = f.target.lanes(self.part.bits) // 2 if self.spec.w_unit else 1
        whole = n - n.urem(wide)
        for count, lo, hi in ((wide, f.i64(0), whole), (1, whole, n)):
            for j in f.range(lo, hi, count):
                f.store(self._columns(j, 2 * count), f.gep(self.out, j, self.spec.dtype.bytes))

    def _columns(self, j: Value, lanes: int) -> Value:
        """Accumulates re(x)·w and im(x)·w, combined at the end: (a + bi)·w = a·w + b·(i·w)."""
        f, given = self.f, self.given
        w = f.gep(self.w, j * given["w_stride_n"])
        zero = f.const(0.0, vec(lanes, self.part))

        def step(k: Value, real: Value, imaginary: Value) -> list[Value]:
            x = f.gep(self.x, k * given["x_stride_k"])
            column = f.load(f.gep(w, k * given["w_stride_k"]), zero.type)
            return [
                f.fma(f.broadcast_load(x, self.part, lanes), column, real),
                f.fma(f.broadcast_load(x, self.part, lanes, self.part.bytes), column, imaginary),
            ]

        real, imaginary = f.loop(0, given["k"], 1, [zero, zero], step)
        swapped = f.shuffle(imaginary, None, [i ^ 1 for i in range(lanes)])
        signs = f.const([-1.0, 1.0] * (lanes // 2), zero.type)
        return f.fma(swapped, signs, real)
