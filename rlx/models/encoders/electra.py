"""ELECTRA: BERT with tables that may be narrower than its layers."""

from __future__ import annotations

from rlx.models.encoders import bert
from rlx.models.encoders.bert import finish, layer
from rlx.models.encoders.blocks import EncoderNet, Tensor
from rlx.models.encoders.roberta import BODY as _ROBERTA
from rlx.models.encoders.roberta import HEAD

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
