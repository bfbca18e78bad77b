"""Indexing: `x[index]`, `x.at[index].set(v)`, `take`.

An index has an int, a slice, None, `...`, an array of ints or a mask for each axis, by NumPy's
rules. A concrete array is indexed by NumPy. In a trace:

- ints and slices, whose bounds may be symbolic sizes, are views; a negative step flips;
- arrays of ints, traced or not, several of which broadcast: their axes are merged into one, on
  which one gather (or one scatter) works;
- a mask that is traced chooses by `where` in an update; `x[mask]` has no size and is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rlx.errors import ArrayValueError, IndexingError, UnsupportedError
from rlx.ir.dim import Dim, as_dim
from rlx.ir.dtype import i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.data_types import astype
from rlx.numpy.dispatch import apply, as_array, trace_among, value_in
from rlx.numpy.manipulation import (
    axis_of,
    broadcast_arrays,
    permute_dims,
    reshape,
)
from rlx.numpy.trace import Size, Trace, dim_of
from rlx.numpy.typing import ArrayLike

Item: TypeAlias = (
    int | slice | EllipsisType | Array | np.ndarray[Any, Any] | np.generic | Sequence[Any] | None
)
Index: TypeAlias = Item | tuple[Item, ...]


# -- reading ----------------------------------------------------------------------------------


def get_item(x: Array, index: Any) -> Array:
    """`x[index]`."""
    parts = index_parts(index)
    trace = trace_among([x, *inside(parts)])
    if trace is None:
        return _concrete(x, parts, index)
    plan = Plan.of(x, parts)
    found = viewed(x, plan, trace)
    return gathered(found, plan) if plan.arrays else found


def index_parts(index: Any) -> tuple[Any, ...]:
    """An index as a tuple, lists in it as arrays."""
    given = index if isinstance(index, tuple) else (index,)
    return tuple([as_array(p) if isinstance(p, (list, np.ndarray, np.generic)) else p
                  for p in given])  # fmt: skip


def inside(parts: Sequence[Any]) -> list[Any]:
    """What may be traced: the parts, and the bounds of slices."""
    found: list[Any] = []
    for p in parts:
        found += [p.start, p.stop, p.step] if isinstance(p, slice) else [p]
    return found


def plain(part: Any) -> Any:
    """A part of an index as NumPy takes it."""
    if isinstance(part, Array):
        data = part.data
        return data.astype(np.int64) if data.size == 0 and data.dtype.kind == "f" else data
    if isinstance(part, slice):
        return slice(*[n if n is None else n.__index__()
                       for n in (part.start, part.stop, part.step)])  # fmt: skip
    return part


def _concrete(x: Array, parts: tuple[Any, ...], index: Any) -> Array:
    empty = _empty_mask(x, parts)
    if empty is not None:
        return empty
    try:
        found = x.data[tuple([plain(p) for p in parts])]
    except (IndexError, AttributeError, TypeError, ValueError) as error:
        raise not_an_index(x, index, str(error)) from error
    return Array(found if isinstance(found, np.ndarray) else np.asarray(found, x.data.dtype))


def _empty_mask(x: Array, parts: tuple[Any, ...]) -> Array | None:
    """The standard lets a mask have size 0 where the array has another size: nothing is chosen."""
    if len(parts) != 1 or not isinstance(parts[0], Array) or parts[0].dtype.kind != "bool":
        return None
    mask = parts[0].shape
    pairs = list(zip(mask, x.shape, strict=False))
    if len(mask) > x.ndim or mask == x.shape[: len(mask)] or any(m not in (0, n) for m, n in pairs):
        return None
    return Array(np.empty((0, *x.shape[len(mask) :]), x.data.dtype))


def not_an_index(x: Array, index: Any, why: str) -> IndexingError:
    return IndexingError(
        "not an index of the array", where="index", got=f"{index!r} for shape {tuple(x.shape)}",
        expected=why or "ints, slices, None, ..., arrays of ints, or a mask",
    )  # fmt: skip


# -- a traced index ---------------------------------------------------------------------------


class Plan(NamedTuple):
    """An index in a trace, its steps in order.

    `views` has an int or a slice per axis of the array. After them and the new axes, `arrays` are
    the axes with arrays of ints, and `place` is where the axes of these stand in the result.
    """

    views: tuple[Any, ...]
    new: tuple[int, ...]  # positions of None among the axes that remain
    arrays: tuple[tuple[int, Array], ...]
    place: int

    @staticmethod
    def of(x: Array, parts: tuple[Any, ...]) -> Plan:
        items = _per_axis(x, parts)
        views: list[Any] = []
        new: list[int] = []
        arrays: list[tuple[int, Array]] = []
        remaining = 0  # axes after views and new ones
        chosen: list[int] = []  # positions of ints and arrays in the index
        places: list[int] = []  # and how many axes are before each
        has_arrays = any(isinstance(item, Array) for item in items)
        for at, item in enumerate(items):
            if item is None:
                new.append(remaining)
                remaining += 1
            elif isinstance(item, slice):
                views.append(item)
                remaining += 1
            else:
                chosen.append(at)
                places.append(remaining - len(arrays))
                if isinstance(item, Array):
                    views.append(slice(None))
                    arrays.append((remaining, item))
                    remaining += 1
                else:
                    views.append(item)
        together = has_arrays and chosen == list(range(chosen[0], chosen[-1] + 1))
        return Plan(tuple(views), tuple(new), tuple(arrays), places[0] if together else 0)


def _per_axis(x: Array, parts: tuple[Any, ...]) -> list[Any]:
    """One item per axis, and None for each new one: the ellipsis expanded, masks as arrays of
    ints."""
    items: list[Any] = []
    dots: list[int] = []
    axis = 0
    count = sum(_width(p) for p in parts)
    for p in parts:
        if p is Ellipsis:
            dots.append(len(items))
            items += [slice(None)] * (x.ndim - count)
            axis += x.ndim - count
        elif isinstance(p, bool) or (isinstance(p, Array) and p.dtype.kind == "bool"):
            items += _positions(x, axis, as_array(p))
            axis += _width(p)
        else:
            items.append(_checked(x, axis, p))
            axis += _width(p)
    if len(dots) > 1:
        raise not_an_index(x, parts, "one ellipsis")
    if count > x.ndim:
        raise not_an_index(x, parts, f"at most {x.ndim} axes")
    return items if dots else items + [slice(None)] * (x.ndim - count)


def _width(part: Any) -> int:
    """How many axes a part is for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.ndim if isinstance(part, Array) and part.dtype.kind == "bool" else 1


