"""Qwen3: Llama with QK norm."""

from __future__ import annotations

from rlx.models.arch.llama import (
    ATTENTION_BIAS,
    ATTENTION_BIASES,
    PLAIN,
    QK_NORM,
    embed,
    finish,
    layer,
)
from rlx.models.arch.qwen2 import FIELDS as _QWEN2
from rlx.models.arch.qwen2 import late_windows
from rlx.models.config import ModelConfig
from rlx.models.config_fields import number, read
from rlx.models.config_hf import HfSettings

HF_NAMES = {**PLAIN, **ATTENTION_BIASES, **QK_NORM}
SHAPES = {"attn_q_norm": "head_dim", "attn_k_norm": "head_dim"}
SWITCHES = {"attention_bias": ATTENTION_BIAS}
FIELDS = {**_QWEN2, **read(head_dim=number(128), attention_bias=False)}


def read_config(s: HfSettings) -> ModelConfig:
    return s.decoder("qwen3", SWITCHES, **late_windows(s))


__all__ = ["FIELDS", "HF_NAMES", "embed", "finish", "layer", "read_config"]
