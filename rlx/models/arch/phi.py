"""Phi-1 and Phi-2: attention and a GELU FFN in parallel, after one layer norm."""

from __future__ import annotations

from rlx.models.arch.llama import LAYER, embed, finish
from rlx.models.config import ModelConfig
from rlx.models.config_fields import DECODER, PARTIAL, ROPE, number, only, read
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.weights import named

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
    **named(LAYER, _PARTS),
}
GGUF_ONLY = ("blk.{i}.attn_qkv.weight", "blk.{i}.attn_qkv.bias")
FIELDS = {
    **DECODER,
    **ROPE,
    **read(
        vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
        num_attention_heads=32, num_key_value_heads=number(), head_dim=number(),
        hidden_act="gelu_new", max_position_embeddings=2048, layer_norm_eps=1e-5,
        tie_word_embeddings=False, qk_layernorm=only(False),
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    return s.decoder("phi", {}, rope=s.rope(s.head_dim(), 0.5, PARTIAL))


def configure(config: ModelConfig) -> ModelConfig:
    return config.with_activation("gelu_tanh")


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    h = net.norm(x, f"blk.{i}.attn_norm")
    joined = f"blk.{i}.attn_qkv.weight" in net.weights  # as GGUF has them
    q, k, v = net.split_qkv(h, i) if joined else net.qkv(h, i)
    y = net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    return x + y + net.plain_ffn(h, i)


__all__ = ["FIELDS", "HF_NAMES", "configure", "embed", "finish", "layer", "read_config"]
