"""ELECTRA: BERT with tables that may be narrower than its layers."""

from __future__ import annotations

from rlx.models.arch.encoders import bert
from rlx.models.arch.encoders.bert import finish, layer
from rlx.models.arch.encoders.roberta import BODY as _ROBERTA
from rlx.models.arch.encoders.roberta import HEAD
from rlx.models.encoder_builder import EncoderNet, Tensor

PREFIXES = ("electra.", "")
BODY = {
    **_ROBERTA,
    "token_proj.weight": "embeddings_project.weight",
    "token_proj.bias": "embeddings_project.bias",
}


def embed(net: EncoderNet, ids: Tensor, types: Tensor | None) -> Tensor:
    x = bert.embed(net, ids, types)
    return net.linear(x, "token_proj") if "token_proj.weight" in net.weights else x


__all__ = ["BODY", "HEAD", "PREFIXES", "embed", "finish", "layer"]
