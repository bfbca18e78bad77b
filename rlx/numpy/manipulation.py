"""Shapes, joining, repeating.

On concrete arrays these are NumPy's views and copies; inside `rlx.jit` they are layout ops, and
sizes may be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import ArrayValueError, AxisError, UnsupportedError
from rlx.ir.dtype import bool_, i64, promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.data_types import astype
from rlx.numpy.dispatch import apply, as_array, trace_among, value_in, with_scalars
from rlx.numpy.trace import Size, dim_of
from rlx.numpy.typing import ArrayLike, Axis, Sizes


def axis_of(axis: int, ndim: int, where: str) -> int:
    """An axis as a number from 0 on."""
    try:
        at = axis.__index__()
    except AttributeError:
        raise ArrayValueError("not an axis", where=where, got=repr(axis), expected="int") from None
    if not -ndim <= at < ndim:
        raise AxisError(
            "no such axis", where=where, got=at,
            expected=f"{-ndim} … {ndim - 1}" if ndim else "none: the array has no axes",
        )  # fmt: skip
    return at % ndim


def axes_of(axis: Axis, ndim: int, where: str) -> tuple[int, ...]:
    """Axes as numbers from 0 on, in the order given; None means all."""
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = tuple([axis_of(a, ndim, where) for a in given])
    if len(set(axes)) != len(axes):
        raise ArrayValueError("an axis twice", where=where, got=tuple(given))
    return axes


# -- shapes -----------------------------------------------------------------------------------


def reshape(x: ArrayLike, /, shape: Sizes, *, copy: bool | None = None) -> Array:
    """The elements in the same order under another shape; one size may be −1."""
    array = as_array(x)
    sizes = (shape,) if isinstance(shape, (int, Size)) else tuple(shape)
    trace = trace_among([array, *sizes])
    if trace is not None:
        value = value_in(array, trace)
        return Tracer(trace, value.graph.reshape(value, [dim_of(n) for n in sizes]))
    try:
        made = Array(array.data.reshape(sizes))
    except (ValueError, TypeError) as error:
        raise ArrayValueError(
            "the sizes do not fit", where="reshape", got=sizes, expected=f"{array.size} elements"
        ) from error
    shares = np.may_share_memory(made.data, array.data) or not array.size
    if copy is False and not shares:
        raise ArrayValueError(
            "a copy is needed", where="reshape", got=f"strides {array.data.strides}",
            expected="elements in row-major order",
        )  # fmt: skip
    return Array(made.data.copy()) if copy and shares else made


def _transposed(g: Graph, x: Value, axes: tuple[int, ...]) -> Any:
    return g.transpose(x, axes)


def permute_dims(x: ArrayLike, /, axes: Sequence[int]) -> Array:
    """The axes in another order."""
    array = as_array(x)
    order = axes_of(tuple(axes), array.ndim, "permute_dims")
    if len(order) != array.ndim:
        raise ArrayValueError("not an order of the axes", where="permute_dims", got=tuple(axes))
    if isinstance(array, Tracer):
        return apply(_transposed, [array], order)
    return Array(array.data.transpose(order))


def transpose(x: ArrayLike, /, axes: Sequence[int] | None = None) -> Array:
    """The axes in another order; reversed when none are given."""
    array = as_array(x)
    return permute_dims(array, tuple(range(array.ndim))[::-1] if axes is None else axes)


def matrix_transpose(x: ArrayLike, /) -> Array:
    """The last two axes swapped."""
    array = as_array(x)
    if array.ndim < 2:
        raise ArrayValueError("fewer than two axes", where="matrix_transpose", got=array.ndim)
    return permute_dims(array, (*range(array.ndim - 2), array.ndim - 1, array.ndim - 2))


def moveaxis(x: ArrayLike, source: Axis, destination: Axis, /) -> Array:
    """Axes moved to other positions."""
    array = as_array(x)
    sources = axes_of(source, array.ndim, "moveaxis")
    targets = axes_of(destination, array.ndim, "moveaxis")
    if len(sources) != len(targets):
        raise ArrayValueError(
            "as many axes as positions", where="moveaxis", got=f"{source} to {destination}"
        )
    pairs = dict(zip(targets, sources, strict=True))
    rest = iter([a for a in range(array.ndim) if a not in sources])
    return permute_dims(array, [pairs[i] if i in pairs else next(rest) for i in range(array.ndim)])


def expand_dims(x: ArrayLike, /, axis: int | Sequence[int] = 0) -> Array:
    """New axes of size 1."""
    array = as_array(x)
    count = len(axis) if isinstance(axis, (tuple, list)) else 1
    new = axes_of(axis, array.ndim + count, "expand_dims")
    sizes = iter(array.shape)
    return reshape(array, [1 if i in new else next(sizes) for i in range(array.ndim + count)])


def squeeze(x: ArrayLike, /, axis: int | Sequence[int]) -> Array:
    """Axes of size 1 removed."""
    array = as_array(x)
    gone = axes_of(axis, array.ndim, "squeeze")
    for a in gone:
        if array.shape[a] != 1:
            raise ArrayValueError(
                "an axis of another size than 1", where="squeeze",
                got=f"size {array.shape[a]} of axis {a}",
            )  # fmt: skip
    return reshape(array, [n for i, n in enumerate(array.shape) if i not in gone])


def broadcast_shapes(*shapes: Sizes) -> tuple[int, ...]:
    """The shape that arrays of these shapes broadcast to."""
    tuples = [(s,) if isinstance(s, (int, Size)) else tuple(s) for s in shapes]
    found: list[Any] = []
    for sizes in tuples:
        found = [1] * (len(sizes) - len(found)) + found
        for i, n in enumerate(reversed(sizes)):
            at = len(found) - 1 - i
            if _is_one(found[at]):
                found[at] = n
            elif not _is_one(n) and not _same(found[at], n):
                raise ArrayValueError(
                    "shapes do not broadcast", where="broadcast_shapes",
                    got=", ".join(str(tuple(s)) for s in tuples),
                    expected="equal sizes, or 1, counted from the last axis",
                )  # fmt: skip
    return tuple(found)


def _is_one(n: object) -> bool:
    return isinstance(n, int) and n == 1


def _same(a: int, b: int) -> bool:
    """Whether two sizes are equal; symbolic ones that are in this call become one."""
    trace = trace_among([a, b])
    return a == b if trace is None else trace.same_size(dim_of(a), dim_of(b), "equal to broadcast")


def broadcast_to(x: ArrayLike, /, shape: Sizes) -> Array:
    """Repeated along new axes and axes of size 1."""
    array = as_array(x)
    sizes = (shape,) if isinstance(shape, (int, Size)) else tuple(shape)
    trace = trace_among([array, *sizes])
    if trace is not None:
        value = value_in(array, trace)
        return Tracer(trace, value.graph.expand(value, [dim_of(n) for n in sizes]))
    try:
        return Array(np.broadcast_to(array.data, sizes))
    except ValueError as error:
        raise ArrayValueError(
            "does not broadcast", where="broadcast_to", got=f"{array.shape} to {sizes}",
            expected="sizes of 1 where they differ",
        ) from error  # fmt: skip


def broadcast_arrays(*arrays: ArrayLike) -> tuple[Array, ...]:
    """All arrays broadcast to one shape."""
    made = [as_array(x) for x in arrays]
    shape = broadcast_shapes(*[x.shape for x in made])
    return tuple([broadcast_to(x, shape) for x in made])


# -- joining ----------------------------------------------------------------------------------


def _concat(g: Graph, *args: Any) -> Any:
    *values, axis = args
    return g.concat(list(values), axis=axis)


def concat(arrays: Sequence[ArrayLike], /, *, axis: int | None = 0) -> Array:
    """Arrays one after the other along an axis; flattened first where it is None."""
    made = with_scalars(*arrays)
    if not made:
        raise ArrayValueError("no arrays", where="concat", got=arrays, expected="one or more")
    if axis is None:
        made, axis = [reshape(x, (-1,)) for x in made], 0
    at = axis_of(axis, made[0].ndim, "concat")
    element = promote(*[x.dtype for x in made])
    if trace_among(made) is not None:
        return apply(_concat, [astype(x, element) for x in made], at)
    datas = [x.data.astype(element.numpy, copy=False) for x in made]
    try:
        return Array(np.concatenate(datas, at))
    except ValueError as error:
        raise ArrayValueError(
            "shapes do not join", where="concat", got=", ".join(str(x.shape) for x in made),
            expected=f"equal sizes but along axis {at}",
        ) from error  # fmt: skip


def stack(arrays: Sequence[ArrayLike], /, *, axis: int = 0) -> Array:
    """Arrays side by side along a new axis."""
    made = with_scalars(*arrays)
    if not made:
        raise ArrayValueError("no arrays", where="stack", got=arrays, expected="one or more")
    for x in made:
        if x.ndim != made[0].ndim:
            raise ArrayValueError(
                "shapes differ", where="stack", got=f"{x.shape} and {made[0].shape}"
            )
    at = axis_of(axis, made[0].ndim + 1, "stack")
    return concat([expand_dims(x, at) for x in made], axis=at)


def unstack(x: ArrayLike, /, *, axis: int = 0) -> tuple[Array, ...]:
    """The slices along an axis, without it."""
    array = as_array(x)
    moved = moveaxis(array, axis_of(axis, array.ndim, "unstack"), 0)
    return tuple([moved[i] for i in range(len(moved))])


# -- repeating and moving ---------------------------------------------------------------------


def _flip(g: Graph, x: Value, axes: tuple[int, ...]) -> Any:
    return g.flip(x, axes) if axes else x


def flip(x: ArrayLike, /, *, axis: Axis = None) -> Array:
    """The order of elements reversed along axes; along all where none are named."""
    array = as_array(x)
    axes = axes_of(axis, array.ndim, "flip")
    if isinstance(array, Tracer):
        return apply(_flip, [array], axes)
    return Array(np.flip(array.data, axes))


def roll(x: ArrayLike, /, shift: int | Array | Sequence[int], *, axis: Axis = None) -> Array:
    """Elements moved along axes; those past the end come in at the start."""
    array = as_array(x)
    if axis is None:
        if isinstance(shift, (tuple, list)):
            raise ArrayValueError("which axes?", where="roll", got=shift, expected="axis=")
        flat = roll(reshape(array, (-1,)), shift, axis=0)
        return reshape(flat, array.shape)
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = [axis_of(a, array.ndim, "roll") for a in given]
    shifts: list[Any] = list(shift) if isinstance(shift, (tuple, list)) else [shift] * len(axes)
    if len(shifts) != len(axes):
        raise ArrayValueError("as many shifts as axes", where="roll", got=f"{shift}, {axis}")
    if trace_among([array, *shifts]) is None:
        return Array(np.roll(array.data, [int(n) for n in shifts], axes))
    for a, n in zip(axes, shifts, strict=True):
        array = apply(_roll, [array, as_array(n)], a)
    return array


def _roll(g: Graph, x: Value, shift: Value, axis: int) -> Any:
    n = x.shape.dims[axis]
    size = g.constant(n, i64) if isinstance(n, int) else g.dim_value(n, i64)
    return g.gather(x, g.mod(g.iota([n], 0, i64) - shift.astype(i64), size), axis)


def tile(x: ArrayLike, repetitions: Sizes, /) -> Array:
    """The array repeated along its axes, which are as many as the longer of the two has."""
    array = as_array(x)
    counts: list[Any] = (
        list(repetitions) if isinstance(repetitions, (tuple, list)) else [repetitions]
    )
    if any(type(n) is int and n < 0 for n in counts):
        raise ArrayValueError("a negative count", where="tile", got=tuple(counts))
    if trace_among([array, *counts]) is None:
        return Array(np.tile(array.data, tuple(counts)))
    rank = max(array.ndim, len(counts))
    sizes = [1] * (rank - array.ndim) + list(array.shape)
    counts = [1] * (rank - len(counts)) + counts
    apart = reshape(array, [n for size in sizes for n in (1, size)])
    wide = broadcast_to(apart, [n for pair in zip(counts, sizes, strict=True) for n in pair])
    return reshape(wide, [count * n for count, n in zip(counts, sizes, strict=True)])


def repeat(x: ArrayLike, repeats: int | ArrayLike, /, *, axis: int | None = None) -> Array:
    """Each element repeated: all as often, or each by its own number."""
    array = as_array(x)
    if axis is None:
        array, axis = reshape(array, (-1,)), 0
    at = axis_of(axis, array.ndim, "repeat")
    if isinstance(repeats, (int, Size)):
        counts: Any = repeats
    else:
        given = as_array(repeats)
        if isinstance(given, Tracer):
            raise UnsupportedError(
                "the size of the result depends on the elements of `repeats`", where="repeat",
                got=repr(given), hint="inside rlx.jit, take(x, indices) with indices of a known "
                "size repeats elements",
            )  # fmt: skip
        counts = int(given.data.item()) if given.size == 1 else given.data
    if trace_among([array, counts]) is None:
        return _repeat_concrete(array, counts, at)
    if isinstance(counts, np.ndarray):
        if array.shape[at] != len(counts):
            raise _unlike(array, counts, at)
        indices = np.repeat(np.arange(len(counts)), counts)
        return apply(_take, [array, Array(indices)], at)
    sizes = list(array.shape)
    apart = reshape(array, [*sizes[: at + 1], 1, *sizes[at + 1 :]])
    wide = broadcast_to(apart, [*sizes[: at + 1], counts, *sizes[at + 1 :]])
    return reshape(wide, [*sizes[:at], sizes[at] * counts, *sizes[at + 1 :]])


def _take(g: Graph, x: Value, indices: Value, axis: int) -> Any:
    return g.gather(x, indices, axis)


def _repeat_concrete(x: Array, counts: int | np.ndarray[Any, Any], axis: int) -> Array:
    try:
        return Array(np.repeat(x.data, counts, axis))
    except ValueError as error:
        raise _unlike(x, counts, axis) from error


def _unlike(x: Array, counts: Any, axis: int) -> ArrayValueError:
    return ArrayValueError(
        "not a count for each element", where="repeat", got=f"{counts} for axis {axis}, {x.shape}",
        expected="one number ≥ 0, or as many as the axis has elements",
    )  # fmt: skip


def _masked(g: Graph, x: Value, upper: bool, k: int) -> Any:
    rows, columns = x.shape.dims[-2:]
    below = g.iota([rows, columns], 1, "i64") - g.iota([rows, columns], 0, "i64")
    kept = below >= k if upper else below <= k
    if x.shape.dtype is bool_:
        return g.logical_and(kept, x)
    return g.where(kept, x, g.constant(0, x.shape.dtype))


def _triangle(x: ArrayLike, upper: bool, k: int, where: str) -> Array:
    array = as_array(x)
    if array.ndim < 2:
        raise ArrayValueError("not matrices", where=where, got=f"shape {array.shape}")
    if isinstance(array, Tracer):
        return apply(_masked, [array], upper, int(k))
    return Array((np.triu if upper else np.tril)(array.data, k))


def tril(x: ArrayLike, /, *, k: int = 0) -> Array:
    """The lower triangle of matrices; zeros elsewhere."""
    return _triangle(x, False, k, "tril")


def triu(x: ArrayLike, /, *, k: int = 0) -> Array:
    """The upper triangle of matrices; zeros elsewhere."""
    return _triangle(x, True, k, "triu")
