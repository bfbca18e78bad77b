"""Mistral: Llama with a sliding window. GGUF calls it llama."""

from __future__ import annotations

from rlx.models.arch.llama import HF_NAMES, embed, finish, layer

__all__ = ["HF_NAMES", "embed", "finish", "layer"]
