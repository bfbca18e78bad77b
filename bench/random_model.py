"""GGUF files in the shapes of real models with random weights, written where a bench runs.

Weights of any GGUF type: a block is random bits, with scales that give its weights one spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rlx.formats.gguf.writer import PackedTensor, write_gguf
from rlx.formats.quant_presets import NAMES, QuantPreset
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, decode

Array = Any
SPREAD = 0.02  # standard deviation of weights, about

# hidden, layers, heads, key heads, head size, width of the FFN, vocabulary, tied embedding
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936, True),
    "1.7b": (2048, 28, 16, 8, 128, 6144, 151936, True),
    "8b": (4096, 36, 32, 8, 128, 12288, 151936, False),
}


class Scale(NamedTuple):
    """Where a block has its f16 scale, and the scale of its minimum: `ratio` times that one."""

    at: int
    minimum: int | None = None
    ratio: float = 0.0


# A minimum takes the mean of the codes away, so that weights lie around zero.
_SCALES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "Q1_0", "IQ4_NL", "IQ4_XS"), Scale(0)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), Scale(0)),
    "Q4_1": Scale(0, 2, -7.5),
    "Q5_1": Scale(0, 2, -15.5),
    "Q2_K": Scale(80, 82, 1.5),
    "Q3_K": Scale(108),
    "Q4_K": Scale(0, 2, 7.5),
    "Q5_K": Scale(0, 2, 15.5),
    "Q6_K": Scale(208),
    "TQ1_0": Scale(52),
    "TQ2_0": Scale(64),
}
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
BLOCK_TYPES = (*_SCALES, "IQ1_M", "MXFP4", "NVFP4")
"""The packed types that a weight may have (Q8_1 and Q8_K are for activations)."""


def write_random_model(
    path: Path, shape: str, kind: str, layers: int | None = None, vocab: int | None = None
) -> None:
    """A Qwen3 of that shape. `kind` is one type for every matrix, or a preset such as Q4_K_M."""
    hidden, depth, heads, kv, head, ffn, words, tied = SHAPES[shape]
    depth, words = layers or depth, vocab or words
    make = _maker(kind, depth, tied)
    tensors: dict[str, Any] = {}

    def put(name: str, n: int, k: int) -> None:
        tensors[name] = make(name, n, k)

    put("token_embd.weight", words, hidden)
    for i in range(depth):
        p = f"blk.{i}."
        for name, n, k in (
            ("attn_q", heads * head, hidden),
            ("attn_k", kv * head, hidden),
            ("attn_v", kv * head, hidden),
            ("attn_output", hidden, heads * head),
            ("ffn_gate", ffn, hidden),
            ("ffn_up", ffn, hidden),
            ("ffn_down", hidden, ffn),
        ):
            put(f"{p}{name}.weight", n, k)
        for name, n in (
            ("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", head),
            ("attn_k_norm", head),
        ):  # fmt: skip
            tensors[f"{p}{name}.weight"] = np.ones(n, np.float32)
    tensors["output_norm.weight"] = np.ones(hidden, np.float32)
    if not tied:
        put("output.weight", words, hidden)
    metadata = {
        "general.architecture": "qwen3",
        "qwen3.context_length": 40960,
        "qwen3.embedding_length": hidden,
        "qwen3.block_count": depth,
        "qwen3.feed_forward_length": ffn,
        "qwen3.attention.head_count": heads,
        "qwen3.attention.head_count_kv": kv,
        "qwen3.attention.key_length": head,
        "qwen3.attention.value_length": head,
        "qwen3.rope.freq_base": 1e6,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3.vocab_size": words,
        **_tokenizer(words),
    }
    write_gguf(path, metadata, tensors)


def _tokenizer(words: int) -> dict[str, Any]:
    """A vocabulary of bytes, as GPT-2 spells them, and of names that no text has."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    letters = [chr(b) for b in plain] + [chr(256 + i) for i in range(len(others))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": letters + [f"[{i}]" for i in range(256, words - 1)] + ["th"],
        "tokenizer.ggml.token_type": np.ones(words, np.int32),
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": words - 2,
        "tokenizer.ggml.bos_token_id": words - 2,
    }


def _maker(kind: str, layers: int, tied: bool) -> Callable[[str, int, int], Any]:
    rng = np.random.default_rng(0)
    if kind in FLOATS:
        return lambda name, n, k: random_floats(rng, n, k, FLOATS[kind])
    preset = QuantPreset.parse(kind) if kind in NAMES and kind not in GGUF_SCHEMES else None

    def make(name: str, n: int, k: int) -> PackedTensor:
        if preset is None:
            scheme = GGUF_SCHEMES[kind]
        else:
            picked = preset.pick(name, (n, k), layers=layers, tied=tied)
            assert picked is not None
            scheme = picked
        return PackedTensor((n, k), scheme, lambda: random_blocks(rng, scheme, n, k))

    return make


def random_floats(rng: np.random.Generator, n: int, k: int, element: Any) -> Array:
    """Numbers of that spread: uniform ones, from a pool that is repeated with other signs."""
    pool = rng.random(1 << 20, np.float32)
    flat = ((pool - 0.5) * (SPREAD * 12**0.5)).astype(element)
    start = int(rng.integers(1 << 20))
    return np.resize(np.roll(flat, start), n * k).reshape(n, k)


def random_blocks(rng: np.random.Generator, scheme: QuantScheme, n: int, k: int) -> Array:
    """Blocks of random bits whose scales give that spread, about."""
    rows = np.frombuffer(rng.bytes(n * scheme.row_bytes(k)), np.uint8).copy()
    set_scales(scheme, rows, SPREAD / _spread_of_one(scheme))
    return rows.reshape(n, -1)


def set_scales(scheme: QuantScheme, rows: Array, scale: float) -> None:
    """Give every block of contiguous rows that scale, as near as its type has it."""
    blocks = rows.reshape(-1, scheme.bytes_per_block)
    if scheme.name == "MXFP4":
        blocks[:, 0] = 127 + round(math.log2(scale))
    elif scheme.name == "NVFP4":
        blocks[:, :4] = _nearest_ue4m3(scale)
    elif scheme.name == "IQ1_M":  # the four nibbles of the scale top four words
        nibbles = int(np.float16(scale).view(np.uint16)) >> np.arange(0, 16, 4) & 15
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 0x0F | nibbles.astype(np.uint8) << 4
    else:
        place = _SCALES[scheme.name]
        _put_f16(blocks, place.at, scale)
        if place.minimum is not None:
            _put_f16(blocks, place.minimum, scale * place.ratio)


def _put_f16(blocks: Array, at: int, value: float) -> None:
    blocks[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)


def _nearest_ue4m3(scale: float) -> int:
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10))
    return int(np.abs(values - scale).argmin())


@cache
def _spread_of_one(scheme: QuantScheme) -> float:
    """The standard deviation of random weights of scale 1."""
    rng = np.random.default_rng(0)
    rows = np.frombuffer(rng.bytes(64 * scheme.bytes_per_block), np.uint8).copy()
    set_scales(scheme, rows, 1.0)
    return float(decode(scheme, rows).astype(np.float64).std())
