"""BERT: learned positions and token types, post-norm, GELU FFN."""

from __future__ import annotations

from rlx.models.config import ModelConfig
from rlx.models.config_fields import ENCODER, OTHER_HEADS, only, read
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
HARMLESS_TENSORS = OTHER_HEADS
SHAPES = {
    "token_types": "encoder.types, hidden",
    "cls": "hidden, hidden",
    "cls.output": "encoder.labels, hidden",
}
FIELDS = {
    **ENCODER,
    **read(
        vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
        intermediate_size=3072, hidden_act="gelu", max_position_embeddings=512, type_vocab_size=2,
        layer_norm_eps=1e-12, position_embedding_type=only("absolute"),
    ),
}  # fmt: skip
# tied is the head of a masked language model
HARMLESS = ("tie_word_embeddings", "directionality", "pooler_*", "classifier_*")


def read_config(s: HfSettings) -> ModelConfig:
    return s.encoder("bert", {"types": s.get("type_vocab_size")})


def embed(net: EncoderBuilder, ids: Tensor, types: Tensor | None) -> Tensor:
    return net.norm(net.embed(ids) + net.position_embeddings(ids, types), "token_embd_norm")


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    return net.post_norm_layer(x, i)


def finish(net: EncoderBuilder, x: Tensor) -> Tensor:
    return x
