"""Qwen2: Llama with biases on q, k and v."""

from __future__ import annotations

from rlx.models.arch.llama import HF_NAMES, embed, finish, layer

__all__ = ["HF_NAMES", "embed", "finish", "layer"]
