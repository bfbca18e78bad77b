"""RoBERTa, XLM-RoBERTa, CamemBERT: BERT with positions counted from the padding token's."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import BODY as _BERT
from rlx.models.arch.encoders.bert import FIELDS as _FIELDS
from rlx.models.arch.encoders.bert import (
    HARMLESS,
    HARMLESS_TENSORS,
    SHAPES,
    embed,
    finish,
    layer,
)
from rlx.models.config import ModelConfig
from rlx.models.config_fields import read
from rlx.models.config_hf import HfSettings

PREFIXES = ("roberta.", "")
BODY = {ours: theirs for ours, theirs in _BERT.items() if not ours.startswith("cls.")}
# as Jina AI publishes its models
_FIRST_PARTS = {
    "attn_qkv": "mixer.Wqkv",
    "attn_output": "mixer.out_proj",
    "attn_output_norm": "norm1",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}
FIRST_BODY = {
    **{ours: theirs for ours, theirs in BODY.items() if "_embeddings." in theirs},
    "token_embd_norm.weight": "emb_ln.weight",
    "token_embd_norm.bias": "emb_ln.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"encoder.layers.{{i}}.{theirs}.{part}"
        for ours, theirs in _FIRST_PARTS.items()
        for part in ("weight", "bias")
    },
}
HEAD = {
    "cls.weight": "classifier.dense.weight",
    "cls.bias": "classifier.dense.bias",
    "cls.output.weight": "classifier.out_proj.weight",
    "cls.output.bias": "classifier.out_proj.bias",
}
FIELDS = {**_FIELDS, **read(pad_token_id=1)}


def read_config(s: HfSettings) -> ModelConfig:
    # positions are counted from behind the padding token's
    first, positions = s.get("pad_token_id") + 1, s.get("max_position_embeddings")
    s.require("pad_token_id", 0 < first < positions, "a position of the table")
    parts = {"first_position": first, "types": s.get("type_vocab_size")}
    return s.encoder("roberta", parts, context=positions - first)


__all__ = [
    "BODY",
    "FIELDS",
    "FIRST_BODY",
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
