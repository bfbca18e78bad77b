"""Making arrays: from data, filled, ranges."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import InputError
from rlx.ir.dtype import DType, f32, i64
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array, scalar_type
from rlx.numpy.trace import Size

ShapeArg = int | Sequence[int]


def asarray(
    obj: Any, /, *, dtype: Any = None, device: str | None = None, copy: bool | None = None
) -> Array:
    """`obj` (numbers, lists of them, an array of any library) as an array."""
    _require_cpu(device)
    made = as_array(obj)
    if dtype is not None and made.dtype is not DType.of(dtype):
        if copy is False:
            raise ValueError("a copy is needed for another element type")
        exact = not isinstance(obj, (Array, np.ndarray))  # numbers do not round twice
        data = np.asarray(obj) if exact and not hasattr(obj, "__dlpack__") else made.data
        return Array(data.astype(DType.of(dtype).numpy))
    return Array(made.data.copy()) if copy else made


def array(obj: Any, dtype: Any = None) -> Array:
    """A new array with the elements of `obj`."""
    return asarray(obj, dtype=dtype, copy=True)


def from_dlpack(x: Any, /, *, device: str | None = None, copy: bool | None = None) -> Array:
    """An array of another library, without a copy."""
    _require_cpu(device)
    made = as_array(np.from_dlpack(x))
    return Array(made.data.copy()) if copy else made


def _require_cpu(device: str | None) -> None:
    if device not in (None, "cpu"):
        raise InputError("no such device of arrays", got=repr(device), expected="'cpu'")


def _sizes(shape: ShapeArg) -> tuple[int, ...]:
    return (int(shape),) if isinstance(shape, (int, Size)) else tuple([int(n) for n in shape])


def full(
    shape: ShapeArg, fill_value: Any, *, dtype: Any = None, device: str | None = None
) -> Array:
    """An array with all elements `fill_value`."""
    _require_cpu(device)
    element = scalar_type(fill_value) if dtype is None else DType.of(dtype)
    return Array(np.full(_sizes(shape), fill_value, element.numpy))


def zeros(shape: ShapeArg, *, dtype: Any = f32, device: str | None = None) -> Array:
    """An array of zeros."""
    _require_cpu(device)
    return Array(np.zeros(_sizes(shape), DType.of(f32 if dtype is None else dtype).numpy))


def ones(shape: ShapeArg, *, dtype: Any = f32, device: str | None = None) -> Array:
    """An array of ones."""
    return full(shape, 1, dtype=f32 if dtype is None else dtype, device=device)


def empty(shape: ShapeArg, *, dtype: Any = f32, device: str | None = None) -> Array:
    """An array of zeros: nothing here shows memory that was not written."""
    return zeros(shape, dtype=dtype, device=device)


def full_like(x: Any, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """`full` with the shape and element type of `x`."""
    x = as_array(x)
    return full(x.shape, fill_value, dtype=dtype or x.dtype, device=device)


def zeros_like(x: Any, /, *, dtype: Any = None, device: str | None = None) -> Array:
    """Zeros with the shape and element type of `x`."""
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: Any, /, *, dtype: Any = None, device: str | None = None) -> Array:
    """Ones with the shape and element type of `x`."""
    return full_like(x, 1, dtype=dtype, device=device)


def empty_like(x: Any, /, *, dtype: Any = None, device: str | None = None) -> Array:
    """Zeros with the shape and element type of `x`."""
    return zeros_like(x, dtype=dtype, device=device)


def arange(
    start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None
) -> Array:
    """start, start + step, … before stop."""
    _require_cpu(device)
    first, last = (0, start) if stop is None else (start, stop)
    whole = builtins.all(isinstance(n, (int, Size)) for n in (first, last, step))
    element = DType.of(dtype) if dtype is not None else i64 if whole else f32
    first, last = (int(n) if isinstance(n, Size) else n for n in (first, last))
    count = builtins.max(int(np.ceil((last - first) / step)), 0)
    return Array((first + np.arange(count) * step).astype(element.numpy))


def linspace(
    start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None,
    endpoint: bool = True,
) -> Array:  # fmt: skip
    """`num` numbers from start to stop, evenly spaced."""
    _require_cpu(device)
    element = scalar_type(0.0 * start * stop) if dtype is None else DType.of(dtype)
    return Array(np.linspace(start, stop, num, endpoint=endpoint).astype(element.numpy))


def eye(
    n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = f32, device: Any = None
) -> Array:
    """Ones on a diagonal, zeros elsewhere."""
    _require_cpu(device)
    element = DType.of(f32 if dtype is None else dtype)
    return Array(np.eye(int(n_rows), n_cols, k, element.numpy))
