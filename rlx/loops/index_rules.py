"""What each layout op and reduction of a traced graph does with the index it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from rlx.ir.dim import Dim, same
from rlx.ir.dtype import bool_, c64, f32, f64, i32
from rlx.ir.node import Node
from rlx.ir.op import lookup
from rlx.ir.ops._common import normalize_axes
from rlx.ir.shape import normalize_axis
from rlx.loops.index_map import ZERO, Affine, NotAffine, linear, unravel
from rlx.loops.trace import RULES, Buffer, Index, Rule, Source, Trace, broadcast, is_plain


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
    wide = f64 if whole or dtype is f64 else dtype if dtype is c64 else f32
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
