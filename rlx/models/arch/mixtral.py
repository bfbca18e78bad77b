"""Mixtral: Mistral with a mixture of experts. GGUF calls it llama."""

from __future__ import annotations

from rlx.models.arch.llama import HF_NAMES as _LLAMA
from rlx.models.arch.llama import embed, finish, layer

_MOE = "model.layers.{i}.block_sparse_moe"

HF_NAMES = {
    **_LLAMA,
    "blk.{i}.ffn_gate_inp.weight": f"{_MOE}.gate.weight",
    "blk.{i}.ffn_gate_exps.weight": f"{_MOE}.experts.{{e}}.w1.weight",
    "blk.{i}.ffn_down_exps.weight": f"{_MOE}.experts.{{e}}.w2.weight",
    "blk.{i}.ffn_up_exps.weight": f"{_MOE}.experts.{{e}}.w3.weight",
}

__all__ = ["HF_NAMES", "embed", "finish", "layer"]