def _positions(x: Array, axis: int, mask: Array) -> list[Any]:
    """The arrays of ints that stand for a mask."""
    if isinstance(mask, Tracer):
        raise UnsupportedError(
            "the size of x[mask] depends on the elements", where="index", got=repr(mask),
            hint="inside rlx.jit, choose with rlx.numpy.where(mask, x, other), change with "
            "x.at[mask].set(value), or take a known number with rlx.numpy.argsort and a slice",
        )  # fmt: skip
    for m, n in zip(mask.shape, x.shape[axis : axis + mask.ndim], strict=False):
        if n != m:  # leaves a guard where the size is symbolic
            raise not_an_index(x, mask, f"a mask with the sizes {x.shape}")
    if not mask.ndim:
        if mask:
            return [None]
        raise not_an_index(x, "False", "ints, slices, None, ..., arrays of ints, or a mask")
    return [Array(i.astype(np.int64)) for i in np.nonzero(mask.data)]


def _checked(x: Array, axis: int, part: Any) -> Any:
    """An int, a slice, None or an array of ints, else an error."""
    if part is None or isinstance(part, (slice, Size)):
        return part
    if isinstance(part, Array):
        if part.dtype.is_integer:
            return part if isinstance(part, Tracer) or part.ndim else int(part.data)
        if not part.size and not isinstance(part, Tracer):
            return astype(part, i64)
    elif not isinstance(part, (str, bytes)) and hasattr(part, "__index__"):
        return part.__index__()
    raise not_an_index(x, part, "ints, slices, None, ..., arrays of ints, or a mask")


