"""Qwen3.5 MoE: mixture of experts with a shared expert."""

from __future__ import annotations

from rlx.ir.op import Array
from rlx.models.arch.qwen2_moe import ROUTED, SHARED
from rlx.models.arch.qwen3_5 import FIELDS as _QWEN
from rlx.models.arch.qwen3_5 import HARMLESS as _HARMLESS
from rlx.models.arch.qwen3_5 import HARMLESS_TENSORS, SHAPES, SWITCHES
from rlx.models.arch.qwen3_5 import HF_NAMES as _NAMES
from rlx.models.arch.qwen3_next import configure, embed, finish, hybrid, layer
from rlx.models.config import ModelConfig
from rlx.models.config_fields import number, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.weights import Derived, Names, inside

_EXPERTS = "model.layers.{i}.mlp.experts"
_JOINED_DIMS = ("experts.count, 2*experts.width, hidden",)


def _gate(config: ModelConfig, joined: Array) -> Array:
    return joined[:, : joined.shape[1] // 2]


def _up(config: ModelConfig, joined: Array) -> Array:
    return joined[:, joined.shape[1] // 2 :]


def _half(make: object) -> Derived:
    return Derived((f"{_EXPERTS}.gate_up_proj",), make, by_expert=True, dims=_JOINED_DIMS)  # type: ignore[arg-type]


def _either(part: str, joined: str | Derived) -> tuple[str | Derived, str]:
    """Experts in one tensor, as they are published, or apart, as transformers saves them."""
    return joined, ROUTED[f"blk.{{i}}.ffn_{part}_exps.weight"]


_FFN = tuple(f"blk.{{i}}.ffn_{part}.weight" for part in ("gate", "up", "down"))
HF_NAMES: Names = {
    **{ours: theirs for ours, theirs in _NAMES.items() if ours not in _FFN},
    **inside(
        "language_model",
        {
            **SHARED,
            "blk.{i}.ffn_gate_inp.weight": ROUTED["blk.{i}.ffn_gate_inp.weight"],
            "blk.{i}.ffn_gate_exps.weight": _either("gate", _half(_gate)),
            "blk.{i}.ffn_up_exps.weight": _either("up", _half(_up)),
            "blk.{i}.ffn_down_exps.weight": _either("down", f"{_EXPERTS}.down_proj"),
        },
    ),
}
FIELDS = {
    **without(_QWEN, "intermediate_size"),
    **read(
        hidden_size=2048, num_hidden_layers=40, num_key_value_heads=number(2),
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts_per_tok=8,
        num_experts=256,
    ),
}  # fmt: skip
HARMLESS = (*_HARMLESS, "intermediate_size")  # every layer has experts


def read_config(s: HfSettings) -> ModelConfig:
    width = s.get("moe_intermediate_size")
    shared = s.get("shared_expert_intermediate_size")
    experts = s.experts("num_experts", width=width, shared_width=shared)
    return hybrid(s, "qwen3_5_moe", HF_NAMES, frozenset(), experts=experts, ffn=width)


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
