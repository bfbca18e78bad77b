"""ALBERT: BERT whose layers share their weights, with narrow tables."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import BODY as _BERT
from rlx.models.arch.encoders.bert import HEAD, finish
from rlx.models.arch.encoders.electra import embed
from rlx.models.encoder_builder import EncoderNet, Tensor

PREFIXES = ("albert.", "")
_PARTS = {
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.dense",
    "attn_output_norm": "attention.LayerNorm",
    "ffn_up": "ffn",
    "ffn_down": "ffn_output",
    "layer_output_norm": "full_layer_layer_norm",
}
_LAYER = "encoder.albert_layer_groups.{i}.albert_layers.0"
BODY = {
    **{ours: theirs for ours, theirs in _BERT.items() if theirs.startswith("embeddings.")},
    "token_proj.weight": "encoder.embedding_hidden_mapping_in.weight",
    "token_proj.bias": "encoder.embedding_hidden_mapping_in.bias",
    "cls.weight": "pooler.weight",
    "cls.bias": "pooler.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"{_LAYER}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
}


def layer(net: EncoderNet, x: Tensor, i: int) -> Tensor:
    c = net.config
    return net.post_norm_layer(x, i * c.groups // c.layers)


__all__ = ["BODY", "HEAD", "PREFIXES", "embed", "finish", "layer"]
