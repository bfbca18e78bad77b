"""Jina embeddings v3: RoBERTa with rotary positions; without its task adapters."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import finish, layer
from rlx.models.arch.encoders.nomic_bert import embed
from rlx.models.arch.encoders.roberta import FIRST_BODY, HEAD
from rlx.models.config import ModelConfig
from rlx.models.config_hf import HfSettings

PREFIXES = ("roberta.", "")
BODY = {ours: theirs for ours, theirs in FIRST_BODY.items() if not ours.startswith("position")}


def read_config(s: HfSettings) -> ModelConfig:
    return s.encoder("jina_embeddings_v3", rope=s.rope(20_000.0))


__all__ = ["BODY", "HEAD", "PREFIXES", "embed", "finish", "layer", "read_config"]
