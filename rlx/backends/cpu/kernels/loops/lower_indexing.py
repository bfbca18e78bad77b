"""Lowering of scatter, of state writes at given slots, and of cumsum."""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cpu.kernels.loops.lower_region import launch_for
from rlx.backends.cpu.kernels.loops.scan import CumSum
from rlx.backends.cpu.kernels.loops.scatter import Scatter
from rlx.backends.cpu.lowering import (
    Context,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Scratch,
    Status,
    lowers,
)
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, c64, f32
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node
from rlx.ir.shape import Shape, normalize_axis
from rlx.llvm.target import Target
from rlx.loops.strided_copies import StridedView, copy
from rlx.loops.trace import Buffer

_UINT = {1: DType.of("u8"), 2: DType.of("u16"), 4: DType.of("u32"), 8: DType.of("u64")}


def _around_axis(shape: Shape, axis: int) -> tuple[Dim, Dim, Dim]:
    """The shape as [outer, size, inner] around an axis."""
    at = normalize_axis(axis, shape.rank)
    before, after = prod(shape.dims[:at], start=1), prod(shape.dims[at + 1 :], start=1)
    return before, shape.dims[at], after


# -- scatter ----------------------------------------------------------------------------------


def _needs_f32_sums(node: Node) -> bool:
    """Whether sums accumulate in an f32 temporary, because the result's type is narrower."""
    dtype = node.output.dtype
    return node.op.name == "scatter_add" and dtype.is_float and dtype.bits < 32


def _scatter_scratch(node: Node, target: Target, threads: int) -> int:
    if not _needs_f32_sums(node):
        return 0
    return node.output.shape.with_dtype(f32).upper_bytes(node.graph.live)


@lowers("scatter", "scatter_add", scratch=_scatter_scratch)
def lower_scatter(node: Node, ctx: Context) -> list[KernelLaunch]:
    """Copy the operand, then scatter into the copy."""
    op: Any = node.op
    x, indices, updates = node.inputs
    if 0 in x.shape.dims:
        return []
    add, f32_sums = op.name == "scatter_add", _needs_f32_sums(node)
    dtype = f32 if f32_sums else x.dtype
    strides = contiguous_strides(x.shape)
    result = StridedView(Buffer("result"), x.dtype, strides)
    sums = StridedView(Buffer("temporary"), f32, strides) if f32_sums else result
    start = copy(x.shape.dims, StridedView(Buffer("operand", 0), x.dtype, strides), sums)
    outer, size, inner = _around_axis(x.shape, op.axis)
    if add and dtype is c64:
        dtypes, inner = (f32, f32), inner * 2
    elif add:
        dtypes = (dtype, updates.dtype)
    else:
        dtypes = (_UINT[dtype.bytes], _UINT[dtype.bytes])
    count = indices.shape.dims[0]
    target = Scratch(node) if f32_sums else Pointer(node.output)
    args = [target, Pointer(indices), Pointer(updates), outer, size, inner, count]
    spec = Scatter(*dtypes, indices.dtype, add)
    write = KernelLaunch(
        spec, [*args, Status(), NodeNumber(node)], [indices, updates],
        [] if f32_sums else node.outputs, uses_scratch=f32_sums, bytes=updates.shape.size_bytes * 2,
    )  # fmt: skip
    steps = [launch_for(node, ctx, start, (0, 0)), write]
    steps[0].bytes = x.shape.size_bytes * 2
    if f32_sums:
        steps.append(launch_for(node, ctx, copy(x.shape.dims, sums, result), (0, 0)))
    return steps


def write_at(node: Node) -> KernelLaunch:
    """Scatter the slices of a `state_update` to its slots."""
    op: Any = node.op
    state, update, slots = node.inputs
    outer, size, inner = _around_axis(state.shape, op.axis)
    bits = _UINT[state.dtype.bytes]
    args = [Pointer(state), Pointer(slots), Pointer(update), outer, size, inner]
    return KernelLaunch(
        Scatter(bits, bits, slots.dtype, add=False),
        [*args, slots.shape.dims[0], Status(), NodeNumber(node)],
        [update, slots], [state, *node.outputs], bytes=update.shape.size_bytes * 2,
    )  # fmt: skip


# -- cumsum -----------------------------------------------------------------------------------


@lowers("cumsum")
def lower_cumsum(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, result = node.inputs[0], node.output
    outer, size, inner = _around_axis(x.shape, op.axis)
    source, target = x.dtype, result.dtype
    if source is c64:  # real and imaginary parts are scanned side by side
        source, target, inner = f32, f32, inner * 2
    spec = CumSum(source, target, op.exclusive, op.reverse, columns=inner != 1)
    args = [Pointer(x), Pointer(result), outer, size, inner]
    cost = op.cost([x.shape], [result.shape])
    return [KernelLaunch(spec, args, node.inputs, node.outputs, flops=cost.flops, bytes=cost.bytes)]
