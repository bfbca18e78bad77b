"""Making arrays: from data, filled, ranges. Inside `rlx.jit` sizes may be symbolic."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.backends.recycle import copied
from rlx.errors import ArrayCopyError, ArrayValueError
from rlx.ir.dtype import DType, f32, i64
from rlx.numpy import dlpack
from rlx.numpy.array import Array, Tracer
from rlx.numpy.data_types import astype, dtype_of, require_host, result_type
from rlx.numpy.dispatch import as_array, has_arrays, supported, trace_among
from rlx.numpy.manipulation import broadcast_to, reshape
from rlx.numpy.trace import Size, dim_of
from rlx.numpy.typing import ArrayLike, DTypeLike, Number, Sizes


def asarray(
    obj: ArrayLike, /, *, dtype: DTypeLike | None = None, device: str | None = None,
    copy: bool | None = None,
) -> Array:  # fmt: skip
    """`obj` (numbers, nested lists of them, an array or buffer of any library) as an array.

    The elements of arrays and buffers are shared where they can be, so write to them no more, or
    ask for a `copy`.
    """
    require_host(device)
    if isinstance(obj, (bool, int, float, complex, list, tuple)) and not isinstance(
        obj, np.generic
    ):
        if copy is False:
            raise ArrayCopyError("Python numbers are copied", where="asarray", got="copy=False")
        return _of_numbers(obj, dtype)
    made = as_array(obj)
    element = dtype_of(dtype, made.dtype)
    if element is not made.dtype:
        if copy is False:
            raise ArrayCopyError(
                "a copy is needed for another element type", where="asarray",
                got=f"{made.dtype} to {element}",
            )  # fmt: skip
        return astype(made, element)
    shared = not copy or isinstance(made, Tracer)
    return made if shared else Array(copied(made.data))


def _of_numbers(obj: Any, dtype: DTypeLike | None) -> Array:
    """Numbers are rounded once, to the type asked for."""
    if dtype is None:
        return as_array(obj)
    element = dtype_of(dtype)
    if isinstance(obj, (list, tuple)) and has_arrays(obj):
        return astype(as_array(obj), element)
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            return Array(np.asarray(obj, element.numpy))
    except (OverflowError, ValueError, TypeError) as error:
        raise ArrayValueError(
            "not numbers of the element type", where="asarray", got=f"{obj!r:.60}",
            expected=f"values of {element}: {error}",
        ) from error  # fmt: skip


def array(obj: ArrayLike, dtype: DTypeLike | None = None) -> Array:
    """A new array with the elements of `obj`."""
    numbers = isinstance(obj, (bool, int, float, complex, list, tuple))
    return asarray(obj, dtype=dtype, copy=None if numbers else True)


def from_dlpack(x: Any, /, *, device: str | None = None, copy: bool | None = None) -> Array:
    """An array of another library, without a copy unless one is asked for."""
    require_host(device)
    if isinstance(x, Array):
        return asarray(x, copy=copy)
    return Array(supported(dlpack.take(x, copy)))


# -- filled -----------------------------------------------------------------------------------


def _sizes(shape: Sizes) -> tuple[int, ...]:
    """A shape as a tuple; its sizes may be symbolic."""
    given: Sequence[Any] = (shape,) if isinstance(shape, (int, Size, np.integer)) else shape
    sizes = tuple([n if isinstance(n, Size) else int(dim_of(n)) for n in given])  # type: ignore[arg-type]
    if builtins.any(type(n) is int and n < 0 for n in sizes):
        raise ArrayValueError("a negative size", where="shape", got=sizes)
    return sizes  # type: ignore[return-value]


def full(
    shape: Sizes, fill_value: Number | Array, *, dtype: DTypeLike | None = None,
    device: str | None = None,
) -> Array:  # fmt: skip
    """An array with all elements `fill_value`."""
    require_host(device)
    value = asarray(fill_value, dtype=dtype)
    if value.ndim:
        raise ArrayValueError("not one value", where="full", got=f"shape {value.shape}")
    sizes = _sizes(shape)
    if trace_among([value, *sizes]) is not None:
        return broadcast_to(value, sizes)
    return Array(np.full(sizes, value.data))


def zeros(shape: Sizes, *, dtype: DTypeLike | None = None, device: str | None = None) -> Array:
    """An array of zeros."""
    return _filled(shape, 0, dtype_of(dtype), device)


def ones(shape: Sizes, *, dtype: DTypeLike | None = None, device: str | None = None) -> Array:
    """An array of ones."""
    return _filled(shape, 1, dtype_of(dtype), device)


def empty(shape: Sizes, *, dtype: DTypeLike | None = None, device: str | None = None) -> Array:
    """An array of zeros: nothing here shows memory that was not written."""
    return _filled(shape, 0, dtype_of(dtype), device)


def _filled(shape: Sizes, value: int, element: DType, device: str | None) -> Array:
    require_host(device)
    sizes = _sizes(shape)
    if trace_among(sizes) is not None:
        return broadcast_to(Array(np.asarray(value, element.numpy)), sizes)
    if value:
        return Array(np.ones(sizes, element.numpy))
    return Array(np.zeros(sizes, element.numpy))


def full_like(
    x: ArrayLike, /, fill_value: Number | Array, *, dtype: DTypeLike | None = None,
    device: str | None = None,
) -> Array:  # fmt: skip
    """`full` with the shape and element type of `x`."""
    made = as_array(x)
    return full(made.shape, fill_value, dtype=dtype_of(dtype, made.dtype), device=device)


def zeros_like(
    x: ArrayLike, /, *, dtype: DTypeLike | None = None, device: str | None = None
) -> Array:
    """Zeros with the shape and element type of `x`."""
    made = as_array(x)
    return _filled(made.shape, 0, dtype_of(dtype, made.dtype), device)


def ones_like(
    x: ArrayLike, /, *, dtype: DTypeLike | None = None, device: str | None = None
) -> Array:
    """Ones with the shape and element type of `x`."""
    made = as_array(x)
    return _filled(made.shape, 1, dtype_of(dtype, made.dtype), device)


def empty_like(
    x: ArrayLike, /, *, dtype: DTypeLike | None = None, device: str | None = None
) -> Array:
    """Zeros with the shape and element type of `x`."""
    return zeros_like(x, dtype=dtype, device=device)


# -- ranges -----------------------------------------------------------------------------------


def arange(
    start: float, /, stop: float | None = None, step: float = 1, *,
    dtype: DTypeLike | None = None, device: str | None = None,
) -> Array:  # fmt: skip
    """start, start + step, … before stop."""
    require_host(device)
    first: Any = 0 if stop is None else start
    last: Any = start if stop is None else stop
    whole = builtins.all(isinstance(n, (int, Size, np.integer)) for n in (first, last, step))
    element = dtype_of(dtype, i64 if whole else f32)
    if step == 0:
        raise ArrayValueError("a step of 0", where="arange", got=step)
    if trace_among([first, last]) is not None:
        if whole and type(step) is int:
            return _counted(first, last, step, element)
        first, last = (int(n) if isinstance(n, Size) else n for n in (first, last))
    count = -((first - last) // step) if whole else math.ceil((last - first) / step)
    places: Any = np.arange(builtins.max(count, 0), dtype=np.int64 if whole else np.float64)
    found = first + places * step
    if whole and element.is_integer and len(found):
        _require_range(int(found[0]), int(found[-1]), element)
    return Array(found.astype(element.numpy))


def _require_range(first: int, last: int, element: DType) -> None:
    info = np.iinfo(element.numpy)
    for n in (first, last):
        if not info.min <= n <= info.max:
            raise ArrayValueError("a number out of range", where="arange", got=n, expected=element)


def _counted(first: Any, last: Any, step: int, element: DType) -> Array:
    """A range between symbolic bounds."""
    if (last < first) if step > 0 else (last > first):  # leaves a guard
        return zeros(0, dtype=element)
    way = 1 if step > 0 else -1
    count = ((last - first) * way + builtins.abs(step) - 1) // builtins.abs(step)
    if not isinstance(count, Size):
        return astype(full(count, first, dtype=i64) + np.arange(count) * step, element)
    found = _iota(count, i64)
    found = found if step == 1 else found * step
    return astype(found if type(first) is int and first == 0 else found + first, element)


def _iota(count: Size, element: DType) -> Array:
    trace = count.trace.innermost()
    return Tracer(trace, trace.graph.iota([count.dim], 0, element))


def linspace(
    start: complex, stop: complex, /, num: int, *, dtype: DTypeLike | None = None,
    device: str | None = None, endpoint: bool = True,
) -> Array:  # fmt: skip
    """`num` numbers from start to stop, evenly spaced."""
    require_host(device)
    element = dtype_of(dtype, result_type(0.0, start, stop))
    if isinstance(num, Size):
        places = num - 1 if endpoint else num
        wide = element if element.kind == "float" else f32
        at = astype(_iota(num, i64), wide)
        return astype(start + at * ((stop - start) / as_array(places).astype(wide)), element)
    if num < 0:
        raise ArrayValueError("a negative count", where="linspace", got=num)
    return Array(np.linspace(start, stop, num, endpoint=endpoint).astype(element.numpy))


def eye(
    n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: DTypeLike | None = None,
    device: str | None = None,
) -> Array:  # fmt: skip
    """Ones on a diagonal, zeros elsewhere."""
    require_host(device)
    element = dtype_of(dtype)
    columns = n_rows if n_cols is None else n_cols
    trace = trace_among((n_rows, columns))
    if trace is None:
        return Array(np.eye(int(n_rows), int(columns), k, element.numpy))
    graph, dims = trace.graph, [dim_of(n_rows), dim_of(columns)]
    below = graph.iota(dims, 1, i64) - graph.iota(dims, 0, i64)
    return astype(Tracer(trace, below.eq(k)), element)


def meshgrid(*arrays: ArrayLike, indexing: str = "xy") -> tuple[Array, ...]:
    """Coordinates of a grid, from those along each axis."""
    if indexing not in ("xy", "ij"):
        raise ArrayValueError(
            "no such order of axes", where="meshgrid", got=repr(indexing), expected="'xy' or 'ij'"
        )
    made = [as_array(x) for x in arrays]
    for x in made:
        if x.ndim > 1:
            raise ArrayValueError("not one axis", where="meshgrid", got=f"shape {x.shape}")
    if builtins.any(x.dtype is not made[0].dtype for x in made):
        raise ArrayValueError(
            "arrays of several types", where="meshgrid", got=", ".join(str(x.dtype) for x in made)
        )
    made = [reshape(x, (-1,)) for x in made]
    order = list(range(len(made)))
    if indexing == "xy" and len(made) > 1:
        order[:2] = [1, 0]
    sizes = [made[i].shape[0] for i in order]
    grids = []
    for i, x in enumerate(made):
        alone = [n if order[axis] == i else 1 for axis, n in enumerate(sizes)]
        grids.append(broadcast_to(reshape(x, alone), sizes))
    return tuple(grids)
