"""Reductions and scans along axes."""

from __future__ import annotations

import builtins
from typing import Any

from rlx.errors import ArrayTypeError, ArrayValueError
from rlx.ir.dtype import DType, bool_, f32, i64, u64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array
from rlx.numpy.data_types import astype, dtype_of
from rlx.numpy.dispatch import apply, apply_along, apply_reduction, as_array, with_scalars
from rlx.numpy.manipulation import axes_of, axis_of, concat, reshape
from rlx.numpy.typing import ArrayLike, Axis, DTypeLike


def _sum_type(x: Array, dtype: DTypeLike | None) -> DType:
    """Sums and products of integers are 64 bits wide, those of floats keep their type."""
    if dtype is not None:
        return dtype_of(dtype)
    return u64 if x.dtype.kind == "uint" else i64 if x.dtype.kind in ("int", "bool") else x.dtype


def _reduce(g: Graph, x: Value, axes: Any, keepdims: bool, op: str, dtype: DType | None) -> Any:
    x = x if dtype is None else x.astype(dtype)
    return getattr(g, op)(x, axes, keepdims)


def _unreduced(g: Graph, x: Value, dtype: DType | None) -> Any:
    return x if dtype is None else x.astype(dtype)


def _reduced(
    x: Array, op: str, axis: Axis, keepdims: bool, dtype: DType | None = None, where: str = ""
) -> Array:
    axes = tuple(sorted(axes_of(axis, x.ndim, where or op)))
    if not axes:
        return apply(_unreduced, [x], dtype, elementwise=True)
    return apply_reduction(_reduce, x, axes, bool(keepdims), op, dtype)


def sum(
    x: ArrayLike, /, *, axis: Axis = None, dtype: DTypeLike | None = None, keepdims: bool = False
) -> Array:
    """The sum along axes; all of them when none are named."""
    array = as_array(x)
    return _reduced(array, "sum", axis, keepdims, _sum_type(array, dtype))


def prod(
    x: ArrayLike, /, *, axis: Axis = None, dtype: DTypeLike | None = None, keepdims: bool = False
) -> Array:
    """The product along axes."""
    array = as_array(x)
    return _reduced(array, "prod", axis, keepdims, _sum_type(array, dtype))


def _floating(x: Array) -> DType:
    return x.dtype if x.dtype.kind in ("float", "complex") else f32


