"""Qwen3-Next: gated delta net in three layers of four, else gated attention; mixture of experts."""

from __future__ import annotations

import numpy as np

from rlx.errors import UnsupportedError
from rlx.ir.op import Array
from rlx.models.arch.llama import embed, finish
from rlx.models.arch.qwen2_moe import HF_NAMES as _QWEN
from rlx.models.config import ModelConfig
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.recurrent import (
    all_of,
    carried,
    convolved,
    decay,
    each,
    recurrence,
    squeezed,
)
from rlx.models.weights import Derived, Names

_LAYER = "model.layers.{i}"
_LINEAR = f"{_LAYER}.linear_attn"


def _qkv(config: ModelConfig, joined: Array) -> Array:
    """Rows of all queries, all keys, all values, which the file groups by key head"""
    return np.concatenate(
        [part.reshape(-1, joined.shape[1]) for part in _by_key(config, joined)[:3]]
    )


def _gate(config: ModelConfig, joined: Array) -> Array:
    return _by_key(config, joined)[3].reshape(-1, joined.shape[1])


def _by_key(config: ModelConfig, joined: Array) -> list[Array]:
    c = recurrence(config)
    values = c.inner // c.groups
    ends = [c.state, 2 * c.state, 2 * c.state + values]
    return np.split(joined.reshape(c.groups, -1, joined.shape[1]), ends, axis=1)


HF_NAMES: Names = {
    **_QWEN,
    "blk.{i}.post_attention_norm.weight": f"{_LAYER}.post_attention_layernorm.weight",
    "blk.{i}.attn_qkv.weight": Derived((f"{_LINEAR}.in_proj_qkvz.weight",), _qkv),
    "blk.{i}.attn_gate.weight": Derived((f"{_LINEAR}.in_proj_qkvz.weight",), _gate),
    "blk.{i}.ssm_ba.weight": f"{_LINEAR}.in_proj_ba.weight",
    "blk.{i}.ssm_conv1d.weight": Derived((f"{_LINEAR}.conv1d.weight",), squeezed),
    "blk.{i}.ssm_dt.bias": f"{_LINEAR}.dt_bias",
    "blk.{i}.ssm_a": Derived((f"{_LINEAR}.A_log",), decay),
    "blk.{i}.ssm_norm.weight": f"{_LINEAR}.norm.weight",
    "blk.{i}.ssm_out.weight": f"{_LINEAR}.out_proj.weight",
}


def configure(config: ModelConfig) -> ModelConfig:
    c = recurrence(config)
    if c.state != c.value:
        raise UnsupportedError(
            "keys and values of different sizes", where=config.arch, got=f"{c.state} and {c.value}",
        )  # fmt: skip
    return config


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    part = _attention if f"blk.{i}.attn_q.weight" in net.weights else _delta_net
    x = x + part(net, net.norm(x, f"blk.{i}.attn_norm"), i)
    return x + net.ffn(net.norm(x, f"blk.{i}.post_attention_norm"), i)


def _attention(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    """Attention whose output is gated; the gate comes with the query."""
    c, seq = net.config, x.shape.dims[1]
    joined, k, v = net.qkv(x, i)
    joined = joined.reshape(1, seq, c.heads, 2 * c.head_dim)
    q, gate = (
        part.reshape(1, seq, c.heads * c.head_dim)
        for part in net.split(joined, [c.head_dim, c.head_dim])
    )
    y = net.attend(q, k, v, i) * gate.sigmoid()
    return net.linear(y, f"blk.{i}.attn_output")


def _delta_net(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    c, g, seq = recurrence(net.config), net.g, x.shape.dims[1]
    shared, keys = c.heads // c.groups, c.groups * c.state
    mixed = convolved(net, net.linear(x, f"blk.{i}.attn_qkv"), i)
    q, k, v = net.split(mixed, [keys, keys, c.inner])
    spread = all_of if net.config.arch != "qwen3_next" and net.weights.is_gguf else each
    q, k = (spread(net, part, shared, c.state).l2_norm() for part in (q, k))
    v = each(net, v, 1, c.value)
    beta, change = _gates(net, x, i)
    state = carried(net, f"delta.{i}", (1, c.heads, c.state, c.value))
    y, _ = g.gated_delta_net_carry(q, k, v, change, beta, state)
    y = g.rms_norm(y, net.param(f"blk.{i}.ssm_norm.weight"), eps=net.config.eps)
    gate = net.linear(x, f"blk.{i}.attn_gate").silu()
    return net.linear(y.reshape(1, seq, c.inner) * gate, f"blk.{i}.ssm_out")


def _gates(net: DecoderBuilder, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """(beta, log decay) of the gated delta rule, [1, seq, heads]"""
    g = net.g
    if f"blk.{i}.ssm_ba.weight" in net.weights:
        beta, step = _split_gates(net, net.linear(x, f"blk.{i}.ssm_ba"))
    else:
        beta, step = (net.linear(x, f"blk.{i}.ssm_{part}") for part in ("beta", "alpha"))
    step = g.softplus(step + net.param(f"blk.{i}.ssm_dt.bias"))
    return beta.sigmoid(), step * net.param(f"blk.{i}.ssm_a")


def _split_gates(net: DecoderBuilder, joined: Tensor) -> tuple[Tensor, Tensor]:
    """Split the two gates, which the weight groups by key head."""
    c, seq = recurrence(net.config), joined.shape.dims[1]
    shared = c.heads // c.groups
    joined = joined.reshape(1, seq, c.groups, 2 * shared)
    beta, step = (part.reshape(1, seq, c.heads) for part in net.split(joined, [shared, shared]))
    return beta, step


__all__ = ["HF_NAMES", "configure", "embed", "finish", "layer"]
