"""GPT-NeoX (Pythia): attention and a GELU FFN in parallel, each after its own norm."""

from __future__ import annotations

from rlx.ir.op import Array
from rlx.models.arch.llama import embed, finish
from rlx.models.config import ModelConfig
from rlx.models.config_fields import DECODER, PARTIAL, ROPE, number, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.weights import Derived, Names, named

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


_QKV = f"{_LAYER}.attention.query_key_value"
HF_NAMES: Names = {
    "token_embd.weight": "gpt_neox.embed_in.weight",
    "output_norm.weight": "gpt_neox.final_layer_norm.weight",
    "output_norm.bias": "gpt_neox.final_layer_norm.bias",
    "output.weight": ("embed_out.weight", "lm_head.weight"),
    **named(_LAYER, _PARTS),
    "blk.{i}.attn_qkv.weight": Derived((f"{_QKV}.weight",), _by_part, dims=("3*hidden, hidden",)),
    "blk.{i}.attn_qkv.bias": Derived((f"{_QKV}.bias",), _by_part, dims=("3*hidden",)),
}
SWITCHES = {"attention_bias": ("attn_qkv.bias", "attn_output.bias")}
HARMLESS_TENSORS = ("*.attention.bias",)  # the causal mask
FIELDS = {
    **DECODER,
    **without(ROPE, "rope_theta", "partial_rotary_factor"),
    **read(
        vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64,
        intermediate_size=24576, hidden_act="gelu", max_position_embeddings=2048,
        layer_norm_eps=1e-5, tie_word_embeddings=False, use_parallel_residual=True,
        attention_bias=True, rotary_emb_base=10000.0, rotary_pct=0.25, num_key_value_heads=number(),
        head_dim=number(),
    ),
}  # fmt: skip
HARMLESS = ("is_decoder",)  # transformers masks the future either way


def read_config(s: HfSettings) -> ModelConfig:
    hidden, heads = s.get("hidden_size"), s.get("num_attention_heads")
    s.require("num_attention_heads", heads > 0 and hidden % heads == 0, "a divisor of hidden_size")
    s.require("head_dim", s.head_dim() == hidden // heads, "hidden_size / num_attention_heads")
    same = s.get("num_key_value_heads") in (None, heads)
    s.require("num_key_value_heads", same, "num_attention_heads")
    rope = s.rope(hidden // heads, s.get("rotary_pct"), PARTIAL, theta=s.get("rotary_emb_base"))
    parallel = s.get("use_parallel_residual")
    return s.decoder("gpt_neox", SWITCHES, rope=rope, parallel=parallel)


def configure(config: ModelConfig) -> ModelConfig:
    return config.with_activation("gelu")


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.split_qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    y = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    seen = x if net.config.parallel else y
    return y + net.plain_ffn(net.norm(seen, f"blk.{i}.ffn_norm"), i)


__all__ = ["FIELDS", "HF_NAMES", "configure", "embed", "finish", "layer", "read_config"]
