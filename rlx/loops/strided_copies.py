"""Nests that copy or fill strided views of tensors: concat, pad and writes to states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.op import lookup
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
