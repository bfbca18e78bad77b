"""Gemma 2: norms before and after each block, soft-capped scores, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from rlx.models.arch.llama import HF_NAMES as _LLAMA
from rlx.models.arch.llama import embed, finish
from rlx.models.config import ModelConfig
from rlx.models.decoder_builder import DecoderBuilder, Tensor

HF_NAMES = {
    **_LLAMA,
    "blk.{i}.post_attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "blk.{i}.post_ffw_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}


def configure(config: ModelConfig) -> ModelConfig:
    scale = config.attention_scale
    if scale is None and config.layers == 46:  # the 27B model scales by hidden / heads
        scale = (config.hidden / config.heads) ** -0.5
    return replace(
        config, activation="gelu_tanh", window_pattern=2, attention_scale=scale,
        embedding_scale=float(config.hidden) ** 0.5,
    )  # fmt: skip


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    y = net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    x = x + net.norm(y, f"blk.{i}.post_attention_norm")
    y = net.gated_ffn(net.norm(x, f"blk.{i}.ffn_norm"), i, net.config.activation)
    return x + net.norm(y, f"blk.{i}.post_ffw_norm")


__all__ = ["HF_NAMES", "configure", "embed", "finish", "layer"]
