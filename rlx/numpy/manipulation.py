"""Shapes, joining, indexing.

On concrete arrays these are NumPy's views and copies; inside `rlx.jit` they are layout ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import InputError, UnsupportedError
from rlx.ir.dtype import promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.dispatch import apply, as_array, value_of, with_scalars
from rlx.numpy.trace import Size, dim_of


def _any_traced(arrays: Sequence[Array]) -> Tracer | None:
    for x in arrays:
        if isinstance(x, Tracer):
            return x
    return None


def reshape(x: Any, /, shape: Any, *, copy: bool | None = None) -> Array:
    """The elements in the same order under another shape; one size may be −1."""
    x = as_array(x)
    sizes = (shape,) if isinstance(shape, (int, Size)) else tuple(shape)
    if isinstance(x, Tracer):
        return Tracer(x.trace, x.trace.graph.reshape(x.value, [dim_of(n) for n in sizes]))
    try:
        return Array(x.data.reshape(sizes).copy() if copy else x.data.reshape(sizes))
    except ValueError as error:
        raise InputError(
            "the sizes do not fit", where="reshape", got=sizes, expected=f"{x.size} elements"
        ) from error


def _transposed(g: Graph, x: Value, axes: tuple[int, ...]) -> Any:
    return g.transpose(x, axes)


def permute_dims(x: Any, /, axes: Sequence[int]) -> Array:
    """The axes in another order."""
    x = as_array(x)
    order = tuple([a % x.ndim for a in axes])
    if sorted(order) != list(range(x.ndim)):
        raise InputError("not an order of the axes", where="permute_dims", got=tuple(axes))
    return Array(x.data.transpose(order)) if not isinstance(x, Tracer) else apply(
        _transposed, [x], order
    )  # fmt: skip


transpose = permute_dims


def matrix_transpose(x: Any, /) -> Array:
    """The last two axes swapped."""
    x = as_array(x)
    if x.ndim < 2:
        raise InputError("fewer than two axes", where="matrix_transpose", got=x.ndim)
    return permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def moveaxis(x: Any, source: Any, destination: Any, /) -> Array:
    """Axes moved to other positions."""
    x = as_array(x)
    sources = [source] if isinstance(source, int) else list(source)
    targets = [destination] if isinstance(destination, int) else list(destination)
    pairs = {t % x.ndim: s % x.ndim for s, t in zip(sources, targets, strict=True)}
    rest = iter([a for a in range(x.ndim) if a not in pairs.values()])
    return permute_dims(x, [pairs[i] if i in pairs else next(rest) for i in range(x.ndim)])


def expand_dims(x: Any, /, axis: int | Sequence[int] = 0) -> Array:
    """New axes of size 1."""
    x = as_array(x)
    given = [axis] if isinstance(axis, int) else list(axis)
    rank = x.ndim + len(given)
    for a in given:
        if not -rank <= a < rank:
            raise InputError("no such axis", where="expand_dims", got=a)
    new = {a % rank for a in given}
    if len(new) != len(given):
        raise InputError("an axis twice", where="expand_dims", got=tuple(given))
    sizes = iter(x.shape)
    return reshape(x, [1 if i in new else next(sizes) for i in range(rank)])


def squeeze(x: Any, /, axis: int | Sequence[int]) -> Array:
    """Axes of size 1 removed."""
    x = as_array(x)
    gone = {a % x.ndim for a in ([axis] if isinstance(axis, int) else axis)}
    for a in gone:
        if x.shape[a] != 1:
            raise InputError("an axis of another size than 1", where="squeeze", got=x.shape[a])
    return reshape(x, [n for i, n in enumerate(x.shape) if i not in gone])


def broadcast_to(x: Any, /, shape: Sequence[int]) -> Array:
    """Repeated along new axes and axes of size 1."""
    x = as_array(x)
    if isinstance(x, Tracer):
        return Tracer(x.trace, x.trace.graph.expand(x.value, [dim_of(n) for n in shape]))
    return Array(np.broadcast_to(x.data, tuple(shape)))


def broadcast_arrays(*arrays: Any) -> list[Array]:
    """All arrays broadcast to one shape."""
    made = [as_array(x) for x in arrays]
    if _any_traced(made) is not None:
        raise UnsupportedError("not available inside rlx.jit yet", where="broadcast_arrays")
    return [Array(x) for x in np.broadcast_arrays(*[x.data for x in made])]


def _concat(g: Graph, *args: Any) -> Any:
    *values, axis = args
    return g.concat(list(values), axis=axis)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Array:
    """Arrays one after the other along an axis; flattened first where it is None."""
    made = with_scalars(*arrays)
    if axis is None:
        made, axis = [reshape(x, -1) for x in made], 0
    if _any_traced(made) is not None:
        return apply(_concat, made, axis % made[0].ndim)
    element = promote(*[x.dtype for x in made])
    datas = [x.data.astype(element.numpy, copy=False) for x in made]
    return Array(np.concatenate(datas, axis))


def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Array:
    """Arrays side by side along a new axis."""
    made = [as_array(x) for x in arrays]
    at = axis % (made[0].ndim + 1)
    return concat([expand_dims(x, at) for x in made], axis=at)


def _flip(g: Graph, x: Value, axes: tuple[int, ...]) -> Any:
    return g.flip(x, axes)


def flip(x: Any, /, *, axis: int | Sequence[int] | None = None) -> Array:
    """The order of elements reversed along axes."""
    x = as_array(x)
    if isinstance(x, Tracer):
        named = range(x.ndim) if axis is None else [axis] if isinstance(axis, int) else axis
        return apply(_flip, [x], tuple([a % x.ndim for a in named]))
    given = axis if axis is None or isinstance(axis, int) else tuple(axis)
    return Array(np.flip(x.data, given))


def roll(x: Any, /, shift: Any, *, axis: Any = None) -> Array:
    """Elements moved along axes; those past the end come in at the start."""
    x = as_array(x)
    if isinstance(x, Tracer):
        raise UnsupportedError("not available inside rlx.jit yet", where="roll", got=repr(x))
    return Array(np.roll(x.data, shift, axis))


def tile(x: Any, repetitions: Sequence[int], /) -> Array:
    """The array repeated along its axes."""
    x = as_array(x)
    if isinstance(x, Tracer):
        raise UnsupportedError("not available inside rlx.jit yet", where="tile", got=repr(x))
    return Array(np.tile(x.data, tuple(repetitions)))


def repeat(x: Any, repeats: Any, /, *, axis: int | None = None) -> Array:
    """Each element repeated."""
    x = as_array(x)
    if isinstance(x, Tracer):
        raise UnsupportedError("not available inside rlx.jit yet", where="repeat", got=repr(x))
    return Array(np.repeat(x.data, _plain(repeats), axis))


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Array, ...]:
    """The slices along an axis, without it."""
    x = as_array(x)
    moved = moveaxis(x, axis, 0)
    return tuple([moved[i] for i in range(len(moved))])


def _masked(g: Graph, x: Value, upper: bool, k: int) -> Any:
    rows, columns = x.shape.dims[-2:]
    below = g.iota([rows, columns], 1, "i64") - g.iota([rows, columns], 0, "i64")
    kept = below >= k if upper else below <= k
    return g.where(kept, x, g.constant(0, x.shape.dtype))


def tril(x: Any, /, *, k: int = 0) -> Array:
    """The lower triangle of matrices; zeros elsewhere."""
    return apply(_masked, [as_array(x)], False, k)


def triu(x: Any, /, *, k: int = 0) -> Array:
    """The upper triangle of matrices; zeros elsewhere."""
    return apply(_masked, [as_array(x)], True, k)


# -- indexing ---------------------------------------------------------------------------------


def _plain(index: Any) -> Any:
    """An index as NumPy takes it."""
    if isinstance(index, tuple):
        return tuple([_plain(i) for i in index])
    return index.data if isinstance(index, Array) else index


def get_item(x: Array, index: Any) -> Array:
    """`x[index]`: NumPy's rules on concrete arrays; inside `rlx.jit` ints, slices, None, `...` and
    one array of ints."""
    parts = index if isinstance(index, tuple) else (index,)
    traced = _any_traced([x, *[i for i in parts if isinstance(i, Array)]])
    if traced is None:
        try:
            return Array(np.asarray(x.data[_plain(index)]))
        except IndexError as error:
            raise IndexError(f"[index] {error}; got {index!r} for shape {x.shape}") from None
    value = value_of(x, traced)
    return Tracer(traced.trace, value[tuple([_symbolic(i, traced) for i in parts])])


def _symbolic(item: Any, traced: Tracer) -> Any:
    if isinstance(item, Array):
        if item.dtype.kind == "bool":
            raise UnsupportedError(
                "the size of x[mask] depends on the elements", where="index", got=repr(item),
                hint="inside rlx.jit, choose with rlx.numpy.where(mask, x, other)",
            )  # fmt: skip
        return value_of(item, traced)
    if isinstance(item, Size):
        return item.dim
    if isinstance(item, slice):
        ends = [n.dim if isinstance(n, Size) else n for n in (item.start, item.stop, item.step)]
        return slice(*ends)
    return item


def take(x: Any, indices: Any, /, *, axis: int | None = None) -> Array:
    """Slices along an axis, at `indices`."""
    x, chosen = as_array(x), as_array(indices)
    if axis is None and x.ndim != 1:
        raise InputError("which axis?", where="take", got=f"{x.ndim} axes")
    at = (axis or 0) % x.ndim
    if _any_traced([x, chosen]) is None:
        return Array(np.take(x.data, chosen.data, at))
    return apply(_take, [x, chosen], at)


def _take(g: Graph, x: Value, indices: Value, axis: int) -> Any:
    return g.gather(x, indices, axis)


def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Array:
    """One element per index along an axis."""
    x, chosen = as_array(x), as_array(indices)
    if _any_traced([x, chosen]) is None:
        return Array(np.take_along_axis(x.data, chosen.data, axis))
    return apply(_take_along, [x, chosen], axis % x.ndim)


def _take_along(g: Graph, x: Value, indices: Value, axis: int) -> Any:
    return g.take_along(x, indices, axis)


def updated(x: Array, index: Any, value: Any, how: str) -> Array:
    """`x` with the elements at `index` set, or added to."""
    parts = index if isinstance(index, tuple) else (index,)
    given = with_scalars(x, value)[1]
    traced = _any_traced([x, given, *[i for i in parts if isinstance(i, Array)]])
    if traced is None:
        made = x.data.copy()
        if how == "set":
            made[_plain(index)] = given.data
        else:
            np.add.at(made, _plain(index), given.data)
        return Array(made)
    if len(parts) != 1 or not isinstance(parts[0], Array) or parts[0].dtype.kind == "bool":
        raise UnsupportedError(
            "inside rlx.jit, an update is at one array of ints yet", where="at", got=repr(index)
        )
    return apply(_update, [x, parts[0], given], how)


def _update(g: Graph, x: Value, indices: Value, updates: Value, how: str) -> Any:
    updates = updates.astype(x.shape.dtype)
    shape = [*indices.shape.dims, *x.shape.dims[1:]]
    updates = g.expand(updates, shape) if list(updates.shape.dims) != shape else updates
    op = g.scatter if how == "set" else g.scatter_add
    return op(x, indices, updates, 0)
