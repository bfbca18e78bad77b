"""Tracing a graph of ops to element instructions, backwards from a result: each value is asked for
at an index and asks for its operands in turn. Layout ops only rewrite the index; a reduction adds
an iteration space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from rlx.errors import UnsupportedError
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType, bool_, f32, f64, i32, i64
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.op import Op, lookup
from rlx.ir.ops._common import normalize_axes
from rlx.ir.shape import normalize_axis
from rlx.loops.index_map import (
    ZERO,
    Affine,
    NotAffine,
    SplitAxis,
    axis,
    linear,
    quotient,
    unravel,
)
from rlx.support.records import dataclass

Index = tuple[Affine, ...]


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory: an operand or result of the region, or a temporary between two kernels; a
    `table` is the data of a constant."""

    kind: str  # operand, result, temporary, table
    number: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class Source:
    """A strided tensor in a buffer."""

    buffer: Buffer
    dtype: DType
    strides: tuple[Dim, ...]

    def address(self, index: Sequence[Affine]) -> Affine:
        total = ZERO
        for i, stride in zip(index, self.strides, strict=True):
            total = total.plus(i.times(stride))
        return total


@dataclass(frozen=True)
class TracedInstruction:
    """An element instruction before scheduling. `opcode` is load, literal, iota, apply,
    bounds_check or reduce; `axes` are the loop axes that its value depends on."""

    opcode: str
    dtype: DType
    axes: frozenset[int]
    args: tuple[int, ...] = ()
    buffer: Buffer | None = None
    address: Affine = ZERO
    record: Op | None = None
    kind: str = ""
    size: Dim = 0
    data: bytes = b""
    space: int = 0


class MustMaterialize(Exception):
    """A value cannot be fused into the kernel that uses it; an earlier kernel must store it."""

    def __init__(self, *values: Value) -> None:
        self.values = values


AxisSplits = dict[
    tuple[object, int], list[Dim]
]  # (shape, axis) → sizes of the axes it is split into


