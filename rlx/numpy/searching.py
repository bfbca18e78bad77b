"""Searching: positions in a sorted array, and positions of what is not zero."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import ArrayTypeError, ArrayValueError, UnsupportedError
from rlx.ir.dtype import i64, promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.data_types import astype
from rlx.numpy.dispatch import apply, apply_many, as_array, with_scalars
from rlx.numpy.sorting import real_operand
from rlx.numpy.trace import dim_of
from rlx.numpy.typing import ArrayLike


def _searchsorted(g: Graph, table: Value, x: Value, side: str) -> Any:
    return g.searchsorted(table, x, side)


def _taken(g: Graph, x: Value, indices: Value) -> Any:
    return g.gather(x, indices, 0)


def searchsorted(
    x1: ArrayLike, x2: ArrayLike, /, *, side: str = "left", sorter: ArrayLike | None = None
) -> Array:
    """Where the elements of x2 would be inserted to keep x1 sorted; with `sorter`, to keep
    x1[sorter] sorted."""
    table, x = [real_operand(a, "searchsorted") for a in with_scalars(x1, x2)]
    if table.ndim != 1:
        raise ArrayValueError("not a sorted row", where="searchsorted", got=f"{table.ndim} axes")
    if side not in ("left", "right"):
        raise ArrayValueError(
            "no such side", where="searchsorted", got=repr(side), expected="'left' or 'right'"
        )
    if sorter is not None:
        order = as_array(sorter)
        if not order.dtype.is_integer or order.ndim != 1:
            raise ArrayTypeError("not an order", where="searchsorted", got=repr(order))
        table = apply(_taken, [table, order])
    met = promote(table.dtype, x.dtype)
    return apply(_searchsorted, [astype(table, met), astype(x, met)], side)


def data_dependent(x: Array, where: str) -> UnsupportedError:
    """The error of a result whose size depends on elements that are not known."""
    return UnsupportedError(
        "the size of the result depends on the elements", where=where, got=repr(x),
        hint=f"inside rlx.jit, say how many there are at most: {where}(x, size=n, fill_value=…)",
    )  # fmt: skip


def positions_of(g: Graph, flags: Value, size: Any) -> tuple[Value, Value]:
    """The first `size` positions of true elements of a row, and which of them there are."""
    order = g.argsort(flags, 0, True)
    padded = g.concat(order, g.expand(g.constant(0, i64), [size]), axis=0)
    found = g.narrow(padded, 0, 0, size)
    count = g.sum(flags.astype(i64), axis=(0,))
    return found, g.lt(g.iota([size], 0, i64), count)


def _nonzero(g: Graph, x: Value, size: Any, fill: int) -> Any:
    dims = x.shape.dims
    rest, known = positions_of(g, g.logical_not(g.logical_not(g.reshape(x, [-1]))), size)
    indices: list[Value] = []
    for n in reversed(dims):
        width = g.constant(n, i64) if isinstance(n, int) else g.dim_value(n, i64)
        indices.append(g.where(known, g.mod(rest, width), g.constant(fill, i64)))
        rest = g.floor_div(rest, width)
    return tuple(indices[::-1])


def nonzero(x: ArrayLike, /, *, size: int | None = None, fill_value: int = 0) -> tuple[Array, ...]:
    """The indices of elements that are not zero, one array per axis.

    Inside `rlx.jit` their number must be given: the first `size`, filled up with `fill_value`.
    """
    array = as_array(x)
    if not array.ndim:
        raise ArrayValueError("an array without axes", where="nonzero", got=repr(array))
    if size is not None:
        return apply_many(_nonzero, [array], dim_of(size), int(fill_value))
    if isinstance(array, Tracer):
        raise data_dependent(array, "nonzero")
    return tuple([Array(i.astype(np.int64)) for i in np.nonzero(array.data)])
