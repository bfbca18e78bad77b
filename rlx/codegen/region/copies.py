"""Boxes of elements copied from one tensor into another, or filled with a number: what concat, pad
and writes to states are made of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from rlx.codegen.region.affine import ZERO, Affine, axis
from rlx.codegen.region.kernels import Stored, Traced, as_bits
from rlx.codegen.region.settle import Settled, settle
from rlx.codegen.region.trace import Item, Place
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.op import lookup
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Box:
    """Where a box of elements lies: strides per axis, and how far its first element is from the
    tensor's."""

    place: Place
    dtype: DType
    strides: tuple[Dim, ...]
    shift: Dim = 0

    def path(self, axes: Sequence[Affine]) -> Affine:
        total = Affine((), self.shift)
        for a, stride in zip(axes, self.strides, strict=True):
            total = total.plus(a.times(stride))
        return total


@lru_cache(maxsize=4096)
def copy(dims: tuple[Dim, ...], source: Box, target: Box) -> Settled:
    """target = source, in the target's element type."""
    traced, axes = _begin(dims)
    path = source.path(axes)
    item = Item("read", source.dtype, frozenset(path.keys), (), source.place, path)
    traced.items.append(item)
    if source.dtype is not target.dtype:
        record = lookup("cast")(dtype=target.dtype)
        traced.items.append(Item("use", target.dtype, item.axes, (0,), record=record))
    return _end(traced, target, axes)


@lru_cache(maxsize=4096)
def fill(dims: tuple[Dim, ...], value: float, target: Box) -> Settled:
    """target = value everywhere."""
    traced, axes = _begin(dims)
    data = np.asarray(value).astype(target.dtype.numpy).tobytes()
    traced.items.append(Item("number", target.dtype, frozenset(), data=data))
    return _end(traced, target, axes)


def _begin(dims: Sequence[Dim]) -> tuple[Traced, list[Affine]]:
    sizes = [d for d in dims if d != 1]
    keys = iter(range(len(sizes)))
    axes = [ZERO if d == 1 else axis(next(keys)) for d in dims]
    return Traced(sizes, list(range(len(sizes))), [], [], []), axes


def _end(traced: Traced, target: Box, axes: Sequence[Affine]) -> Settled:
    path = target.path(axes)
    last = len(traced.items) - 1
    stored = Stored(target.place, target.dtype, path, last, frozenset(path.keys))
    traced.stores.append(stored)
    return settle(as_bits(traced))
