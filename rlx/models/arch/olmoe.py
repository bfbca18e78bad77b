"""OLMoE: mixture of experts, QK norm over all heads together."""

from __future__ import annotations

from rlx.models.arch.llama import (
    ATTENTION_BIASES,
    COMMON,
    PLAIN,
    QK_NORM,
    embed,
    finish,
    layer,
)
from rlx.models.arch.olmo2 import SHAPES, SWITCHES
from rlx.models.arch.qwen2_moe import ROUTED
from rlx.models.config import ModelConfig
from rlx.models.config_fields import Field, only, read
from rlx.models.config_hf import HfSettings

HF_NAMES = {
    **{ours: theirs for ours, theirs in PLAIN.items() if ".mlp." not in theirs},
    **ATTENTION_BIASES,
    **QK_NORM,
    **ROUTED,
}
FIELDS = {
    **COMMON,
    **read(
        vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16,
        num_attention_heads=16, max_position_embeddings=4096, rms_norm_eps=1e-5,
        attention_bias=False, clip_qkv=only(None), num_experts_per_tok=8,
        num_experts=Field(64, also=("num_local_experts",)),
        norm_topk_prob=False,
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    experts = s.experts(
        "num_experts", normalize=s.get("norm_topk_prob"), width=s.get("intermediate_size")
    )
    return s.decoder("olmoe", SWITCHES, experts=experts)


__all__ = ["FIELDS", "HF_NAMES", "SHAPES", "embed", "finish", "layer", "read_config"]
