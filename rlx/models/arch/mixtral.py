"""Mixtral: Mistral with a mixture of experts. GGUF calls it llama."""

from __future__ import annotations

from rlx.models.arch.llama import LAYER, embed, finish, layer
from rlx.models.arch.llama import PLAIN as _LLAMA
from rlx.models.arch.mistral import FIELDS as _MISTRAL
from rlx.models.config import ModelConfig
from rlx.models.config_fields import number, read
from rlx.models.config_hf import HfSettings

_MOE = f"{LAYER}.block_sparse_moe"

HF_NAMES = {
    **{ours: theirs for ours, theirs in _LLAMA.items() if ".mlp." not in theirs},
    "blk.{i}.ffn_gate_inp.weight": f"{_MOE}.gate.weight",
    "blk.{i}.ffn_gate_exps.weight": f"{_MOE}.experts.{{e}}.w1.weight",
    "blk.{i}.ffn_down_exps.weight": f"{_MOE}.experts.{{e}}.w2.weight",
    "blk.{i}.ffn_up_exps.weight": f"{_MOE}.experts.{{e}}.w3.weight",
}
FIELDS = {
    **_MISTRAL,
    **read(
        rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=number(), num_experts_per_tok=2,
        num_local_experts=8,
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    experts = s.experts("num_local_experts", width=s.get("intermediate_size"))
    return s.decoder("mixtral", {}, sliding_window=s.window(), experts=experts)


__all__ = ["FIELDS", "HF_NAMES", "embed", "finish", "layer", "read_config"]