class Trace:
    """The trace of one kernel: `root` at every index of its shape, and what that depends on."""

    def __init__(self, sources: Mapping[Value, Source], root: Value, splits: AxisSplits) -> None:
        self.sources, self.splits = sources, splits
        self.sizes: list[Dim] = []
        self.owner: list[tuple[object, int, int]] = []  # shape, axis, number after splitting
        self.instructions: list[TracedInstruction] = []
        self.seen: dict[tuple[Value, Index], int] = {}
        self.rows: frozenset[int] | None = None  # row axes, once there is a reduction
        self.reductions: list[Value] = []
        self.spaces: list[list[int]] = []
        self._reduction_spaces: dict[tuple[Dim, ...], tuple[int, Index]] = {}
        self.index = self._axes("root", root.shape.dims)
        self.root_axes = list(range(len(self.sizes)))

    def _axes(self, shape: object, dims: Sequence[Dim]) -> Index:
        """New loop axes for a shape, split where `splits` says; axes of size 1 need no loop."""
        index = []
        for position, size in enumerate(dims):
            parts = self.splits.get((shape, position), [size])
            exprs = [self._axis(shape, position, part, d) for part, d in enumerate(parts)]
            index.append(linear(exprs, parts))
        return tuple(index)

    def _axis(self, shape: object, position: int, part: int, size: Dim) -> Affine:
        if size == 1:
            return ZERO
        self.sizes.append(size)
        self.owner.append((shape, position, part))
        return axis(len(self.sizes) - 1)

    def split_axis(self, found: SplitAxis) -> None:
        """Record that an axis is split in two; tracing must start again."""
        shape, position, part = self.owner[found.key]
        size = self.sizes[found.key]
        outer = quotient(size, found.inner)
        assert outer is not None
        parts = self.splits.get((shape, position), [size])
        self.splits[shape, position] = [*parts[:part], outer, found.inner, *parts[part + 1 :]]

    # -- values -------------------------------------------------------------------------------

    def value(self, v: Value, index: Sequence[Affine]) -> int:
        """The number of the instruction that computes `v` at `index`."""
        key = (v, tuple(index))
        found, source = self.seen.get(key), self.sources.get(v)
        if found is not None:
            return found
        node, rule = v.node, RULES.get(v.node.op.name)
        if source is not None:
            found = self.read(source, source.address(key[1]))
        else:
            try:
                if rule is not None:
                    found = rule(self, node, node.op, key[1])
                elif node.op.is_elementwise:
                    args = []
                    for x in node.inputs:
                        args.append(self.value(x, broadcast(key[1], x.shape.dims)))
                    found = self.apply(node.op, args, v.shape.dtype)
                else:
                    raise UnsupportedError(
                        "cannot be part of a region", where=node.op.name, got=repr(node),
                        origin=node.origin,
                    )  # fmt: skip
            except NotAffine:
                raise MustMaterialize(node.inputs[0] if node.inputs else v) from None
        self.seen[key] = found
        return found

    def add(self, instruction: TracedInstruction) -> int:
        self.instructions.append(instruction)
        return len(self.instructions) - 1

    def axes_of(self, index: Affine) -> frozenset[int]:
        """Loop axes that an index depends on, through gathered indices too."""
        found: set[int] = set()
        for key in index.keys:
            found |= {key} if key >= 0 else self.instructions[-1 - key].axes
        return frozenset(found)

    def read(self, source: Source, address: Affine) -> int:
        args = tuple(-1 - k for k in address.keys if k < 0)
        axes = self.axes_of(address)
        return self.add(TracedInstruction("load", source.dtype, axes, args, source.buffer, address))

    def apply(self, record: Op, args: Sequence[int], dtype: DType) -> int:
        axes = frozenset().union(*(self.instructions[a].axes for a in args))
        return self.add(TracedInstruction("apply", dtype, axes, tuple(args), record=record))

    def iota(self, index: Affine) -> int:
        """An index as an i64 value."""
        args = tuple(-1 - k for k in index.keys if k < 0)
        if args:
            raise NotAffine
        return self.add(TracedInstruction("iota", i64, self.axes_of(index), address=index))

    def literal(self, value: Any, dtype: DType) -> int:
        data = np.asarray(value).astype(dtype.numpy).tobytes()
        return self.add(TracedInstruction("literal", dtype, frozenset(), data=data))

    def cast(self, instruction: int, dtype: DType) -> int:
        if self.instructions[instruction].dtype is dtype:
            return instruction
        return self.apply(lookup("cast")(dtype=dtype), [instruction], dtype)

    def bounds_check(self, instruction: int, size: Dim) -> Affine:
        """A gathered index, checked against `size` before it is used."""
        axes = self.instructions[instruction].axes
        return axis(
            -1 - self.add(TracedInstruction("bounds_check", i64, axes, (instruction,), size=size))
        )

    # -- reductions ---------------------------------------------------------------------------

    def reduce(
        self,
        node: Node,
        kind: str,
        axes: Sequence[int],
        index: Index,
        dtype: DType | None = None,
    ) -> int:
        """Reduce the operand over `axes`, as `dtype`, at an index of the result."""
        x = node.inputs[0]
        keepdims = bool(node.op.keepdims)  # type: ignore[attr-defined]
        others = [i for i in range(x.shape.rank) if i not in axes]
        result_index = [i for at, i in enumerate(index) if not keepdims or at not in axes]
        self._require_rows(node.outputs[0], frozenset().union(*map(self.axes_of, result_index)))
        space, inner = self._space([x.shape.dims[a] for a in axes])
        where: dict[int, Affine] = dict(zip(others, result_index, strict=True))
        where |= dict(zip(axes, inner, strict=True))
        instruction = self.value(x, [where[i] for i in range(x.shape.rank)])
        args = [instruction if dtype is None else self.cast(instruction, dtype)]
        if kind in ("argmax", "argmin"):
            args.append(self.cast(self.iota(inner[0]), i32))
        assert self.rows is not None
        result = self.instructions[args[-1]].dtype
        return self.add(
            TracedInstruction("reduce", result, self.rows, tuple(args), kind=kind, space=space)
        )

    def _require_rows(self, v: Value, axes: frozenset[int]) -> None:
        """All reductions of a kernel have the same rows, and none is nested in another."""
        if self.rows is None:
            self.rows = axes
        elif axes < self.rows or not axes <= set(self.root_axes):
            raise MustMaterialize(v)
        elif axes != self.rows:
            raise MustMaterialize(*self.reductions, *([] if axes > self.rows else [v]))
        self.reductions.append(v)

    def _space(self, dims: Sequence[Dim]) -> tuple[int, Index]:
        """The iteration space of a reduction: the root's inner axes where sizes agree, else new
        axes."""
        assert self.rows is not None
        known = self._reduction_spaces.get(tuple(dims))
        if known is not None:
            return known
        inner = [a for a in self.root_axes if a not in self.rows]
        sizes = [self.sizes[a] for a in inner]
        made: tuple[int, Index] | None = None
        if inner and same(prod(sizes, start=1), prod(dims, start=1)):
            try:
                index = unravel(linear([axis(a) for a in inner], sizes), dims, self.sizes)
                made = (self._space_of(inner), tuple(index))
            except NotAffine:
                pass
        if made is None:
            first = len(self.sizes)
            index_of = self._axes(("reduction", *dims), dims)
            made = (self._space_of(list(range(first, len(self.sizes)))), index_of)
        self._reduction_spaces[tuple(dims)] = made
        return made

    def _space_of(self, axes: list[int]) -> int:
        if axes not in self.spaces:
            self.spaces.append(axes)
        return self.spaces.index(axes)


