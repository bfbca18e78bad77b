"""Weights in {-1, 0, 1} with one scale per 256."""

from __future__ import annotations

import numpy as np

from rlx.ir.quant_decode.blocks import F32, Array, decoder, f32, planes

_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


@decoder("TQ1_0", ("qs0", "u1", 32), ("qs1", "u1", 16), ("qh", "u1", 4), ("d", "<f2"))
def tq1_0(b: Array, out: F32) -> None:
    """A byte is a fraction of 256 whose first base-3 digits are five weights (four in qh)."""
    start = 0
    for field, digits in (("qs0", 5), ("qs1", 5), ("qh", 4)):
        # Multiplying by 3^i modulo 256 drops i digits; the next one is then floor(3 * fraction).
        rest = (b[field][:, None, :] * _POWERS[:digits]).reshape(len(b), -1)
        digit = ((rest.astype(np.uint16) * np.uint16(3)) >> np.uint16(8)).astype(np.int8)
        stop = start + digit.shape[1]
        np.multiply(digit - np.int8(1), f32(b["d"]), out=out[:, start:stop])
        start = stop


@decoder("TQ2_0", ("qs", "u1", (2, 32)), ("d", "<f2"))
def tq2_0(b: Array, out: F32) -> None:
    q = planes(b["qs"], 2).reshape(out.shape).view(np.int8)
    q -= np.int8(1)
    np.multiply(q, f32(b["d"]), out=out)
