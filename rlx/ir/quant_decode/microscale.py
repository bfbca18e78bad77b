"""4-bit floats (e2m1) with a scale of 8 bits per 32 (MXFP4) or 16 (NVFP4) weights.

The code book holds doubled values, so that they are integers; the scales are halved to match.
"""

from __future__ import annotations

import numpy as np

from rlx.ir.quant_decode.blocks import F32, Array, decoder, planes

_BOOK = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


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


_E8M0, _UE4M3 = _half_e8m0(), _half_ue4m3()


@decoder("MXFP4", ("e", "u1"), ("qs", "u1", 16))
def mxfp4(b: Array, out: F32) -> None:
    _BOOK.take(planes(b["qs"], 4).reshape(out.shape), out=out, mode="clip")
    out *= _E8M0[b["e"]][:, None]


@decoder("NVFP4", ("d", "u1", 4), ("qs", "u1", (4, 8)))
def nvfp4(b: Array, out: F32) -> None:
    groups = out.reshape(-1, 4, 16)
    _BOOK.take(planes(b["qs"], 4).reshape(groups.shape), out=groups, mode="clip")
    groups *= _UE4M3[b["d"]][..., None]
