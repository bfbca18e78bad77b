"""Granite: Llama with multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from rlx.models.arch.llama import HF_NAMES, embed, finish
from rlx.models.decoder_builder import DecoderBuilder, Tensor


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    scale = net.config.residual_scale
    q, k, v = net.qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output") * scale
    return x + net.ffn(net.norm(x, f"blk.{i}.ffn_norm"), i) * scale


__all__ = ["HF_NAMES", "embed", "finish", "layer"]
