"""The extension `fft` of the array API standard: discrete Fourier transforms.

Real inputs of complex transforms become complex, integers `float32`. `n` crops an axis, or fills it
up with zeros. `norm` says which direction has the factor 1/n: "backward", "forward", or both by
half, "ortho".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from rlx.errors import ArrayTypeError, ArrayValueError
from rlx.ir.dtype import f32
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.creation import arange
from rlx.numpy.data_types import astype, dtype_of, require_host
from rlx.numpy.dispatch import apply, as_array
from rlx.numpy.elementwise import conj, where
from rlx.numpy.manipulation import axes_of, axis_of, roll
from rlx.numpy.trace import Size, dim_of
from rlx.numpy.typing import ArrayLike, Axis, DTypeLike

__all__ = [
    "fft", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifftn", "ifftshift", "ihfft", "irfft",
    "irfftn", "rfft", "rfftfreq", "rfftn",
]  # fmt: skip

Norm = Literal["backward", "ortho", "forward"]
_SWAPPED: dict[str, Norm] = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


# -- builders -------------------------------------------------------------------------------------


def _factor(g: Graph, n: Any, power: float, like: Value) -> Value:
    """n^power in the type of the parts of `like`."""
    part = like.shape.dtype.part
    if isinstance(n, int):
        return g.constant(float(n) ** power, part)
    return g.pow(g.dim_value(n, "f64"), g.constant(power, "f64")).astype(part)


def _scaled(g: Graph, y: Value, n: Any, power: float) -> Any:
    return y if power == 0.0 else g.mul(y, _factor(g, n, power, y))


def _complex_fft(g: Graph, x: Value, axis: int, inverse: bool, power: float) -> Any:
    return _scaled(g, g.fft(x, axis, inverse), x.shape.dims[axis], power)


def _real_fft(g: Graph, x: Value, axis: int, power: float) -> Any:
    return _scaled(g, g.rfft(x, axis), x.shape.dims[axis], power)


def _inverse_real_fft(g: Graph, x: Value, axis: int, odd: bool, power: float) -> Any:
    n = (x.shape.dims[axis] - 1) * 2 + int(odd)
    return _scaled(g, g.irfft(x, n, axis), n, power)


def _crop(g: Graph, x: Value, axis: int, n: Any) -> Any:
    return g.narrow(x, axis, 0, n)


def _fill_up(g: Graph, x: Value, axis: int, n: Any) -> Any:
    dims = list(x.shape.dims)
    dims[axis] = n - dims[axis]
    return g.concat(x, g.expand(g.constant(0, x.shape.dtype), dims), axis=axis)


# -- operands -------------------------------------------------------------------------------------


def _operand(x: ArrayLike, where_: str, norm: str, *, real: bool = False) -> Array:
    array = as_array(x)
    if norm not in _SWAPPED:
        raise ArrayValueError(
            "no such normalisation", where=where_, got=repr(norm), expected=", ".join(_SWAPPED)
        )
    if array.dtype.kind == "bool" or (real and array.dtype.is_complex):
        raise ArrayTypeError(
            "no transform of this type", where=where_, got=array.dtype,
            expected="real numbers" if real else "numbers",
        )  # fmt: skip
    return astype(array, f32) if array.dtype.is_integer else array


def _resized(x: Array, axis: int, n: Any, name: str) -> Array:
    """The array with n elements along an axis."""
    now = x.shape[axis]
    if n is None:
        n = now
    if n < 1:
        raise ArrayValueError("no elements to transform", where=name, got=n, expected="1 or more")
    if now == n:
        return x
    if not isinstance(x, Tracer) and isinstance(n, int):
        if n < now:
            kept = [slice(n) if a == axis else slice(None) for a in range(x.ndim)]
            return Array(x.data[tuple(kept)])
        return Array(np.pad(x.data, [(0, (n - now) * (a == axis)) for a in range(x.ndim)]))
    return apply(_crop if n < now else _fill_up, [x], axis, dim_of(n))


def _forward(norm: str) -> float:
    """The power of n in the factor of the forward transform."""
    return {"backward": 0.0, "ortho": -0.5, "forward": -1.0}[norm]


def _inverse(norm: str) -> float:
    """The power of n in the factor of the inverse, whose op has 1/n already."""
    return {"backward": 0.0, "ortho": 0.5, "forward": 1.0}[norm]


def _transformed(
    x: ArrayLike, n: int | None, axis: int, norm: Norm, name: str, inverse: bool
) -> Array:
    array = _operand(x, name, norm)
    at = axis_of(axis, array.ndim, name)
    array = _resized(array, at, n, name)
    power = _inverse(norm) if inverse else _forward(norm)
    return apply(_complex_fft, [array], at, inverse, power)


# -- one axis -------------------------------------------------------------------------------------


def fft(x: ArrayLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Array:
    """The transform along an axis."""
    return _transformed(x, n, axis, norm, "fft", False)


def ifft(
    x: ArrayLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"
) -> Array:
    """The inverse of `fft`."""
    return _transformed(x, n, axis, norm, "ifft", True)


def rfft(
    x: ArrayLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"
) -> Array:
    """The first n // 2 + 1 terms of the transform of real numbers."""
    array = _operand(x, "rfft", norm, real=True)
    at = axis_of(axis, array.ndim, "rfft")
    return apply(_real_fft, [_resized(array, at, n, "rfft")], at, _forward(norm))


