"""StarCoder2: layer norms, a GELU FFN, biases, sliding-window attention."""

from __future__ import annotations

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
from rlx.models.config_fields import number, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.weights import named

NORM_BIASES = {
    "output_norm.bias": "model.norm.bias",
    "blk.{i}.attn_norm.bias": f"{LAYER}.input_layernorm.bias",
    "blk.{i}.ffn_norm.bias": f"{LAYER}.post_attention_layernorm.bias",
}
HF_NAMES = {
    **{ours: theirs for ours, theirs in PLAIN.items() if ".mlp." not in theirs},
    **ATTENTION_BIASES,
    **NORM_BIASES,
    **named(LAYER, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
SWITCHES = {"use_bias": (*ATTENTION_BIAS, "ffn_up.bias", "ffn_down.bias")}
FIELDS = {
    **without(COMMON, "rms_norm_eps"),
    **read(
        vocab_size=49152, hidden_size=3072, intermediate_size=12288, num_hidden_layers=30,
        num_attention_heads=24, num_key_value_heads=number(2), hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=4096, norm_epsilon=1e-5, sliding_window=number(), use_bias=True,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
# norms and FFN have one form; the first folders name it
HARMLESS = ("norm_type", "mlp_type")


def read_config(s: HfSettings) -> ModelConfig:
    return s.decoder("starcoder2", SWITCHES, sliding_window=s.window())


def configure(config: ModelConfig) -> ModelConfig:
    return config.with_activation("gelu_tanh")


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    return x + net.plain_ffn(net.norm(x, f"blk.{i}.ffn_norm"), i)


__all__ = ["FIELDS", "HF_NAMES", "configure", "embed", "finish", "layer", "read_config"]
