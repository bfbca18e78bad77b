"""Qwen3.5 MoE: mixture of experts with a shared expert."""

from __future__ import annotations

from rlx.ir.op import Array
from rlx.models.arch.qwen3_5 import HF_NAMES as _QWEN
from rlx.models.arch.qwen3_next import configure, embed, finish, layer
from rlx.models.config import ModelConfig
from rlx.models.weights import Derived, Names, inside

_EXPERTS = "model.layers.{i}.mlp.experts"


def _gate(config: ModelConfig, joined: Array) -> Array:
    return joined[:, : joined.shape[1] // 2]


def _up(config: ModelConfig, joined: Array) -> Array:
    return joined[:, joined.shape[1] // 2 :]


HF_NAMES: Names = {
    **_QWEN,
    **inside(
        "language_model",
        {
            "blk.{i}.ffn_gate_exps.weight": Derived(
                (f"{_EXPERTS}.gate_up_proj",), _gate, by_expert=True
            ),
            "blk.{i}.ffn_up_exps.weight": Derived(
                (f"{_EXPERTS}.gate_up_proj",), _up, by_expert=True
            ),
            "blk.{i}.ffn_down_exps.weight": f"{_EXPERTS}.down_proj",
        },
    ),
}

__all__ = ["HF_NAMES", "configure", "embed", "finish", "layer"]