# -- rules: what an op does with the index it is asked for ----------------------------------------

Rule = Callable[[Trace, Node, Any, Index], int]  # node, its op, result index → instruction
RULES: dict[str, Rule] = {}


def is_plain(strides: Sequence[Dim], dims: Sequence[Dim]) -> bool:
    """Whether strides are contiguous and row-major; those of axes of size 1 do not matter."""
    wanted = contiguous_strides(dims)
    return all(d == 1 or same(s, w) for s, w, d in zip(strides, wanted, dims, strict=True))


def broadcast(index: Sequence[Affine], dims: Sequence[Dim]) -> list[Affine]:
    """The index of a broadcast operand: 0 along its axes of size 1."""
    own = index[len(index) - len(dims) :]
    return [ZERO if d == 1 else i for i, d in zip(own, dims, strict=True)]


def _transpose(t: Trace, node: Node, op: Any, index: Index) -> int:
    where = dict(zip(op.axes, index, strict=True))
    return t.value(node.inputs[0], [where[a] for a in range(len(index))])


def _narrow(t: Trace, node: Node, op: Any, index: Index) -> int:
    at = normalize_axis(op.axis, len(index))
    moved = [i.plus(op.start) if a == at else i for a, i in enumerate(index)]
    return t.value(node.inputs[0], moved)


def _slice(t: Trace, node: Node, op: Any, index: Index) -> int:
    bounds = op.bounds(node.inputs[0].shape.dims)
    moved = [i.times(step).plus(low) for i, (low, _, step) in zip(index, bounds, strict=True)]
    return t.value(node.inputs[0], moved)


def _flip(t: Trace, node: Node, op: Any, index: Index) -> int:
    x = node.inputs[0]
    axes = normalize_axes(op.axis, x.shape.rank)
    pairs = enumerate(zip(index, x.shape.dims, strict=True))
    moved = [i.times(-1).plus(d - 1) if a in axes else i for a, (i, d) in pairs]
    return t.value(x, [ZERO if d == 1 else i for i, d in zip(moved, x.shape.dims, strict=True)])


def _expand(t: Trace, node: Node, op: Any, index: Index) -> int:
    x = node.inputs[0]
    return t.value(x, broadcast(index, x.shape.dims))


def _reshape(t: Trace, node: Node, op: Any, index: Index) -> int:
    x, dims = node.inputs[0], node.outputs[0].shape.dims
    old = x.shape.dims
    if 0 in old:
        return t.value(x, [ZERO] * len(old))
    source = t.sources.get(x)
    if source is not None and is_plain(source.strides, old):
        return t.read(source, linear(index, dims))
    where: list[Affine] = []
    i = j = 0
    while i < len(old) or j < len(dims):
        a, b = _next_group(old, dims, i, j)
        if old[i:a] == dims[j:b]:
            where += index[j:b]
        else:
            where += unravel(linear(index[j:b], dims[j:b]), old[i:a], t.sizes)
        i, j = a, b
    return t.value(x, where)


