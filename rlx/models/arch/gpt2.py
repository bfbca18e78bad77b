"""GPT-2: learned positions, layer norms, a GELU FFN."""

from __future__ import annotations

from rlx.models.config import ModelConfig
from rlx.models.config_fields import DECODER, Field, number, only, read
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.weights import Names, named

_PARTS = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BODY = {
    "token_embd.weight": "wte.weight",
    "position_embd.weight": "wpe.weight",
    "output_norm.weight": "ln_f.weight",
    "output_norm.bias": "ln_f.bias",
    **named("h.{i}", _PARTS),
}
# the first folders are those of the body alone
HF_NAMES: Names = {
    **{ours: (f"transformer.{theirs}", theirs) for ours, theirs in _BODY.items()},
    "output.weight": "lm_head.weight",
}
# Hugging Face stores these weights as [in, out]
HF_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
HARMLESS_TENSORS = ("*h.*.attn.bias",)  # the causal mask
FIELDS = {
    **DECODER,
    **read(
        vocab_size=50257, n_positions=Field(1024, also=("max_position_embeddings",)),
        n_embd=Field(768, also=("hidden_size",)), n_layer=Field(12, also=("num_hidden_layers",)),
        n_head=Field(12, also=("num_attention_heads",)), n_inner=number(),
        activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True,
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=only(False),
    ),
}  # fmt: skip
# reorder_and_upcast_attn is about the precision of scores, which are f32 here
HARMLESS = ("summary_*", "reorder_and_upcast_attn", "n_ctx")


def read_config(s: HfSettings) -> ModelConfig:
    hidden, heads = s.get("n_embd"), s.get("n_head")
    s.require("n_head", heads > 0 and hidden % heads == 0, "a divisor of n_embd")
    return ModelConfig(
        arch="gpt2",
        vocab=s.get("vocab_size"),
        hidden=hidden,
        layers=s.get("n_layer"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=s.get("n_inner") or 4 * hidden,
        context=s.get("n_positions"),
        eps=s.get("layer_norm_epsilon"),
        activation=s.activation("activation_function"),
        attention_scale=None if s.get("scale_attn_weights") else 1.0,
        deeper_is_flatter=s.get("scale_attn_by_inverse_layer_idx"),
        tied=s.get("tie_word_embeddings"),
    )


def configure(config: ModelConfig) -> ModelConfig:
    return config.with_activation("gelu_tanh")


def embed(net: DecoderBuilder, ids: Tensor) -> Tensor:
    seq = ids.shape.dims[1]
    table = net.param("position_embd.weight")
    return net.embed(ids) + net.as_f32(net.position_rows(table, seq))


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.split_qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    q = q * (1 / (i + 1)) if net.config.deeper_is_flatter and i else q
    x = x + net.linear(net.attend(q, k, v, i, rope=False), f"blk.{i}.attn_output")
    return x + net.plain_ffn(net.norm(x, f"blk.{i}.ffn_norm"), i)


def finish(net: DecoderBuilder, x: Tensor) -> Tensor:
    return net.norm(x, "output_norm")
