"""Phi-1 and Phi-2: attention and a GELU FFN in parallel, after one layer norm."""

from __future__ import annotations

from rlx.models.arch.llama import embed, finish
from rlx.models.decoder_builder import DecoderBuilder, Tensor

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.final_layernorm.weight",
    "output_norm.bias": "model.final_layernorm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"model.layers.{{i}}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
}


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    h = net.norm(x, f"blk.{i}.attn_norm")
    joined = f"blk.{i}.attn_qkv.weight" in net.weights  # as GGUF has them
    q, k, v = net.split_qkv(h, i) if joined else net.qkv(h, i)
    y = net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    return x + y + net.plain_ffn(h, i, "gelu_tanh")


__all__ = ["HF_NAMES", "embed", "finish", "layer"]
