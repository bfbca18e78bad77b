"""Sorting along an axis. NaN counts as greater than every number."""

from __future__ import annotations

from typing import Any

from rlx.errors import ArrayTypeError
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array
from rlx.numpy.dispatch import apply, as_array
from rlx.numpy.manipulation import axis_of
from rlx.numpy.typing import ArrayLike


def _sort(g: Graph, x: Value, axis: int, descending: bool) -> Any:
    return g.sort(x, axis, descending)


def _argsort(g: Graph, x: Value, axis: int, descending: bool) -> Any:
    return g.argsort(x, axis, descending)


def real_operand(x: ArrayLike, where: str) -> Array:
    """An array whose elements have an order."""
    array = as_array(x)
    if array.dtype.is_complex:
        raise ArrayTypeError(
            "complex numbers have no order", where=where, got=array.dtype,
            expected="a real type", hint="sort by rlx.numpy.abs(x) or rlx.numpy.real(x)",
        )  # fmt: skip
    return array


def sort(
    x: ArrayLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> Array:
    """The elements in order along an axis. It is always stable."""
    array = real_operand(x, "sort")
    return apply(_sort, [array], axis_of(axis, array.ndim, "sort"), bool(descending))


def argsort(
    x: ArrayLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> Array:
    """The indices that sort an axis; those of equal elements ascend."""
    array = real_operand(x, "argsort")
    return apply(_argsort, [array], axis_of(axis, array.ndim, "argsort"), bool(descending))
