"""Jina embeddings v3: RoBERTa with rotary positions; without its task adapters."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import FIELDS as _FIELDS
from rlx.models.arch.encoders.bert import HARMLESS as _HARMLESS
from rlx.models.arch.encoders.bert import HARMLESS_TENSORS, finish, layer
from rlx.models.arch.encoders.bert import SHAPES as _SHAPES
from rlx.models.arch.encoders.nomic_bert import embed
from rlx.models.arch.encoders.roberta import FIRST_BODY, HEAD
from rlx.models.config import ModelConfig
from rlx.models.config_fields import BIDIRECTIONAL, ROPE, only, read
from rlx.models.config_hf import HfSettings

PREFIXES = ("roberta.", "")
BODY = {ours: theirs for ours, theirs in FIRST_BODY.items() if not ours.startswith("position")}
SHAPES = {**_SHAPES, "attn_qkv": "3*hidden, hidden"}
FIELDS = {
    **_FIELDS,
    **ROPE,
    **read(
        vocab_size=250002, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096, max_position_embeddings=8194, type_vocab_size=1,
        layer_norm_eps=1e-5, rope_theta=20_000.0, position_embedding_type=only("rotary"),
    ),
}  # fmt: skip
HARMLESS = (
    *_HARMLESS,
    "truncate_dim",
    "matryoshka_dimensions",
    "lora_*",
    "task_instructions",
    "emb_pooler",
    "load_*",
)


def read_config(s: HfSettings) -> ModelConfig:
    width = s.get("hidden_size") // max(s.get("num_attention_heads"), 1)
    parts = {"types": s.get("type_vocab_size")}
    return s.encoder("jina_embeddings_v3", parts, rope=s.rope(width, types=BIDIRECTIONAL))


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