def viewed(x: Array, plan: Plan, trace: Trace) -> Array:
    """The ints, slices and new axes of an index."""
    value = value_in(x, trace)
    graph, kept = value.graph, []
    for axis, item in enumerate(plan.views):
        if isinstance(item, slice):
            value = _sliced(value, axis, item, x, trace)
            kept.append(value.shape.dims[axis])
        else:
            value = graph.narrow(value, axis, _position(item, value.shape.dims[axis], x, trace), 1)
    dims: list[Dim] = kept
    for at in plan.new:
        dims.insert(at, 1)
    if list(value.shape.dims) != dims:
        value = graph.reshape(value, dims)
    return Tracer(trace, value)


def _position(item: Any, size: Dim, x: Array, trace: Trace) -> Dim:
    """An int as a position from 0 on, which is checked where it is a number."""
    at = as_dim(dim_of(item))
    if isinstance(at, int) and isinstance(size, int) and not -size <= at < size:
        raise not_an_index(x, item, f"{-size} … {size - 1}")
    return at + size if isinstance(at, int) and at < 0 else at


def _sliced(value: Value, axis: int, item: slice, x: Array, trace: Trace) -> Value:
    """A slice of one axis, its bounds clipped as in Python."""
    size = value.shape.dims[axis]
    if item == slice(None):
        return value
    for n in (item.start, item.stop):
        if isinstance(n, Tracer):
            raise UnsupportedError(
                "the size of the slice depends on elements", where="index", got=repr(item),
                hint="take `n` elements from a traced start with "
                "rlx.numpy.take(x, start + rlx.numpy.arange(n))",
            )  # fmt: skip
    step = 1 if item.step is None else int(item.step)
    if not step:
        raise not_an_index(x, item, "a step that is not 0")
    start = None if item.start is None else as_dim(dim_of(item.start))
    stop = None if item.stop is None else as_dim(dim_of(item.stop))
    first, count = _range(start, stop, step, size, trace)
    graph = value.graph
    if step < 0:  # the same elements from the other end
        first = first + (count - 1) * step if count != 0 else 0
        value = _forward(value, axis, first, count, -step)
        return graph.flip(value, (axis,))
    return _forward(value, axis, first, count, step)


def _forward(value: Value, axis: int, first: Dim, count: Dim, step: int) -> Value:
    """`count` elements from `first` on, each `step` after the other."""
    graph = value.graph
    if step == 1:
        if first == 0 and count == value.shape.dims[axis]:
            return value
        return graph.narrow(value, axis, first, count)
    if (
        isinstance(first, int)
        and isinstance(count, int)
        and isinstance(value.shape.dims[axis], int)
    ):
        starts: list[Any] = [None] * value.shape.rank
        stops: list[Any] = [None] * value.shape.rank
        steps = [1] * value.shape.rank
        starts[axis], stops[axis], steps[axis] = first, first + max(count - 1, -1) * step + 1, step
        if not count:
            return graph.narrow(value, axis, 0, 0)
        return graph.slice(value, starts, stops, steps)
    at = graph.iota([count], 0, i64) * step
    offset = first if isinstance(first, int) else graph.dim_value(first, i64)
    return graph.gather(value, at + offset, axis)


def _range(
    start: Dim | None, stop: Dim | None, step: int, size: Dim, trace: Trace
) -> tuple[Dim, Dim]:
    """The first index and the number of elements, with Python's clipping. What a symbolic bound
    needs to be known leaves a guard."""

    def ask(left: Dim, right: Dim) -> bool:
        """left < right"""
        apart = right - left
        return apart > 0 if isinstance(apart, int) else trace.guard(left, "<", right)

    def clipped(bound: Dim, low: Dim, high: Dim) -> Dim:
        if (isinstance(bound, int) and bound < 0) or (not isinstance(bound, int) and ask(bound, 0)):
            bound = bound + size
        if bound == size or (bound == 0 and low == 0):
            return high if ask(high, bound) else bound
        return low if ask(bound, low) else high if ask(high, bound) else bound

    low, high = (0, size) if step > 0 else (-1, size - 1)
    first = (low if step > 0 else high) if start is None else clipped(start, low, high)
    end = (high if step > 0 else low) if stop is None else clipped(stop, low, high)
    way, ahead = (1, step) if step > 0 else (-1, -step)
    span = (end - first) * way
    if span != 0 and not (start is None or stop is None) and not ask(0, span):
        return 0, 0
    if isinstance(span, int) and span < 0:
        return 0, 0
    return first, (span + ahead - 1) // ahead if ahead > 1 else span


