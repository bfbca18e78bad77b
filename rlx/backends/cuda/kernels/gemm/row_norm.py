"""RMS norms of many rows, for products by tensor cores: a block has a row in registers.

They are written in bf16; for packed weights as `Planes` writes one plane of f16, or as
`SplitDigits` writes digits.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.lower_norm import is_left_to_reader
from rlx.backends.cuda.kernels.gemm.many_rows import are_fixed
from rlx.backends.cuda.kernels.gemm.planes import ordered, power_of_two
from rlx.backends.cuda.kernels.gemm.problem import is_aligned, row_stride
from rlx.backends.cuda.kernels.gemm.weight_rows import load_run
from rlx.backends.cuda.kernels.qgemm.digits import RECORD
from rlx.backends.cuda.kernels.qgemm.split_digits import store_record
from rlx.backends.cuda.lowering import Context, KernelLaunch, Layouts, lowers
from rlx.backends.kernel_args import Pointer
from rlx.ir.dtype import DType, bf16
from rlx.ir.node import Node
from rlx.llvm.builder import Value, f16, f32, i64
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

_OWN = 8  # numbers of a thread, at least
_MOST_THREADS = 512


@dataclass(frozen=True)
class RowNorm(BlockKernel):
    """args: x, rows of x apart, gamma, result, rows, scales of rows (where there is a unit)"""

    x: DType
    gamma: DType
    k: int
    eps: float
    early: bool  # no kernel writes gamma
    digits: bool = False  # the result is records of digits
    unit: int = 0  # columns are ordered in units of so many, in f16, and rows are scaled

    @property
    def label(self) -> str:
        return f"rms_norm({self.k})"

    @property
    def threads(self) -> int:
        return min(_MOST_THREADS, -(-self.k // (_OWN * WARP)) * WARP)

    @property
    def shared(self) -> int:
        return 8 * (self.threads // WARP)

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads, self.shared)
        args = f["args"]
        x, stride = f.arg(args, 0), f.arg(args, 1, i64)
        gamma, out = f.arg(args, 2), f.arg(args, 3)
        row, count = f.block_number().to(i64), f.arg(args, 4, i64)
        places = [(f.thread() * 4 + at).to(i64) for at in range(0, self.k, 4 * self.threads)]
        there = [f.min(p, self.k - 4) for p in places]
        f.let_next_start()
        if not self.early:
            f.wait_for_previous()
        factors = [load_run(f, gamma, p, 4, self.gamma) for p in there]
        if self.early:
            f.wait_for_previous()

        def emit_row() -> None:
            base = f.gep(x, row * stride, self.x.bytes)
            numbers = [load_run(f, base, p, 4, self.x) for p in there]
            scale = self._scale(f, places, numbers)
            made = [
                [v * scale * g for v, g in zip(four, by, strict=True)]
                for four, by in zip(numbers, factors, strict=True)
            ]
            if self.digits:
                records = f.gep(out, row * (self.k // 32 * RECORD))
                for p, four in zip(places, made, strict=True):
                    store_record(f, four, records, p, p < self.k)
                return
            if self.unit:
                scales = f.gep(f.arg(args, 5), row, 4)
                self._store_plane(f, places, made, f.gep(out, row * self.k, 2), scales)
                return
            for p, four in zip(places, made, strict=True):
                words = [f.pack_halves(four[i], four[i + 1], memory_type(bf16)) for i in (0, 2)]
                to = f.gep(out, row * self.k + p, 2)
                f.if_(p < self.k, partial(f.store, f.join(words), to, align=8))

        f.if_(row < count, emit_row)

    def _scale(self, f: BlockFunction, places: list[Value], numbers: list[list[Value]]) -> Value:
        """What a row is multiplied with."""
        total = f.const(0.0, f32)
        for p, four in zip(places, numbers, strict=True):
            squares = four[0] * four[0]
            for v in four[1:]:
                squares = f.fma(v, v, squares)
            total = total + f.select(p < self.k, squares, 0.0)
        return 1.0 / f.sqrt(self._sum(f, total) * (1.0 / self.k) + self.eps)

    def _store_plane(
        self, f: BlockFunction, places: list[Value], made: list[list[Value]], out: Value,
        scales: Value,
    ) -> None:  # fmt: skip
        top = f.const(0.0, f32)
        for four in made:
            for v in four:
                top = f.max_fast(f.abs(v), top)
        power = power_of_two(f, self._most(f, top))
        f.if_(f.thread().eq(0), lambda: f.store(power.bits(f32), scales))
        factor = (f.i32(254 << 23) - power).bits(f32)
        for p, four in zip(places, made, strict=True):
            pairs = [f.pack_halves(four[i] * factor, four[i + 1] * factor, f16) for i in (0, 2)]
            to = f.gep(out, ordered(p, self.unit), 2)
            for _ in f.when(p < self.k):
                f.store(pairs[0], to, align=4)
                f.store(pairs[1], to, 16, align=4)

    def _most(self, f: BlockFunction, top: Value) -> Value:
        """The largest of all threads of the block, in each of them."""
        top, warps = f.warp_max(top), self.threads // WARP
        if warps == 1:
            return top
        first, start = f.lane32().eq(0), f.i32(4 * warps)
        f.if_(first, lambda: f.store_shared(top, (f.thread() >> 5) * 4 + start))
        f.barrier()
        whole = f.load_shared(start, f32)
        for i in range(1, warps):
            whole = f.max_fast(f.load_shared(start, f32, 4 * i), whole)
        return whole

    def _sum(self, f: BlockFunction, total: Value) -> Value:
        """The sum over all threads of the block, in each of them."""
        total = f.warp_sum(total)
        warps = self.threads // WARP
        if warps == 1:
            return total
        first = f.lane32().eq(0)
        f.if_(first, lambda: f.store_shared(total, (f.thread() >> 5) * 4))
        f.barrier()
        whole = f.load_shared(f.i32(0), f32)
        for i in range(1, warps):
            whole = whole + f.load_shared(f.i32(0), f32, 4 * i)
        return whole


def _reads(node: Node, layouts: Layouts) -> bool:
    x, gamma = node.inputs
    return row_stride(x, layouts) is not None and layouts.is_plain(gamma) and (
        is_aligned(x, layouts) and is_aligned(gamma, layouts))  # fmt: skip


@lowers("rounded_rms_norm", strided=_reads)
def lower_rounded_norm(node: Node, ctx: Context) -> list[KernelLaunch]:
    if is_left_to_reader(node, ctx):
        return []
    op: Any = node.op
    x, gamma = node.inputs
    rows, k, stride = prod(x.shape.dims[:-1], start=1), x.shape.dims[-1], row_stride(x, ctx)
    assert isinstance(k, int) and stride is not None
    kernel = RowNorm(x.dtype, gamma.dtype, k, op.eps, are_fixed([gamma], ctx))
    args = [Pointer(x), stride, Pointer(gamma), Pointer(node.output), rows]
    return [KernelLaunch(kernel, args, blocks=ctx.upper(rows))]
