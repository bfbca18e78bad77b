"""Jina embeddings v3: RoBERTa with rotary positions; of its adapters, none."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import finish, layer
from rlx.models.arch.encoders.nomic_bert import embed
from rlx.models.arch.encoders.roberta import FIRST_BODY, HEAD

PREFIXES = ("roberta.", "")
BODY = {ours: theirs for ours, theirs in FIRST_BODY.items() if not ours.startswith("position")}

__all__ = ["BODY", "HEAD", "PREFIXES", "embed", "finish", "layer"]