# -- arrays of ints ---------------------------------------------------------------------------


def gathered(x: Array, plan: Plan) -> Array:
    """The elements at arrays of ints, in the place that NumPy gives them."""
    axes = [axis for axis, _ in plan.arrays]
    chosen = broadcast_arrays(*[i for _, i in plan.arrays])
    if axes == [plan.place]:
        return apply(_take, [x, chosen[0]], plan.place)
    flat, rest = _merged(x, axes)
    indices = _flat_indices(x, axes, chosen)
    found = apply(_take, [flat, indices], 0)
    rank = chosen[0].ndim
    order = [*range(rank, rank + len(rest))]
    order[plan.place : plan.place] = range(rank)
    return permute_dims(found, order)


def _merged(x: Array, axes: Sequence[int]) -> tuple[Array, list[int]]:
    """The array with `axes` merged into the first, and the axes after it."""
    rest = [a for a in range(x.ndim) if a not in axes]
    moved = permute_dims(x, [*axes, *rest])
    if len(axes) == 1:
        return moved, rest
    total = 1
    for a in axes:
        total = total * x.shape[a]
    return reshape(moved, [total, *[x.shape[a] for a in rest]]), rest


def _flat_indices(x: Array, axes: Sequence[int], chosen: Sequence[Array]) -> Array:
    """Indices of the merged axis. One that is out of range in its own axis stays so."""
    if len(axes) == 1:
        return chosen[0]
    return apply(_joint, [x, *chosen], tuple(axes))


def _joint(g: Graph, x: Value, *args: Any) -> Any:
    *indices, axes = args
    flat: Any = None
    bad: Any = None
    for axis, index in zip(axes, indices, strict=True):
        n = x.shape.dims[axis]
        size = g.constant(n, i64) if isinstance(n, int) else g.dim_value(n, i64)
        at = index.astype(i64)
        at = g.where(at < 0, at + size, at)
        outside = g.logical_or(at < 0, at >= size)
        flat = at if flat is None else flat * size + at
        bad = outside if bad is None else g.logical_or(bad, outside)
    return g.where(bad, g.constant(np.iinfo(np.int64).max, i64), flat)


def _take(g: Graph, x: Value, indices: Value, axis: int) -> Any:
    return g.gather(x, indices, axis)


def take(x: ArrayLike, indices: ArrayLike, /, *, axis: int | None = None) -> Array:
    """Slices along an axis, at `indices`."""
    array, chosen = as_array(x), _integers(indices, "take")
    if axis is None and array.ndim != 1:
        raise ArrayValueError(
            "which axis?", where="take", got=f"{array.ndim} axes", expected="axis="
        )
    at = axis_of(0 if axis is None else axis, array.ndim, "take")
    if trace_among([array, chosen]) is not None:
        return apply(_take, [array, chosen], at)
    try:
        return Array(np.asarray(np.take(array.data, chosen.data, at)))
    except IndexError as error:
        raise not_an_index(array, indices, str(error)) from error


def _integers(indices: ArrayLike, where: str) -> Array:
    chosen = as_array(indices)
    if not chosen.dtype.is_integer:
        if isinstance(chosen, Tracer) or chosen.size:
            raise IndexingError("not integers", where=where, got=chosen.dtype)
        chosen = astype(chosen, i64)
    return chosen


def take_along_axis(x: ArrayLike, indices: ArrayLike, /, *, axis: int = -1) -> Array:
    """One element per index along an axis; the other axes broadcast."""
    array, chosen = as_array(x), _integers(indices, "take_along_axis")
    if array.ndim != chosen.ndim:
        raise ArrayValueError(
            "axes differ", where="take_along_axis", got=f"{array.ndim} and {chosen.ndim} axes"
        )
    at = axis_of(axis, array.ndim, "take_along_axis")
    if trace_among([array, chosen]) is not None:
        return apply(_take_along, [array, chosen], at)
    try:
        return Array(np.take_along_axis(array.data, chosen.data, at))
    except IndexError as error:
        raise not_an_index(array, indices, str(error)) from error


def _take_along(g: Graph, x: Value, indices: Value, axis: int) -> Any:
    return g.take_along(x, indices, axis)
