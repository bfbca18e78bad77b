"""K-quants: superblocks of 256 weights in sub-blocks of 16 or 32 with small integer scales.

Encoders search for codes, integer scales and f16 superblock scales by least squares, weighted by
the importance `w` of each weight where it is given.
"""

from __future__ import annotations

import numpy as np

from rlx.ir.quant.blocks import (
    F32,
    Array,
    BestScale,
    as_f16,
    decoder,
    dots,
    encoder,
    f32,
    fill,
    planes,
    reciprocal,
)

# Below it, 127 / peak overflows.
_SMALLEST = 128 * np.finfo(np.float32).tiny


@decoder("Q2_K", ("scales", "u1", 16), ("qs", "u1", (2, 32)), ("d", "<f2"), ("dmin", "<f2"))
def q2_k(b: Array, out: F32) -> None:
    scale = f32(b["d"]) * (b["scales"] & 15)
    minimum = f32(b["dmin"]) * (b["scales"] >> 4)
    fill(out, planes(b["qs"], 2), scale, minimum)


@decoder("Q3_K", ("hmask", "u1", 32), ("qs", "u1", (2, 32)), ("scales", "u1", 12), ("d", "<f2"))
def q3_k(b: Array, out: F32) -> None:
    low, high = planes(b["scales"][:, :8], 4), planes(b["scales"][:, 8:], 2, at=4)
    six_bits = low.reshape(-1, 16) | high.reshape(-1, 16)
    q = planes(b["hmask"], 1, at=2).reshape(-1, 256)
    q |= planes(b["qs"], 2).reshape(q.shape)
    fill(out, _minus(q, 4), f32(b["d"]) * _minus(six_bits, 32))


@decoder("Q4_K", ("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", (4, 32)))
def q4_k(b: Array, out: F32) -> None:
    fill(out, planes(b["qs"], 4), *_scale_min(b))


@decoder(
    "Q5_K",
    ("d", "<f2"),
    ("dmin", "<f2"),
    ("scales", "u1", 12),
    ("qh", "u1", 32),
    ("qs", "u1", (4, 32)),
)
def q5_k(b: Array, out: F32) -> None:
    q = planes(b["qh"], 1, at=4).reshape(-1, 256)
    q |= planes(b["qs"], 4).reshape(q.shape)
    fill(out, q, *_scale_min(b))


@decoder("Q6_K", ("ql", "u1", (2, 64)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), ("d", "<f2"))
def q6_k(b: Array, out: F32) -> None:
    q = planes(b["qh"], 2, at=4).reshape(-1, 256)
    q |= planes(b["ql"], 4).reshape(q.shape)
    fill(out, _minus(q, 32), f32(b["d"]) * b["scales"])


