"""Super-blocks of 256 weights in sub-blocks of 16 or 32, each with a small integer scale."""

from __future__ import annotations

import numpy as np

from rlx.ir.quant_decode.blocks import F32, Array, decoder, encoder, f32, fill, planes

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
def to_q8_k(x: F32, b: Array) -> None:
    """The largest weight becomes -127, which leaves the sign of the scale to it."""
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
