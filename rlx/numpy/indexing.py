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

from rlx.errors import ArrayValueError, IndexingError, ShapeError, UnsupportedError
from rlx.ir.dim import Dim, as_dim
from rlx.ir.dtype import i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.shape import Shape
from rlx.numpy.array import Array, Tracer
from rlx.numpy.data_types import astype
from rlx.numpy.dispatch import apply, as_array, value_of, with_scalars
from rlx.numpy.manipulation import (
    any_traced,
    axis_of,
    broadcast_arrays,
    broadcast_to,
    permute_dims,
    reshape,
)
from rlx.numpy.trace import Size, dim_of
from rlx.numpy.typing import ArrayLike

Item: TypeAlias = (
    int | slice | EllipsisType | Array | np.ndarray[Any, Any] | np.generic | Sequence[Any] | None
)
Index: TypeAlias = Item | tuple[Item, ...]


# -- reading ----------------------------------------------------------------------------------


def get_item(x: Array, index: Any) -> Array:
    """`x[index]`."""
    parts = _parts(index)
    traced = any_traced([x, *_inside(parts)])
    if traced is None:
        return _concrete(x, parts, index)
    plan = _Plan.of(x, parts)
    found = _viewed(x, plan, traced)
    return _gathered(found, plan) if plan.arrays else found


def _parts(index: Any) -> tuple[Any, ...]:
    """An index as a tuple, lists in it as arrays."""
    given = index if isinstance(index, tuple) else (index,)
    return tuple([as_array(p) if isinstance(p, (list, np.ndarray, np.generic)) else p
                  for p in given])  # fmt: skip


def _inside(parts: Sequence[Any]) -> list[Any]:
    """What may be traced: the parts, and the bounds of slices."""
    found: list[Any] = []
    for p in parts:
        found += [p.start, p.stop, p.step] if isinstance(p, slice) else [p]
    return found


def _plain(part: Any) -> Any:
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
        found = x.data[tuple([_plain(p) for p in parts])]
    except (IndexError, AttributeError, TypeError, ValueError) as error:
        raise _wrong(x, index, str(error)) from error
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


def _wrong(x: Array, index: Any, why: str) -> IndexingError:
    return IndexingError(
        "not an index of the array", where="index", got=f"{index!r} for shape {tuple(x.shape)}",
        expected=why or "ints, slices, None, ..., arrays of ints, or a mask",
    )  # fmt: skip


# -- a traced index ---------------------------------------------------------------------------


class _Plan(NamedTuple):
    """An index in a trace, its steps in order.

    `views` has an int or a slice per axis of the array. After them and the new axes, `arrays` are
    the axes with arrays of ints, and `place` is where the axes of these stand in the result.
    """

    views: tuple[Any, ...]
    new: tuple[int, ...]  # positions of None among the axes that remain
    arrays: tuple[tuple[int, Array], ...]
    place: int

    @staticmethod
    def of(x: Array, parts: tuple[Any, ...]) -> _Plan:
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
        return _Plan(tuple(views), tuple(new), tuple(arrays), places[0] if together else 0)


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
        raise _wrong(x, parts, "one ellipsis")
    if count > x.ndim:
        raise _wrong(x, parts, f"at most {x.ndim} axes")
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
            raise _wrong(x, mask, f"a mask with the sizes {x.shape}")
    if not mask.ndim:
        if mask:
            return [None]
        raise _wrong(x, "False", "ints, slices, None, ..., arrays of ints, or a mask")
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
    raise _wrong(x, part, "ints, slices, None, ..., arrays of ints, or a mask")


def _viewed(x: Array, plan: _Plan, traced: Tracer | Size) -> Array:
    """The ints, slices and new axes of an index."""
    value = value_of(x, traced)
    graph, kept = value.graph, []
    for axis, item in enumerate(plan.views):
        if isinstance(item, slice):
            value = _sliced(value, axis, item, x, traced)
            kept.append(value.shape.dims[axis])
        else:
            value = graph.narrow(value, axis, _position(item, value.shape.dims[axis], x, traced), 1)
    dims: list[Dim] = kept
    for at in plan.new:
        dims.insert(at, 1)
    if list(value.shape.dims) != dims:
        value = graph.reshape(value, dims)
    return Tracer(traced.trace, value)