@decoder("Q8_K", ("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16))
def q8_k(b: Array, out: F32) -> None:
    """`bsums` are sums of 16 quants, kept for dot products; the weights do not need them."""
    fill(out, b["qs"], f32(b["d"]))


@encoder("Q8_K")
def to_q8_k(x: F32, b: Array, w: F32 | None) -> None:
    """The largest weight becomes -127, so the scale takes its opposite sign."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    usable = np.abs(peak) >= _SMALLEST
    factor = np.float32(-127) / np.where(usable, peak, np.float32(1))
    q = np.where(usable, np.rint(x * factor), 0).clip(-127, 127).astype(np.int8)
    b["qs"] = q
    b["bsums"] = q.reshape(-1, 16, 16).sum(axis=2, dtype=np.int16)
    b["d"] = np.where(usable, np.float32(1) / factor, 0)[:, 0]


def _minus(q: Array, offset: int) -> Array:
    signed = q.view(np.int8)
    signed -= np.int8(offset)
    return signed


def _scale_min(b: Array) -> tuple[Array, Array]:
    """Eight 6-bit scales and minima in twelve bytes.

    Bytes 0-3 hold the first four scales and 4-7 the first four minima, in their low six bits.
    Bytes 8-11 hold the low nibbles of the last four (scale below, minimum above); the two bits
    on top of bytes 0-7 complete them.
    """
    first = b["scales"][:, :8]
    low = planes(b["scales"][:, 8:], 4).reshape(-1, 8)
    last = low | ((first >> np.uint8(2)) & np.uint8(0x30))
    six_bits = np.empty((2, len(b), 8), np.uint8)
    for i, half in enumerate((slice(0, 4), slice(4, 8))):
        np.bitwise_and(first[:, half], 0x3F, out=six_bits[i, :, :4])
        six_bits[i, :, 4:] = last[:, half]
    return f32(b["d"]) * six_bits[0], f32(b["dmin"]) * six_bits[1]


# Offsets of the level that the peak maps to, relative to the last one; negative ones clip it.
# (first, last, count) by bits: more would lower the error by less than half a percent.
_GRIDS = {
    2: (-1.0, 0.9, 13),
    3: (-1.2, 0.6, 7),
    4: (-2.4, 0.6, 13),
    5: (-2.4, 0.6, 9),
    6: (-3.0, 0.6, 7),
}
STEPS = {bits: np.linspace(*grid, dtype=np.float32) for bits, grid in _GRIDS.items()}


@encoder("Q2_K")
def to_q2_k(x: F32, b: Array, w: F32 | None) -> None:
    d, dmin, scales, minima, q = _affine(x, w, 16, 2, 15)
    b["d"], b["dmin"] = d, dmin
    b["scales"] = scales | minima << np.uint8(4)
    b["qs"] = joined(q.reshape(-1, 2, 4, 32), 2)


@encoder("Q3_K")
def to_q3_k(x: F32, b: Array, w: F32 | None) -> None:
    d, scales, q = _symmetric(x, w, 3, 32)
    b["d"] = d
    stored = (scales + 32).astype(np.uint8)
    b["scales"][:, :8] = joined((stored & 15).reshape(-1, 2, 8), 4)
    b["scales"][:, 8:] = joined((stored >> 4).reshape(-1, 4, 4), 2)
    b["qs"] = joined((q & 3).reshape(-1, 2, 4, 32), 2)
    b["hmask"] = joined((q >> 2).reshape(-1, 8, 32), 1)


@encoder("Q4_K")
def to_q4_k(x: F32, b: Array, w: F32 | None) -> None:
    b["d"], b["dmin"], scales, minima, q = _affine(x, w, 32, 4, 63)
    b["scales"] = _six_bits(scales, minima)
    b["qs"] = joined(q.reshape(-1, 4, 2, 32), 4)


@encoder("Q5_K")
def to_q5_k(x: F32, b: Array, w: F32 | None) -> None:
    b["d"], b["dmin"], scales, minima, q = _affine(x, w, 32, 5, 63)
    b["scales"] = _six_bits(scales, minima)
    b["qs"] = joined((q & 15).reshape(-1, 4, 2, 32), 4)
    b["qh"] = joined((q >> 4).reshape(-1, 8, 32), 1)


@encoder("Q6_K")
def to_q6_k(x: F32, b: Array, w: F32 | None) -> None:
    b["d"], b["scales"], q = _symmetric(x, w, 6, 128)
    b["ql"] = joined((q & 15).reshape(-1, 2, 2, 64), 4)
    b["qh"] = joined((q >> 4).reshape(-1, 2, 4, 32), 2)


# -- scale · q ------------------------------------------------------------------------------------


def _symmetric(x: F32, w: F32 | None, bits: int, half: int) -> tuple[Array, Array, Array]:
    """d [n], scales -half … half-1 [n, 16] and codes from 0 [n, 256]."""
    limit = 1 << (bits - 1)
    columns, importance = _columns(x, 16), None if w is None else _columns(w, 16)
    best = fit_scale(columns, importance, limit, STEPS[bits]).reshape(len(x), -1)
    # The largest scale maps to the most negative integer, which has no positive counterpart.
    peak = np.take_along_axis(best, np.abs(best).argmax(axis=1)[:, None], axis=1)
    d = as_f16(peak / np.float32(-half))
    scales = np.rint(best * reciprocal(d)).clip(-half, half - 1).astype(np.float32)
    q = _codes(columns, (d * scales).reshape(-1), -limit, limit - 1)
    d = _refitted(columns, importance, q, scales, d)
    q = _codes(columns, (d * scales).reshape(-1), -limit, limit - 1)
    q += np.float32(limit)
    return d[:, 0], scales.astype(np.int8), _rows(q, len(x))


def fit_scale(x: F32, w: F32 | None, limit: int, steps: F32) -> F32:
    """The scale of each run, a column of x, that leaves the least (weighted) squared error."""
    high, low = x.max(axis=0), x.min(axis=0)
    peak: F32 = np.where(high >= -low, high, low)
    inverse = reciprocal(peak)
    best, q = BestScale(x, w), np.empty_like(x)
    for step in steps:
        np.multiply(x, inverse * (-limit - step), out=q)
        _round(q, -limit, limit - 1)
        best.try_codes(q)
    return best.scale


def _refitted(x: F32, w: F32 | None, q: F32, scales: F32, d: F32) -> F32:
    """The least-squares d for the codes and rounded scales; the old one if undefined."""
    wq = _weighted(q, w)
    xq = (dots(x, wq).reshape(scales.shape) * scales).sum(axis=1, keepdims=True)
    qq = (dots(q, wq).reshape(scales.shape) * scales**2).sum(axis=1, keepdims=True)
    best: F32 = np.where(qq > 0, as_f16(xq * reciprocal(qq)), d)
    return best


# -- scale · q - minimum --------------------------------------------------------------------------


def _affine(
    x: F32, w: F32 | None, run: int, bits: int, top: int
) -> tuple[Array, Array, Array, Array, Array]:
    """d, dmin [n], scales and minima up to `top` [n, runs], and codes [n, 256]."""
    columns, importance = _columns(x, run), None if w is None else _columns(w, run)
    found = fit_line(columns, importance, (1 << bits) - 1, STEPS[bits])
    scale, minimum = (f.reshape(len(x), -1) for f in found)
    d, scales = _shared(scale, top)
    dmin, minima = _shared(minimum, top)
    for last in (False, True):
        moved = columns + (dmin * minima).reshape(-1)
        q = _codes(moved, (d * scales).reshape(-1), 0, (1 << bits) - 1)
        if not last:
            d, dmin = _refitted_pair(columns, importance, q, scales, minima, d, dmin)
    return d[:, 0], dmin[:, 0], scales.astype(np.uint8), minima.astype(np.uint8), _rows(q, len(x))


def _shared(values: F32, top: int) -> tuple[F32, F32]:
    """One f16 scale for the values of a superblock, and the integers they become."""
    d = as_f16(values.max(axis=1, keepdims=True) / np.float32(top))
    return d, np.rint(values * reciprocal(d)).clip(0, top)


def fit_line(
    x: F32, w: F32 | None, top: int, steps: F32, *, any_sign: bool = False
) -> tuple[F32, F32]:
    """Scale and minimum of each run, a column of x, with the least (weighted) squared error.

    Both are non-negative, so that zero is representable; with `any_sign` the minimum need not be.
    """
    low = x.min(axis=0) if any_sign else np.minimum(x.min(axis=0), 0)
    count, total = np.float32(len(x)), x.sum(axis=0)
    if w is not None:
        count, total = w.sum(axis=0), dots(x, w)
    inverse = reciprocal(x.max(axis=0) - low)
    shifted, q = x - low, np.empty_like(x)
    room = None if w is None else np.empty_like(x)
    scale, minimum = np.zeros_like(low), -low
    most = np.full_like(low, -np.inf)
    again = 0 if w is None else 3  # codes of the best line so far, which moved far from the peaks
    for step in (*steps, *(None,) * again):
        if step is None:
            np.multiply(x + minimum, reciprocal(scale), out=q)
        else:
            np.multiply(shifted, inverse * (top + step), out=q)
        _round(q, 0, top)
        wq = _weighted(q, w, room)
        sums, xq, qq = wq.sum(axis=0), dots(x, wq), dots(q, wq)
        fitted = (count * xq - total * sums) * reciprocal(count * qq - sums * sums)
        offset = (total - fitted * sums) / count
        if not any_sign:
            through_zero = offset > 0
            np.copyto(fitted, xq * reciprocal(qq), where=through_zero)
            np.copyto(offset, 0, where=through_zero)
        gain = fitted * xq + offset * total
        better = (gain > most) & (fitted > 0)
        for kept, new in ((most, gain), (scale, fitted), (minimum, -offset)):
            np.copyto(kept, new, where=better)
    return scale, minimum


def _refitted_pair(
    x: F32, w: F32 | None, q: F32, scales: F32, minima: F32, d: F32, dmin: F32
) -> tuple[F32, F32]:
    """The least-squares d and dmin for the codes and rounded scales and minima."""

    def total(values: Array) -> Array:
        summed: Array = values.reshape(scales.shape).sum(axis=1, keepdims=True)
        return summed

    s, m, wq = scales.reshape(-1), minima.reshape(-1), _weighted(q, w)
    count, sums = np.float32(len(x)), x.sum(axis=0)
    if w is not None:
        count, sums = w.sum(axis=0), dots(x, w)
    a, c = total(dots(q, wq) * s * s), total(count * m * m)
    b = total(wq.sum(axis=0) * s * m)
    xs, xm = total(dots(x, wq) * s), total(sums * m)
    # [a -b; -b c] · (d, dmin) = (xs, -xm)
    det = a * c - b * b
    usable = det > 1e-6 * a * c
    inverse = reciprocal(np.where(usable, det, 0))
    best, best_min = as_f16((c * xs - b * xm) * inverse), as_f16((b * xs - a * xm) * inverse)
    usable &= (best > 0) & (best_min >= 0)
    return np.where(usable, best, d), np.where(usable, best_min, dmin)


# -- parts ----------------------------------------------------------------------------------------


def _weighted(q: F32, w: F32 | None, out: F32 | None = None) -> F32:
    return q if w is None else np.multiply(q, w, out=out)


def _columns(x: F32, run: int) -> F32:
    return np.ascontiguousarray(x.reshape(-1, run).T)


def _rows(q: F32, count: int) -> Array:
    return np.ascontiguousarray(q.astype(np.uint8).T).reshape(count, -1)


def _codes(x: F32, scale: F32, low: int, high: int) -> F32:
    q: F32 = x * reciprocal(scale)
    _round(q, low, high)
    return q


def _round(q: F32, low: int, high: int) -> None:
    np.rint(q, out=q)
    # np.maximum and np.minimum take three times as long
    np.clip(q, np.float32(low), np.float32(high), out=q)


def joined(q: Array, bits: int) -> Array:
    """Pack codes [..., 8 / bits, w] into bytes [..., w]: the inverse of `planes`."""
    found = q[..., 0, :].copy()
    for i in range(1, 8 // bits):
        found |= q[..., i, :] << np.uint8(i * bits)
    return found


def _six_bits(scales: Array, minima: Array) -> Array:
    """Pack eight scales and minima into twelve bytes; see `_scale_min`."""
    packed = np.empty((len(scales), 12), np.uint8)
    for at, part in ((0, scales), (4, minima)):
        packed[:, at : at + 4] = part[:, :4] | (part[:, 4:] >> 4) << np.uint8(6)
    packed[:, 8:] = (scales[:, 4:] & 15) | minima[:, 4:] << np.uint8(4)
    return packed
