"""ALBERT: BERT with layers that share weights and a factorised embedding."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import BODY as _BERT
from rlx.models.arch.encoders.bert import FIELDS as _FIELDS
from rlx.models.arch.encoders.bert import HARMLESS as _HARMLESS
from rlx.models.arch.encoders.bert import HARMLESS_TENSORS, HEAD, finish
from rlx.models.arch.encoders.electra import NARROW, embed
from rlx.models.config import ModelConfig
from rlx.models.config_fields import only, read
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
SHAPES = NARROW
FIELDS = {
    **_FIELDS,
    **read(
        vocab_size=30000, embedding_size=128, hidden_size=4096, num_hidden_groups=1,
        num_attention_heads=64, intermediate_size=16384, inner_group_num=only(1),
        hidden_act="gelu_new",
    ),
}  # fmt: skip
# of experiments that no published model is of
HARMLESS = (*_HARMLESS, "net_structure_type", "down_scale_factor", "gap_size", "num_memory_blocks")


def read_config(s: HfSettings) -> ModelConfig:
    width, groups = s.get("embedding_size"), s.get("num_hidden_groups")
    s.require("embedding_size", width > 0, "a positive number")
    s.require(
        "num_hidden_groups", 0 < groups <= s.get("num_hidden_layers"), "1 … num_hidden_layers"
    )
    parts = {"embedding": width, "groups": groups, "types": s.get("type_vocab_size")}
    return s.encoder("albert", parts)


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    return net.post_norm_layer(x, i * net.encoder.groups // net.config.layers)


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