def _position(item: Any, size: Dim, x: Array, traced: Tracer | Size) -> Dim:
    """An int as a position from 0 on, which is checked where it is a number."""
    at = as_dim(dim_of(item))
    if isinstance(at, int) and isinstance(size, int) and not -size <= at < size:
        raise _wrong(x, item, f"{-size} … {size - 1}")
    return at + size if isinstance(at, int) and at < 0 else at


def _sliced(value: Value, axis: int, item: slice, x: Array, traced: Tracer | Size) -> Value:
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
        raise _wrong(x, item, "a step that is not 0")
    start = None if item.start is None else as_dim(dim_of(item.start))
    stop = None if item.stop is None else as_dim(dim_of(item.stop))
    first, count = _range(start, stop, step, size, traced)
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
    start: Dim | None, stop: Dim | None, step: int, size: Dim, traced: Tracer | Size
) -> tuple[Dim, Dim]:
    """The first index and the number of elements, with Python's clipping. What a symbolic bound
    needs to be known leaves a guard."""

    def ask(left: Dim, right: Dim) -> bool:
        """left < right"""
        apart = right - left
        return apart > 0 if isinstance(apart, int) else traced.trace.guard(left, "<", right)

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


def _gathered(x: Array, plan: _Plan) -> Array:
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
    if any_traced([array, chosen]) is not None:
        return apply(_take, [array, chosen], at)
    try:
        return Array(np.asarray(np.take(array.data, chosen.data, at)))
    except IndexError as error:
        raise _wrong(array, indices, str(error)) from error


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
    if any_traced([array, chosen]) is not None:
        return apply(_take_along, [array, chosen], at)
    try:
        return Array(np.take_along_axis(array.data, chosen.data, at))
    except IndexError as error:
        raise _wrong(array, indices, str(error)) from error


def _take_along(g: Graph, x: Value, indices: Value, axis: int) -> Any:
    return g.take_along(x, indices, axis)


# -- updates ----------------------------------------------------------------------------------

_UFUNCS = {
    "add": np.add, "multiply": np.multiply, "minimum": np.minimum, "maximum": np.maximum
}  # fmt: skip


def updated(x: Array, index: Any, value: ArrayLike, how: str) -> Array:
    """`x` with the elements at `index` replaced, or combined with `value`. The element type is
    that of `x`."""
    parts = _parts(index)
    given = astype(with_scalars(x, value)[1], x.dtype)
    traced = any_traced([x, given, *_inside(parts)])
    if traced is None:
        return _updated_concrete(x, parts, given, how, index)
    if len(parts) == 1 and isinstance(parts[0], Tracer) and parts[0].dtype.kind == "bool":
        return _masked(x, parts[0], given, how)
    plan = _Plan.of(x, parts)
    along = _one_axis(x, plan, traced)
    if along is not None:
        return _scattered_along(x, *along, given, how)
    positions = _viewed(reshape(_numbered(x, traced), x.shape), plan, traced)
    positions = _gathered(positions, plan) if plan.arrays else positions
    flat = reshape(x, (_total(x),))
    values = reshape(_broadcast(given, positions.shape), (-1,))
    changed = _scattered(flat, reshape(positions, (-1,)), values, 0, how, bool(plan.arrays))
    return reshape(changed, x.shape)


def _updated_concrete(
    x: Array, parts: tuple[Any, ...], given: Array, how: str, index: Any
) -> Array:
    made = x.data.copy()
    at = tuple([_plain(p) for p in parts])
    try:
        if how == "set":
            made[at] = given.data
        else:
            _UFUNCS[how].at(made, at, given.data)
    except IndexError as error:
        raise _wrong(x, index, str(error)) from error
    except ValueError as error:
        raise _unlike(given, index, str(error)) from error
    return Array(made)


def _unlike(given: Array, index: Any, why: str) -> ArrayValueError:
    return ArrayValueError(
        "the value does not broadcast to what the index names", where="at",
        got=f"shape {given.shape} at {index!r}", expected=why,
    )  # fmt: skip


