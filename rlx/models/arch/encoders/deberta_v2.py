"""DeBERTa v2 and v3: BERT with disentangled attention, of content and of relative position."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from rlx.ir.attrs import MaskKind
from rlx.models.arch.encoders.bert import BODY as _BERT
from rlx.models.arch.encoders.bert import FIELDS as _FIELDS
from rlx.models.arch.encoders.bert import HARMLESS as _HARMLESS
from rlx.models.arch.encoders.bert import HARMLESS_TENSORS as _HEADS
from rlx.models.arch.encoders.bert import SHAPES as _SHAPES
from rlx.models.arch.encoders.bert import finish
from rlx.models.arch.encoders.nomic_bert import embed
from rlx.models.config import EncoderConfig, ModelConfig
from rlx.models.config_fields import Field, only, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor

PREFIXES = ("deberta.", "")
BODY = {
    **{ours: theirs for ours, theirs in _BERT.items() if not ours.startswith(("cls.", "position"))},
    **{
        f"blk.{{i}}.attn_{theirs[0]}.{part}": f"encoder.layer.{{i}}.attention.self.{theirs}.{part}"
        for theirs in ("query_proj", "key_proj", "value_proj")
        for part in ("weight", "bias")
    },
    "relative_embd.weight": "encoder.rel_embeddings.weight",
    "relative_norm.weight": "encoder.LayerNorm.weight",
    "relative_norm.bias": "encoder.LayerNorm.bias",
}
HEAD = {
    "cls.weight": "pooler.dense.weight",
    "cls.bias": "pooler.dense.bias",
    "cls.output.weight": "classifier.weight",
    "cls.output.bias": "classifier.bias",
}
SHAPES = {**_SHAPES, "relative_embd": "encoder.distance_buckets, hidden"}
HARMLESS_TENSORS = (*_HEADS, "*embeddings.position_embeddings.weight")
FIELDS = {
    **without(_FIELDS, "position_embedding_type"),
    **read(
        vocab_size=128100, hidden_size=1536, num_hidden_layers=24, num_attention_heads=24,
        intermediate_size=6144, type_vocab_size=0, layer_norm_eps=1e-7,
        relative_attention=Field(False, values=(True,)), share_att_key=Field(False, values=(True,)),
        position_biased_input=Field(True, values=(False,)),
        norm_rel_ebd=Field("none", values=("layer_norm",)), max_relative_positions=-1,
        position_buckets=-1, pos_att_type=Field(None, kind=object), conv_kernel_size=only(0),
        pooler_hidden_act="gelu", pooler_hidden_size=Field(None, kind=int),
        embedding_size=Field(None, kind=int), attention_head_size=Field(None, kind=int),
    ),
}  # fmt: skip
# legacy is about the head of a masked language model
HARMLESS = (*_HARMLESS, "legacy", "cls_dropout", "conv_act", "conv_groups")


def read_config(s: HfSettings) -> ModelConfig:
    kinds = s.get("pos_att_type") or []
    kinds = [k.strip() for k in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    kinds = kinds if isinstance(kinds, list) else [kinds]
    s.require("pos_att_type", sorted(map(str, kinds)) == ["c2p", "p2c"], "c2p and p2c")
    hidden, heads = s.get("hidden_size"), max(s.get("num_attention_heads"), 1)
    sizes = {"pooler_hidden_size": hidden, "embedding_size": hidden}
    for name, size in {**sizes, "attention_head_size": hidden // heads}.items():
        s.require(name, s.get(name) in (None, size), str(size))
    farthest, buckets = s.get("max_relative_positions"), s.get("position_buckets")
    s.require("position_buckets", buckets > 1, "more than 1")
    parts = {
        "distance_buckets": 2 * buckets,
        "farthest": farthest if farthest > 0 else s.get("max_position_embeddings"),
        "classifier_activation": s.activation("pooler_hidden_act"),
        "types": s.get("type_vocab_size"),
    }
    absent = set() if parts["types"] else {"token_types.weight"}
    return s.encoder("deberta_v2", parts, without=frozenset(absent))


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    return net.post_norm_layer(x, i, attend=partial(_attend, net))


def _attend(net: EncoderBuilder, qkv: list[Tensor], i: int) -> Tensor:
    """softmax((q·k + q·k′ + q′·k) / √3d)·v, where k′ and q′ are of relative positions."""
    g, c = net.g, net.config
    q, k, v = qkv
    scale = (3 * c.head_dim) ** -0.5
    relative = net.once("relative", partial(_relative_embeddings, net))
    to_keys = _scores(net, q, net.linear(relative, f"blk.{i}.attn_k"), -1)
    to_queries = _scores(net, k, net.linear(relative, f"blk.{i}.attn_q"), 1)
    bias = (to_keys + to_queries.transpose(0, 1, 3, 2)) * scale
    keep = net.key_mask()
    bias = bias if keep is None else g.where(keep, bias, float("-inf"))
    return g.attention(
        q, k, v, bias, num_heads=c.heads, head_dim=c.head_dim, mask_kind=MaskKind.BIAS, scale=scale
    )


def _relative_embeddings(net: EncoderBuilder) -> Tensor:
    return net.norm(net.as_f32(net.param("relative_embd.weight")), "relative_norm")


def _scores(net: EncoderBuilder, x: Tensor, relative: Tensor, sign: int) -> Tensor:
    """Scores of tokens with relative positions, [batch, heads, seq, seq]; `sign` is -1 for queries,
    1 for keys."""
    c = net.config
    batch, seq, _ = x.shape.dims
    heads = x.reshape(batch, seq, c.heads, c.head_dim)
    heads = heads.transpose(0, 2, 1, 3)
    apart = relative.reshape(net.encoder.distance_buckets, c.heads, c.head_dim)
    found = heads @ apart.transpose(1, 2, 0)
    return found.take_along(net.once(f"at{sign}", partial(_at, net, sign)), axis=-1)


def _at(net: EncoderBuilder, sign: int) -> Tensor:
    """Rows of the relative position table, [1, 1, seq, seq]."""
    c = net.config
    rows = net.array_param("position_buckets", position_buckets(c, net.encoder))
    at = net.distance() * sign + (c.context - 1)
    found = rows.gather(at, axis=0)
    return found.reshape(1, 1, *found.shape.dims)


def position_buckets(c: ModelConfig, e: EncoderConfig) -> Any:
    """Near distances have a bucket each, far ones share logarithmic buckets."""
    distance, half = np.arange(-(c.context - 1), c.context), e.distance_buckets // 2
    near, size = half // 2, np.abs(distance)
    # in f32, as the models were trained: a border may fall to either side
    far = np.log(np.maximum(size, near).astype(np.float32) / np.float32(near))
    steps = far / np.log(np.float32((e.farthest - 1) / near)) * np.float32(near - 1)
    wide = np.ceil(steps).astype(np.int64) + near
    place = np.where(size <= near, distance, wide * np.sign(distance))
    return np.clip(place + half, 0, e.distance_buckets - 1).astype(np.int32)


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