def mean(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The mean along axes; of integers in f32."""
    array = as_array(x)
    return _reduced(array, "mean", axis, keepdims, _floating(array))


def max(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The greatest element along axes; NaN if there is one."""
    return _reduced(_nonempty(x, axis, "max"), "max", axis, keepdims)


def min(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """The least element along axes; NaN if there is one."""
    return _reduced(_nonempty(x, axis, "min"), "min", axis, keepdims)


def _nonempty(x: ArrayLike, axis: Axis, what: str) -> Array:
    made = as_array(x)
    sizes = [made.shape[a] for a in axes_of(axis, made.ndim, what)]
    if builtins.any(type(n) is int and n == 0 for n in sizes):
        raise ArrayValueError(f"the {what} of no elements", where=what, got=f"shape {made.shape}")
    if made.dtype.kind == "complex":
        raise ArrayTypeError("complex numbers have no order", where=what, got=made.dtype)
    return made


def all(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Whether all elements along axes are true."""
    return _reduced(as_array(x), "all", axis, keepdims, bool_)


def any(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """Whether one element along axes is true."""
    return _reduced(as_array(x), "any", axis, keepdims, bool_)


def count_nonzero(x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False) -> Array:
    """How many elements along axes are not zero."""
    flags = astype(as_array(x), bool_)
    return _reduced(flags, "sum", axis, keepdims, i64, "count_nonzero")


def _var(g: Graph, x: Value, axes: Any, keepdims: bool, correction: float, dtype: DType) -> Any:
    x = x.astype(dtype)
    centred = x - g.mean(x, axes, True)
    count: Any = 1
    for a in axes:
        count = count * x.shape.dims[a]
    total = g.sum(centred * centred, axes, keepdims)
    if isinstance(count, int):
        return total / g.constant(builtins.max(count - correction, 0.0), dtype)
    number = g.dim_value(count, i64).astype(dtype)
    return total / g.maximum(number - correction, 0.0)


def _std(g: Graph, x: Value, axes: Any, *options: Any) -> Any:
    return g.sqrt(_var(g, x, axes, *options))


def _no_spread(g: Graph, x: Value, correction: float, dtype: DType) -> Any:
    """The variance of one element."""
    x = x.astype(dtype)
    return (x - x) / g.constant(builtins.max(1.0 - correction, 0.0), dtype)


def _spread(
    build: Any, x: ArrayLike, axis: Axis, correction: float, keepdims: bool, where: str
) -> Array:
    array = as_array(x)
    if array.dtype.kind == "complex":
        raise ArrayTypeError("not real numbers", where=where, got=array.dtype)
    axes = tuple(sorted(axes_of(axis, array.ndim, where)))
    options = float(correction), _floating(array)
    if not axes:
        return apply(_no_spread, [array], *options, elementwise=True)
    return apply_reduction(build, array, axes, bool(keepdims), *options)


def var(
    x: ArrayLike, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False
) -> Array:
    """The variance along axes, over n − correction."""
    return _spread(_var, x, axis, correction, keepdims, "var")


def std(
    x: ArrayLike, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False
) -> Array:
    """The standard deviation along axes."""
    return _spread(_std, x, axis, correction, keepdims, "std")


# -- along one axis ---------------------------------------------------------------------------


def _along(g: Graph, x: Value, axis: int, op: str) -> Any:
    return getattr(g, op)(x, axis)


def softmax(x: ArrayLike, /, axis: int = -1) -> Array:
    """e^x over its sum along an axis."""
    array = as_array(x)
    return apply_along(_along, array, axis_of(axis, array.ndim, "softmax"), "softmax")


def log_softmax(x: ArrayLike, /, axis: int = -1) -> Array:
    """The logarithm of the softmax along an axis."""
    array = as_array(x)
    return apply_along(_along, array, axis_of(axis, array.ndim, "log_softmax"), "log_softmax")


def cumulative_sum(
    x: ArrayLike, /, *, axis: int | None = None, dtype: DTypeLike | None = None,
    include_initial: bool = False,
) -> Array:  # fmt: skip
    """The sum of the elements up to each one along an axis."""
    return _cumulated(x, "cumsum", 0, axis, dtype, include_initial)


def cumulative_prod(
    x: ArrayLike, /, *, axis: int | None = None, dtype: DTypeLike | None = None,
    include_initial: bool = False,
) -> Array:  # fmt: skip
    """The product of the elements up to each one along an axis."""
    return _cumulated(x, "cumprod", 1, axis, dtype, include_initial)


def _cumulated(
    x: ArrayLike, op: str, start: int, axis: int | None, dtype: Any, include_initial: bool
) -> Array:
    array = as_array(x)
    if axis is None and array.ndim != 1:
        raise ArrayValueError("which axis?", where=op, got=f"{array.ndim} axes", expected="axis=")
    at = axis_of(0 if axis is None else axis, array.ndim, op)
    options = op, start, _sum_type(array, dtype), include_initial
    return apply_along(_cumulate, array, at, *options, more=int(include_initial))


def _cumulate(
    g: Graph, x: Value, axis: int, op: str, start: int, dtype: DType, include_initial: bool
) -> Any:
    found = getattr(g, op)(x.astype(dtype), axis)
    if not include_initial:
        return found
    dims = [1 if a == axis else d for a, d in enumerate(x.shape.dims)]
    return g.concat(g.expand(g.constant(start, dtype), dims), found, axis=axis)


def diff(
    x: ArrayLike, /, *, axis: int = -1, n: int = 1, prepend: ArrayLike | None = None,
    append: ArrayLike | None = None,
) -> Array:  # fmt: skip
    """The differences between neighbours along an axis, taken n times; whether they differ, of
    bools."""
    array = as_array(x)
    at = axis_of(axis, array.ndim, "diff")
    if n < 0:
        raise ArrayValueError("a negative count", where="diff", got=n)
    parts = [p for p in (prepend, array, append) if p is not None]
    if len(parts) > 1:
        array = concat(with_scalars(*parts), axis=at)
    later = tuple([slice(1, None) if a == at else slice(None) for a in range(array.ndim)])
    earlier = tuple([slice(None, -1) if a == at else slice(None) for a in range(array.ndim)])
    for _ in range(n):
        a, b = array[later], array[earlier]
        array = a != b if array.dtype is bool_ else a - b
    return array


def _arg(g: Graph, x: Value, axes: tuple[int, ...], keepdims: bool, op: str) -> Any:
    return getattr(g, op)(x, axes[0], keepdims).astype(i64)


def _position(x: ArrayLike, op: str, axis: int | None, keepdims: bool) -> Array:
    array = _nonempty(x, axis, op)
    if axis is not None:
        at = axis_of(axis, array.ndim, op)
        return apply_reduction(_arg, array, (at,), bool(keepdims), op)
    found = apply_reduction(_arg, reshape(array, (-1,)), (0,), False, op)
    return reshape(found, [1] * array.ndim) if keepdims else found


def argmax(x: ArrayLike, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """The index of the greatest element; the first of equal ones."""
    return _position(x, "argmax", axis, keepdims)


def argmin(x: ArrayLike, /, *, axis: int | None = None, keepdims: bool = False) -> Array:
    """The index of the least element; the first of equal ones."""
    return _position(x, "argmin", axis, keepdims)
