"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT with positions counted from behind the padding token."""

from __future__ import annotations

from rlx.models.encoders.bert import BODY as _BERT
from rlx.models.encoders.bert import embed, finish, layer

PREFIXES = ("roberta.", "")
BODY = {ours: theirs for ours, theirs in _BERT.items() if not ours.startswith("cls.")}
HEAD = {
    "cls.weight": "classifier.dense.weight",
    "cls.bias": "classifier.dense.bias",
    "cls.output.weight": "classifier.out_proj.weight",
    "cls.output.bias": "classifier.out_proj.bias",
}

__all__ = ["BODY", "HEAD", "PREFIXES", "embed", "finish", "layer"]
