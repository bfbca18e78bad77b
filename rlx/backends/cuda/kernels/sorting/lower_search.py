"""Places in a sorted table: a thread searches for a number."""

from __future__ import annotations

from typing import Any

from rlx.backends.cuda.builder import KernelModule
from rlx.backends.cuda.kernel import GpuKernel
from rlx.backends.cuda.kernels.sorting.sort_keys import ascending_key
from rlx.backends.cuda.lowering import Context, KernelLaunch, lowers
from rlx.backends.kernel_args import Pointer
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.llvm.builder import Value, i64
from rlx.support.records import dataclass


@dataclass(frozen=True)
class SearchSorted(GpuKernel):
    """args: table, x, result (i64), elements of the table, of x"""

    dtype: DType
    right: bool  # behind equal ones
    steps: int

    @property
    def label(self) -> str:
        return "searchsorted"

    def emit(self, m: KernelModule) -> None:
        f = m.begin_kernel()
        args, size = f["args"], self.dtype.bytes
        table, x, out = (f.arg(args, i) for i in range(3))
        length, count = f.arg(args, 3, i64), f.arg(args, 4, i64)
        for i in f.elements(count):
            key = ascending_key(f, f.gep(x, i, size), self.dtype)

            def halve(_: Value, low: Value, high: Value, key: Value = key) -> list[Value]:
                middle = (low + high) >> 1
                at = f.gep(table, f.min(middle, f.max(high - 1, 0)), size)
                found = ascending_key(f, at, self.dtype)
                before = (found <= key if self.right else found < key) & (low < high)
                return [f.select(before, middle + 1, low), f.select(before, high, middle)]

            place = f.i64(0)
            if self.steps:
                place = f.loop(f.i64(0), f.i64(self.steps), 1, [f.i64(0), length], halve)[0]
            f.store(place, f.gep(out, i, 8))


@lowers("searchsorted", strided=False)
def lower_search(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    table, x = node.inputs
    length, count = table.shape.dims[0], x.shape.num_elements
    most = ctx.upper(length)
    kernel = SearchSorted(x.dtype, op.side == "right", (most + 1).bit_length() if most else 0)
    args = [Pointer(table), Pointer(x), Pointer(node.output), length, count]
    return [KernelLaunch(kernel, args, ctx.upper(count))] if ctx.upper(count) else []
