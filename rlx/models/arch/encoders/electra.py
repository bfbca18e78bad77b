"""ELECTRA: BERT with embeddings that may be narrower than its layers."""

from __future__ import annotations

from rlx.models.arch.encoders import bert
from rlx.models.arch.encoders.bert import finish, layer
from rlx.models.arch.encoders.roberta import BODY as _ROBERTA
from rlx.models.arch.encoders.roberta import HEAD
from rlx.models.config import ModelConfig
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor

PREFIXES = ("electra.", "")
BODY = {
    **_ROBERTA,
    "token_proj.weight": "embeddings_project.weight",
    "token_proj.bias": "embeddings_project.bias",
}


def read_config(s: HfSettings) -> ModelConfig:
    s.require("position_embedding_type", "absolute", "absolute")
    parts = {"embedding": s.need("embedding_size"), "classifier_activation": "gelu"}
    return s.encoder("electra", parts)


def embed(net: EncoderBuilder, ids: Tensor, types: Tensor | None) -> Tensor:
    x = bert.embed(net, ids, types)
    return net.linear(x, "token_proj") if "token_proj.weight" in net.weights else x


__all__ = ["BODY", "HEAD", "PREFIXES", "embed", "finish", "layer", "read_config"]
