"""Running sums and products: a block has a row, or a thread where rows are short or many.

A thread of a block has neighbouring elements; it begins with what all threads before it have. Sums
of floats are kept in f64, integers wrap.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cuda.builder import THREADS, WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.lowering import Context, KernelLaunch, lowers
from rlx.backends.kernel_args import Pointer
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.ir.shape import normalize_axis
from rlx.llvm.builder import Type, Value, f32, f64, i64
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass

_SHORT, _MANY = 64, 1 << 15  # elements of a row; rows


@dataclass(frozen=True)
class RunningSum(BlockKernel):
    """args: x, result, rows, elements of a row, their stride"""

    dtype: DType
    out: DType
    multiplies: bool
    exclusive: bool
    reverse: bool
    alone: bool  # a thread has a row

    @property
    def label(self) -> str:
        return "cumprod" if self.multiplies else "cumsum"

    @property
    def shared(self) -> int:
        return 0 if self.alone else 8 * THREADS // WARP

    @property
    def wide(self) -> Type:
        return f64 if self.dtype.is_float else i64

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads, self.shared)
        f.let_next_start()
        f.wait_for_previous()
        args = f["args"]
        rows, size, stride = (f.arg(args, i, i64) for i in (2, 3, 4))
        row = f.block_number().to(i64)
        if self.alone:
            row = row * THREADS + f.thread().to(i64)

        def emit_row() -> None:
            outer = row.udiv(stride)
            first = outer * size * stride + (row - outer * stride)
            self._row(f, first, size, stride)

        f.if_(row < rows, emit_row)

    def _row(self, f: BlockFunction, first: Value, size: Value, stride: Value) -> None:
        args, start = f["args"], f.const(int(self.multiplies), self.wide)

        def place(i: Value) -> Value:
            return first + (size - 1 - i if self.reverse else i) * stride

        def number(i: Value) -> Value:
            at = f.gep(f.arg(args, 0), place(i), self.dtype.bytes)
            if self.dtype.is_float:
                return load(f, at, self.dtype, 1, f64)
            found = f.load(at, memory_type(self.dtype))
            return found.to(i64, signed=self.dtype.kind == "int")

        low, high = f.i64(0), size
        if not self.alone:
            each = f.ceil_div(size, THREADS)
            low = f.min(f.thread().to(i64) * each, size)
            high = f.min(low + each, size)
            [own] = f.loop(low, high, 1, [start], lambda i, t: [self._join(t, number(i))])
            start = self._before(f, own, start)

        def go_on(i: Value, total: Value) -> list[Value]:
            new = self._join(total, number(i))
            kept = total if self.exclusive else new
            to = f.gep(f.arg(args, 1), place(i), memory_type(self.out).bytes)
            if self.out.is_float:
                store(f, kept.to(f32) if self.out.bits == 8 else kept, to, self.out)
            else:
                f.store(kept.to(memory_type(self.out)), to)
            return [new]

        f.loop(low, high, 1, [start], go_on)

    def _join(self, a: Value, b: Value) -> Value:
        return a * b if self.multiplies else a + b

    def _before(self, f: BlockFunction, own: Value, start: Value) -> Value:
        """What the threads before this one have."""
        before, total, distance = start, own, 1
        while distance < WARP:
            other = f.exchange(total, distance)
            upper = (f.lane32() & distance).ne(0)
            before = f.select(upper, self._join(other, before), before)
            total = self._join(total, other)
            distance *= 2
        warp = f.thread() >> 5
        f.if_(f.lane32().eq(0), lambda: f.store_shared(total, warp * 8))
        f.barrier()
        for i in range(THREADS // WARP - 1):
            earlier = f.load_shared(f.i32(8 * i), self.wide)
            before = f.select(warp > i, self._join(earlier, before), before)
        return before


def _is_real(node: Node) -> bool:
    return node.inputs[0].dtype.kind in ("int", "uint", "float", "bool")


@lowers("cumsum", "cumprod", when=_is_real, strided=False)
def lower_running(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x = node.inputs[0].shape
    axis = normalize_axis(op.axis, x.rank)
    inner = prod(x.dims[axis + 1 :], start=1)
    rows, size = prod(x.dims[:axis], start=1) * inner, x.dims[axis]
    most = ctx.upper(rows)
    if not most or not ctx.upper(size):
        return []
    alone = ctx.upper(size) <= _SHORT or most >= _MANY
    kernel = RunningSum(
        x.dtype, node.output.dtype, op.name == "cumprod", op.exclusive, op.reverse, alone
    )
    args = [Pointer(node.inputs[0]), Pointer(node.output), rows, size, inner]
    return [KernelLaunch(kernel, args, blocks=-(-most // THREADS) if alone else most)]
