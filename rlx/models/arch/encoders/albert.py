"""ALBERT: BERT with layers that share weights and a factorised embedding."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import BODY as _BERT
from rlx.models.arch.encoders.bert import HEAD, finish
from rlx.models.arch.encoders.electra import embed
from rlx.models.config import ModelConfig
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor

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


def read_config(s: HfSettings) -> ModelConfig:
    s.require("position_embedding_type", "absolute", "absolute")
    s.require("inner_group_num", 1, 1)
    groups = s.get("num_hidden_groups", default=1)
    activation = s.activation("hidden_act", default="gelu_new")
    parts = {"embedding": s.need("embedding_size"), "groups": groups}
    return s.encoder("albert", parts, activation=activation)


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    return net.post_norm_layer(x, i * net.encoder.groups // net.config.layers)


__all__ = ["BODY", "HEAD", "PREFIXES", "embed", "finish", "layer", "read_config"]
