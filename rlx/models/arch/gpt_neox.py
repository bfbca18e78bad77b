"""GPT-NeoX (Pythia): attention and a GELU FFN in parallel, each after its own norm."""

from __future__ import annotations

from rlx.ir.op import Array
from rlx.models.arch.llama import embed, finish
from rlx.models.config import ModelConfig
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.weights import Derived

_LAYER = "gpt_neox.layers.{i}"
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def _by_part(config: ModelConfig, joined: Array) -> Array:
    """[heads, (q, k, v)] → [(q, k, v), heads]"""
    heads = joined.reshape(config.heads, 3, config.head_dim, *joined.shape[1:])
    return heads.swapaxes(0, 1).reshape(joined.shape)


HF_NAMES = {
    "token_embd.weight": "gpt_neox.embed_in.weight",
    "output_norm.weight": "gpt_neox.final_layer_norm.weight",
    "output_norm.bias": "gpt_neox.final_layer_norm.bias",
    "output.weight": "embed_out.weight",
    **{
        f"blk.{{i}}.{ours}.{part}": f"{_LAYER}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
    **{
        f"blk.{{i}}.attn_qkv.{part}": Derived(
            (f"{_LAYER}.attention.query_key_value.{part}",), _by_part
        )
        for part in ("weight", "bias")
    },
}


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.split_qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    y = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    seen = x if net.config.parallel else y
    return y + net.plain_ffn(net.norm(seen, f"blk.{i}.ffn_norm"), i, "gelu")


__all__ = ["HF_NAMES", "embed", "finish", "layer"]
