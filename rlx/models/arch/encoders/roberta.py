"""RoBERTa, XLM-RoBERTa, CamemBERT: BERT with positions counted from the padding token's."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import BODY as _BERT
from rlx.models.arch.encoders.bert import embed, finish, layer
from rlx.models.config import ModelConfig
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


def read_config(s: HfSettings) -> ModelConfig:
    s.require("position_embedding_type", "absolute", "absolute")
    # positions are counted from behind the padding token's
    first = s.get("pad_token_id", default=1) + 1
    positions = s.need("max_position_embeddings")
    return s.encoder("roberta", {"first_position": first}, context=positions - first)


__all__ = ["BODY", "FIRST_BODY", "HEAD", "PREFIXES", "embed", "finish", "layer", "read_config"]