def irfft(
    x: ArrayLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"
) -> Array:
    """The n real numbers whose `rfft` is given; 2 (m − 1) for m terms where n is None."""
    return _real_inverse(x, n, axis, norm, "irfft")


def _real_inverse(x: ArrayLike, n: int | None, axis: int, norm: Norm, name: str) -> Array:
    array = _operand(x, name, norm)
    if not array.dtype.is_complex:
        array = array + 0j
    at = axis_of(axis, array.ndim, name)
    points = (array.shape[at] - 1) * 2 if n is None else n
    if points < 1:
        raise ArrayValueError("no elements to transform", where=name, got=points, expected="n ≥ 1")
    array = _resized(array, at, points // 2 + 1, name)
    return apply(_inverse_real_fft, [array], at, bool(points % 2 == 1), _inverse(norm))


def hfft(
    x: ArrayLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"
) -> Array:
    """The real transform of a signal that is Hermitian: x[−j] is the conjugate of x[j]."""
    array = _operand(x, "hfft", norm)
    return _real_inverse(conj(array), n, axis, _SWAPPED[norm], "hfft")


def ihfft(
    x: ArrayLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward"
) -> Array:
    """The inverse of `hfft`."""
    array = _operand(x, "ihfft", norm, real=True)
    return conj(rfft(array, n=n, axis=axis, norm=_SWAPPED[norm]))


# -- several axes ---------------------------------------------------------------------------------


def _axes(
    x: Array, s: Sequence[int] | None, axes: Sequence[int] | None, name: str
) -> list[tuple[int, int | None]]:
    """Axes and their sizes."""
    chosen: Axis = axes
    if axes is None and s is not None:
        chosen = tuple(range(x.ndim - len(s), x.ndim))
    found = axes_of(None if chosen is None else tuple(chosen), x.ndim, name)  # type: ignore[arg-type]
    if s is not None and len(s) != len(found):
        raise ArrayValueError("as many sizes as axes", where=name, got=f"s={s}, axes={axes}")
    return list(zip(found, [None] * len(found) if s is None else s, strict=True))


def fftn(
    x: ArrayLike, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: Norm = "backward",
) -> Array:  # fmt: skip
    """The transform along several axes; along all where none are named."""
    array = _operand(x, "fftn", norm)
    for axis, n in _axes(array, s, axes, "fftn"):
        array = _transformed(array, n, axis, norm, "fftn", False)
    return array


def ifftn(
    x: ArrayLike, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: Norm = "backward",
) -> Array:  # fmt: skip
    """The inverse of `fftn`."""
    array = _operand(x, "ifftn", norm)
    for axis, n in _axes(array, s, axes, "ifftn"):
        array = _transformed(array, n, axis, norm, "ifftn", True)
    return array


def rfftn(
    x: ArrayLike, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: Norm = "backward",
) -> Array:  # fmt: skip
    """`rfft` along the last of several axes, and `fft` along the others."""
    array = _operand(x, "rfftn", norm, real=True)
    *others, (last, n) = _axes(array, s, axes, "rfftn")
    array = rfft(array, n=n, axis=last, norm=norm)
    for axis, size in others:
        array = fft(array, n=size, axis=axis, norm=norm)
    return array


def irfftn(
    x: ArrayLike, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: Norm = "backward",
) -> Array:  # fmt: skip
    """The inverse of `rfftn`."""
    array = _operand(x, "irfftn", norm)
    *others, (last, n) = _axes(array, s, axes, "irfftn")
    for axis, size in others:
        array = ifft(array, n=size, axis=axis, norm=norm)
    return irfft(array, n=n, axis=last, norm=norm)


# -- frequencies ----------------------------------------------------------------------------------


def fftfreq(
    n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: str | None = None
) -> Array:
    """The frequencies of the terms of `fft`, for samples d apart."""
    require_host(device)
    element = dtype_of(dtype)
    if not isinstance(n, Size):
        return Array(np.fft.fftfreq(n, d).astype(element.numpy))
    k = arange(n)
    signed = where(k < (n + 1) // 2, k, k - n)
    return astype(astype(signed, "float64") / (as_array(n) * d), element)


def rfftfreq(
    n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: str | None = None
) -> Array:
    """The frequencies of the terms of `rfft`, for samples d apart."""
    require_host(device)
    element = dtype_of(dtype)
    if not isinstance(n, Size):
        return Array(np.fft.rfftfreq(n, d).astype(element.numpy))
    return astype(astype(arange(n // 2 + 1), "float64") / (as_array(n) * d), element)


def _shifted(x: ArrayLike, axes: Axis, name: str, inverse: bool) -> Array:
    array = as_array(x)
    chosen = axes_of(axes, array.ndim, name)
    shifts: list[Any] = [-(array.shape[a] // 2) if inverse else array.shape[a] // 2 for a in chosen]
    return roll(array, shifts, axis=chosen) if chosen else array


def fftshift(x: ArrayLike, /, *, axes: Axis = None) -> Array:
    """The term of frequency 0 moved to the middle."""
    return _shifted(x, axes, "fftshift", False)


def ifftshift(x: ArrayLike, /, *, axes: Axis = None) -> Array:
    """The inverse of `fftshift`."""
    return _shifted(x, axes, "ifftshift", True)
