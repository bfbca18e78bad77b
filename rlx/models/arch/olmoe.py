"""OLMoE: mixture of experts, QK norm over all heads together."""

from __future__ import annotations

from rlx.models.arch.qwen2_moe import HF_NAMES, embed, finish, layer

__all__ = ["HF_NAMES", "embed", "finish", "layer"]
