"""Llama, SmolLM2; Mistral and Mixtral by their GGUF name: pre-norm, rotary positions, gated FFN."""

from __future__ import annotations

from rlx.models.config import ModelConfig
from rlx.models.config_fields import DECODER, ROPE, number, read
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.weights import named

LAYER = "model.layers.{i}"
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_FFN = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    **named(LAYER, _NORMS, ("weight",)),
    **named(LAYER, {**_ATTENTION, **_FFN}),
}
PLAIN = {ours: theirs for ours, theirs in HF_NAMES.items() if not ours.endswith(".bias")}
ATTENTION_BIASES = dict(named(LAYER, _ATTENTION, ("bias",)).items())
QK_NORM = named(LAYER, {f"attn_{p}_norm": f"self_attn.{p}_norm" for p in "qk"}, ("weight",))
# weights that are there only if a field says so
ATTENTION_BIAS = tuple(f"{part}.bias" for part in _ATTENTION)
SWITCHES = {"attention_bias": ATTENTION_BIAS, "mlp_bias": tuple(f"{part}.bias" for part in _FFN)}
# GGUF has the experts of Mixtral under this name
GGUF_ONLY = (
    "blk.{i}.ffn_gate_inp.weight",
    *(f"blk.{{i}}.ffn_{p}_exps.weight" for p in ("gate", "up", "down")),
)
COMMON = {
    **DECODER,
    **ROPE,
    **read(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=number(), head_dim=number(),
        hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
FIELDS = {**COMMON, **read(attention_bias=False, mlp_bias=False)}
# transformers does not apply these to the type
HARMLESS = ("sliding_window", "use_sliding_window", "max_window_layers", "rope_interleaved")


def read_config(s: HfSettings) -> ModelConfig:
    return s.decoder("llama", SWITCHES)


def embed(net: DecoderBuilder, ids: Tensor) -> Tensor:
    return net.embed(ids, net.config.embedding_scale)


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    return x + net.ffn(net.norm(x, f"blk.{i}.ffn_norm"), i)


def finish(net: DecoderBuilder, x: Tensor) -> Tensor:
    return net.norm(x, "output_norm")
