"""Encoders of types whose 4-bit codes index a list of values: IQ4_NL, IQ4_XS, MXFP4 and NVFP4.

The midpoints between the values are multiples of 1/2, so floor(2 x) finds the nearest one in a
table. Scales are searched for the least (weighted) squared error.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from rlx.errors import NumericsError
from rlx.ir.quant.blocks import F32, Array, BestScale, as_f16, dots, encoder, reciprocal
from rlx.ir.quant.iq import CURVE
from rlx.ir.quant.plain import BOOK, E8M0, UE4M3

# What the peak of a run maps to: the ends of the curve are -127 and 113.
_PEAKS = np.concatenate(
    [np.linspace(-150, -84, 12, dtype=np.float32), np.linspace(92, 134, 7, dtype=np.float32)]
)
_LEAST = -256  # floor(2 x) of the first entry of the table


@cache
def _table() -> tuple[Array, F32]:
    """Codes and values by floor(2 x) - _LEAST."""
    middle = (np.arange(_LEAST, -_LEAST) + 0.5) / 2
    codes = np.abs(middle[:, None] - CURVE).argmin(axis=1).astype(np.uint8)
    return codes, CURVE[codes]


def _entry(x: F32, inverse: F32) -> Array:
    """The entries of the table for x · inverse."""
    scaled = x * (2 * inverse)
    np.floor(scaled, out=scaled)
    np.clip(scaled, np.float32(_LEAST), np.float32(-_LEAST - 1), out=scaled)
    scaled -= np.float32(_LEAST)
    return scaled.astype(np.intp)


def _fit_curve(x: F32, w: F32 | None) -> F32:
    """The scale of each run, a column of x."""
    high, low = x.max(axis=0), x.min(axis=0)
    # an inverse that some peak, doubled, makes overflow is 0
    room = np.float32(2.0**-9)
    inverse = reciprocal(np.where(high >= -low, high, low) * room) * room
    best, values = BestScale(x, w), _table()[1]
    for peak in _PEAKS:
        best.try_codes(values.take(_entry(x, inverse * peak)))
    return best.scale


def _columns(x: F32) -> F32:
    return np.ascontiguousarray(x.reshape(-1, 32).T)


def _pair(codes: Array) -> Array:
    """Codes [..., 32] in bytes: the first half below, the second above."""
    packed: Array = codes[..., :16] | codes[..., 16:] << np.uint8(4)
    return packed


@encoder("IQ4_NL")
def to_iq4_nl(x: F32, b: Array, w: F32 | None) -> None:
    d = as_f16(_fit_curve(_columns(x), None if w is None else _columns(w)))
    b["d"] = d
    b["qs"] = _pair(_table()[0].take(_entry(x, reciprocal(d)[:, None])))


@encoder("IQ4_XS")
def to_iq4_xs(x: F32, b: Array, w: F32 | None) -> None:
    columns, importance = _columns(x), None if w is None else _columns(w)
    codes, values = _table()
    best = _fit_curve(columns, importance).reshape(len(x), 8)
    # The largest scale maps to -32, which has no positive counterpart.
    peak = np.take_along_axis(best, np.abs(best).argmax(axis=1)[:, None], axis=1)
    d = as_f16(peak / np.float32(-32))
    scales = np.rint(best * reciprocal(d)).clip(-32, 31)
    q = values.take(_entry(columns, reciprocal((d * scales).reshape(-1))))
    wq = q if importance is None else q * importance
    xq = (dots(columns, wq).reshape(scales.shape) * scales).sum(axis=1)
    qq = (dots(q, wq).reshape(scales.shape) * scales**2).sum(axis=1)
    d = np.where(qq > 0, as_f16(xq * reciprocal(qq)), d[:, 0])
    entries = _entry(x.reshape(-1, 8, 32), reciprocal(d[:, None] * scales)[..., None])
    stored = (scales + 32).astype(np.uint8)
    b["d"], b["qs"] = d, _pair(codes.take(entries))
    b["low"] = (stored[:, ::2] & 15) | (stored[:, 1::2] & 15) << np.uint8(4)
    high = (stored >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    b["high"] = np.bitwise_or.reduce(high, axis=1)


# -- FP4 ------------------------------------------------------------------------------------------

# Codes 0 to 7 by floor(2 |x|); the last one holds from 20 on.
_FP4 = np.repeat(np.arange(8, dtype=np.uint8), [1, 2, 2, 2, 3, 4, 6, 1])


def _fp4(x: F32, inverse: F32) -> Array:
    scaled = np.abs(x) * (2 * inverse)
    np.minimum(scaled, np.float32(len(_FP4) - 1), out=scaled)
    return _FP4.take(scaled.astype(np.intp)) | (x < 0).view(np.uint8) << np.uint8(3)


def _best_fp4(x: F32, w: F32 | None, tried: Array, scales: F32) -> tuple[Array, Array]:
    """Of the scale numbers `tried` [choices, runs] the best for each run of x, and its codes."""
    best = np.full(len(x), np.inf, np.float32)
    unit = reciprocal(
        np.abs(x).max(axis=1, keepdims=True)
    )  # squares of the largest weights overflow
    picked, codes = np.zeros(len(x), np.uint8), np.zeros(x.shape, np.uint8)
    for number in tried:
        scale = scales[number][:, None]
        found = _fp4(x, reciprocal(scale))
        error = np.square((x - BOOK.take(found) * scale) * unit)
        loss = error.sum(axis=1) if w is None else np.einsum("ij,ij->i", error, w)
        better = loss < best
        np.copyto(best, loss, where=better)
        picked[better], codes[better] = number[better], found[better]
    return picked, codes


@encoder("MXFP4")
def to_mxfp4(x: F32, b: Array, w: F32 | None) -> None:
    """The scale is a power of two: the peak becomes 4 to 8, or less, or more and is clipped."""
    _, exponent = np.frexp(np.abs(x).max(axis=1))
    tried = (exponent + np.arange(-1, 2)[:, None] + 124).clip(0, 254)
    b["e"], codes = _best_fp4(x, w, tried, E8M0)
    b["qs"] = _pair(codes)


@encoder("NVFP4")
def to_nvfp4(x: F32, b: Array, w: F32 | None) -> None:
    runs, importance = x.reshape(-1, 16), None if w is None else w.reshape(-1, 16)
    peak = np.abs(runs).max(axis=1)
    most = BOOK.max() * UE4M3[:0x7F].max()
    if peak.max(initial=0) > most:
        raise NumericsError(
            "a block scale of NVFP4 does not fit e4m3",
            where="quant",
            got=float(peak.max()),
            expected=f"weights up to {most:g}",
            hint="scale the weights down, or take MXFP4",
        )
    middle = np.searchsorted(UE4M3[:0x7F], peak / np.float32(12))
    tried = (middle + np.arange(-4, 3)[:, None]).clip(0, 0x7E)
    picked, codes = _best_fp4(runs, importance, tried, UE4M3)
    b["d"] = picked.reshape(-1, 4)
    codes = codes.reshape(-1, 4, 16)
    b["qs"] = codes[..., :8] | codes[..., 8:] << np.uint8(4)
