"""Gemma 2: norms before and after each block, soft-capped scores, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from rlx.models.arch.llama import (
    ATTENTION_BIAS,
    ATTENTION_BIASES,
    COMMON,
    LAYER,
    PLAIN,
    embed,
    finish,
)
from rlx.models.config import ModelConfig
from rlx.models.config_fields import WINDOWS, Field, number, only, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor

HF_NAMES = {
    **PLAIN,
    **ATTENTION_BIASES,
    "blk.{i}.post_attention_norm.weight": f"{LAYER}.post_attention_layernorm.weight",
    "blk.{i}.ffn_norm.weight": f"{LAYER}.pre_feedforward_layernorm.weight",
    "blk.{i}.post_ffw_norm.weight": f"{LAYER}.post_feedforward_layernorm.weight",
}
SWITCHES = {"attention_bias": ATTENTION_BIAS}
FIELDS = {
    **without(COMMON, "hidden_act"),
    **WINDOWS,
    **read(
        vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
        num_attention_heads=8, num_key_value_heads=number(4), head_dim=number(256),
        hidden_activation="gelu_pytorch_tanh", max_position_embeddings=8192,
        tie_word_embeddings=True, attention_bias=False, query_pre_attn_scalar=256.0,
        final_logit_softcapping=Field(30.0, null=True),
        attn_logit_softcapping=Field(50.0, null=True), use_bidirectional_attention=only(False),
    ),
}  # fmt: skip
# the first folders name another activation here, which was never applied
HARMLESS = ("hidden_act",)


def read_config(s: HfSettings) -> ModelConfig:
    full = (i % 2 == 1 for i in range(s.get("num_hidden_layers")))
    return scaled(s, s.decoder("gemma2", SWITCHES, **s.windows(full)))


def scaled(s: HfSettings, config: ModelConfig) -> ModelConfig:
    """With what Gemma scales, and the norms that it stores minus one."""
    s.require("query_pre_attn_scalar", s.get("query_pre_attn_scalar") > 0, "a positive number")
    return replace(
        config,
        norm_offset=1.0,
        attention_scale=s.get("query_pre_attn_scalar") ** -0.5,
        embedding_scale=float(config.hidden) ** 0.5,
        attention_softcap=s.get("attn_logit_softcapping") or 0.0,
        final_softcap=s.get("final_logit_softcapping") or 0.0,
    )


def configure(config: ModelConfig) -> ModelConfig:
    scale = config.attention_scale
    if scale is None and config.layers == 46:  # the 27B model scales by hidden / heads
        scale = (config.hidden / config.heads) ** -0.5
    return replace(
        config, activation="gelu_tanh", window_layers=config.windows_or_every(2),
        attention_scale=scale, embedding_scale=float(config.hidden) ** 0.5,
    )  # fmt: skip


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    y = net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    x = x + net.norm(y, f"blk.{i}.post_attention_norm")
    y = net.gated_ffn(net.norm(x, f"blk.{i}.ffn_norm"), i)
    return x + net.norm(y, f"blk.{i}.post_ffw_norm")


__all__ = ["FIELDS", "HF_NAMES", "configure", "embed", "finish", "layer", "read_config"]
