"""Nests that copy or fill strided views of tensors, and ops that are such copies: concat, pad and
writes to states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.ir.shape import Shape, normalize_axis
from rlx.loops.index_map import ZERO, Affine, axis
from rlx.loops.partition import TracedKernel, TracedStore, as_bits
from rlx.loops.schedule import ScheduledNest, schedule
from rlx.loops.trace import Buffer, TracedInstruction
from rlx.support.records import dataclass


@dataclass(frozen=True)
class StridedView:
    """A strided view of a buffer: strides per axis, and the offset of its first element."""

    buffer: Buffer
    dtype: DType
    strides: tuple[Dim, ...]
    offset: Dim = 0

    def index_map_of(self, axes: Sequence[Affine]) -> Affine:
        total = Affine((), self.offset)
        for a, stride in zip(axes, self.strides, strict=True):
            total = total.plus(a.times(stride))
        return total


@lru_cache(maxsize=4096)
def copy(dims: tuple[Dim, ...], source: StridedView, target: StridedView) -> ScheduledNest:
    """target = source, in the target's element type."""
    traced, axes = _begin(dims)
    index_map = source.index_map_of(axes)
    instruction = TracedInstruction(
        "load", source.dtype, frozenset(index_map.keys), (), source.buffer, index_map
    )
    traced.instructions.append(instruction)
    if source.dtype is not target.dtype:
        record = lookup("cast")(dtype=target.dtype)
        traced.instructions.append(
            TracedInstruction("apply", target.dtype, instruction.axes, (0,), record=record)
        )
    return _end(traced, target, axes)


@lru_cache(maxsize=4096)
def fill(dims: tuple[Dim, ...], value: float, target: StridedView) -> ScheduledNest:
    """target = value everywhere."""
    traced, axes = _begin(dims)
    data = np.asarray(value).astype(target.dtype.numpy).tobytes()
    traced.instructions.append(TracedInstruction("literal", target.dtype, frozenset(), data=data))
    return _end(traced, target, axes)


def _begin(dims: Sequence[Dim]) -> tuple[TracedKernel, list[Affine]]:
    sizes = [d for d in dims if d != 1]
    keys = iter(range(len(sizes)))
    axes = [ZERO if d == 1 else axis(next(keys)) for d in dims]
    return TracedKernel(sizes, list(range(len(sizes))), [], [], []), axes


def _end(traced: TracedKernel, target: StridedView, axes: Sequence[Affine]) -> ScheduledNest:
    index_map = target.index_map_of(axes)
    last = len(traced.instructions) - 1
    stored = TracedStore(target.buffer, target.dtype, index_map, last, frozenset(index_map.keys))
    traced.stores.append(stored)
    return schedule(as_bits(traced))


# -- ops that are strided copies -------------------------------------------------------------------

Strides = tuple[Dim, ...]
_RESULT = Buffer("result")


def copy_nests(node: Node, strides: Callable[[Value], Strides]) -> list[ScheduledNest]:
    """The nests of a node of `COPIES`, whose operands have these strides."""
    return list(COPIES[node.op.name](node, strides))


def _operand(node: Node, strides: Callable[[Value], Strides], number: int) -> StridedView:
    value = node.inputs[number]
    return StridedView(Buffer("operand", number), value.dtype, strides(value))


def _concat(node: Node, strides: Callable[[Value], Strides]) -> Iterator[ScheduledNest]:
    op: Any = node.op
    out = node.output.shape
    at = normalize_axis(op.axis, out.rank)
    plain = contiguous_strides(out)
    start: Dim = 0
    for number, value in enumerate(node.inputs):
        dims = value.shape.dims
        if 0 not in dims:
            target = StridedView(_RESULT, out.dtype, plain, start * plain[at])
            yield copy(dims, _operand(node, strides, number), target)
        start = start + dims[at]


def _state_update(node: Node, strides: Callable[[Value], Strides]) -> Iterator[ScheduledNest]:
    """A write to a state from a start on; writes at slots are no copies."""
    op: Any = node.op
    state, update = node.inputs
    if 0 in update.shape.dims:
        return
    along = strides(state)
    offset = op.start * along[normalize_axis(op.axis, state.shape.rank)]
    target = StridedView(Buffer("operand", 0), state.dtype, along, offset)
    yield copy(update.shape.dims, _operand(node, strides, 1), target)


def _pad(node: Node, strides: Callable[[Value], Strides]) -> Iterator[ScheduledNest]:
    """Copy the operand to the interior, then make the borders axis by axis: those of a later axis
    include the borders of earlier ones."""
    op: Any = node.op
    x, out = node.inputs[0].shape, node.output.shape
    if 0 in out.dims:
        return
    plain = contiguous_strides(out)
    if 0 not in x.dims:
        target = StridedView(_RESULT, out.dtype, plain, _offset(plain, op.low))
        yield copy(x.dims, _operand(node, strides, 0), target)
    for at in range(x.rank):
        yield from _borders(op, x, out, at)


def _offset(strides: Strides, starts: Sequence[Dim]) -> Dim:
    total: Dim = 0
    for stride, start in zip(strides, starts, strict=True):
        total = total + stride * start
    return total


def _borders(op: Any, x: Shape, out: Shape, at: int) -> Iterator[ScheduledNest]:
    """The two borders along one axis. Axes before it are complete, later ones hold the operand's
    elements only."""
    strides = contiguous_strides(out)
    low, size, high = op.low[at], x.dims[at], op.high[at]
    for width, start, edge, mirrored in (
        (low, 0, low, 2 * low),
        (high, low + size, low + size - 1, low + size - 2),
    ):
        dims = (*out.dims[:at], width, *x.dims[at + 1 :])
        if 0 in dims:
            continue
        starts = (*[0] * at, start, *op.low[at + 1 :])
        target = StridedView(_RESULT, out.dtype, strides, _offset(strides, starts))
        if op.mode == "constant":
            yield fill(dims, op.value, target)
            continue
        is_edge = op.mode == "edge"
        along = 0 if is_edge else strides[at] * -1
        first = _offset(strides, (*starts[:at], edge if is_edge else mirrored, *starts[at + 1 :]))
        source = StridedView(_RESULT, out.dtype, (*strides[:at], along, *strides[at + 1 :]), first)
        yield copy(dims, source, target)


COPIES = {"concat": _concat, "pad": _pad, "state_update": _state_update}
