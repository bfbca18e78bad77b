"""DistilBERT: BERT without token types, under names of its own."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import (
    HARMLESS,
    HARMLESS_TENSORS,
    SHAPES,
    embed,
    finish,
    layer,
)
from rlx.models.config import ModelConfig
from rlx.models.config_fields import ENCODER, Field, read
from rlx.models.config_hf import HfSettings

PREFIXES = ("distilbert.", "")
_PARTS = {
    "attn_q": "attention.q_lin",
    "attn_k": "attention.k_lin",
    "attn_v": "attention.v_lin",
    "attn_output": "attention.out_lin",
    "attn_output_norm": "sa_layer_norm",
    "ffn_up": "ffn.lin1",
    "ffn_down": "ffn.lin2",
    "layer_output_norm": "output_layer_norm",
}
BODY = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    "token_embd_norm.weight": "embeddings.LayerNorm.weight",
    "token_embd_norm.bias": "embeddings.LayerNorm.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"transformer.layer.{{i}}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
}
HEAD = {
    "cls.weight": "pre_classifier.weight",
    "cls.bias": "pre_classifier.bias",
    "cls.output.weight": "classifier.weight",
    "cls.output.bias": "classifier.bias",
}
# sinusoidal_pos_embds is how the stored table of positions was first filled
FIELDS = {
    **ENCODER,
    **read(
        vocab_size=30522, max_position_embeddings=512, activation="gelu",
        num_hidden_layers=Field(6, also=("n_layers",)),
        num_attention_heads=Field(12, also=("n_heads",)), hidden_size=Field(768, also=("dim",)),
        intermediate_size=Field(3072, also=("hidden_dim",)), sinusoidal_pos_embds=False,
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    return s.encoder("distilbert", {"classifier_activation": "relu"}, eps=1e-12)


__all__ = [
    "BODY",
    "FIELDS",
    "HARMLESS",
    "HARMLESS_TENSORS",
    "HEAD",
    "PREFIXES",
    "SHAPES",
    "embed",
    "finish",
    "layer",
    "read_config",
]
