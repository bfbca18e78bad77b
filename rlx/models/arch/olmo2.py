"""OLMo 2: post-norm, and QK norm over all heads together."""

from __future__ import annotations

from rlx.models.arch.llama import (
    ATTENTION_BIAS,
    ATTENTION_BIASES,
    COMMON,
    LAYER,
    PLAIN,
    QK_NORM,
    embed,
    finish,
)
from rlx.models.config import ModelConfig
from rlx.models.config_fields import read
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor

HF_NAMES = {
    **{ours: theirs for ours, theirs in PLAIN.items() if "layernorm" not in theirs},
    **ATTENTION_BIASES,
    **QK_NORM,
    "blk.{i}.post_attention_norm.weight": f"{LAYER}.post_attention_layernorm.weight",
    "blk.{i}.post_ffw_norm.weight": f"{LAYER}.post_feedforward_layernorm.weight",
}
SHAPES = {"attn_q_norm": "heads*head_dim", "attn_k_norm": "kv_heads*head_dim"}
SWITCHES = {"attention_bias": ATTENTION_BIAS}
FIELDS = {**COMMON, **read(vocab_size=50304, rms_norm_eps=1e-5, attention_bias=False)}


def read_config(s: HfSettings) -> ModelConfig:
    return s.decoder("olmo2", SWITCHES)


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.qkv(x, i)
    y = net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    x = x + net.norm(y, f"blk.{i}.post_attention_norm")
    return x + net.norm(net.ffn(x, i), f"blk.{i}.post_ffw_norm")


__all__ = ["FIELDS", "HF_NAMES", "embed", "finish", "layer", "read_config"]
