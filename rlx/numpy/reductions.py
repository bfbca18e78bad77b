"""Reductions, scans along an axis, sorting and searching."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import InputError, UnsupportedError
from rlx.ir.dtype import DType, bool_, i64, u64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.dispatch import apply, apply_reduction, as_array

Axis = int | Sequence[int] | None


def _axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """The axes that are reduced, not negative, in order; None means all."""
    given = range(ndim) if axis is None else [axis] if isinstance(axis, int) else list(axis)
    for a in given:
        if not -ndim <= a < ndim:
            raise InputError("no such axis", got=a, expected=f"{-ndim} … {ndim - 1}")
    return tuple(sorted(a % ndim for a in given))


def _sum_type(x: Array, dtype: Any) -> DType:
    """Sums and products of integers are 64 bits wide, those of floats keep their type."""
    if dtype is not None:
        return DType.of(dtype)
    return u64 if x.dtype.kind == "uint" else i64 if x.dtype.kind in ("int", "bool") else x.dtype


def _reduce(g: Graph, x: Value, axes: Any, keepdims: bool, op: str, dtype: DType | None) -> Any:
    x = x if dtype is None else x.astype(dtype)
    return getattr(g, op)(x, axes, keepdims)


def _unreduced(g: Graph, x: Value, dtype: DType | None) -> Any:
    return x if dtype is None else x.astype(dtype)


def _reduced(x: Any, op: str, axis: Axis, keepdims: bool, dtype: DType | None = None) -> Array:
    x = as_array(x)
    axes = _axes(axis, x.ndim)
    if not axes:
        return apply(_unreduced, [x], dtype, elementwise=True)
    return apply_reduction(_reduce, x, axes, keepdims, op, dtype)


def sum(x: Any, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Array:
    """The sum along axes; all of them when none are named."""
    x = as_array(x)
    return _reduced(x, "sum", axis, keepdims, _sum_type(x, dtype))


def prod(x: Any, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False) -> Array:
    """The product along axes."""
    x = as_array(x)
    return _reduced(x, "prod", axis, keepdims, _sum_type(x, dtype))


def mean(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The mean along axes."""
    return _reduced(x, "mean", axis, keepdims)


