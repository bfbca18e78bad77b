"""Qwen3.5: the layers of Qwen3-Next with a gated FFN; the text part of a multimodal model."""

from __future__ import annotations

from rlx.models.arch.qwen3_next import (
    ATTENTION,
    DELTA_NET,
    HARMLESS_TENSORS,
    HYBRID,
    REST,
    SHAPES,
    SWITCHES,
    configure,
    embed,
    finish,
    hybrid,
    layer,
)
from rlx.models.config import ModelConfig
from rlx.models.config_fields import number, read
from rlx.models.config_hf import HfSettings
from rlx.models.weights import Names, inside

_LINEAR = "model.layers.{i}.linear_attn"

HF_NAMES: Names = inside(
    "language_model",
    {
        **REST,
        **ATTENTION,
        **DELTA_NET,
        "blk.{i}.attn_qkv.weight": f"{_LINEAR}.in_proj_qkv.weight",
        "blk.{i}.attn_gate.weight": f"{_LINEAR}.in_proj_z.weight",
        "blk.{i}.ssm_beta.weight": f"{_LINEAR}.in_proj_b.weight",
        "blk.{i}.ssm_alpha.weight": f"{_LINEAR}.in_proj_a.weight",
    },
)
FIELDS = {
    **HYBRID,
    **read(
        vocab_size=248320, intermediate_size=12288, num_key_value_heads=number(4),
    ),
}  # fmt: skip
# of layers that draft tokens, and of the precision of states, which are f32 here
HARMLESS = ("mtp_*", "mamba_ssm_dtype", "mlp_only_layers", "attn_output_gate")


def read_config(s: HfSettings) -> ModelConfig:
    return hybrid(s, "qwen3_5", HF_NAMES, frozenset())


__all__ = [
    "FIELDS",
    "HARMLESS",
    "HARMLESS_TENSORS",
    "HF_NAMES",
    "SHAPES",
    "SWITCHES",
    "configure",
    "embed",
    "finish",
    "layer",
    "read_config",
]
