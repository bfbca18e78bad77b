"""A tiny model with a vocabulary, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlx.formats.gguf import write_gguf

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, CONTEXT = 32, 2, 4, 2, 48, 256
SPECIAL = ["<|im_start|>", "<|im_end|>"]
NORMAL, CONTROL = 1, 3
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 256 + len(SPECIAL)


def byte_characters() -> list[str]:
    """GPT-2's character for each byte."""
    table, extra = [], 0
    for byte in range(256):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
        table.append(chr(byte) if printable else chr(256 + extra))
        extra += not printable
    return table


def write_tiny(
    path: Path, *, template: str | None = TEMPLATE, more: dict[str, Any] | None = None
) -> Path:
    """A llama of random weights whose tokens are bytes, so that a prompt is as long as its text."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*byte_characters(), *SPECIAL],
        "tokenizer.ggml.token_type": np.array([NORMAL] * 256 + [CONTROL] * len(SPECIAL), np.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": VOCAB - 1,
        "tokenizer.ggml.bos_token_id": VOCAB - 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    metadata |= more or {}
    rng = np.random.default_rng(0)

    def matrix(out: int, into: int) -> np.ndarray:
        return (rng.standard_normal((out, into)) / np.sqrt(into)).astype(np.float32)

    head = HIDDEN // HEADS
    tensors: dict[str, np.ndarray] = {"token_embd.weight": matrix(VOCAB, HIDDEN)}
    for i in range(LAYERS):
        shapes = {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_HEADS * head, HIDDEN),
            "attn_v": (KV_HEADS * head, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
        }  # fmt: skip
        for name, (out, into) in shapes.items():
            tensors[f"blk.{i}.{name}.weight"] = matrix(out, into)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{i}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    tensors["output_norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["output.weight"] = matrix(VOCAB, HIDDEN)
    write_gguf(path, metadata, tensors)
    return path
