"""Qwen2 MoE: mixture of experts with a shared expert."""

from __future__ import annotations

from rlx.models.arch.llama import HF_NAMES as _LLAMA
from rlx.models.arch.llama import embed, finish, layer

_MLP = "model.layers.{i}.mlp"

HF_NAMES = {
    **_LLAMA,
    "blk.{i}.ffn_gate_inp.weight": f"{_MLP}.gate.weight",
    "blk.{i}.ffn_gate_inp_shexp.weight": f"{_MLP}.shared_expert_gate.weight",
    **{
        f"blk.{{i}}.ffn_{part}_exps.weight": f"{_MLP}.experts.{{e}}.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
    **{
        f"blk.{{i}}.ffn_{part}_shexp.weight": f"{_MLP}.shared_expert.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
}

__all__ = ["HF_NAMES", "embed", "finish", "layer"]
