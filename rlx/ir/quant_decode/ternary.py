"""Weights in {-1, 0, 1} with one scale per 256."""

from __future__ import annotations

import numpy as np

from rlx.ir.quant_decode.blocks import F32, Array, decoder, f32, fill, planes

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


def _digits(source: Array, count: int) -> Array:
    """The first `count` base-3 digits of bytes [n, w], less one: [n, count, w]."""
    # Multiplying by 3^i modulo 256 drops i digits; the next one is then floor(3 * fraction).
    rest = (source[:, None, :] * _POWERS[:count]).astype(np.uint16)
    rest *= np.uint16(3)
    rest >>= np.uint16(8)
    digits = rest.astype(np.int8)
    digits -= np.int8(1)
    return digits
