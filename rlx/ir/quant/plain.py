"""Unblocked formats: plain floats, and int8, int4, fp8 with separate scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from rlx.ir.quant.blocks import F32, Array, decoder, encoder, require_finite

if TYPE_CHECKING:
    from rlx.ir.quant.scheme import QuantScheme


@decoder("F32", ("x", "<f4"))
def from_f32(b: Array, out: F32) -> None:
    out[:, 0] = b["x"]


@encoder("F32")
def to_f32(x: F32, b: Array) -> None:
    b["x"] = x[:, 0]


@decoder("F16", ("x", "<f2"))
def from_f16(b: Array, out: F32) -> None:
    out[:, 0] = b["x"]


@encoder("F16")
def to_f16(x: F32, b: Array) -> None:
    b["x"] = x[:, 0]


@decoder("BF16", ("x", "<u2"))
def from_bf16(b: Array, out: F32) -> None:
    np.left_shift(b["x"], np.uint32(16), out=out.view(np.uint32)[:, 0])


@encoder("BF16")
def to_bf16(x: F32, b: Array) -> None:
    bits = x.view(np.uint32)[:, 0]
    nearest_even = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    # Rounding a NaN with a full mantissa would overflow into the sign: keep its top bits, quiet.
    b["x"] = np.where(np.isnan(x[:, 0]), bits >> 16 | 0x40, nearest_even)


def decode_rows(scheme: QuantScheme, packed: Array, scale: F32 | None, zp: Array | None) -> F32:
    if scheme.packed_dtype == "u8":
        values = _unpack_nibbles(packed)
    elif scheme.packed_dtype == "i8":
        values = packed.astype(np.float32)
    else:
        values = _fp8_to_f32(packed)
    if scale is None:
        return values
    groups = values.reshape(*scale.shape, scheme.block or values.shape[-1])
    with np.errstate(invalid="ignore", over="ignore"):
        if zp is not None:
            groups -= zp[..., None]
        elif scheme.packed_dtype == "u8":
            groups -= np.float32(8)
        groups *= scale[..., None]
    return values


def encode_rows(scheme: QuantScheme, values: F32) -> tuple[Array, F32 | None, Array | None]:
    require_finite(scheme, values)
    block = scheme.block or values.shape[-1]
    count = values.shape[-1] // block if scheme.block else 1
    # f64, so that scales of very large and very small weights neither overflow nor vanish early.
    groups = values.astype(np.float64).reshape(*values.shape[:-1], count, block)
    zp = None
    if scheme.packed_dtype.startswith("f8"):
        q, scale = _to_fp8(scheme, groups)
    elif scheme.has_zero_point:
        q, scale, zp = _affine(groups, *((-128, 127) if scheme.packed_dtype == "i8" else (0, 15)))
    elif scheme.packed_dtype == "i8":
        q, scale = _symmetric(groups, 127)
    else:
        q, scale = _symmetric(groups, 7)
        q = q + 8
    q = q.reshape(values.shape)
    if scheme.packed_dtype == "u8":
        q = q.astype(np.uint8)
        q = q[..., ::2] | q[..., 1::2] << 4
    elif scheme.packed_dtype == "i8":
        q = q.astype(np.int8)
    return q, scale, zp


def _unpack_nibbles(packed: Array) -> F32:
    out = np.empty((*packed.shape, 2), np.float32)
    out[..., 0] = packed & 15
    out[..., 1] = packed >> 4
    return out.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _fp8_to_f32(packed: Array) -> F32:
    """By table lookup: more than twice as fast as a conversion."""
    every = np.arange(256, dtype=np.uint8).view(packed.dtype).astype(np.float32)
    return every.take(packed.view(np.uint8))


def _symmetric(x: Array, limit: int) -> tuple[Array, F32]:
    scale = (np.abs(x).max(axis=-1, initial=0) / limit).astype(np.float32)
    return np.rint(_divide(x, scale)).clip(-limit, limit), scale


def _affine(x: Array, low: int, high: int) -> tuple[Array, F32, Array]:
    """The range always includes 0, so that zero weights stay exactly zero."""
    bottom, top = x.min(axis=-1, initial=0), x.max(axis=-1, initial=0)
    scale = ((top - bottom) / (high - low)).astype(np.float32)
    zp = np.rint(low - _divide(bottom[..., None], scale)[..., 0]).clip(low, high)
    q = (np.rint(_divide(x, scale)) + zp[..., None]).clip(low, high)
    return q, scale, zp.astype(np.int8 if low < 0 else np.uint8)


def _to_fp8(scheme: QuantScheme, x: Array) -> tuple[Array, F32 | None]:
    e4m3 = scheme.packed_dtype == "f8e4m3"
    dtype = ml_dtypes.float8_e4m3fn if e4m3 else ml_dtypes.float8_e5m2
    limit = 448.0 if e4m3 else 57344.0
    scale = None
    if scheme.has_scale:
        scale = (np.abs(x).max(axis=-1, initial=0) / limit).astype(np.float32)
        x = _divide(x, scale)
    return x.clip(-limit, limit).astype(dtype), scale


def _divide(x: Array, scale: F32) -> Array:
    """x / scale by group; a scale of 0 belongs to weights that are all (all but) zero."""
    quotient: Array = x / np.where(scale == 0, np.inf, scale.astype(np.float64))[..., None]
    return quotient
