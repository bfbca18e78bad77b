"""`x.at[index]`: new arrays with some elements changed.

A concrete array is copied and changed by NumPy. In a trace an index that restricts one axis is one
scatter along it; any other is a scatter of elements, whose numbers are found by indexing an array
of them. A traced mask chooses by `where`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.errors import ArrayValueError, InputError, ShapeError, UnsupportedError
from rlx.ir.dtype import i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.data_types import astype
from rlx.numpy.dispatch import apply, trace_among, with_scalars
from rlx.numpy.indexing import (
    Index,
    Plan,
    gathered,
    index_parts,
    inside,
    not_an_index,
    plain,
    viewed,
)
from rlx.numpy.manipulation import broadcast_to, reshape
from rlx.numpy.trace import Trace, dim_of
from rlx.numpy.typing import ArrayLike


class Updates:
    """`x.at`; with an index, `x.at[i]`, its methods return arrays with the elements there changed.

    At equal indices `set` keeps the last value, and the others take each in turn.
    """

    __slots__ = ("array", "index")

    def __init__(self, array: Array, index: Any = None) -> None:
        self.array, self.index = array, index

    def __getitem__(self, index: Index) -> Updates:
        return Updates(self.array, (index,))

    def set(self, value: ArrayLike) -> Array:
        """The elements at the index replaced."""
        return self._updated(value, "set")

    def add(self, value: ArrayLike) -> Array:
        """`value` added at the index."""
        return self._updated(value, "add")

    def multiply(self, value: ArrayLike) -> Array:
        """The elements at the index multiplied."""
        return self._updated(value, "multiply")

    def min(self, value: ArrayLike) -> Array:
        """The lesser of each element at the index and `value`."""
        return self._updated(value, "minimum")

    def max(self, value: ArrayLike) -> Array:
        """The greater of each element at the index and `value`."""
        return self._updated(value, "maximum")

    def get(self) -> Array:
        """`x[index]`."""
        return self.array[self._chosen()]

    def apply(self, function: Callable[[Array], ArrayLike]) -> Array:
        """`function` applied to the elements at the index; once, also where the index repeats."""
        return self.set(function(self.get()))

    def _updated(self, value: ArrayLike, how: str) -> Array:
        return _updated(self.array, self._chosen(), value, how)

    def _chosen(self) -> Any:
        if self.index is None:
            raise InputError("no index", where="at", expected="x.at[index].set(value)")
        return self.index[0]


_UFUNCS = {
    "add": np.add, "multiply": np.multiply, "minimum": np.minimum, "maximum": np.maximum
}  # fmt: skip


def _updated(x: Array, index: Any, value: ArrayLike, how: str) -> Array:
    """`x` with the elements at `index` replaced, or combined with `value`. The element type is
    that of `x`."""
    parts = index_parts(index)
    given = astype(with_scalars(x, value)[1], x.dtype)
    trace = trace_among([x, given, *inside(parts)])
    if trace is None:
        return _updated_concrete(x, parts, given, how, index)
    if len(parts) == 1 and isinstance(parts[0], Tracer) and parts[0].dtype.kind == "bool":
        return _masked(x, parts[0], given, how)
    plan = Plan.of(x, parts)
    along = _one_axis(x, plan, trace)
    if along is not None:
        return _scattered_along(x, *along, given, how)
    positions = viewed(reshape(_numbered(x, trace), x.shape), plan, trace)
    positions = gathered(positions, plan) if plan.arrays else positions
    flat = reshape(x, (_total(x),))
    values = reshape(_broadcast(given, positions.shape), (-1,))
    changed = _scattered(flat, reshape(positions, (-1,)), values, 0, how, bool(plan.arrays))
    return reshape(changed, x.shape)


def _updated_concrete(
    x: Array, parts: tuple[Any, ...], given: Array, how: str, index: Any
) -> Array:
    made = x.data.copy()
    at = tuple([plain(p) for p in parts])
    try:
        if how == "set":
            made[at] = given.data
        else:
            _UFUNCS[how].at(made, at, given.data)
    except IndexError as error:
        raise not_an_index(x, index, str(error)) from error
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


def _numbered_axis(x: Array, axis: int, trace: Trace) -> Array:
    """0, 1, … for the elements of one axis."""
    return Tracer(trace, trace.graph.iota([dim_of(x.shape[axis])], 0, i64))


def _numbered(x: Array, trace: Trace) -> Array:
    """The number of each element of `x`, in row-major order."""
    total = _total(x)
    graph = trace.graph
    return Tracer(trace, graph.iota([dim_of(total)], 0, i64))


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


def _one_axis(x: Array, plan: Plan, trace: Trace) -> tuple[int, Any] | None:
    """The only axis that an index restricts, and the int, slice or array for it."""
    named = [(a, i) for a, i in enumerate(plan.views) if i != slice(None)]
    if plan.new or len(named) + len(plan.arrays) != 1:
        return None
    if plan.arrays:
        axis, indices = plan.arrays[0]
        return (axis, indices) if plan.place == axis else None
    axis, item = named[0]
    numbers = viewed(_numbered_axis(x, axis, trace), Plan((item,), (), (), 0), trace)
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
    build = _scatter_reduce if repeated else _scatter_combined
    return apply(build, [x, indices, values], {"multiply": "mul"}.get(how, how), axis)


def _scatter(g: Graph, x: Value, indices: Value, updates: Value, how: str, axis: int) -> Any:
    return (g.scatter if how == "set" else g.scatter_add)(x, indices, updates, axis)


def _scatter_reduce(g: Graph, x: Value, indices: Value, updates: Value, op: str, axis: int) -> Any:
    return g.scatter_reduce(x, indices, updates, axis, op)


def _scatter_combined(
    g: Graph, x: Value, indices: Value, updates: Value, op: str, axis: int
) -> Any:
    changed = getattr(g, op)(g.gather(x, indices, axis), updates)
    return g.scatter(x, indices, changed, axis)
