"""Phi-3: Llama with fused weights of q, k, v and of gate and up."""

from __future__ import annotations

from rlx.models.arch.llama import HF_NAMES as _LLAMA
from rlx.models.arch.llama import embed, finish
from rlx.models.decoder_builder import DecoderBuilder, Tensor

HF_NAMES = {
    **_LLAMA,
    "blk.{i}.attn_qkv.weight": "model.layers.{i}.self_attn.qkv_proj.weight",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.gate_up_proj.weight",
}


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.split_qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    joined = net.linear(net.norm(x, f"blk.{i}.ffn_norm"), f"blk.{i}.ffn_up")
    gate, up = net.split(joined, [net.config.ffn] * 2)
    return x + net.linear(gate.silu() * up, f"blk.{i}.ffn_down")


__all__ = ["HF_NAMES", "embed", "finish", "layer"]
