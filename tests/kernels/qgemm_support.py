"""Packed weights to test with, and the error bounds of GEMMs with them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from rlx.backends.cpu.layouts.quant_grids import GRID_WORDS
from rlx.backends.cpu.layouts.quant_rows import RowLayout
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, decode
from rlx.ir.shape import Shape

_EXTRA = (
    "int8 int8_asym int8_b32 int8_b64_asym int4 int4_asym int4_b32 int4_b32_asym "
    "fp8_e4m3 fp8_e4m3_b128 fp8_e5m2 fp8_e4m3_raw"
)
SCHEMES = [*GGUF_SCHEMES.values(), *map(QuantScheme.parse, _EXTRA.split())]
_INTEGER = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4 NVFP4 TQ1_0 TQ2_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS "
    "IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M "
    "int8 int8_asym int8_b32 int8_b64_asym int4 int4_asym int4_b32 int4_b32_asym"
)
INTEGER = [QuantScheme.parse(name) for name in _INTEGER.split()]
# Kernels of the grid types are long: those tests run with the slow ones.
QUICK_AND_GRIDS = [
    pytest.param(s, id=str(s), marks=[pytest.mark.slow] if s.name in GRID_WORDS else [])
    for s in INTEGER
]

# Where the f16 scales of a block lie, and where its minimum does.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q8_1": (0,),
    "Q1_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,),
    "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
_MINIMUM = {"Q4_1": 2, "Q5_1": 2, "Q2_K": 82, "Q4_K": 2, "Q5_K": 2}


def columns(scheme: QuantScheme) -> int:
    """Enough for several blocks, and for whole groups of them and less."""
    block = scheme.block or scheme.block_size
    return 768 if block == 256 else -(-288 // block) * block


def graph_of(scheme: QuantScheme, x: np.ndarray, parts: list[np.ndarray]) -> Graph:
    g = Graph("qgemm")
    rows = g.input("x", Shape(x.shape, x.dtype))
    g.set_outputs(g.dequant_matmul(rows, *weight_params(g, parts), scheme=scheme))
    return g


def random_weight(
    scheme: QuantScheme, dims: tuple[int, ...], k: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Random codes with scales of about 0.01: packed rows [*dims, row], then scale and zp."""
    if scheme.name in ("F32", "F16", "BF16"):
        numbers = rng.standard_normal((*dims, k)).astype(np.float32)
        if scheme.name == "BF16":
            return [(numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)]
        return [numbers.astype(np.float16 if scheme.name == "F16" else np.float32).view(np.uint8)]
    packed = rng.integers(0, 256, (*dims, scheme.row_bytes(k)), dtype=np.uint8)
    if scheme.ggml_type is not None:
        _tame(scheme, packed.reshape(-1, scheme.bytes_per_block), rng)
        return [packed]
    if scheme.packed_dtype.startswith("f8"):
        packed &= 0xBF  # neither large nor NaN
    parts = [packed.view(_numpy(scheme.packed_dtype))]
    groups = (*dims, k // scheme.block if scheme.block else 1)
    if scheme.has_scale:
        parts.append((rng.standard_normal(groups) * 0.01).astype(np.float32))
    if scheme.has_zero_point:
        parts.append(rng.integers(0, 16, groups).astype(parts[0].dtype))
    return parts


def _tame(scheme: QuantScheme, blocks: np.ndarray, rng: np.random.Generator) -> None:
    for at in _HALVES.get(scheme.name, ()):
        half = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, at : at + 2] = half.view(np.uint8).reshape(-1, 2)
    if scheme.name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 126, len(blocks))
    elif scheme.name == "IQ1_M":
        blocks[:, 55] = blocks[:, 55] & 0x0F | 0x20  # the top of its scattered scale
    elif scheme.name == "Q8_K":
        scale = (rng.standard_normal(len(blocks)) * 0.01).astype(np.float32)
        blocks[:, :4] = scale.view(np.uint8).reshape(-1, 4)


def _numpy(name: str) -> np.dtype:
    return Shape((), name).dtype.numpy


def weight_params(g: Graph, parts: list[np.ndarray], name: str = "w") -> list[Value]:
    return [g.param(f"{name}{i}", Shape(a.shape, a.dtype)) for i, a in enumerate(parts)]


def named(parts: list[np.ndarray], name: str = "w") -> Mapping[str, np.ndarray]:
    return {f"{name}{i}": a for i, a in enumerate(parts)}


def magnitude(scheme: QuantScheme, parts: list[np.ndarray]) -> np.ndarray:
    """|code * scale| + |minimum| of every weight: what is rounded, although it may cancel."""
    whole = decode(scheme, *parts).astype(np.float64)
    if scheme.name in _MINIMUM:
        at = _MINIMUM[scheme.name]
        blocks = parts[0].copy().reshape(-1, scheme.bytes_per_block)
        blocks[:, at : at + 2] = 0
        scaled = decode(scheme, blocks.reshape(parts[0].shape)).astype(np.float64)
    elif scheme.has_zero_point:
        scaled = decode(scheme, parts[0], parts[1], np.zeros_like(parts[2])).astype(np.float64)
    else:
        return np.abs(whole)
    return np.abs(scaled) + np.abs(scaled - whole)


def rounding_bound(
    scheme: QuantScheme, layout: RowLayout, x: np.ndarray, parts: list[np.ndarray]
) -> np.ndarray:
    """What f32 arithmetic may add to a product of integers.

    Sums of codes are exact. A block's sum is converted, multiplied by d, the other sum likewise,
    their difference taken and multiplied by the row's scale: six roundings. Adding up the blocks
    rounds once for each.
    """
    k = x.shape[-1]
    roundings = k // layout.size(k) + 6
    return roundings * 2.0**-24 * (np.abs(x) @ magnitude(scheme, parts).T)


def activation_bound(
    scheme: QuantScheme, layout: RowLayout, x: np.ndarray, parts: list[np.ndarray]
) -> np.ndarray:
    """What codes of 8 or 7 bits in place of x may add: half a step of its block for each weight.

    The codes are computed in f32 (a product, a quotient, a rounding), which moves them by less than
    2^-16 of a step, so that a number halfway between two codes may get the farther one.
    """
    size = layout.size(x.shape[-1])
    steps = np.abs(x).reshape(len(x), -1, size).max(axis=2) / layout.limit
    weights = np.abs(decode(scheme, *parts).astype(np.float64))
    sums = weights.reshape(len(weights), -1, size).sum(axis=2)
    return (0.5 + 2.0**-16) * (steps @ sums.T)
