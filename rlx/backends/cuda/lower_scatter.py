"""Slices stored at given indices: scatter; and writes to states, at a start or at such slots.

Threads divide the elements of a slice, not the slices: each visits all indices in order, so that
of equal indices the last one wins.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from rlx.backends.cuda.builder import KernelModule
from rlx.backends.cuda.kernel import GpuKernel
from rlx.backends.cuda.lower_loops import launch_for, lower_copies
from rlx.backends.cuda.lowering import Context, KernelLaunch, lowers
from rlx.backends.kernel_args import NodeNumber, Pointer, Status
from rlx.ir.dtype import DType
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.shape import normalize_axis
from rlx.llvm.builder import Type, i8, i16, i32, i64
from rlx.llvm.storage import memory_type
from rlx.loops.strided_copies import StridedView, copy
from rlx.loops.trace import Buffer
from rlx.support.records import dataclass

_WHOLE: dict[int, Type] = {1: i8, 2: i16, 4: i32, 8: i64}


@dataclass(frozen=True)
class StoreSlices(GpuKernel):
    """args: target, updates, indices, number of indices, size of the axis, outer, inner, status,
    node

    The target is [outer, size, inner], updates are [outer, number, inner]. With `wraps`, negative
    indices count from the end.
    """

    bytes: int
    index: DType
    wraps: bool

    @property
    def label(self) -> str:
        return "scatter"

    def emit(self, m: KernelModule) -> None:
        f = m.begin_kernel()
        args = f["args"]
        target, updates, indices = (f.arg(args, i) for i in range(3))
        count, size, outer, inner = (f.arg(args, i, i64) for i in range(3, 7))
        status, node = f.arg(args, 7), f.arg(args, 8, i64)
        for item in f.elements(outer * inner):
            row = item.udiv(inner)
            column = item - row * inner
            to = f.gep(target, row * size * inner + column, self.bytes)
            of = f.gep(updates, row * count * inner + column, self.bytes)
            for i in f.range(0, count):
                there = f.gep(indices, i, self.index.bytes)
                index = f.load(there, memory_type(self.index))
                index = index.to(i64, signed=self.index.kind == "int")
                if self.wraps:
                    index = f.select(index < 0, index + size, index)
                element = f.load(f.gep(of, i * inner, self.bytes), _WHOLE[self.bytes])
                place = f.gep(to, index * inner, self.bytes)
                store, report = partial(f.store, element, place), partial(f.store, node, status)
                f.if_(index.ult(size), store, report)


def _store_slices(node: Node, target: Value, ctx: Context, wraps: bool) -> KernelLaunch:
    op: Any = node.op
    x, indices, updates = _operands(node)
    axis = normalize_axis(op.axis, x.shape.rank)
    outer = prod(x.shape.dims[:axis], start=1)
    inner = prod(x.shape.dims[axis + 1 :], start=1)
    kernel = StoreSlices(x.dtype.bytes, indices.dtype, wraps and indices.dtype.kind == "int")
    pointers = [Pointer(target), Pointer(updates), Pointer(indices)]
    sizes = [indices.shape.dims[0], x.shape.dims[axis], outer, inner]
    args = [*pointers, *sizes, Status(), NodeNumber(node)]
    return KernelLaunch(kernel, args, ctx.upper(outer * inner))


def _operands(node: Node) -> tuple[Value, Value, Value]:
    """What is written to, where, and what."""
    if node.op.name == "state_update":
        state, update, slots = node.inputs
        return state, slots, update
    x, indices, updates = node.inputs
    return x, indices, updates


@lowers("scatter", strided=False)
def lower_scatter(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, updates = node.inputs[0].shape, node.inputs[2].shape
    if 0 in x.dims:
        return []
    strides = contiguous_strides(x)
    source, target = (StridedView(Buffer(k), x.dtype, strides) for k in ("operand", "result"))
    made = [launch_for(node, ctx, copy(x.dims, source, target))]
    if 0 not in updates.dims:
        made.append(_store_slices(node, node.output, ctx, wraps=True))
    return made


@lowers("state_update", strided=lambda node, _: len(node.inputs) == 2)
def lower_state_update(node: Node, ctx: Context) -> list[KernelLaunch]:
    """The state itself is changed, at a start or at given slots."""
    if len(node.inputs) == 2:
        return lower_copies(node, ctx)
    state, update = node.inputs[:2]
    if 0 in update.shape.dims:
        return []
    return [_store_slices(node, state, ctx, wraps=False)]
