"""BERT: learned positions and token types, post-norm, GELU FFN."""

from __future__ import annotations

from rlx.models.config import ModelConfig
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor

PREFIXES = ("bert.", "")
_PARTS = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
BODY = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "token_embd_norm.weight": "embeddings.LayerNorm.weight",
    "token_embd_norm.bias": "embeddings.LayerNorm.bias",
    "cls.weight": "pooler.dense.weight",
    "cls.bias": "pooler.dense.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"encoder.layer.{{i}}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
}
HEAD = {"cls.output.weight": "classifier.weight", "cls.output.bias": "classifier.bias"}


def read_config(s: HfSettings) -> ModelConfig:
    s.require("position_embedding_type", "absolute", "absolute")
    return s.encoder("bert")


def embed(net: EncoderBuilder, ids: Tensor, types: Tensor | None) -> Tensor:
    return net.norm(net.embed(ids) + net.position_embeddings(ids, types), "token_embd_norm")


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    return net.post_norm_layer(x, i)


def finish(net: EncoderBuilder, x: Tensor) -> Tensor:
    return x
