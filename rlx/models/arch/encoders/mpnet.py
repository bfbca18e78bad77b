"""MPNet: BERT without token types, with a relative position bias."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import embed, finish, layer
from rlx.models.arch.encoders.roberta import HEAD
from rlx.models.config import ModelConfig
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


def read_config(s: HfSettings) -> ModelConfig:
    buckets = s.get("relative_attention_num_buckets", default=32)
    parts = {"first_position": 2, "distance_buckets": buckets}
    return s.encoder("mpnet", parts, context=s.need("max_position_embeddings") - 2)


__all__ = ["BODY", "HEAD", "PREFIXES", "embed", "finish", "layer", "read_config"]