def _next_group(old: Sequence[Dim], new: Sequence[Dim], i: int, j: int) -> tuple[int, int]:
    """The smallest runs of axes from i and j that hold the same number of elements."""
    for a in range(i, len(old) + 1):
        for b in range(j, len(new) + 1):
            if (a > i or b > j) and same(prod(old[i:a], start=1), prod(new[j:b], start=1)):
                return a, b
    raise NotAffine


def _gather(t: Trace, node: Node, op: Any, index: Index) -> int:
    x, indices = node.inputs
    at = normalize_axis(op.axis, x.shape.rank)
    end = at + indices.shape.rank
    found = t.bounds_check(t.value(indices, index[at:end]), x.shape.dims[at])
    return t.value(x, [*index[:at], found, *index[end:]])


def _take_along(t: Trace, node: Node, op: Any, index: Index) -> int:
    x, indices = node.inputs
    at = normalize_axis(op.axis, x.shape.rank)
    found = t.bounds_check(t.value(indices, broadcast(index, indices.shape.dims)), x.shape.dims[at])
    where = broadcast(index, x.shape.dims)
    where[at] = found
    return t.value(x, where)


def _iota(t: Trace, node: Node, op: Any, index: Index) -> int:
    at = normalize_axis(op.axis, len(index))
    return t.cast(t.iota(index[at].plus(op.start)), op.dtype)


def _dim_value(t: Trace, node: Node, op: Any, index: Index) -> int:
    return t.cast(t.iota(Affine((), op.dim)), op.dtype)


def _constant(t: Trace, node: Node, op: Any, index: Index) -> int:
    array = op.data.array
    if array.size == 1:
        return t.literal(array.reshape(()), op.data.shape.dtype)
    strides = tuple(s // array.itemsize for s in array.strides)
    source = Source(Buffer("table", data=array.tobytes()), op.data.shape.dtype, strides)
    return t.read(source, source.address(index))


def _reduction(t: Trace, node: Node, op: Any, index: Index) -> int:
    x = node.inputs[0].shape
    wide = bool_ if op.name in ("any", "all") else i32 if x.dtype is bool_ else None
    return t.reduce(node, op.name, normalize_axes(op.axis, x.rank), index, wide)


def _position(t: Trace, node: Node, op: Any, index: Index) -> int:
    x = node.inputs[0].shape
    wide = i32 if x.dtype is bool_ else None
    return t.reduce(node, op.name, [normalize_axis(op.axis, x.rank)], index, wide)


def _mean(t: Trace, node: Node, op: Any, index: Index) -> int:
    x, dtype = node.inputs[0].shape, node.outputs[0].shape.dtype
    axes = normalize_axes(op.axis, x.rank)
    size: Any = prod((x.dims[a] for a in axes), start=1)
    whole = x.dtype.kind in ("int", "uint", "bool")
    # a narrow float would not hold the number
    wide = f64 if whole or dtype is f64 else dtype if dtype.is_complex else f32
    total = t.reduce(node, "sum", axes, index, f64 if whole else None)
    known = isinstance(size, int)
    number = t.literal(size, wide) if known else t.cast(t.iota(Affine((), size)), wide)
    mean = t.apply(lookup("div")(), [total, number], f64 if whole else dtype)
    return t.cast(mean, dtype)


_MOVES: dict[str, Rule] = {
    "transpose": _transpose,
    "narrow": _narrow,
    "slice": _slice,
    "flip": _flip,
    "expand": _expand,
    "reshape": _reshape,
    "contiguous": _expand,
    "gather": _gather,
    "take_along": _take_along,
    "iota": _iota,
    "dim_value": _dim_value,
    "constant": _constant,
}
_FOLDS: dict[str, Rule] = {
    "mean": _mean,
    **dict.fromkeys(("sum", "prod", "max", "min", "any", "all"), _reduction),
    **dict.fromkeys(("argmax", "argmin"), _position),
}
RULES.update(_MOVES | _FOLDS)
MOVES, FOLDS = frozenset(_MOVES), frozenset(_FOLDS)
