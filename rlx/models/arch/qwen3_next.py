"""Qwen3-Next: gated delta net in three layers of four, else gated attention; mixture of experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import UnsupportedError
from rlx.ir.op import Array
from rlx.models.arch.llama import (
    ATTENTION_BIAS,
    ATTENTION_BIASES,
    COMMON,
    LAYER,
    PLAIN,
    QK_NORM,
    embed,
    finish,
)
from rlx.models.arch.qwen2_moe import EXPERTS, ROUTED, SHARED
from rlx.models.config import ModelConfig, RecurrentConfig
from rlx.models.config_fields import PARTIAL, Field, number, read
from rlx.models.config_hf import HfSettings, only_experts
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.recurrent import (
    CARRIED,
    all_of,
    convolved,
    decay,
    each,
    recurrence,
    squeezed,
)
from rlx.models.weights import Derived, Names

_LINEAR = f"{LAYER}.linear_attn"


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


_MIXED = "2*recurrent.groups*recurrent.state+recurrent.inner"
_QKVZ = (f"{_LINEAR}.in_proj_qkvz.weight",)
_QKVZ_DIMS = (f"{_MIXED}+recurrent.inner, hidden",)
ATTENTION = {
    **{ours: theirs for ours, theirs in PLAIN.items() if ".self_attn." in theirs},
    **ATTENTION_BIASES,
    **QK_NORM,
}
# what both kinds of layers have
DELTA_NET: Names = {
    "blk.{i}.ssm_conv1d.weight": Derived(
        (f"{_LINEAR}.conv1d.weight",), squeezed, dims=(f"{_MIXED}, 1, recurrent.taps",)
    ),
    "blk.{i}.ssm_dt.bias": f"{_LINEAR}.dt_bias",
    "blk.{i}.ssm_a": Derived((f"{_LINEAR}.A_log",), decay, dims=("recurrent.heads",)),
    "blk.{i}.ssm_norm.weight": f"{_LINEAR}.norm.weight",
    "blk.{i}.ssm_out.weight": f"{_LINEAR}.out_proj.weight",
}
REST: Names = {
    **{n: s for n, s in PLAIN.items() if n not in ATTENTION and n != "blk.{i}.ffn_norm.weight"},
    "blk.{i}.post_attention_norm.weight": f"{LAYER}.post_attention_layernorm.weight",
}
HF_NAMES: Names = {
    **REST,
    **ATTENTION,
    **ROUTED,
    **SHARED,
    **DELTA_NET,
    "blk.{i}.attn_qkv.weight": Derived(_QKVZ, _qkv, dims=_QKVZ_DIMS),
    "blk.{i}.attn_gate.weight": Derived(_QKVZ, _gate, dims=_QKVZ_DIMS),
    "blk.{i}.ssm_ba.weight": f"{_LINEAR}.in_proj_ba.weight",
}
SHAPES = {
    "attn_q": "2*heads*head_dim, hidden",
    "attn_q_norm": "head_dim",
    "attn_k_norm": "head_dim",
    "attn_qkv": f"{_MIXED}, hidden",
    "attn_gate": "recurrent.inner, hidden",
    "ssm_ba": "2*recurrent.heads, hidden",
    "ssm_beta": "recurrent.heads, hidden",
    "ssm_alpha": "recurrent.heads, hidden",
    "ssm_norm": "recurrent.value",
    "ssm_out": "hidden, recurrent.inner",
}
SWITCHES = {"attention_bias": ATTENTION_BIAS}
HARMLESS_TENSORS = ("mtp.*", "*visual.*")  # they draft tokens; they see images
HYBRID = {
    **COMMON,
    **read(
        num_attention_heads=16, max_position_embeddings=32768, attention_bias=False,
        head_dim=number(256), linear_conv_kernel_dim=4, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        layer_types=Field(None, kind=list), full_attention_interval=4,
    ),
}  # fmt: skip
FIELDS = {
    **HYBRID,
    **EXPERTS,
    **read(
        vocab_size=151936, hidden_size=2048, intermediate_size=5632, num_hidden_layers=48,
        num_key_value_heads=number(2), moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts_per_tok=10,
        num_experts=Field(512, also=("num_local_experts",)),
        norm_topk_prob=True,
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    experts = s.experts(
        "num_experts", normalize=s.get("norm_topk_prob"), width=s.get("moe_intermediate_size"),
        shared_width=s.get("shared_expert_intermediate_size"),
    )  # fmt: skip
    absent = only_experts(s.dense_layers(), s.get("num_hidden_layers"), HF_NAMES)
    return hybrid(s, "qwen3_next", HF_NAMES, absent, experts=experts)


def hybrid(
    s: HfSettings, arch: str, names: Names, absent: frozenset[str], **changes: Any
) -> ModelConfig:
    """A model with layers of two kinds; `names` are all weights, `absent` those that are not there
    besides."""
    every, layers = s.get("full_attention_interval"), range(s.get("num_hidden_layers"))
    s.require("full_attention_interval", every > 0, "a positive number")
    attention, delta = "full_attention", "linear_attention"
    usual = (delta if (i + 1) % every else attention for i in layers)
    kinds = s.layer_types(usual, (delta, attention))
    for i, kind in enumerate(kinds):
        wrong = (n for n in names if _of_one_kind(n) and (n in ATTENTION) == (kind == delta))
        absent |= {n.replace("{i}", str(i)) for n in wrong}
    sizes = ("conv_kernel_dim", "num_key_heads", "num_value_heads", "key_head_dim")
    taps, groups, heads, state = (s.get(f"linear_{n}") for n in sizes)
    recurrent = RecurrentConfig(taps, groups, heads, state, heads * s.get("linear_value_head_dim"))
    rope = s.rope(s.head_dim(), 0.25, PARTIAL, harmless=("mrope_section", "mrope_interleaved"))
    config = s.decoder(
        arch, SWITCHES, rope=rope, recurrent=recurrent, norm_offset=1.0, without=absent, **changes
    )
    return configure(config.check(s.where))


def _of_one_kind(name: str) -> bool:
    return (
        name.startswith("blk.{i}.")
        and (".ssm_" in name or ".attn_" in name)
        and (name != "blk.{i}.attn_norm.weight")
    )


def configure(config: ModelConfig) -> ModelConfig:
    c = recurrence(config)
    if c.state != c.value:
        raise UnsupportedError(
            "linear_key_head_dim and linear_value_head_dim differ", where=config.arch,
            got=f"{c.state} and {c.value}", expected="equal sizes",
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
    name = f"{CARRIED}delta.{i}"
    state = net.carried(name, (c.heads, c.state, c.value))
    whole = v.shape.dims
    q, k, v, change, beta = (net.by_sequence(x) for x in (q, k, v, change, beta))
    y, last = g.gated_delta_net_carry(q, k, v, change, beta, state)
    net.carry_written(name, last)
    y = y.reshape(*whole)
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


__all__ = ["FIELDS", "HF_NAMES", "configure", "embed", "finish", "layer", "read_config"]
