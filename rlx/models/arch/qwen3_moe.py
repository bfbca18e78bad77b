"""Qwen3 MoE: mixture of experts."""

from __future__ import annotations

from rlx.models.arch.llama import COMMON, embed, finish, layer
from rlx.models.arch.qwen2_moe import EXPERTS, ROUTED
from rlx.models.arch.qwen3 import HF_NAMES as _QWEN3
from rlx.models.arch.qwen3 import SHAPES, SWITCHES
from rlx.models.config import ModelConfig
from rlx.models.config_fields import Field, number, read
from rlx.models.config_hf import HfSettings, only_experts

HF_NAMES = {**_QWEN3, **ROUTED}
FIELDS = {
    **COMMON,
    **EXPERTS,
    **read(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24,
        num_key_value_heads=number(4), max_position_embeddings=32768, attention_bias=False,
        use_sliding_window=False, sliding_window=number(4096),
        num_experts=Field(128, also=("num_local_experts",)),
        num_experts_per_tok=8, moe_intermediate_size=768,
    ),
}  # fmt: skip
HARMLESS = ("max_window_layers",)


def read_config(s: HfSettings) -> ModelConfig:
    window = s.window() if s.get("use_sliding_window") else 0
    experts = s.experts(
        "num_experts", normalize=s.get("norm_topk_prob"), width=s.get("moe_intermediate_size")
    )
    absent = only_experts(s.dense_layers(), s.get("num_hidden_layers"), HF_NAMES)
    return s.decoder("qwen3_moe", SWITCHES, experts=experts, without=absent, sliding_window=window)


__all__ = ["FIELDS", "HARMLESS", "HF_NAMES", "SHAPES", "embed", "finish", "layer", "read_config"]
