"""Qwen2 MoE: mixture of experts with a shared expert."""

from __future__ import annotations

from rlx.models.arch.llama import LAYER, PLAIN, embed, finish, layer
from rlx.models.arch.qwen2 import FIELDS as _QWEN2
from rlx.models.arch.qwen2 import QKV_BIASES
from rlx.models.config import ModelConfig
from rlx.models.config_fields import Field, number, read
from rlx.models.config_hf import HfSettings, only_experts

_MLP = f"{LAYER}.mlp"
_FFN = ("gate", "up", "down")
ROUTED = {
    "blk.{i}.ffn_gate_inp.weight": f"{_MLP}.gate.weight",
    **{
        f"blk.{{i}}.ffn_{part}_exps.weight": f"{_MLP}.experts.{{e}}.{part}_proj.weight"
        for part in _FFN
    },
}
SHARED = {
    "blk.{i}.ffn_gate_inp_shexp.weight": f"{_MLP}.shared_expert_gate.weight",
    **{
        f"blk.{{i}}.ffn_{part}_shexp.weight": f"{_MLP}.shared_expert.{part}_proj.weight"
        for part in _FFN
    },
}
HF_NAMES = {**PLAIN, **QKV_BIASES, **ROUTED, **SHARED}
SWITCHES = {"qkv_bias": tuple(ours.removeprefix("blk.{i}.") for ours in QKV_BIASES)}
EXPERTS = read(
    num_experts=Field(60, also=("num_local_experts",)), num_experts_per_tok=4,
    moe_intermediate_size=1408, norm_topk_prob=False,
    decoder_sparse_step=1, mlp_only_layers=Field([]),
)  # fmt: skip
FIELDS = {
    **_QWEN2,
    **EXPERTS,
    **read(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=number(16), shared_expert_intermediate_size=5632, qkv_bias=True,
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    last, used = s.get("max_window_layers"), s.get("use_sliding_window")
    layers = range(s.get("num_hidden_layers"))
    full = (not used or i % 2 == 1 or i >= last for i in layers)
    experts = s.experts(
        "num_experts", normalize=s.get("norm_topk_prob"), width=s.get("moe_intermediate_size"),
        shared_width=s.get("shared_expert_intermediate_size"),
    )  # fmt: skip
    absent = only_experts(s.dense_layers(), len(layers), HF_NAMES)
    return s.decoder(
        "qwen2_moe", SWITCHES, experts=experts, without=absent, **s.windows(full, used)
    )


__all__ = ["FIELDS", "HF_NAMES", "embed", "finish", "layer", "read_config"]
