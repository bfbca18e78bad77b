"""Qwen3.5: the layers of Qwen3-Next with a gated FFN; the text part of a multimodal model."""

from __future__ import annotations

from rlx.models.arch.qwen3_next import HF_NAMES as _NEXT
from rlx.models.arch.qwen3_next import configure, embed, finish, layer
from rlx.models.weights import Names, inside

_LINEAR = "model.layers.{i}.linear_attn"

HF_NAMES: Names = inside(
    "language_model",
    {
        **{ours: theirs for ours, theirs in _NEXT.items() if ours != "blk.{i}.ssm_ba.weight"},
        "blk.{i}.attn_qkv.weight": f"{_LINEAR}.in_proj_qkv.weight",
        "blk.{i}.attn_gate.weight": f"{_LINEAR}.in_proj_z.weight",
        "blk.{i}.ssm_beta.weight": f"{_LINEAR}.in_proj_b.weight",
        "blk.{i}.ssm_alpha.weight": f"{_LINEAR}.in_proj_a.weight",
    },
)

__all__ = ["HF_NAMES", "configure", "embed", "finish", "layer"]
