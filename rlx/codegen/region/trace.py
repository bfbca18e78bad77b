"""From a graph of ops to element instructions: each value is asked for at an index, and asks its
operands in turn. Layout ops only change the index; a reduction opens loops of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from rlx.codegen.region.affine import (
    ZERO,
    Affine,
    CutAxis,
    Inseparable,
    axis,
    linear,
    quotient,
    unravel,
)
from rlx.codegen.region.elements import NAMES
from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType, i32, i64
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.op import Op, lookup
from rlx.support.records import dataclass

Index = tuple[Affine, ...]


@dataclass(frozen=True)
class Place:
    """A tensor in memory: an operand or result of the region, or a value kept between kernels; a
    `table` holds the data of a constant."""

    kind: str  # operand, result, temporary, table
    number: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class Source:
    place: Place
    dtype: DType
    strides: tuple[Dim, ...]

    def address(self, index: Sequence[Affine]) -> Affine:
        total = ZERO
        for i, stride in zip(index, self.strides, strict=True):
            total = total.plus(i.times(stride))
        return total


@dataclass(frozen=True)
class Item:
    """An instruction before its loops are settled. `what` says the kind: read, number, count, use,
    check or fold; `axes` are those its value depends on."""

    what: str
    dtype: DType
    axes: frozenset[int]
    args: tuple[int, ...] = ()
    place: Place | None = None
    address: Affine = ZERO
    record: Op | None = None
    kind: str = ""
    size: Dim = 0
    data: bytes = b""
    space: int = 0


class NeedsMemory(Exception):
    """A value cannot be computed where it is used; it must be kept in memory before."""

    def __init__(self, *values: Value) -> None:
        self.values = values


Cuts = dict[tuple[object, int], list[Dim]]  # (which shape, axis) → sizes of its parts


class Trace:
    """One kernel: `root` at every index of its shape, and all that it needs."""

    def __init__(self, sources: Mapping[Value, Source], root: Value, cuts: Cuts) -> None:
        self.sources, self.cuts = sources, cuts
        self.sizes: list[Dim] = []
        self.owner: list[tuple[object, int, int]] = []  # shape, axis and part of each axis
        self.items: list[Item] = []
        self.seen: dict[tuple[Value, Index], int] = {}
        self.rows: frozenset[int] | None = None  # axes of the rows, once there is a fold
        self.folds: list[Value] = []
        self.spaces: list[list[int]] = []
        self._fresh: dict[tuple[Dim, ...], tuple[int, Index]] = {}
        self.index = self._axes("root", root.shape.dims)
        self.root_axes = list(range(len(self.sizes)))

    def _axes(self, shape: object, dims: Sequence[Dim]) -> Index:
        """New axes for a shape; those of size 1 need none, and some are known to be cut."""
        index = []
        for position, size in enumerate(dims):
            parts = self.cuts.get((shape, position), [size])
            exprs = [self._axis(shape, position, part, d) for part, d in enumerate(parts)]
            index.append(linear(exprs, parts))
        return tuple(index)

    def _axis(self, shape: object, position: int, part: int, size: Dim) -> Affine:
        if size == 1:
            return ZERO
        self.sizes.append(size)
        self.owner.append((shape, position, part))
        return axis(len(self.sizes) - 1)

    def cut(self, found: CutAxis) -> None:
        """Note that an axis is two; the trace must begin anew."""
        shape, position, part = self.owner[found.key]
        size = self.sizes[found.key]
        outer = quotient(size, found.inner)
        assert outer is not None
        parts = self.cuts.get((shape, position), [size])
        self.cuts[shape, position] = [*parts[:part], outer, found.inner, *parts[part + 1 :]]

    # -- values -------------------------------------------------------------------------------

    def value(self, v: Value, index: Sequence[Affine]) -> int:
        """The number of the item that is `v` at `index`."""
        key = (v, tuple(index))
        found = self.seen.get(key)
        if found is None:
            found = self.seen[key] = self._value(v, key[1])
        return found

    def _value(self, v: Value, index: Index) -> int:
        source = self.sources.get(v)
        if source is not None:
            return self.read(source, source.address(index))
        node = v.node
        rule = RULES.get(node.op.name)
        try:
            if rule is not None:
                return rule(self, node, node.op, index)
            if node.op.name in NAMES:
                args = [self.value(x, broadcast(index, x.shape.dims)) for x in node.inputs]
                return self.use(node.op, args, v.shape.dtype)
        except Inseparable:
            raise NeedsMemory(node.inputs[0] if node.inputs else v) from None
        raise UnsupportedError(
            "cannot be part of a region", where=node.op.name, got=repr(node), origin=node.origin
        )

    def add(self, item: Item) -> int:
        self.items.append(item)
        return len(self.items) - 1

    def axes_of(self, index: Affine) -> frozenset[int]:
        """Axes an index depends on, by way of data too."""
        found: set[int] = set()
        for key in index.keys:
            found |= {key} if key >= 0 else self.items[-1 - key].axes
        return frozenset(found)

    def read(self, source: Source, address: Affine) -> int:
        args = tuple(-1 - k for k in address.keys if k < 0)
        axes = self.axes_of(address)
        return self.add(Item("read", source.dtype, axes, args, source.place, address))

    def use(self, record: Op, args: Sequence[int], dtype: DType) -> int:
        axes = frozenset().union(*(self.items[a].axes for a in args))
        return self.add(Item("use", dtype, axes, tuple(args), record=record))

    def count(self, index: Affine) -> int:
        """An index as a number, an i64."""
        args = tuple(-1 - k for k in index.keys if k < 0)
        if args:
            raise Inseparable
        return self.add(Item("count", i64, self.axes_of(index), address=index))

    def number(self, value: Any, dtype: DType) -> int:
        data = np.asarray(value).astype(dtype.numpy).tobytes()
        return self.add(Item("number", dtype, frozenset(), data=data))

    def cast(self, item: int, dtype: DType) -> int:
        if self.items[item].dtype is dtype:
            return item
        return self.use(lookup("cast")(dtype=dtype), [item], dtype)

    def check(self, item: int, size: Dim) -> Affine:
        """An index that is data, looked at before it is used."""
        axes = self.items[item].axes
        return axis(-1 - self.add(Item("check", i64, axes, (item,), size=size)))

    # -- reductions ---------------------------------------------------------------------------

    def fold(
        self,
        node: Node,
        kind: str,
        axes: Sequence[int],
        index: Index,
        dtype: DType | None = None,
    ) -> int:
        """All of `axes` of the operand, as `dtype`, taken together, at the index of the result."""
        x = node.inputs[0]
        keepdims = bool(node.op.keepdims)  # type: ignore[attr-defined]
        others = [i for i in range(x.shape.rank) if i not in axes]
        kept = [i for at, i in enumerate(index) if not keepdims or at not in axes]
        self._require_rows(node.outputs[0], frozenset().union(*map(self.axes_of, kept)))
        space, inner = self._space([x.shape.dims[a] for a in axes])
        where: dict[int, Affine] = dict(zip(others, kept, strict=True))
        where |= dict(zip(axes, inner, strict=True))
        item = self.value(x, [where[i] for i in range(x.shape.rank)])
        args = [item if dtype is None else self.cast(item, dtype)]
        if kind in ("argmax", "argmin"):
            args.append(self.cast(self.count(inner[0]), i32))
        assert self.rows is not None
        result = self.items[args[-1]].dtype
        return self.add(Item("fold", result, self.rows, tuple(args), kind=kind, space=space))

    def _require_rows(self, v: Value, axes: frozenset[int]) -> None:
        """All folds of a kernel are over the same rows, and none is inside another's loops."""
        if self.rows is None:
            self.rows = axes
        elif axes < self.rows or not axes <= set(self.root_axes):
            raise NeedsMemory(v)
        elif axes != self.rows:
            raise NeedsMemory(*self.folds, *([] if axes > self.rows else [v]))
        self.folds.append(v)

    def _space(self, dims: Sequence[Dim]) -> tuple[int, Index]:
        """The loops of a fold: those of the root that are not rows, where they have that size."""
        assert self.rows is not None
        known = self._fresh.get(tuple(dims))
        if known is not None:
            return known
        inner = [a for a in self.root_axes if a not in self.rows]
        sizes = [self.sizes[a] for a in inner]
        made: tuple[int, Index] | None = None
        if inner and same(prod(sizes, start=1), prod(dims, start=1)):
            try:
                index = unravel(linear([axis(a) for a in inner], sizes), dims, self.sizes)
                made = (self._space_of(inner), tuple(index))
            except Inseparable:
                pass
        if made is None:
            first = len(self.sizes)
            index_of = self._axes(("fold", *dims), dims)
            made = (self._space_of(list(range(first, len(self.sizes)))), index_of)
        self._fresh[tuple(dims)] = made
        return made

    def _space_of(self, axes: list[int]) -> int:
        if axes not in self.spaces:
            self.spaces.append(axes)
        return self.spaces.index(axes)


Rule = Callable[[Trace, Node, Any, Index], int]  # node, its op, index of the result → item
RULES: dict[str, Rule] = {}


def is_plain(strides: Sequence[Dim], dims: Sequence[Dim]) -> bool:
    """Row-major without gaps; the stride of an axis of size 1 does not matter."""
    wanted = contiguous_strides(dims)
    return all(d == 1 or same(s, w) for s, w, d in zip(strides, wanted, dims, strict=True))


def broadcast(index: Sequence[Affine], dims: Sequence[Dim]) -> list[Affine]:
    """The index of an operand whose axes of size 1 are repeated."""
    own = index[len(index) - len(dims) :]
    return [ZERO if d == 1 else i for i, d in zip(own, dims, strict=True)]
