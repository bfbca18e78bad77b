"""Packed weights as GPUs read them: the parts of all blocks of a row, each part by itself.

Blocks of GGUF have sizes such as 34 or 210 bytes, so that their numbers lie at odd addresses. Here
a row is its quants, then its scales, every part padded to 16 bytes. Quants of 4 and 6 bits come in
chunks of 32 elements: byte i has the low bits of elements i and i + 16.

Types that have no such parts of their own are unpacked: a byte an element, and an f32 for each run
of elements that share a scale, or two where they have a minimum too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme

Array = Any
_BLOCKS = {
    "Q8_0": (32, 34), "Q4_0": (32, 18), "MXFP4": (32, 17), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# name → bytes of each part for 256 elements
PARTS: dict[str, tuple[tuple[str, int], ...]] = {
    "Q8_0": (("quants", 256), ("scales", 16)),
    "Q4_0": (("quants", 128), ("scales", 16)),
    "MXFP4": (("quants", 128), ("scales", 8)),
    "Q4_K": (("quants", 128), ("scales", 16), ("supers", 4)),
    "Q5_K": (("quants", 128), ("high", 32), ("scales", 16), ("supers", 4)),
    "Q6_K": (("quants", 128), ("high", 64), ("scales", 16), ("supers", 2)),
}
# elements of a run
RUNS = {
    **dict.fromkeys(("Q2_K", "Q3_K", "IQ2_XS", "IQ2_S", "IQ1_M", "NVFP4"), 16),
    **dict.fromkeys(
        ("Q4_1", "Q5_0", "Q5_1", "Q8_1", "Q8_K", "Q1_0", "TQ1_0", "TQ2_0", "IQ4_NL", "IQ4_XS",
         "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ1_S"), 32
    ),
}  # fmt: skip
MINIMA = frozenset(["Q2_K", "Q4_1", "Q5_1"])
for _name, _run in RUNS.items():
    _floats = 4 * 256 // _run
    _more = (("minima", _floats),) if _name in MINIMA else ()
    PARTS[_name] = (("quants", 256), ("scales", _floats), *_more)


# layouts of integers whose scales lie beside them, by the length of a run and whether there are
# zero points: those of types with the same parts
_BESIDE = {(32, False): "Q8_K", (32, True): "Q5_1", (16, False): "Q3_K", (16, True): "Q2_K"}


def layout_of(scheme: QuantScheme) -> str:
    """The name of the layout of a scheme's weights, a key of `PARTS`; empty if there is none."""
    if scheme.ggml_type is not None:
        return scheme.name if scheme.name in PARTS else ""
    block = scheme.block or 32
    if not scheme.has_scale or scheme.packed_dtype not in ("i8", "u8") or block % 16:
        return ""
    return _BESIDE[16 if block % 32 else 32, scheme.has_zero_point]


def suits(scheme: str, k: int) -> bool:
    """Whether there are kernels for rows of k elements."""
    return scheme in PARTS and k % 32 == 0


