"""IQ formats: eight or four weights are a codebook entry, times signs and a scale."""

from __future__ import annotations

import numpy as np

from rlx.ir.quant.blocks import F32, Array, bits_of, decoder, f32, fields, fill, planes
from rlx.ir.quant.grids import grid

_CURVE = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def _even_signs() -> Array:
    """Seven stored sign bits; the eighth makes the number of minus signs even."""
    low = np.arange(128, dtype=np.uint8)
    odd: Array = bits_of(low).reshape(128, 8).sum(axis=1, dtype=np.uint8) % 2
    return low | odd << 7


_EVEN_SIGNS = _even_signs()
# Per byte of sign bits, eight bytes of 0 or -1.
_SIGN_MASKS = (-bits_of(np.arange(256, dtype=np.uint8)).view(np.int8)).view(np.uint64)
# Eight bytes of -1, eight of 1.
_DOWN, _UP = np.repeat(np.array([-1, 1], np.int8), 8).view(np.uint64)
_SEVENS = np.array([0, 7, 14, 21], np.uint32)
_THREES = np.array([0, 3, 6, 9], np.uint16)


@decoder("IQ2_XXS", ("d", "<f2"), ("qs", [("index", "u1", 4), ("aux", "<u4")], 8))
def iq2_xxs(b: Array, out: F32) -> None:
    aux = b["qs"]["aux"]
    points = grid("IQ2_XXS").take(b["qs"]["index"].reshape(-1, 32))
    _fill_signed(points, _packed_signs(aux), f32(b["d"]) * _quarters(aux >> 28), out)


@decoder("IQ2_XS", ("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8))
def iq2_xs(b: Array, out: F32) -> None:
    points = grid("IQ2_XS").take(b["qs"] & 511)
    scale = f32(b["d"]) * _quarters(fields(b["scales"], 4))
    _fill_signed(points, _EVEN_SIGNS.take(b["qs"] >> 9), scale, out)


@decoder(
    "IQ2_S",
    ("d", "<f2"),
    ("qs", "u1", 32),
    ("signs", "u1", 32),
    ("qh", "u1", 8),
    ("scales", "u1", 8),
)
def iq2_s(b: Array, out: F32) -> None:
    points = grid("IQ2_S").take(b["qs"] | fields(b["qh"], 2).astype(np.uint16) << 8)
    _fill_signed(points, b["signs"], f32(b["d"]) * _quarters(fields(b["scales"], 4)), out)


@decoder("IQ3_XXS", ("d", "<f2"), ("qs", "u1", 64), ("aux", "<u4", 8))
def iq3_xxs(b: Array, out: F32) -> None:
    points = grid("IQ3_XXS").take(b["qs"]).view(np.uint64)
    scale = f32(b["d"]) * (_quarters(b["aux"] >> 28) * np.float32(2))
    _fill_signed(points, _packed_signs(b["aux"]), scale, out)


@decoder(
    "IQ3_S",
    ("d", "<f2"),
    ("qs", "u1", 64),
    ("qh", "u1", 8),
    ("signs", "u1", 32),
    ("scales", "u1", 4),
)
def iq3_s(b: Array, out: F32) -> None:
    points = grid("IQ3_S").take(b["qs"] | bits_of(b["qh"]).astype(np.uint16) << 8)
    scale = f32(b["d"]) * (2 * fields(b["scales"], 4) + 1)
    _fill_signed(points.view(np.uint64), b["signs"], scale, out)


@decoder("IQ1_S", ("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8))
def iq1_s(b: Array, out: F32) -> None:
    high = (b["qh"][..., None] >> _THREES) & 7
    index = b["qs"] | high.reshape(-1, 32) << 8
    shift = np.repeat(np.where(b["qh"] & 0x8000, _DOWN, _UP), 4, axis=1)
    _fill_shifted(index, shift, f32(b["d"]) * (2 * (b["qh"] >> 12 & 7) + 1), out)


@decoder("IQ1_M", ("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4))
def iq1_m(b: Array, out: F32) -> None:
    """The f16 scale is in the top nibbles of the four words of scales, lowest first."""
    words = b["scales"]
    parts = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    d = np.bitwise_or.reduce(parts, axis=1, keepdims=True).view(np.float16)
    scale = 2 * ((words[..., None] >> _THREES) & 7).reshape(-1, 16) + 1
    high = fields(b["qh"], 4)
    shift = np.where(high & 8, _DOWN, _UP)
    index = b["qs"] | (high & 7).astype(np.uint16) << 8
    _fill_shifted(index, shift, d.astype(np.float32) * scale, out)


@decoder("IQ4_NL", ("d", "<f2"), ("qs", "u1", 16))
def iq4_nl(b: Array, out: F32) -> None:
    _CURVE.take(planes(b["qs"], 4).reshape(out.shape), out=out, mode="clip")
    out *= f32(b["d"])


@decoder("IQ4_XS", ("d", "<f2"), ("high", "<u2"), ("low", "u1", 4), ("qs", "u1", (8, 16)))
def iq4_xs(b: Array, out: F32) -> None:
    high = (b["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    six_bits = fields(b["low"], 4) | high.astype(np.uint8) << 4
    groups = out.reshape(-1, 8, 32)
    _CURVE.take(planes(b["qs"], 4).reshape(groups.shape), out=groups, mode="clip")
    groups *= (f32(b["d"]) * (six_bits.view(np.int8) - np.int8(32)))[..., None]


def _quarters(scale: Array) -> Array:
    """(1/2 + s) / 4, the scale of the two-bit types."""
    return (scale.astype(np.float32) + np.float32(0.5)) * np.float32(0.25)


def _packed_signs(aux: Array) -> Array:
    index = (aux[..., None] >> _SEVENS) & 127
    return _EVEN_SIGNS.take(index.reshape(-1, 32))


def _fill_signed(points: Array, signs: Array, scale: Array, out: F32) -> None:
    """out = scale * ±point; points are words of eight i8, signs bytes of eight bits."""
    masks = _SIGN_MASKS.take(signs)
    points ^= masks
    values = points.view(np.int8)
    values -= masks.view(np.int8)  # two's complement: -x is ~x + 1
    fill(out, values, scale)


def _fill_shifted(index: Array, shift: Array, scale: Array, out: F32) -> None:
    """out = scale * (point ± 1/8). The grid is stored times 8, so the sum is an integer."""
    values = grid("IQ1_S").take(index).view(np.int8)
    values += shift.view(np.int8)
    fill(out, values, scale * np.float32(0.125))
