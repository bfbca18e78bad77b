"""Ops that write at indices that are data, and running sums."""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cpu.lowering import (
    Context,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Scratch,
    Status,
    lowers,
)
from rlx.backends.cpu.region import launch_for
from rlx.codegen.region.copies import Box, copy
from rlx.codegen.region.running import CumSum
from rlx.codegen.region.scatter import Scatter
from rlx.codegen.region.trace import Place
from rlx.codegen.target import Target
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, c64, f32
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node
from rlx.ir.shape import Shape, normalize_axis

_PLAIN = {1: DType.of("u8"), 2: DType.of("u16"), 4: DType.of("u32"), 8: DType.of("u64")}


def _cut(shape: Shape, axis: int) -> tuple[Dim, Dim, Dim]:
    """Elements before, along and after an axis."""
    at = normalize_axis(axis, shape.rank)
    before, after = prod(shape.dims[:at], start=1), prod(shape.dims[at + 1 :], start=1)
    return before, shape.dims[at], after


# -- scatter ----------------------------------------------------------------------------------


def _sums_apart(node: Node) -> bool:
    """Whether sums are kept in f32 beside the result, because its type is narrower."""
    dtype = node.output.dtype
    return node.op.name == "scatter_add" and dtype.is_float and dtype.bits < 32


def _scatter_scratch(node: Node, target: Target, threads: int) -> int:
    if not _sums_apart(node):
        return 0
    return node.output.shape.with_dtype(f32).upper_bytes(node.graph.live)


@lowers("scatter", "scatter_add", scratch=_scatter_scratch)
def lower_scatter(node: Node, ctx: Context) -> list[KernelLaunch]:
    """The operand copied, then written to."""
    op: Any = node.op
    x, indices, updates = node.inputs
    if 0 in x.shape.dims:
        return []
    add, apart = op.name == "scatter_add", _sums_apart(node)
    dtype = f32 if apart else x.dtype
    strides = contiguous_strides(x.shape)
    result = Box(Place("result"), x.dtype, strides)
    sums = Box(Place("temporary"), f32, strides) if apart else result
    start = copy(x.shape.dims, Box(Place("operand", 0), x.dtype, strides), sums)
    outer, size, inner = _cut(x.shape, op.axis)
    if add and dtype is c64:
        kinds, inner = (f32, f32), inner * 2
    elif add:
        kinds = (dtype, updates.dtype)
    else:
        kinds = (_PLAIN[dtype.bytes], _PLAIN[dtype.bytes])
    count = indices.shape.dims[0]
    target = Scratch(node) if apart else Pointer(node.output)
    args = [target, Pointer(indices), Pointer(updates), outer, size, inner, count]
    spec = Scatter(*kinds, indices.dtype, add)
    write = KernelLaunch(
        spec, [*args, Status(), NodeNumber(node)], [indices, updates],
        [] if apart else node.outputs, uses_scratch=apart, bytes=updates.shape.size_bytes * 2,
    )  # fmt: skip
    steps = [launch_for(node, ctx, start, (0, 0)), write]
    steps[0].bytes = x.shape.size_bytes * 2
    if apart:
        steps.append(launch_for(node, ctx, copy(x.shape.dims, sums, result), (0, 0)))
    return steps


def write_at(node: Node) -> KernelLaunch:
    """The slices of a `state_update` written at its slots."""
    op: Any = node.op
    state, update, slots = node.inputs
    outer, size, inner = _cut(state.shape, op.axis)
    plain = _PLAIN[state.dtype.bytes]
    args = [Pointer(state), Pointer(slots), Pointer(update), outer, size, inner]
    return KernelLaunch(
        Scatter(plain, plain, slots.dtype, add=False),
        [*args, slots.shape.dims[0], Status(), NodeNumber(node)],
        [update, slots], [state, *node.outputs], bytes=update.shape.size_bytes * 2,
    )  # fmt: skip


# -- cumsum -----------------------------------------------------------------------------------


@lowers("cumsum")
def lower_cumsum(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, result = node.inputs[0], node.output
    outer, size, inner = _cut(x.shape, op.axis)
    source, target = x.dtype, result.dtype
    if source is c64:  # parts are summed side by side
        source, target, inner = f32, f32, inner * 2
    spec = CumSum(source, target, op.exclusive, op.reverse, columns=inner != 1)
    args = [Pointer(x), Pointer(result), outer, size, inner]
    cost = op.cost([x.shape], [result.shape])
    return [KernelLaunch(spec, args, node.inputs, node.outputs, flops=cost.flops, bytes=cost.bytes)]
