"""Super-blocks of 256 weights in sub-blocks of 16 or 32, each with a small integer scale."""

from __future__ import annotations

import numpy as np

from rlx.ir.quant_decode.blocks import F32, Array, decoder, encoder, f32, planes


@decoder("Q2_K", ("scales", "u1", 16), ("qs", "u1", (2, 32)), ("d", "<f2"), ("dmin", "<f2"))
def q2_k(b: Array, out: F32) -> None:
    scale = f32(b["d"]) * (b["scales"] & 15)
    minimum = f32(b["dmin"]) * (b["scales"] >> 4)
    _affine(planes(b["qs"], 2), scale, minimum, out)


@decoder("Q3_K", ("hmask", "u1", 32), ("qs", "u1", (2, 32)), ("scales", "u1", 12), ("d", "<f2"))
def q3_k(b: Array, out: F32) -> None:
    low, high = planes(b["scales"][:, :8], 4), planes(b["scales"][:, 8:], 2)
    six_bits = low.reshape(-1, 16) | (high.reshape(-1, 16) << np.uint8(4))
    q = planes(b["hmask"], 1).reshape(-1, 256)
    q <<= np.uint8(2)
    q |= planes(b["qs"], 2).reshape(q.shape)
    _scaled(q, 4, f32(b["d"]) * (six_bits.view(np.int8) - np.int8(32)), out)


@decoder("Q4_K", ("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", (4, 32)))
def q4_k(b: Array, out: F32) -> None:
    _affine(planes(b["qs"], 4), *_scale_min(b), out)


@decoder(
    "Q5_K",
    ("d", "<f2"),
    ("dmin", "<f2"),
    ("scales", "u1", 12),
    ("qh", "u1", 32),
    ("qs", "u1", (4, 32)),
)
def q5_k(b: Array, out: F32) -> None:
    q = planes(b["qh"], 1).reshape(-1, 256)
    q <<= np.uint8(4)
    q |= planes(b["qs"], 4).reshape(q.shape)
    _affine(q, *_scale_min(b), out)


@decoder("Q6_K", ("ql", "u1", (2, 64)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), ("d", "<f2"))
def q6_k(b: Array, out: F32) -> None:
    q = planes(b["qh"], 2).reshape(-1, 256)
    q <<= np.uint8(4)
    q |= planes(b["ql"], 4).reshape(q.shape)
    _scaled(q, 32, f32(b["d"]) * b["scales"], out)


@decoder("Q8_K", ("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16))
def q8_k(b: Array, out: F32) -> None:
    """`bsums` are sums of 16 quants, kept for dot products; the weights do not need them."""
    np.multiply(b["qs"], f32(b["d"]), out=out)


@encoder("Q8_K")
def to_q8_k(x: F32, b: Array) -> None:
    """The largest weight becomes -127, which leaves the sign of the scale to it."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    usable = np.abs(peak) >= np.finfo(np.float32).tiny
    factor = np.float32(-127) / np.where(usable, peak, np.float32(1))
    q = np.where(usable, np.rint(x * factor), 0).clip(-127, 127).astype(np.int8)
    b["qs"] = q
    b["bsums"] = q.reshape(-1, 16, 16).sum(axis=2, dtype=np.int16)
    b["d"] = np.where(usable, np.float32(1) / factor, 0)[:, 0]


def _affine(q: Array, scale: Array, minimum: Array, out: F32) -> None:
    """out = scale * q - minimum over sub-blocks."""
    groups = out.reshape(*scale.shape, -1)
    np.multiply(q.reshape(groups.shape), scale[..., None], out=groups)
    groups -= minimum[..., None]


def _scaled(q: Array, offset: int, scale: Array, out: F32) -> None:
    """out = scale * (q - offset) over sub-blocks."""
    signed = q.view(np.int8)
    signed -= np.int8(offset)
    groups = out.reshape(*scale.shape, -1)
    np.multiply(signed.reshape(groups.shape), scale[..., None], out=groups)


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
