"""Formats with one scale or none: plain floats, int8, int4, fp8 with separate scales, and blocks
with a scale (Q4_0 to Q8_1, Q1_0, ternary TQ1_0 and TQ2_0, MXFP4 and NVFP4)."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from rlx.ir.quant.blocks import (
    F32,
    Array,
    CodeTable,
    as_f16,
    bits_of,
    decoder,
    encoder,
    f32,
    fill,
    planes,
    reciprocal,
    require_finite,
)
from rlx.ir.quant.kquants import STEPS, fit_line, fit_scale, joined
from rlx.ir.quant.scheme import LANE_BLOCK, LANE_LIMIT, LANE_WORDS, QuantScheme


@decoder("F32", ("x", "<f4"))
def from_f32(b: Array, out: F32) -> None:
    out[:, 0] = b["x"]


@encoder("F32")
def to_f32(x: F32, b: Array, w: F32 | None) -> None:
    b["x"] = x[:, 0]


@decoder("F16", ("x", "<f2"))
def from_f16(b: Array, out: F32) -> None:
    out[:, 0] = b["x"]


@encoder("F16")
def to_f16(x: F32, b: Array, w: F32 | None) -> None:
    b["x"] = x[:, 0]


@decoder("BF16", ("x", "<u2"))
def from_bf16(b: Array, out: F32) -> None:
    np.left_shift(b["x"], np.uint32(16), out=out.view(np.uint32)[:, 0])


@encoder("BF16")
def to_bf16(x: F32, b: Array, w: F32 | None) -> None:
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
        limited = bool(scheme.block) and scheme.block_size % LANE_BLOCK == 0 and groups.size > 0
        q, scale = _symmetric(groups, 127, _lane_scales(groups) if limited else 0.0)
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


def _lane_scales(x: Array) -> Array:
    """Scales with which the sums of lanes fit LANE_LIMIT."""
    lanes = x.reshape(*x.shape[:-1], -1, LANE_WORDS, 2, 2)
    above = np.maximum(lanes, 0).sum(axis=(-3, -1))
    below = above - lanes.sum(axis=(-3, -1))
    worst: Array = np.maximum(above, below).max(axis=(-2, -1), initial=0)
    return worst / (LANE_LIMIT - LANE_WORDS)  # rounding adds up to a half for each of two a word


def _symmetric(x: Array, limit: int, least: Array | float = 0.0) -> tuple[Array, F32]:
    """Codes up to `limit`, with scales of at least `least`."""
    scale = np.maximum(np.abs(x).max(axis=-1, initial=0) / limit, least).astype(np.float32)
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


_STEPS = {8: STEPS[4], 16: STEPS[5]}  # by the codes on one side of zero


@decoder("Q4_0", ("d", "<f2"), ("qs", "u1", 16))
def q4_0(b: Array, out: F32) -> None:
    q = planes(b["qs"], 4).view(np.int8)
    q -= np.int8(8)
    fill(out, q, f32(b["d"]))


@decoder("Q4_1", ("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16))
def q4_1(b: Array, out: F32) -> None:
    fill(out, planes(b["qs"], 4), f32(b["d"]), -f32(b["m"]))


@decoder("Q5_0", ("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16))
def q5_0(b: Array, out: F32) -> None:
    q = _five_bits(b).view(np.int8)
    q -= np.int8(16)
    fill(out, q, f32(b["d"]))


@decoder("Q5_1", ("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16))
def q5_1(b: Array, out: F32) -> None:
    fill(out, _five_bits(b), f32(b["d"]), -f32(b["m"]))


@decoder("Q8_0", ("d", "<f2"), ("qs", "i1", 32))
def q8_0(b: Array, out: F32) -> None:
    fill(out, b["qs"], f32(b["d"]))


@decoder("Q8_1", ("d", "<f2"), ("s", "<f2"), ("qs", "i1", 32))
def q8_1(b: Array, out: F32) -> None:
    """`s` is d * sum(qs), kept for dot products; the weights do not need it."""
    fill(out, b["qs"], f32(b["d"]))


@decoder("Q1_0", ("d", "<f2"), ("qs", "u1", 16))
def q1_0(b: Array, out: F32) -> None:
    """A set bit is d, a clear one -d."""
    q = bits_of(b["qs"]).view(np.int8)
    q += q
    q -= np.int8(1)
    fill(out, q, f32(b["d"]))


def _five_bits(b: Array) -> Array:
    q = bits_of(b["qh"])
    q *= np.uint8(16)
    q |= planes(b["qs"], 4).reshape(q.shape)
    return q


@encoder("Q4_0")
def to_q4_0(x: F32, b: Array, w: F32 | None) -> None:
    d, q = _around_zero(x, w, 8)
    b["d"], b["qs"] = d, _nibbles(q)


@encoder("Q4_1")
def to_q4_1(x: F32, b: Array, w: F32 | None) -> None:
    d, m, q = _from_minimum(x, w, 15)
    b["d"], b["m"], b["qs"] = d, m, _nibbles(q)


@encoder("Q5_0")
def to_q5_0(x: F32, b: Array, w: F32 | None) -> None:
    d, q = _around_zero(x, w, 16)
    b["d"], b["qs"], b["qh"] = d, _nibbles(q & 15), _top_bits(q)


@encoder("Q5_1")
def to_q5_1(x: F32, b: Array, w: F32 | None) -> None:
    d, m, q = _from_minimum(x, w, 31)
    b["d"], b["m"], b["qs"], b["qh"] = d, m, _nibbles(q & 15), _top_bits(q)


@encoder("Q8_0")
def to_q8_0(x: F32, b: Array, w: F32 | None) -> None:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = (x * reciprocal(d)).astype(np.float64)
    b["d"] = d[:, 0]
    # Round half away from zero, as C's roundf; the addition is exact in f64.
    b["qs"] = np.trunc(scaled + np.copysign(0.5, scaled))


def _around_zero(x: F32, w: F32 | None, half: int) -> tuple[Array, Array]:
    """The largest weight becomes -half, the code with no positive counterpart; with an importance
    the scale is that of the least weighted error."""
    if w is None:
        peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
        d = peak / np.float32(-half)
    else:
        d = fit_scale(_columns(x), _columns(w), half, _STEPS[half])[:, None]
        d = as_f16(d)
    q = np.trunc((x * reciprocal(d) + np.float32(half + 0.5)).clip(0, 2 * half - 1))
    return d[:, 0], q.astype(np.uint8)


def _from_minimum(x: F32, w: F32 | None, top: int) -> tuple[Array, Array, Array]:
    if w is None:
        low = x.min(axis=1, keepdims=True)
        d = (x.max(axis=1, keepdims=True) - low) / np.float32(top)
    else:
        line = fit_line(_columns(x), _columns(w), top, _STEPS[(top + 1) // 2], any_sign=True)
        d, low = (as_f16(f)[:, None] for f in (line[0], -line[1]))
    q = np.trunc(((x - low) * reciprocal(d) + np.float32(0.5)).clip(0, top))
    return d[:, 0], low[:, 0], q.astype(np.uint8)


def _columns(x: F32) -> F32:
    return np.ascontiguousarray(x.T)


def _nibbles(q: Array) -> Array:
    packed: Array = q[:, :16] | (q[:, 16:] << np.uint8(4))
    return packed


def _top_bits(q: Array) -> Array:
    return np.packbits(q >> np.uint8(4), axis=1, bitorder="little")


_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


@decoder("TQ1_0", ("qs0", "u1", 32), ("qs1", "u1", 16), ("qh", "u1", 4), ("d", "<f2"))
def tq1_0(b: Array, out: F32) -> None:
    """A byte is a fraction of 256 whose first base-3 digits are five weights (four in qh)."""
    digits = [
        _digits(b[field], count).reshape(len(b), -1)
        for field, count in (("qs0", 5), ("qs1", 5), ("qh", 4))
    ]
    fill(out, np.concatenate(digits, axis=1), f32(b["d"]))


@decoder("TQ2_0", ("qs", "u1", (2, 32)), ("d", "<f2"))
def tq2_0(b: Array, out: F32) -> None:
    q = planes(b["qs"], 2).view(np.int8)
    q -= np.int8(1)
    fill(out, q, f32(b["d"]))


def _ternary(x: F32, w: F32 | None) -> tuple[F32, Array]:
    """d and the digits 0, 1 and 2 of each block with the least (weighted) squared error.

    Weights beyond d / 2 become ±d, so they are the largest ones: with m of them the error falls by
    (Σ w |x|)² / Σ w. All m are tried.
    """
    order = np.argsort(np.abs(x), axis=1)[:, ::-1]
    sorted_x = np.take_along_axis(np.abs(x), order, axis=1).astype(np.float64)
    sorted_w = np.ones_like(sorted_x) if w is None else np.take_along_axis(w, order, axis=1)
    weights = sorted_w.cumsum(axis=1, dtype=np.float64)
    sums = (sorted_x * sorted_w).cumsum(axis=1)
    most = (sums * sums / weights).argmax(axis=1)[:, None]
    mean = np.take_along_axis(sums, most, axis=1) / np.take_along_axis(weights, most, axis=1)
    d = as_f16(mean.astype(np.float32))
    q = np.rint(x * reciprocal(d)).clip(-1, 1) + 1
    return d[:, 0], q.astype(np.uint8)


@encoder("TQ1_0")
def to_tq1_0(x: F32, b: Array, w: F32 | None) -> None:
    b["d"], q = _ternary(x, w)
    b["qs0"] = _fraction(q[:, :160].reshape(-1, 5, 32))
    b["qs1"] = _fraction(q[:, 160:240].reshape(-1, 5, 16))
    b["qh"] = _fraction(q[:, 240:].reshape(-1, 4, 4))


@encoder("TQ2_0")
def to_tq2_0(x: F32, b: Array, w: F32 | None) -> None:
    b["d"], q = _ternary(x, w)
    b["qs"] = joined(q.reshape(-1, 2, 4, 32), 2)


def _fraction(digits: Array) -> Array:
    """Bytes whose first base-3 digits are [n, count, w]: the inverse of `_digits`."""
    powers = np.array([81, 27, 9, 3, 1], np.uint16)[: digits.shape[1], None]
    whole = (digits * powers).sum(axis=1, dtype=np.uint16)
    packed: Array = ((whole * 256 + 242) // 243).astype(np.uint8)
    return packed


def _digits(source: Array, count: int) -> Array:
    """The first `count` base-3 digits of bytes [n, w], less one: [n, count, w]."""
    # Multiplying by 3^i modulo 256 drops i digits; the next one is then floor(3 * fraction).
    rest = (source[:, None, :] * _POWERS[:count]).astype(np.uint16)
    rest *= np.uint16(3)
    rest >>= np.uint16(8)
    digits = rest.astype(np.int8)
    digits -= np.int8(1)
    return digits


BOOK = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_BOOK = CodeTable(BOOK)


def _half_e8m0() -> F32:
    """2^(e - 127) / 2. The lowest two are subnormal; 255 is not NaN here."""
    return np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)


def _half_ue4m3() -> F32:
    """e4m3 without a sign, halved; bit 7 is ignored and 0x7F means 0."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = np.ldexp(8.0 + mantissa, exponent - 11)
    value = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float64), -10), normal)
    value[0x7F] = 0
    return value.astype(np.float32)


E8M0, UE4M3 = _half_e8m0(), _half_ue4m3()


@decoder("MXFP4", ("e", "u1"), ("qs", "u1", 16))
def mxfp4(b: Array, out: F32) -> None:
    BOOK.take(planes(b["qs"], 4).reshape(out.shape), out=out, mode="clip")
    out *= E8M0[b["e"]][:, None]


@decoder("NVFP4", ("d", "u1", 4), ("qs", "u1", (4, 8)))
def nvfp4(b: Array, out: F32) -> None:
    fill(out, _BOOK.take(planes(b["qs"], 4)), UE4M3[b["d"]])
