"""MPNet: BERT without token types, with a relative position bias."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import FIELDS as _FIELDS
from rlx.models.arch.encoders.bert import (
    HARMLESS,
    HARMLESS_TENSORS,
    embed,
    finish,
    layer,
)
from rlx.models.arch.encoders.bert import SHAPES as _SHAPES
from rlx.models.arch.encoders.roberta import HEAD
from rlx.models.config import ModelConfig
from rlx.models.config_fields import only, read, without
from rlx.models.config_hf import HfSettings

PREFIXES = ("mpnet.", "")
_PARTS = {
    "attn_q": "attention.attn.q",
    "attn_k": "attention.attn.k",
    "attn_v": "attention.attn.v",
    "attn_output": "attention.attn.o",
    "attn_output_norm": "attention.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
BODY = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    "token_embd_norm.weight": "embeddings.LayerNorm.weight",
    "token_embd_norm.bias": "embeddings.LayerNorm.bias",
    "relative_bias.weight": "encoder.relative_attention_bias.weight",
    **{
        f"blk.{{i}}.{ours}.{part}": f"encoder.layer.{{i}}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
}
SHAPES = {**_SHAPES, "relative_bias": "encoder.distance_buckets, heads"}
FIELDS = {
    **without(_FIELDS, "type_vocab_size", "position_embedding_type"),
    # transformers has 32 buckets whatever the file says
    **read(vocab_size=30527, relative_attention_num_buckets=only(32)),
}


def read_config(s: HfSettings) -> ModelConfig:
    buckets, positions = s.get("relative_attention_num_buckets"), s.get("max_position_embeddings")
    s.require("max_position_embeddings", positions > 2, "more than 2")
    parts = {"first_position": 2, "distance_buckets": buckets}
    return s.encoder("mpnet", parts, context=positions - 2)


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
