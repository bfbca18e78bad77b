"""GGUF files in the shapes of real models with random weights, written where a bench runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlx.formats.gguf.writer import PackedTensor, write_gguf
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme

Array = Any
SPREAD = 0.02  # standard deviation of weights, about

# hidden, layers, heads, key heads, head size, width of the FFN, vocabulary, tied embedding
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936, True),
    "8b": (4096, 36, 32, 8, 128, 12288, 151936, False),
}


def write_random_model(
    path: Path, shape: str, kind: str, layers: int | None = None, vocab: int | None = None
) -> None:
    """A Qwen3 of that shape; `kind` is BF16, F16 or a type of packed blocks."""
    hidden, depth, heads, kv, head, ffn, words, tied = SHAPES[shape]
    depth, words = layers or depth, vocab or words
    make = _maker(kind)
    tensors: dict[str, Any] = {"token_embd.weight": make(words, hidden)}
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
            tensors[f"{p}{name}.weight"] = make(n, k)
        for name, n in (
            ("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", head),
            ("attn_k_norm", head),
        ):  # fmt: skip
            tensors[f"{p}{name}.weight"] = np.ones(n, np.float32)
    tensors["output_norm.weight"] = np.ones(hidden, np.float32)
    if not tied:
        tensors["output.weight"] = make(words, hidden)
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
    }
    write_gguf(path, metadata, tensors)


def _maker(kind: str) -> Callable[[int, int], Any]:
    rng = np.random.default_rng(0)
    if kind in ("BF16", "F16"):
        element = ml_dtypes.bfloat16 if kind == "BF16" else np.float16
        return lambda n, k: random_floats(rng, n, k, element)
    scheme = GGUF_SCHEMES[kind]
    return lambda n, k: PackedTensor((n, k), scheme, lambda: random_blocks(rng, scheme, n, k))


def random_floats(rng: np.random.Generator, n: int, k: int, element: Any) -> Array:
    """Numbers of that spread: uniform ones, from a pool that is repeated with other signs."""
    pool = rng.random(1 << 20, np.float32)
    flat = ((pool - 0.5) * (SPREAD * 12**0.5)).astype(element)
    start = int(rng.integers(1 << 20))
    return np.resize(np.roll(flat, start), n * k).reshape(n, k)


def random_blocks(rng: np.random.Generator, scheme: QuantScheme, n: int, k: int) -> Array:
    """Blocks of random bits whose scales give that spread, about."""
    rows = np.frombuffer(rng.bytes(n * scheme.row_bytes(k)), np.uint8).copy()
    blocks = rows.reshape(-1, scheme.row_bytes(scheme.block_size))
    for place, share in _SCALES[scheme.name]:
        scale = np.array([SPREAD * share], np.float16).view(np.uint8)
        blocks[:, place : place + 2] = scale
    return rows.reshape(n, -1)


# where a block has f16 numbers that scale it, and what they are of the spread
_SCALES = {
    "Q8_0": [(0, 1 / 74)],
    "Q4_0": [(0, 1 / 4.6)],
    "Q4_K": [(0, 1 / 145), (2, 1 / 19)],
    "Q6_K": [(208, 1 / 1360)],
}