def _masked(x: Array, mask: Array, given: Array, how: str) -> Array:
    """An update where a traced mask is true, by one value or one per element of an axis."""
    if given.ndim > x.ndim - mask.ndim:
        raise UnsupportedError(
            "values in a number that depends on the mask", where="at", got=repr(given),
            expected="one value, or an array for the axes after those of the mask",
            hint="rlx.numpy.where(mask, values, x) takes an array with the shape of x",
        )  # fmt: skip
    names = {"set": None, "add": "add", "multiply": "mul"}
    mask = reshape(mask, [*mask.shape, *[1] * (x.ndim - mask.ndim)])
    return apply(_choose, [x, mask, given], names.get(how, how))


def _choose(g: Graph, x: Value, mask: Value, value: Value, op: str | None) -> Any:
    changed = value if op is None else getattr(g, op)(x, value)
    return g.where(mask, changed, x)


def _numbered_axis(x: Array, axis: int, traced: Tracer | Size) -> Array:
    """0, 1, … for the elements of one axis."""
    return Tracer(traced.trace, traced.trace.graph.iota([dim_of(x.shape[axis])], 0, i64))


def _numbered(x: Array, traced: Tracer | Size) -> Array:
    """The number of each element of `x`, in row-major order."""
    total = _total(x)
    graph = traced.trace.graph
    return Tracer(traced.trace, graph.iota([dim_of(total)], 0, i64))


def _total(x: Array) -> Any:
    total: Any = 1
    for n in x.shape:
        total = total * n
    return total


def _broadcast(given: Array, shape: tuple[int, ...]) -> Array:
    try:
        return broadcast_to(given, shape)
    except (ShapeError, ArrayValueError) as error:
        raise _unlike(given, shape, str(error)) from error


def _one_axis(x: Array, plan: _Plan, traced: Tracer | Size) -> tuple[int, Any] | None:
    """The only axis that an index restricts, and the int, slice or array for it."""
    items = list(plan.views)
    for axis, indices in plan.arrays:
        items[axis] = indices
    named = [(a, i) for a, i in enumerate(items) if not (isinstance(i, slice) and i == slice(None))]
    if plan.new or len(named) != 1:
        return None
    axis, item = named[0]
    if isinstance(item, Array):
        return (axis, item) if plan.place == axis else None
    numbers = _viewed(_numbered_axis(x, axis, traced), _Plan((item,), (), (), 0), traced)
    return axis, numbers


def _scattered_along(x: Array, axis: int, indices: Array, given: Array, how: str) -> Array:
    """An update of whole slices of one axis."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    values = _broadcast(given, (*before, *indices.shape, *after))
    count = _total(indices)
    values = reshape(values, (*before, count, *after))
    return _scattered(x, reshape(indices, (count,)), values, axis, how, indices.ndim > 0)


def _scattered(
    x: Array, indices: Array, values: Array, axis: int, how: str, repeated: bool
) -> Array:
    """Slices of an axis changed. Where indices may be equal, values are taken in turn."""
    if how in ("set", "add"):
        return apply(_scatter, [x, indices, values], how, axis)
    build = _scatter_each if repeated else _scatter_combined
    return apply(build, [x, indices, values], {"multiply": "mul"}.get(how, how), axis)


def _scatter(g: Graph, x: Value, indices: Value, updates: Value, how: str, axis: int) -> Any:
    return (g.scatter if how == "set" else g.scatter_add)(x, indices, updates, axis)


def _scatter_combined(
    g: Graph, x: Value, indices: Value, updates: Value, op: str, axis: int
) -> Any:
    changed = getattr(g, op)(g.gather(x, indices, axis), updates)
    return g.scatter(x, indices, changed, axis)


def _scatter_each(g: Graph, x: Value, indices: Value, updates: Value, op: str, axis: int) -> Any:
    body = Graph("update")
    kept = body.input("x", x.shape)
    index = body.reshape(body.input("index", Shape((), indices.shape.dtype)), [1])
    dims = [d for a, d in enumerate(x.shape.dims) if a != axis]
    value = body.input("value", Shape(dims, x.shape.dtype))
    one = [1 if a == axis else d for a, d in enumerate(x.shape.dims)]
    body.set_outputs(_scatter_combined(body, kept, index, body.reshape(value, one), op, axis))
    order = [axis, *[a for a in range(x.shape.rank) if a != axis]]
    return g.scan(x, indices, g.transpose(updates, order), body=body, n_carry=1, n_xs=2)
