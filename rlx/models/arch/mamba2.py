"""Mamba 2: selective scans instead of attention; a recurrent state instead of a KV cache."""

from __future__ import annotations

import math

import numpy as np

from rlx.ir.op import Array
from rlx.models.arch.llama import finish
from rlx.models.config import ModelConfig, RecurrentConfig
from rlx.models.config_fields import DECODER, Field, only, read
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.recurrent import CARRIED, convolved, decay, each, recurrence, squeezed
from rlx.models.weights import Derived, Names

_LAYER = "backbone.layers.{i}"

HF_NAMES: Names = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
    "blk.{i}.attn_norm.weight": f"{_LAYER}.norm.weight",
    "blk.{i}.ssm_conv1d.weight": Derived(
        (f"{_LAYER}.mixer.conv1d.weight",), squeezed,
        dims=("recurrent.inner+2*recurrent.groups*recurrent.state, 1, recurrent.taps",),
    ),
    "blk.{i}.ssm_conv1d.bias": f"{_LAYER}.mixer.conv1d.bias",
    "blk.{i}.ssm_dt.bias": f"{_LAYER}.mixer.dt_bias",
    "blk.{i}.ssm_a": Derived((f"{_LAYER}.mixer.A_log",), decay, dims=("recurrent.heads",)),
    "blk.{i}.ssm_d": f"{_LAYER}.mixer.D",
    "blk.{i}.ssm_norm.weight": f"{_LAYER}.mixer.norm.weight",
    **{
        f"blk.{{i}}.ssm_{ours}.{part}": f"{_LAYER}.mixer.{ours}_proj.{part}"
        for ours in ("in", "out")
        for part in ("weight", "bias")
    },
}  # fmt: skip
_MIXED = "recurrent.inner+2*recurrent.groups*recurrent.state"
SHAPES = {
    "ssm_in": f"recurrent.inner+{_MIXED}+recurrent.heads, hidden",
    "ssm_out": "hidden, recurrent.inner",
    "ssm_conv1d": _MIXED,
    "ssm_norm": "recurrent.inner",
}
GGUF_SHAPES = {"ssm_norm": "any, any", "ssm_conv1d": "any, any"}
SWITCHES = {"use_bias": ("ssm_in.bias", "ssm_out.bias"), "use_conv_bias": ("ssm_conv1d.bias",)}
FIELDS = {
    **DECODER,
    **read(
        num_heads=128, head_dim=64, vocab_size=32768, hidden_size=4096, state_size=128,
        num_hidden_layers=64, layer_norm_epsilon=1e-5, expand=2, conv_kernel=4, n_groups=8,
        use_bias=False, use_conv_bias=True, hidden_act="silu", tie_word_embeddings=False,
        time_step_limit=Field((0.0, math.inf)), rescale_prenorm_residual=only(False),
    ),
}  # fmt: skip
# the others of time_step are of training, chunk_size is of a kernel; residuals are f32 here
HARMLESS = (
    "time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "chunk_size",
    "residual_in_fp32", "rms_norm", "norm_before_gate", "use_associative_scan",
)  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    heads, head_dim = s.get("num_heads"), s.get("head_dim")
    inner, limits = heads * head_dim, s.get("time_step_limit")
    for name in ("num_heads", "head_dim"):
        s.require(name, s.get(name) > 0, "a positive number")
    fits = s.get("expand") * s.get("hidden_size") == inner
    s.require("expand", fits, f"{inner} / hidden_size, for num_heads × head_dim channels")
    fits = len(limits) == 2 and all(isinstance(n, float) for n in limits) and limits[0] < limits[1]
    s.require("time_step_limit", fits, "two numbers, the lower one first")
    taps, groups, state = (s.get(n) for n in ("conv_kernel", "n_groups", "state_size"))
    off = (parts for field, parts in SWITCHES.items() if not s.get(field))
    return ModelConfig(
        arch="mamba2",
        vocab=s.get("vocab_size"),
        hidden=s.get("hidden_size"),
        layers=s.get("num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=inner,
        context=1 << 20,  # as in GGUF: there is no limit
        eps=s.get("layer_norm_epsilon"),
        activation=s.activation("hidden_act"),
        recurrent=RecurrentConfig(taps, groups, heads, state, inner, limits),
        tied=s.get("tie_word_embeddings"),
        without=frozenset(f"blk.{{i}}.{part}" for parts in off for part in parts),
    )


def embed(net: DecoderBuilder, ids: Tensor) -> Tensor:
    return net.embed(ids)


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    c = recurrence(net.config)
    joined = net.linear(net.norm(x, f"blk.{i}.attn_norm"), f"blk.{i}.ssm_in")
    keys = c.groups * c.state
    gate, mixed, step = net.split(joined, [c.inner, c.inner + 2 * keys, c.heads])
    u, b, to_read = net.split(convolved(net, mixed, i), [c.inner, keys, keys])
    y = _scan(net, u, step, b, to_read, i)
    y = _norm(net, y * gate.silu(), i)
    return x + net.linear(y, f"blk.{i}.ssm_out")


def _scan(
    net: DecoderBuilder, u: Tensor, step: Tensor, b: Tensor, to_read: Tensor, i: int
) -> Tensor:
    """A selective scan for each group of heads, with its own B and C."""
    c, g, seq = recurrence(net.config), net.g, u.shape.dims[1]
    step = g.softplus(step + net.param(f"blk.{i}.ssm_dt.bias"))
    low, high = c.step_limits
    step = step if (low, high) == (0.0, math.inf) else step.clamp(low=low, high=high)
    step = each(net, step, c.value, 1).reshape(1, seq, c.inner)
    width, parts = c.inner // c.groups, []
    wide, narrow = [width] * c.groups, [c.state] * c.groups
    splits = (net.split(x, w) for x, w in ((u, wide), (step, wide), (b, narrow), (to_read, narrow)))
    for group, (u1, step1, b1, read1) in enumerate(zip(*splits, strict=True)):
        a, d = (_of_group(net, f"blk.{i}.ssm_{p}", group) for p in "ad")
        name = f"{CARRIED}ssm.{i}.{group}"
        state = net.carried(name, (width, c.state))
        flat = (u1, step1, b1, read1)
        given, steps, to_write, read = (net.by_sequence(x) for x in flat)
        operands = [given, steps, a, to_write, read, d, state]
        y, last = g.selective_scan(*operands, has_d=True, has_state=True)
        net.carry(name, state, last)
        parts.append(y.reshape(1, seq, width))
    return parts[0] if len(parts) == 1 else g.concat(parts, axis=2)


def _of_group(net: DecoderBuilder, name: str, group: int) -> Tensor:
    """A per-head weight expanded to the channels of a group: [width]; A is [width, state]."""
    c = recurrence(net.config)

    def make() -> Array:
        heads = net.weights.get(name).array.reshape(c.groups, -1)[group].astype(np.float32)
        channels = np.repeat(heads, c.value)
        return np.repeat(channels[:, None], c.state, axis=1) if name.endswith("ssm_a") else channels

    return net.param(f"{name}.{group}", make)


def _norm(net: DecoderBuilder, y: Tensor, i: int) -> Tensor:
    """RMS norm over all channels, or over each group where the file has weights for each."""
    g, (_, seq, inner) = net.g, y.shape.dims
    weight = net.param(f"blk.{i}.ssm_norm.weight")
    width = weight.shape.dims[-1]
    y = y.reshape(1, seq, inner // width, width)
    ones = net.array_param("ssm_norm.ones", np.ones(width, np.float32))
    y = g.rms_norm(y, ones, eps=net.config.eps) * weight
    return y.reshape(1, seq, inner)


__all__ = ["FIELDS", "HF_NAMES", "embed", "finish", "layer", "read_config"]
