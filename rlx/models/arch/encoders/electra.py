"""ELECTRA: BERT with embeddings that may be narrower than its layers."""

from __future__ import annotations

from rlx.models.arch.encoders import bert
from rlx.models.arch.encoders.bert import FIELDS as _FIELDS
from rlx.models.arch.encoders.bert import HARMLESS as _HARMLESS
from rlx.models.arch.encoders.bert import HARMLESS_TENSORS, finish, layer
from rlx.models.arch.encoders.bert import SHAPES as _SHAPES
from rlx.models.arch.encoders.roberta import BODY as _ROBERTA
from rlx.models.arch.encoders.roberta import HEAD
from rlx.models.config import ModelConfig
from rlx.models.config_fields import read
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor

PREFIXES = ("electra.", "")
BODY = {
    **_ROBERTA,
    "token_proj.weight": "embeddings_project.weight",
    "token_proj.bias": "embeddings_project.bias",
}
FIELDS = {
    **_FIELDS,
    **read(
        embedding_size=128, hidden_size=256, num_attention_heads=4, intermediate_size=1024,
    ),
}  # fmt: skip
HARMLESS = (*_HARMLESS, "summary_*")
OPTIONAL = ("token_proj.weight", "token_proj.bias")
NARROW = {
    **_SHAPES,
    "token_embd": "vocab, encoder.embedding",
    "position_embd": "context+encoder.first_position, encoder.embedding",
    "token_types": "encoder.types, encoder.embedding",
    "token_embd_norm": "encoder.embedding",
    "token_proj": "hidden, encoder.embedding",
}
SHAPES = NARROW


def read_config(s: HfSettings) -> ModelConfig:
    width = s.get("embedding_size")
    s.require("embedding_size", width > 0, "a positive number")
    parts = {"embedding": width, "classifier_activation": "gelu", "types": s.get("type_vocab_size")}
    same = width == s.get("hidden_size")
    absent = {f"token_proj.{end}" for end in ("weight", "bias")} if same else set()
    return s.encoder("electra", parts, without=frozenset(absent))


def embed(net: EncoderBuilder, ids: Tensor, types: Tensor | None) -> Tensor:
    x = bert.embed(net, ids, types)
    return net.linear(x, "token_proj") if "token_proj.weight" in net.weights else x


__all__ = [
    "BODY",
    "FIELDS",
    "HARMLESS",
    "HARMLESS_TENSORS",
    "HEAD",
    "OPTIONAL",
    "PREFIXES",
    "SHAPES",
    "embed",
    "finish",
    "layer",
    "read_config",
]
