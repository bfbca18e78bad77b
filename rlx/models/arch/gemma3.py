"""Gemma 3: Gemma 2 without soft caps, with QK norm, and full attention in one layer of six."""

from __future__ import annotations

from dataclasses import replace

from rlx.models.arch.gemma2 import HF_NAMES, embed, finish, layer
from rlx.models.config import ModelConfig
from rlx.models.rope_tables import RopeConfig


def configure(config: ModelConfig) -> ModelConfig:
    scale = config.attention_scale
    if scale is None and config.layers == 62:  # the 27B model scales by hidden / heads
        scale = (config.hidden / config.heads) ** -0.5
    return replace(
        config, activation="gelu_tanh", window_pattern=6, attention_scale=scale,
        embedding_scale=float(config.hidden) ** 0.5, local_rope=RopeConfig(theta=10000.0),
    )  # fmt: skip


__all__ = ["HF_NAMES", "configure", "embed", "finish", "layer"]
