"""OLMo 2: post-norm, and QK norm over all heads together."""

from __future__ import annotations

from rlx.models.arch.llama import HF_NAMES as _LLAMA
from rlx.models.arch.llama import embed, finish
from rlx.models.decoder_builder import DecoderBuilder, Tensor

HF_NAMES = {
    **_LLAMA,
    "blk.{i}.post_attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.post_ffw_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.qkv(x, i)
    y = net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    x = x + net.norm(y, f"blk.{i}.post_attention_norm")
    return x + net.norm(net.ffn(x, i), f"blk.{i}.post_ffw_norm")


__all__ = ["HF_NAMES", "embed", "finish", "layer"]
