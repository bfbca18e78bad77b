"""GTE (v1.5 and multilingual): Nomic BERT with biases, and up and gate in one weight."""

from __future__ import annotations

from functools import partial

from rlx.models.arch.encoders.bert import HEAD, finish
from rlx.models.arch.encoders.nomic_bert import embed
from rlx.models.config import ModelConfig
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor

PREFIXES = ("gte.", "new.", "")
_PARTS = {
    "attn_qkv": "attention.qkv_proj",
    "attn_output": "attention.o_proj",
    "attn_output_norm": "attn_ln",
    "ffn_up": "mlp.up_gate_proj",
    "ffn_down": "mlp.down_proj",
    "layer_output_norm": "mlp_ln",
}
BODY = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
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


def read_config(s: HfSettings) -> ModelConfig:
    s.require("position_embedding_type", "rope", "rope")
    s.require("layer_norm_type", "layer_norm", "layer_norm")
    s.require("logn_attention_scale", False, False)
    return s.encoder("gte", rope=s.rope(160_000.0))


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    return net.post_norm_layer(x, i, partial(net.joined_ffn, gate_first=False))


__all__ = ["BODY", "HEAD", "PREFIXES", "embed", "finish", "layer", "read_config"]
