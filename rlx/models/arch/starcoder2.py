"""StarCoder2: layer norms, a GELU FFN, biases, sliding-window attention."""

from __future__ import annotations

from rlx.models.arch.llama import HF_NAMES as _LLAMA
from rlx.models.arch.llama import embed, finish
from rlx.models.decoder_builder import DecoderBuilder, Tensor

HF_NAMES = {
    **_LLAMA,
    "output_norm.bias": "model.norm.bias",
    "blk.{i}.attn_norm.bias": "model.layers.{i}.input_layernorm.bias",
    "blk.{i}.ffn_norm.bias": "model.layers.{i}.post_attention_layernorm.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"model.layers.{{i}}.mlp.{theirs}.{part}"
        for ours, theirs in (("ffn_up", "c_fc"), ("ffn_down", "c_proj"))
        for part in ("weight", "bias")
    },
}


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    return x + net.plain_ffn(net.norm(x, f"blk.{i}.ffn_norm"), i, "gelu_tanh")


__all__ = ["HF_NAMES", "embed", "finish", "layer"]
