"""Casts between element types.

Those that devices have run there; strings and the small floats and integers of quantised models
are converted on the host.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from rlx.ir.dtype import DType
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.table import op
from rlx.onnx.values import (
    Known,
    NeedsValueError,
    elements_of,
    is_number_type,
    shrunk,
    type_of,
)

_SATURATING = {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}
MOST_FOLDED = 4096


@op("Cast", raw=True)
def cast(node: Call, x: Any) -> Any:
    return converted(node, x, node.element_type("to"))


@op("CastLike", raw=True)
def cast_like(node: Call, x: Any, like: Any) -> Any:
    return converted(node, x, type_of(like))


def converted(node: Call, x: Any, to: np.dtype[Any]) -> Any:
    """`x` in another element type."""
    source = type_of(x)
    if source == to:
        return x
    if isinstance(x, Known) and x.is_symbolic:
        return Known(x.data, to) if to.kind in "iu" else _on_device(x.array(), to)
    small = isinstance(x, Known) and (x.data.size <= MOST_FOLDED or not x.is_constant)
    plain = is_number_type(source) and is_number_type(to) and to.name not in _SATURATING
    if not plain or small:
        if not isinstance(x, Known) and node.traced:
            raise NeedsValueError(x, on_host=True)
        return Known(on_host(node, elements_of(x), to))
    return _on_device(x.array() if isinstance(x, Known) else x, to)


def _on_device(x: Array, to: np.dtype[Any]) -> Array:
    return x.astype(DType.of(to))


def on_host(node: Call, data: Any, to: np.dtype[Any]) -> Any:
    if data.dtype == object:
        return _from_text(node, data, to)
    if to.kind == "O":
        return _to_text(data)
    with np.errstate(all="ignore"):
        if to.name in _SATURATING and node.int("saturate", 1):
            return _saturated(data, to)
        if to.name == "float8_e8m0fnu":
            return _scale_type(node, data, to)
        if to.name in ("float4_e2m1fn",):
            return np.clip(data.astype(np.float32), -6, 6).astype(to)
        if to.name in ("int4", "uint4", "int2", "uint2"):
            return _narrow(data, to)
        return shrunk(data.astype(np.float32) if _is_tiny(data.dtype) else data, to).data


def _is_tiny(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "V" or not is_number_type(dtype)


def _narrow(data: Any, to: np.dtype[Any]) -> Any:
    """Whole numbers of some bits: those that are left after wrapping."""
    bits = int(to.name[-1])
    wide = data.astype(np.float32) if _is_tiny(data.dtype) else data
    codes = np.trunc(wide).astype(np.int64) & (2**bits - 1)
    if to.name.startswith("int"):
        half = 1 << (bits - 1)
        codes = (codes ^ half) - half
    return codes.astype(np.int8).astype(to)


def _saturated(data: Any, to: np.dtype[Any]) -> Any:
    wide = data.astype(np.float32)
    limits: Any = ml_dtypes.finfo
    most = float(limits(to).max)
    return np.clip(wide, -most, most).astype(to)


def _scale_type(node: Call, data: Any, to: np.dtype[Any]) -> Any:
    """Powers of two, rounded as the attribute says."""
    how = node.text("round_mode", "up")
    wide = np.abs(data.astype(np.float32))
    mantissa, exponent = np.frexp(wide)  # wide = mantissa · 2^exponent, mantissa in 0.5 … 1
    whole = mantissa == 0.5
    power = exponent - 1
    if how == "up":
        power = np.where(whole, power, power + 1)
    elif how == "nearest":
        power = np.where(mantissa >= 0.75, power + 1, power)
    power = np.clip(power, -127, 127)
    power = np.where(wide == 0, -127, power)
    code = np.where(np.isfinite(wide), power + 127, np.where(np.isnan(wide), 255, 254))
    return code.astype(np.uint8).view(to)


def _from_text(node: Call, data: Any, to: np.dtype[Any]) -> Any:
    try:
        if to.kind == "b":
            return np.array([t not in ("", "0", "False") for t in data.flat]).reshape(data.shape)
        if to.kind in "iu":
            return np.array([int(float(t)) for t in data.flat], to).reshape(data.shape)
        return np.array([float(t) for t in data.flat], np.float64).astype(to).reshape(data.shape)
    except (ValueError, OverflowError) as error:
        raise node.fault("text that is not a number", got=str(error)) from None


def _to_text(data: Any) -> Any:
    found = np.empty(data.shape, object)
    found.reshape(-1)[:] = [_text(x) for x in data.reshape(-1)]
    return found


def _text(x: Any) -> str:
    if isinstance(x, (float, np.floating)) or x.dtype.kind == "V":
        value = float(x)
        if np.isnan(value):
            return "NaN"
        if np.isinf(value):
            return "INF" if value > 0 else "-INF"
        return str(x) if isinstance(x, np.floating) else str(value)
    return str(x)


@op("BitCast", raw=True)
def bit_cast(node: Call, x: Any) -> Any:
    if not isinstance(x, Known) and node.traced:
        raise NeedsValueError(x, on_host=True)
    data, to = elements_of(x), node.element_type("to")
    flat = np.ascontiguousarray(data).reshape(-1)
    if "b" in (data.dtype.kind, to.kind):
        flat = flat.view(np.uint8)
    return flat.view(to).reshape(data.shape)


__all__ = ["converted"]
