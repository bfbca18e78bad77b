"""Slices stored or added at given indices; and writes to states, at a start or at such slots.

A block has a slice. It looks through the indices behind its own: of equal ones the last one wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

from rlx.backends.carried_state import is_written
from rlx.backends.cuda.builder import BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.lower_loops import launch_for, lower_copies
from rlx.backends.cuda.lowering import Context, KernelLaunch, Layouts, lowers
from rlx.backends.kernel_args import NodeNumber, Pointer, Status
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType, f32
from rlx.ir.dtype import f64 as f64_type
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.shape import normalize_axis
from rlx.llvm.builder import Type, f64, i8, i16, i32, i64
from rlx.llvm.builder import Value as Code
from rlx.llvm.storage import load, memory_type, store
from rlx.loops.strided_copies import StridedView, copy
from rlx.loops.trace import Buffer
from rlx.support.records import dataclass

_WHOLE: dict[int, Type] = {1: i8, 2: i16, 4: i32, 8: i64}


@dataclass(frozen=True)
class StoreSlices(BlockKernel):
    """args: target, updates, indices, number of indices, size of the axis, outer, inner, status,
    node, strides of updates (outer, number, inner)

    The target is [outer, size, inner], updates are [outer, number, inner]. With `wraps`, negative
    indices count from the end.
    """

    dtype: DType
    index: DType
    wraps: bool
    adds: bool = False  # to what is there; the first of equal indices adds the slices of all

    @property
    def bytes(self) -> int:
        return self.dtype.bytes

    @property
    def label(self) -> str:
        return "scatter_add" if self.adds else "scatter"

    @property
    def shared(self) -> int:
        return 16

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads, self.shared)
        f.let_next_start()
        f.wait_for_previous()
        args, number = f["args"], f.block_number().to(i64)
        count, size = f.arg(args, 3, i64), f.arg(args, 4, i64)
        f.if_(number < count, lambda: self._emit_slice(f, number, count, size))

    def _emit_slice(self, f: BlockFunction, number: Code, count: Code, size: Code) -> None:
        """A block stores a slice, unless a later one goes to the same place. Where slices are
        added, the first one of a place adds the others."""
        indices, flag, thread = f.arg(f["args"], 2), f.i32(0), f.thread().to(i64)
        index = self._index(f, indices, number, size)
        f.if_(f.thread().eq(0), lambda: f.store_shared(f.i32(0), flag))
        f.barrier()
        first, last = (f.i64(0), number) if self.adds else (number + 1, count)
        for i in f.range(first + thread, last, self.threads):
            same = self._index(f, indices, i, size).eq(index)
            f.if_(same, lambda: f.store_shared(f.i32(1), flag))
        f.barrier()
        wins = f.load_shared(flag, i32).eq(0)
        known = index.ult(size)
        f.if_(wins & known, lambda: self._copy(f, number, index, size))
        args = f["args"]
        f.if_(~known, lambda: f.store(f.arg(args, 8, i64), f.arg(args, 7)))

    def _copy(self, f: BlockFunction, number: Code, index: Code, size: Code) -> None:
        args = f["args"]
        target, updates = f.arg(args, 0), f.arg(args, 1)
        outer, inner, *strides = (f.arg(args, i, i64) for i in (5, 6, 9, 10, 11))
        for item in f.range(f.thread().to(i64), outer * inner, self.threads):
            row = item.udiv(inner)
            column = item - row * inner
            at = row * strides[0] + number * strides[1] + column * strides[2]
            of = f.gep(updates, at, self.bytes)
            to = f.gep(target, (row * size + index) * inner + column, self.bytes)
            if self.adds:
                self._add(f, number, index, size, to, of, strides[1])
            else:
                f.store(f.load(of, _WHOLE[self.bytes]), to)

    def _add(
        self, f: BlockFunction, number: Code, index: Code, size: Code, to: Code, of: Code,
        stride: Code,
    ) -> None:  # fmt: skip
        """Add the numbers of all slices of this place, from the first on, in f64."""
        dtype, args = self.dtype, f["args"]
        wide = f64 if dtype.is_float else memory_type(dtype)
        indices, count = f.arg(args, 2), f.arg(args, 3, i64)

        def add(i: Code, total: Code) -> list[Code]:
            same = self._index(f, indices, i, size).eq(index)

            def more() -> list[Code]:
                at = f.gep(of, (i - number) * stride, dtype.bytes)
                return [total + load(f, at, dtype, 1, wide)]

            return f.if_(same, more, lambda: [total])

        [total] = f.loop(number, count, 1, [load(f, to, dtype, 1, wide)], add)
        store(f, total, to, dtype)

    def _index(self, f: BlockFunction, indices: Code, i: Code, size: Code) -> Code:
        found = f.load(f.gep(indices, i, self.index.bytes), memory_type(self.index))
        wide = found.to(i64, signed=self.index.kind == "int")
        return f.select(wide < 0, wide + size, wide) if self.wraps else wide


def _store_slices(
    node: Node, target: Value, ctx: Context, wraps: bool, adds: bool = False
) -> KernelLaunch:
    op: Any = node.op
    x, indices, updates = _operands(node)
    axis = normalize_axis(op.axis, x.shape.rank)
    outer = prod(x.shape.dims[:axis], start=1)
    inner = prod(x.shape.dims[axis + 1 :], start=1)
    dtype = x.dtype
    if dtype.is_complex and (adds or dtype.bytes > 8):  # its parts are floats
        dtype, inner = (f32 if dtype.bits == 64 else f64_type), 2 * inner
    kernel = StoreSlices(dtype, indices.dtype, wraps and indices.dtype.kind == "int", adds)
    pointers = [Pointer(target), Pointer(updates), Pointer(indices)]
    sizes = [indices.shape.dims[0], x.shape.dims[axis], outer, inner]
    strides = _update_strides(node, ctx)
    assert strides is not None  # others were copied
    if dtype is not x.dtype:
        strides = 2 * strides[0], 2 * strides[1], 1
    args = [*pointers, *sizes, Status(), NodeNumber(node), *strides]
    return KernelLaunch(kernel, args, blocks=ctx.upper(indices.shape.dims[0]))


def _operands(node: Node) -> tuple[Value, Value, Value]:
    """What is written to, where, and what."""
    if node.op.name == "state_update":
        state, update, slots = node.inputs
        return state, slots, update
    x, indices, updates = node.inputs
    return x, indices, updates


def _update_strides(node: Node, ctx: Layouts) -> tuple[Dim, Dim, Dim] | None:
    """Strides of the updates as [outer, number, inner]; None where there are no such, or where
    another operand does not lie row-major."""
    op: Any = node.op
    x, indices, updates = _operands(node)
    if not ctx.is_plain(x) or not ctx.is_plain(indices):
        return None
    axis, strides = normalize_axis(op.axis, x.shape.rank), ctx.strides(updates)
    found = []
    for part in (slice(0, axis), slice(axis + 1, None)):
        axes = [(d, s) for d, s in zip(updates.shape.dims[part], strides[part], strict=True)]
        found.append(_joined([(d, s) for d, s in axes if d != 1]))
    outer, inner = found
    if outer is None or inner is None or (x.dtype.bytes > 8 and not same(inner, 1)):
        return None
    return outer, strides[axis], inner


def _joined(axes: Sequence[tuple[Dim, Dim]]) -> Dim | None:
    """The stride of axes as one; None where there is no such."""
    for (_, outer), (size, inner) in pairwise(axes):
        if not same(outer, size * inner):
            return None
    return axes[-1][1] if axes else 1


@lowers("scatter_add", strided=False)
@lowers("scatter", strided=False)
def lower_scatter(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, updates = node.inputs[0].shape, node.inputs[2].shape
    if 0 in x.dims:
        return []
    strides = contiguous_strides(x)
    source, target = (StridedView(Buffer(k), x.dtype, strides) for k in ("operand", "result"))
    made = [launch_for(node, ctx, copy(x.dims, source, target))]
    if 0 not in updates.dims:
        adds = node.op.name == "scatter_add"
        made.append(_store_slices(node, node.output, ctx, wraps=True, adds=adds))
    return made


def _reads(node: Node, layouts: Layouts) -> bool:
    return len(node.inputs) == 2 or _update_strides(node, layouts) is not None


@lowers("state_update", strided=_reads)
def lower_state_update(node: Node, ctx: Context) -> list[KernelLaunch]:
    """The state itself is changed, at a start or at given slots."""
    if is_written(node, ctx):
        return []
    if len(node.inputs) == 2:
        return lower_copies(node, ctx)
    state, update = node.inputs[:2]
    if 0 in update.shape.dims:
        return []
    return [_store_slices(node, state, ctx, wraps=False)]
