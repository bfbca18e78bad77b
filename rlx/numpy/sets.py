"""Sets: distinct elements, and membership. NaN is distinct from itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlx.ir.dtype import i64, promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.data_types import astype
from rlx.numpy.dispatch import apply, apply_many, as_array, with_scalars
from rlx.numpy.searching import data_dependent, positions_of
from rlx.numpy.sorting import real_operand
from rlx.numpy.trace import dim_of
from rlx.numpy.typing import ArrayLike, Number


class UniqueAllResult(NamedTuple):
    """What `unique_all` returns."""

    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCountsResult(NamedTuple):
    """What `unique_counts` returns."""

    values: Array
    counts: Array


class UniqueInverseResult(NamedTuple):
    """What `unique_inverse` returns."""

    values: Array
    inverse_indices: Array


def _unique(g: Graph, x: Value, size: Any, fill: Number | None) -> Any:
    """Values, indices of their first elements, inverse indices and counts, from a stable sort."""
    flat = g.reshape(x, [-1])
    n = flat.shape.dims[0]
    order = g.argsort(flat, 0, False)
    ordered = g.gather(flat, order, 0)
    before = g.gather(ordered, _earlier(g, n), 0)
    at_start = g.eq(g.iota([n], 0, i64), g.constant(0, i64))
    starts = g.logical_or(at_start, g.ne(ordered, before))
    places, known = positions_of(g, starts, size)
    element, zero = x.shape.dtype, g.constant(0, i64)
    # one more element, for a row of none
    values, indices = (
        g.concat(row, g.expand(g.constant(0, row.shape.dtype), [1]), axis=0)
        for row in (ordered, order)
    )
    filler = g.gather(values, zero, 0) if fill is None else g.constant(fill, element)
    values = g.where(known, g.gather(values, places, 0), filler)
    indices = g.where(known, g.gather(indices, places, 0), zero)
    group = g.cumsum(starts.astype(i64), 0) - 1
    inverse = g.scatter(group, order, group, axis=0)
    zeros = g.expand(g.constant(0, i64), [size + 1])
    last = g.constant(size, i64) if isinstance(size, int) else g.dim_value(size, i64)
    ones = g.expand(g.constant(1, i64), [n])
    counts = g.narrow(g.scatter_add(zeros, g.minimum(group, last), ones, axis=0), 0, 0, size)
    return values, indices, g.reshape(inverse, list(x.shape.dims)), counts


def _earlier(g: Graph, n: Any) -> Value:
    """0, 0, 1, 2, …: the index before each."""
    found: Value = g.maximum(g.iota([n], 0, i64) - 1, g.constant(0, i64))
    return found


def _results(x: ArrayLike, where: str, size: int | None, fill: Number | None) -> tuple[Array, ...]:
    if size is not None:
        return apply_many(_unique, [real_operand(x, where)], dim_of(size), fill)
    array = as_array(x)
    if isinstance(array, Tracer):
        raise data_dependent(array, where)
    found = np.unique(
        array.data, return_index=True, return_inverse=True, return_counts=True, equal_nan=False
    )
    values, indices, inverse, counts = found
    inverse = inverse.reshape(array.data.shape)
    return Array(values), *[
        Array(np.asarray(part, np.int64)) for part in (indices, inverse, counts)
    ]


def unique_all(
    x: ArrayLike, /, *, size: int | None = None, fill_value: Number | None = None
) -> UniqueAllResult:
    """The distinct elements in ascending order, the index of the first of each, for each element
    the index of its value, and how many there are of each.

    Inside `rlx.jit` the number of values must be given: the first `size`, filled up with
    `fill_value`, or the least value where it is None.
    """
    return UniqueAllResult(*_results(x, "unique_all", size, fill_value))


def unique_counts(
    x: ArrayLike, /, *, size: int | None = None, fill_value: Number | None = None
) -> UniqueCountsResult:
    """The distinct elements and how many there are of each; options as in `unique_all`."""
    values, _, _, counts = _results(x, "unique_counts", size, fill_value)
    return UniqueCountsResult(values, counts)


def unique_inverse(
    x: ArrayLike, /, *, size: int | None = None, fill_value: Number | None = None
) -> UniqueInverseResult:
    """The distinct elements, and for each element the index of its value; options as in
    `unique_all`."""
    values, _, inverse, _ = _results(x, "unique_inverse", size, fill_value)
    return UniqueInverseResult(values, inverse)


def unique_values(
    x: ArrayLike, /, *, size: int | None = None, fill_value: Number | None = None
) -> Array:
    """The distinct elements in ascending order; options as in `unique_all`."""
    return _results(x, "unique_values", size, fill_value)[0]


def _isin(g: Graph, x: Value, table: Value, invert: bool) -> Any:
    row = g.reshape(table, [-1])
    if x.shape.dtype.is_complex:
        wide = g.reshape(x, [*x.shape.dims, 1])
        found = g.any(g.eq(wide, row), axis=(-1,))
    else:
        ordered = g.sort(row, 0)
        first, last = (g.searchsorted(ordered, x, side) for side in ("left", "right"))
        found = g.logical_and(g.lt(first, last), g.eq(x, x))  # NaN is in no set
    return g.logical_not(found) if invert else found


def isin(x1: ArrayLike, x2: ArrayLike, /, *, invert: bool = False) -> Array:
    """Whether each element of x1 is among those of x2; with `invert`, whether it is not."""
    x, table = with_scalars(x1, x2)
    met = promote(x.dtype, table.dtype)
    return apply(_isin, [astype(x, met), astype(table, met)], bool(invert))