def max(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The greatest element along axes; NaN if there is one."""
    return _reduced(_nonempty(x, axis, "max"), "max", axis, keepdims)


def min(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The least element along axes; NaN if there is one."""
    return _reduced(_nonempty(x, axis, "min"), "min", axis, keepdims)


def _nonempty(x: Any, axis: Axis, what: str) -> Array:
    made = as_array(x)
    if not isinstance(made, Tracer) and _is_empty(made, axis):
        raise InputError(f"the {what} of no elements", got=f"shape {made.shape}")
    return made


def _is_empty(x: Array, axis: Axis) -> bool:
    return 0 in [x.shape[a] for a in _axes(axis, x.ndim)]


def all(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Whether all elements along axes are true."""
    return _reduced(x, "all", axis, keepdims, bool_)


def any(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Whether one element along axes is true."""
    return _reduced(x, "any", axis, keepdims, bool_)


def count_nonzero(x: Any, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """How many elements along axes are not zero."""
    from rlx.numpy.elementwise import astype

    return sum(astype(x, bool_), axis=axis, keepdims=keepdims)


def _var(g: Graph, x: Value, axes: Any, keepdims: bool, correction: float) -> Any:
    centred = x - g.mean(x, axes, True)
    count: Any = 1
    for a in axes:
        count = count * x.shape.dims[a]
    number = count if isinstance(count, int) else g.dim_value(count)
    total = g.sum(centred * centred, axes, keepdims)
    if isinstance(number, int):
        return total / float(builtins.max(number - correction, 0.0))
    return total / g.maximum(number.astype(x.shape.dtype) - correction, 0.0)


def _no_spread(g: Graph, x: Value, correction: float) -> Any:
    """The variance of one element."""
    return (x - x) / builtins.max(1.0 - correction, 0.0)


def var(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """The variance along axes, over n − correction."""
    x = as_array(x)
    axes = _axes(axis, x.ndim)
    if not axes:
        return apply(_no_spread, [x], float(correction), elementwise=True)
    return apply_reduction(_var, x, axes, keepdims, float(correction))


def _std(g: Graph, x: Value, axes: Any, keepdims: bool, correction: float) -> Any:
    return g.sqrt(_var(g, x, axes, keepdims, correction))


def std(x: Any, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """The standard deviation along axes."""
    x = as_array(x)
    axes = _axes(axis, x.ndim)
    if not axes:
        return apply(_no_spread, [x], float(correction), elementwise=True)
    return apply_reduction(_std, x, axes, keepdims, float(correction))


# -- along one axis ---------------------------------------------------------------------------


def _along(g: Graph, x: Value, op: str, axis: int, *options: Any) -> Any:
    return getattr(g, op)(x, axis, *options)


def softmax(x: Any, /, axis: int = -1) -> Array:
    """e^x over its sum along an axis."""
    return apply(_along, [as_array(x)], "softmax", axis)


def log_softmax(x: Any, /, axis: int = -1) -> Array:
    """The logarithm of the softmax along an axis."""
    return apply(_along, [as_array(x)], "log_softmax", axis)


def cumulative_sum(
    x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False
) -> Array:
    """The sum of the elements up to each one along an axis."""
    x = as_array(x)
    if axis is None and x.ndim != 1:
        raise InputError("which axis?", where="cumulative_sum", got=f"{x.ndim} axes")
    chosen = _axes(axis, x.ndim)[0]
    return apply(_cumsum, [x], chosen, _sum_type(x, dtype), include_initial)


def _cumsum(g: Graph, x: Value, axis: int, dtype: DType, include_initial: bool) -> Any:
    x = x.astype(dtype)
    if include_initial:
        low = [int(i == axis) for i in range(x.shape.rank)]
        x = g.pad(x, low, [0] * x.shape.rank)
    return g.cumsum(x, axis)


def _arg(g: Graph, x: Value, axes: tuple[int, ...], keepdims: bool, op: str) -> Any:
    return getattr(g, op)(x, axes[0], keepdims).astype(i64)


def _arg_reduced(x: Array, op: str, axis: int | None, keepdims: bool) -> Array:
    from rlx.numpy.manipulation import reshape

    if axis is not None:
        return apply_reduction(_arg, x, _axes(axis, x.ndim), keepdims, op)
    found = apply_reduction(_arg, reshape(x, -1), (0,), False, op)
    return reshape(found, [1] * x.ndim) if keepdims else found


def argmax(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """The index of the greatest element; the first of equal ones."""
    return _arg_reduced(_nonempty(x, axis, "argmax"), "argmax", axis, keepdims)


def argmin(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """The index of the least element; the first of equal ones."""
    return _arg_reduced(_nonempty(x, axis, "argmin"), "argmin", axis, keepdims)


def _order(x: Array, axis: int, descending: bool) -> np.ndarray[Any, Any]:
    data = np.flip(x.data, axis) if descending else x.data
    order = np.argsort(data, axis=axis, stable=True)
    if descending:  # reversed twice, so that equal elements keep their order
        order = np.flip(data.shape[axis] - 1 - order, axis)
    return order


def on_host(x: Any, what: str) -> Array:
    """A concrete array for a function whose kernel is NumPy's."""
    made = as_array(x)
    if isinstance(made, Tracer):
        raise UnsupportedError(
            "not available inside rlx.jit yet", where=what, got=repr(made),
            hint="compute it outside the jitted function",
        )  # fmt: skip
    return made


def sort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """The elements in order along an axis."""
    x = on_host(x, "sort")
    return Array(np.take_along_axis(x.data, _order(x, axis, descending), axis))


def argsort(x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """The indices that sort an axis."""
    return Array(_order(on_host(x, "argsort"), axis, descending).astype(np.int64))


def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Array:
    """Where the elements of x2 would be inserted to keep x1 sorted."""
    order = None if sorter is None else on_host(sorter, "searchsorted").data
    table, wanted = on_host(x1, "searchsorted").data, on_host(x2, "searchsorted").data
    return Array(np.searchsorted(table, wanted, side, order).astype(np.int64))  # type: ignore[call-overload]


def nonzero(x: Any, /) -> tuple[Array, ...]:
    """The indices of elements that are not zero, one array per axis."""
    x = on_host(x, "nonzero")
    if not x.ndim:
        raise InputError("an array without axes", where="nonzero", got=repr(x))
    return tuple([Array(i.astype(np.int64)) for i in np.nonzero(x.data)])


def unique_values(x: Any, /) -> Array:
    """The distinct elements."""
    return Array(np.unique_values(on_host(x, "unique_values").data))