def offsets(scheme: str, k: int) -> tuple[dict[str, int], int]:
    """Where the parts of a row begin, and the bytes of a row."""
    found, at = {}, 0
    for name, size in PARTS[scheme]:
        found[name] = at
        at += -(-size * k // 256 // 16) * 16
    return found, at


def split_blocks(scheme: str, w: Array) -> Array:
    """Rows of blocks [n, row] as rows of parts."""
    if scheme in RUNS:
        return _unpacked(scheme, w)
    block, size = _BLOCKS[scheme]
    n, k = w.shape[0], w.shape[1] // size * block
    places, total = offsets(scheme, k)
    out = np.zeros((n, total), np.uint8)
    for first in range(0, n, 4096):  # large weights a piece at a time
        blocks = np.ascontiguousarray(w[first : first + 4096]).reshape(-1, k // block, size)
        for name, part in _SPLIT[scheme](blocks).items():
            flat = np.ascontiguousarray(part).reshape(len(blocks), -1).view(np.uint8)
            at = places[name]
            out[first : first + len(blocks), at : at + flat.shape[1]] = flat
    return out


def _unpacked(scheme: str, w: Array) -> Array:
    """Rows of blocks as bytes and f32."""
    from rlx.ir.quant.codecs import blocks  # decoders of all types

    k = GGUF_SCHEMES[scheme].row_elements(w.shape[1])
    out = np.zeros((len(w), offsets(scheme, k)[1]), np.uint8)
    for first in range(0, len(w), 1024):
        rows = slice(first, first + 1024)
        _join(scheme, k, out[rows], *blocks.split_rows(GGUF_SCHEMES[scheme], w[rows]))
    return out


def join_sides(scheme: QuantScheme, w: Array, scale: Array, zero: Array | None = None) -> Array:
    """Rows of integers whose scales lie beside them as bytes and f32."""
    k, name = scheme.row_elements(w.shape[1]), layout_of(scheme)
    quants = w
    if scheme.packed_dtype == "u8":
        quants = np.stack([w & 15, w >> 4], -1).reshape(len(w), k).astype(np.int8)
        quants -= np.int8(0 if scheme.has_zero_point else 8)
    minimum = None if zero is None else scale * zero.astype(np.float32)
    out = np.zeros((len(w), offsets(name, k)[1]), np.uint8)
    _join(name, k, out, quants, scale, minimum)
    return out


def _join(
    name: str, k: int, out: Array, quants: Array, scale: Array, minimum: Array | None
) -> None:
    """Write the parts of rows; scales and minima are of runs that may be longer than those of the
    layout."""
    places = offsets(name, k)[0]
    parts = {"quants": quants, "scales": scale, **({} if minimum is None else {"minima": minimum})}
    for part, data in parts.items():
        if part != "quants":
            data = np.repeat(data, k // RUNS[name] // data.shape[1], axis=1).astype(np.float32)
        flat = np.ascontiguousarray(data).view(np.uint8)
        out[:, places[part] : places[part] + flat.shape[1]] = flat


def decoded(scheme: str, rows: Array, k: int) -> Array:
    """Rows of parts as floats [n, k]: what the kernels compute with."""
    places, sizes = offsets(scheme, k)[0], dict(PARTS[scheme])

    def part(name: str, dtype: str) -> Array:
        at, size = places[name], sizes[name] * k // 256
        return np.ascontiguousarray(rows[:, at : at + size]).view(dtype)

    def spread(scales: Array) -> Array:
        return scales.astype(np.float32).repeat(k // scales.shape[1], axis=1)

    if scheme in RUNS:
        made = part("quants", "i1").astype(np.float32) * spread(part("scales", "<f4"))
        return made - spread(part("minima", "<f4")) if scheme in MINIMA else made
    if scheme == "Q8_0":
        return part("quants", "i1").astype(np.float32) * spread(part("scales", "f2"))
    chunks = part("quants", "u1").reshape(-1, k // 32, 16)
    numbers = np.concatenate([chunks & 15, chunks >> 4], -1)
    if scheme == "Q6_K":
        high = part("high", "u1").reshape(-1, k // 32, 8)
        twos = [high >> shift & 3 for shift in (0, 2, 4, 6)]
        numbers = numbers | np.concatenate(twos, -1) << 4
    if scheme == "Q5_K":
        high = part("high", "<u4").reshape(-1, k // 32, 1)
        numbers = numbers | ((high >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4
    if scheme == "MXFP4":
        exponents = part("scales", "u1").astype(np.int32) - 127
        values = _FP4[numbers].reshape(-1, k // 32, 32)
        return np.ldexp(values, exponents[..., None]).reshape(-1, k)
    q = numbers.reshape(-1, k).astype(np.float32)
    if scheme == "Q4_0":
        return (q - 8) * spread(part("scales", "f2"))
    if scheme == "Q6_K":
        return (q - 32) * (spread(part("supers", "f2")) * spread(part("scales", "i1")))
    pairs, supers = part("scales", "u1"), part("supers", "f2")
    scale = spread(supers[:, ::2]) * spread(pairs[:, ::2])
    return q * scale - spread(supers[:, 1::2]) * spread(pairs[:, 1::2])


def _q8_0(b: Array) -> dict[str, Array]:
    return {"quants": b[..., 2:], "scales": b[..., :2]}


def _q4_0(b: Array) -> dict[str, Array]:
    return {"quants": b[..., 2:], "scales": b[..., :2]}


def _mxfp4(b: Array) -> dict[str, Array]:
    return {"quants": b[..., 1:], "scales": b[..., :1]}


def _q5_k(b: Array) -> dict[str, Array]:
    bits = b[..., 16:48]  # bit j of byte i belongs to element i of the j-th 32
    each = [np.packbits(bits >> j & 1, axis=-1, bitorder="little") for j in range(8)]
    rest = _q4_k(np.concatenate([b[..., :16], b[..., 48:]], -1))
    return {**rest, "high": np.stack(each, -2)}


def _q4_k(b: Array) -> dict[str, Array]:
    packed = b[..., 4:16].astype(np.uint8)
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], -1)
    quants = b[..., 16:].reshape(*b.shape[:-1], 4, 32)
    numbers = np.stack([quants & 15, quants >> 4], -2)  # [..., 4, 2, 32]
    # pairs of a scale and a minimum for each 32 elements
    pairs = np.stack([scales, minima], -1)
    return {"quants": _nibbles(numbers), "scales": pairs, "supers": b[..., :4]}


def _q6_k(b: Array) -> dict[str, Array]:
    low = b[..., :128].reshape(*b.shape[:-1], 2, 64)
    high = b[..., 128:192].reshape(*b.shape[:-1], 2, 32)
    nibbles = [low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4]
    twos = [high >> shift & 3 for shift in (0, 2, 4, 6)]
    elements = np.stack(nibbles, -2)  # [..., 2, 4, 32]
    more = np.stack(twos, -2).reshape(*b.shape[:-1], 8, 4, 8)
    # byte i has the high bits of elements i, i + 8, i + 16 and i + 24
    joined = more[..., 0, :] | more[..., 1, :] << 2 | more[..., 2, :] << 4 | more[..., 3, :] << 6
    return {
        "quants": _nibbles(elements), "high": joined, "scales": b[..., 192:208],
        "supers": b[..., 208:],
    }  # fmt: skip


def _nibbles(numbers: Array) -> Array:
    """Numbers below 16, 32 at a time, in 16 bytes each."""
    rows = numbers.reshape(*numbers.shape[:-1], 2, 16)
    return (rows[..., 0, :] | rows[..., 1, :] << 4).astype(np.uint8)


_SPLIT = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "MXFP4": _mxfp4, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
