"""gpt-oss: MXFP4 experts, attention sinks, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlx.ir.op import Array
from rlx.ir.quant.scheme import GGUF_SCHEMES
from rlx.models.arch.llama import HF_NAMES as _LLAMA
from rlx.models.arch.llama import embed, finish
from rlx.models.config import ModelConfig
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.experts import experts_ffn
from rlx.models.weights import Derived

_LAYER = "model.layers.{i}"
_EXPERTS = f"{_LAYER}.mlp.experts"
_ALPHA, _LIMIT = 1.702, 7.0


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
    return {
        f"blk.{{i}}.ffn_{part}_exps.weight": (
            Derived((f"{name}_blocks", f"{name}_scales"), packed, GGUF_SCHEMES["MXFP4"], True),
            Derived((name,), plain, by_expert=True),
        ),
        f"blk.{{i}}.ffn_{part}_exps.bias": (Derived((f"{name}_bias",), bias),),
    }


HF_NAMES = {
    **_LLAMA,
    "blk.{i}.post_attention_norm.weight": f"{_LAYER}.post_attention_layernorm.weight",
    "blk.{i}.attn_sinks.weight": f"{_LAYER}.self_attn.sinks",
    "blk.{i}.ffn_gate_inp.weight": f"{_LAYER}.mlp.router.weight",
    "blk.{i}.ffn_gate_inp.bias": f"{_LAYER}.mlp.router.bias",
    **_sources("gate", 0, 2),
    **_sources("up", 1, 2),
    **_sources("down", 0, 1),
}


def configure(config: ModelConfig) -> ModelConfig:
    return replace(config, window_pattern=2, rope=replace(config.rope, whole_steps=False))


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    return x + experts_ffn(net, net.norm(x, f"blk.{i}.post_attention_norm"), i, _gate)


def _gate(net: DecoderBuilder, gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) · gate · sigmoid(α gate), both clamped."""
    g, most = net.g, float("inf")
    gate = gate.clamp(low=-most, high=_LIMIT)
    up = up.clamp(low=-_LIMIT, high=_LIMIT)
    return (up + 1.0) * (gate * g.sigmoid(gate * _ALPHA))


__all__ = ["HF_NAMES", "configure", "embed", "finish", "layer"]
