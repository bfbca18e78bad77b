"""Lowering of ops that are strided copies: concat, pad, and contiguous writes to states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlx.backends.cpu.kernels.loops.indexing import write_at
from rlx.backends.cpu.kernels.loops.lower_region import launch_for
from rlx.backends.cpu.kernels.recurrent.lower_recurrent import is_written
from rlx.backends.cpu.lowering import Context, KernelLaunch, lowers
from rlx.ir.dim import Dim
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node
from rlx.ir.shape import Shape, normalize_axis
from rlx.loops.schedule import ScheduledNest
from rlx.loops.strided_copies import StridedView, copy, fill
from rlx.loops.trace import Buffer

_RESULT = Buffer("result")


def _launches(node: Node, ctx: Context, kernels: list[ScheduledNest]) -> list[KernelLaunch]:
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    steps = [launch_for(node, ctx, k) for k in kernels]
    for step in steps:
        step.bytes = cost.bytes // len(steps)
    return steps


def _operand(node: Node, ctx: Context, number: int) -> StridedView:
    value = node.inputs[number]
    return StridedView(Buffer("operand", number), value.dtype, ctx.strides(value))


@lowers("concat", strided=True)
def lower_concat(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    out = node.output.shape
    at = normalize_axis(op.axis, out.rank)
    strides = contiguous_strides(out)
    kernels: list[ScheduledNest] = []
    start: Dim = 0
    for number, value in enumerate(node.inputs):
        dims = value.shape.dims
        if 0 not in dims:
            target = StridedView(_RESULT, out.dtype, strides, start * strides[at])
            kernels.append(copy(dims, _operand(node, ctx, number), target))
        start = start + dims[at]
    return _launches(node, ctx, kernels)


@lowers("state_update", strided=lambda node: len(node.inputs) == 2)
def lower_state_update(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    state, update, *slots = node.inputs
    if 0 in update.shape.dims or is_written(node, ctx):
        return []
    if slots:
        return [write_at(node)]
    strides = ctx.strides(state)
    offset = op.start * strides[normalize_axis(op.axis, state.shape.rank)]
    target = StridedView(Buffer("operand", 0), state.dtype, strides, offset)
    return _launches(node, ctx, [copy(update.shape.dims, _operand(node, ctx, 1), target)])


# -- pad --------------------------------------------------------------------------------------


@lowers("pad", strided=True)
def lower_pad(node: Node, ctx: Context) -> list[KernelLaunch]:
    """Copy the operand to the interior, then make the borders axis by axis: those of a later axis
    include the borders of earlier ones."""
    op: Any = node.op
    x, out = node.inputs[0].shape, node.output.shape
    if 0 in out.dims:
        return []
    strides = contiguous_strides(out)
    middle = _offset(strides, op.low)
    kernels = []
    if 0 not in x.dims:
        target = StridedView(_RESULT, out.dtype, strides, middle)
        kernels.append(copy(x.dims, _operand(node, ctx, 0), target))
    for at in range(x.rank):
        kernels += _borders(op, x, out, at)
    return _launches(node, ctx, kernels)


def _offset(strides: tuple[Dim, ...], starts: tuple[Dim, ...]) -> Dim:
    total: Dim = 0
    for stride, start in zip(strides, starts, strict=True):
        total = total + stride * start
    return total


def _borders(op: Any, x: Shape, out: Shape, at: int) -> Iterator[ScheduledNest]:
    """The two borders along one axis."""
    strides = contiguous_strides(out)
    low, size, high = op.low[at], x.dims[at], op.high[at]
    for width, start, edge, mirrored in (
        (low, 0, low, 2 * low),
        (high, low + size, low + size - 1, low + size - 2),
    ):
        dims = (*out.dims[:at], width, *x.dims[at + 1 :])
        if 0 in dims:
            continue
        # axes before this one are complete, later ones hold the operand's elements only
        starts = (*[0] * at, start, *op.low[at + 1 :])
        target = StridedView(_RESULT, out.dtype, strides, _offset(strides, starts))
        if op.mode == "constant":
            yield fill(dims, op.value, target)
            continue
        first = edge if op.mode == "edge" else mirrored
        source_strides = [
            s if i != at else 0 if op.mode == "edge" else s * -1 for i, s in enumerate(strides)
        ]
        source_offset = _offset(strides, (*starts[:at], first, *starts[at + 1 :]))
        source = StridedView(_RESULT, out.dtype, tuple(source_strides), source_offset)
        yield copy(dims, source, target)
