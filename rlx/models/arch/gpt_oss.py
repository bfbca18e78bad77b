"""gpt-oss: MXFP4 experts, attention sinks, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlx.ir.op import Array
from rlx.ir.quant.scheme import GGUF_SCHEMES
from rlx.models.arch.llama import (
    ATTENTION_BIAS,
    ATTENTION_BIASES,
    COMMON,
    LAYER,
    PLAIN,
    embed,
    finish,
)
from rlx.models.config import ModelConfig
from rlx.models.config_fields import WINDOWS, Field, number, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor, experts_ffn
from rlx.models.weights import Derived, Names

_EXPERTS = f"{LAYER}.mlp.experts"
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _blocks(first: int, step: int, blocks: Array, scales: Array) -> Array:
    """Every `step`-th row in GGUF's layout of MXFP4: the scale, then codes 0–15 below codes 16–31.

    Files have [experts, rows, blocks, 16], two neighbouring codes to a byte.
    """
    blocks, scales = blocks[:, first::step], scales[:, first::step]
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    joined = codes[..., :16] | codes[..., 16:] << 4
    packed = np.concatenate([scales[..., None], joined], axis=-1)
    return packed.reshape(*packed.shape[:2], -1)


def _sources(part: str, first: int, step: int) -> dict[str, tuple[Derived, ...]]:
    """Weight and bias of a part of the experts; gate and up are interleaved in one tensor."""

    def packed(config: ModelConfig, blocks: Array, scales: Array) -> Array:
        return _blocks(first, step, blocks, scales)

    def plain(config: ModelConfig, joined: Array) -> Array:
        return joined[..., first::step].swapaxes(1, 2)

    def bias(config: ModelConfig, joined: Array) -> Array:
        return joined[:, first::step]

    name = f"{_EXPERTS}.{'down' if part == 'down' else 'gate_up'}_proj"
    wide, rows = ("experts.width", "hidden") if part == "down" else ("hidden", "2*experts.width")
    files = (f"{name}_blocks", f"{name}_scales")
    dims = tuple(f"experts.count, {rows}, any{end}" for end in (", any", ""))
    return {
        f"blk.{{i}}.ffn_{part}_exps.weight": (
            Derived(files, packed, GGUF_SCHEMES["MXFP4"], True, dims),
            Derived((name,), plain, by_expert=True, dims=(f"experts.count, {wide}, {rows}",)),
        ),
        f"blk.{{i}}.ffn_{part}_exps.bias": (
            Derived((f"{name}_bias",), bias, dims=(f"experts.count, {rows}",)),
        ),
    }


HF_NAMES: Names = {
    **{ours: theirs for ours, theirs in PLAIN.items() if "ffn_" not in ours},
    **ATTENTION_BIASES,
    "blk.{i}.post_attention_norm.weight": f"{LAYER}.post_attention_layernorm.weight",
    "blk.{i}.attn_sinks.weight": f"{LAYER}.self_attn.sinks",
    "blk.{i}.ffn_gate_inp.weight": f"{LAYER}.mlp.router.weight",
    "blk.{i}.ffn_gate_inp.bias": f"{LAYER}.mlp.router.bias",
    **_sources("gate", 0, 2),
    **_sources("up", 1, 2),
    **_sources("down", 0, 1),
}
SWITCHES = {"attention_bias": ATTENTION_BIAS}
FIELDS = {
    **without(COMMON, "hidden_act"),
    **WINDOWS,
    **read(
        num_hidden_layers=36, num_local_experts=Field(128, also=("num_experts",)),
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, head_dim=number(64),
        num_attention_heads=64, num_key_value_heads=number(8), sliding_window=number(128),
        max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=150000.0,
        rope_parameters=Field(_YARN), num_experts_per_tok=4, swiglu_alpha=1.702, swiglu_limit=7.0,
        attention_bias=True,
    ),
}  # fmt: skip
# the gate is swiglu_alpha's; experts_per_token is another name that the first folders add
HARMLESS = ("hidden_act", "experts_per_token", "initial_context_length")


def read_config(s: HfSettings) -> ModelConfig:
    full = (i % 2 == 1 for i in range(s.get("num_hidden_layers")))
    experts = s.experts("num_local_experts", width=s.get("intermediate_size"))
    gate = s.get("swiglu_alpha"), s.get("swiglu_limit")
    s.require("swiglu_limit", gate[1] > 0, "a positive number")
    return s.decoder(
        "gpt_oss", SWITCHES, experts=experts, swiglu=gate, activation="silu", **s.windows(full)
    )


def configure(config: ModelConfig) -> ModelConfig:
    rope = replace(config.rope, whole_steps=False)
    return replace(config, window_layers=config.windows_or_every(2), rope=rope)


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    return x + experts_ffn(net, net.norm(x, f"blk.{i}.post_attention_norm"), i, _gate)


def _gate(net: DecoderBuilder, gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) · gate · sigmoid(α gate), both clamped."""
    (alpha, limit), g = net.config.swiglu, net.g
    gate = gate.clamp(low=-float("inf"), high=limit)
    up = up.clamp(low=-limit, high=limit)
    return (up + 1.0) * (gate * g.sigmoid(gate * alpha))


__all__ = ["FIELDS", "HF_NAMES", "configure", "embed", "finish", "layer", "read_config"]
