"""ModernBERT: pre-norm, rotary positions, local attention in two layers of three."""

from __future__ import annotations

from rlx.models.config import ModelConfig
from rlx.models.config_fields import (
    BIDIRECTIONAL,
    ENCODER,
    OTHER_HEADS,
    ROPE_KEYS,
    Field,
    number,
    only,
    read,
    without,
)
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor
from rlx.models.rope_tables import RopeConfig

PREFIXES = ("model.", "")
_PARTS = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
BODY = {
    "token_embd.weight": "embeddings.tok_embeddings.weight",
    "token_embd_norm.weight": "embeddings.norm.weight",
    "token_embd_norm.bias": "embeddings.norm.bias",
    "output_norm.weight": "final_norm.weight",
    "output_norm.bias": "final_norm.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"layers.{{i}}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
}
HEAD = {
    "cls.weight": "head.dense.weight",
    "cls.bias": "head.dense.bias",
    "cls.norm.weight": "head.norm.weight",
    "cls.norm.bias": "head.norm.bias",
    "cls.output.weight": "classifier.weight",
    "cls.output.bias": "classifier.bias",
}
HARMLESS_TENSORS = OTHER_HEADS
SHAPES = {
    "token_embd_norm": "hidden",
    "attn_qkv": "3*hidden, hidden",
    "ffn_up": "2*ffn, hidden",
    "cls": "hidden, hidden",
    "cls.norm": "hidden",
    "cls.output": "encoder.labels, hidden",
}
_NORMS = ("token_embd_norm", "output_norm", "blk.{i}.attn_norm", "blk.{i}.ffn_norm", "cls.norm")
# field → weights that are there only if it is true
SWITCHES = {
    "norm_bias": tuple(f"{part}.bias" for part in _NORMS),
    "attention_bias": ("blk.{i}.attn_qkv.bias", "blk.{i}.attn_output.bias"),
    "mlp_bias": ("blk.{i}.ffn_up.bias", "blk.{i}.ffn_down.bias"),
    "classifier_bias": ("cls.bias",),
}
FIELDS = {
    **without(ENCODER, "is_causal"),
    **read(
        vocab_size=50368, hidden_size=768, intermediate_size=1152, num_hidden_layers=22,
        num_attention_heads=12, hidden_activation="gelu", max_position_embeddings=8192,
        norm_eps=1e-5, norm_bias=False, attention_bias=False, mlp_bias=False,
        layer_types=Field(None, kind=list), global_attn_every_n_layers=3, local_attention=128,
        sliding_window=number(),
        rope_parameters=Field(None, kind=dict), rope_scaling=only(None),
        global_rope_theta=160_000.0, local_rope_theta=10_000.0,
        classifier_pooling=Field("cls", values=("cls", "mean")), classifier_bias=False,
        classifier_activation="gelu", position_embedding_type=only("absolute"),
        embedding_norm=only(True), final_norm=only(True),
    ),
}  # fmt: skip
# of masked language models, and of kernels
HARMLESS = (
    "decoder_bias", "sparse_pred*", "tie_word_embeddings", "reference_compile", "repad_*",
    "layer_norm_eps",
)  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    layers, every = s.get("num_hidden_layers"), s.get("global_attn_every_n_layers")
    s.require("global_attn_every_n_layers", every > 0, "a positive number")
    local, full = "sliding_attention", "full_attention"
    kinds = s.layer_types((local if i % every else full for i in range(layers)), (local, full))
    window = s.get("sliding_window")  # to either side
    window = s.get("local_attention") // 2 if window is None else window
    name = "local_attention" if s.get("sliding_window") is None else "sliding_window"
    s.require(name, window > 0, "at least one token to either side")
    parts = {
        "window": window,
        "local_layers": frozenset(i for i, kind in enumerate(kinds) if kind == local),
        "classifier_activation": s.activation("classifier_activation"),
        "classifier_pooling": s.get("classifier_pooling"),
    }
    off = {n for field, names in SWITCHES.items() if not s.get(field) for n in names}
    off |= {"blk.0.attn_norm.weight", "blk.0.attn_norm.bias"}  # after the norm of the embeddings
    return s.encoder(
        "modernbert", parts, rope=_rope(s, "full"), local_rope=_rope(s, "sliding"),
        without=frozenset(off),
    )  # fmt: skip


def _rope(s: HfSettings, kind: str) -> RopeConfig:
    """The rotary embedding of full or of sliding layers."""
    theta = s.get("global_rope_theta" if kind == "full" else "local_rope_theta")
    objects = read(**{f"{k}_attention": Field(None, kind=dict) for k in ("full", "sliding")})
    given = s.inside("rope_parameters", objects).inside(f"{kind}_attention", ROPE_KEYS)
    return s.rope_of(
        given,
        s.get("hidden_size") // max(s.get("num_attention_heads"), 1),
        theta,
        None,
        BIDIRECTIONAL,
    )


def embed(net: EncoderBuilder, ids: Tensor, types: Tensor | None) -> Tensor:
    return net.norm(net.embed(ids), "token_embd_norm")


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    name = f"blk.{i}."
    # the first layer follows the norm of the embeddings
    h = net.norm(x, f"{name}attn_norm") if f"{name}attn_norm.weight" in net.weights else x
    x = x + net.linear(net.attend(net.qkv(h, i), i), f"{name}attn_output")
    return x + net.joined_ffn(net.norm(x, f"{name}ffn_norm"), i)


def finish(net: EncoderBuilder, x: Tensor) -> Tensor:
    return net.norm(x, "output_norm")
