"""Recurrent layers: f32 states that every run replaces, and the causal convolution before them.

A state cannot be rewound to an earlier token. The runner zeroes it at the start of a sequence: a
test in the graph would cost more per token than the layer.
"""

from __future__ import annotations

import numpy as np

from rlx.errors import FormatError
from rlx.ir.op import Array
from rlx.models.builder import activate
from rlx.models.config import ModelConfig, RecurrentConfig
from rlx.models.decoder_builder import DecoderBuilder, Tensor

CARRIED = "carried."  # prefix of the names of these states


def recurrence(config: ModelConfig) -> RecurrentConfig:
    """The sizes of a model's recurrent layers."""
    if config.recurrent is None:
        raise FormatError("no sizes of recurrent layers", where=config.arch)
    return config.recurrent


def convolved(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    """The activation of the causal depthwise convolution of x [1, tokens, channels]."""
    g, dims = net.g, x.shape.dims
    weight, x = net.param(f"blk.{i}.ssm_conv1d.weight"), net.by_sequence(x)
    before, name = weight.shape.dims[1] - 1, f"{CARRIED}conv.{i}"
    state = net.carried(name, (before, dims[2]))
    y = g.depthwise_conv1d_causal(x, weight, state).reshape(*dims)
    joined = g.concat([state, x], axis=1)
    net.carry(name, state, joined.narrow(axis=1, start=x.shape.dims[1], length=before))
    bias = f"blk.{i}.ssm_conv1d.bias"
    y = y + net.param(bias) if bias in net.weights else y
    return activate(g, net.config.activation, y)


def squeezed(config: ModelConfig, taps: Array) -> Array:
    """[channels, 1, taps] as [channels, taps]"""
    return taps[:, 0]


def decay(config: ModelConfig, logarithm: Array) -> Array:
    return -np.exp(logarithm.astype(np.float32))


def each(net: DecoderBuilder, x: Tensor, count: int, width: int) -> Tensor:
    """[1, seq, heads · width] → [1, seq, heads · count, width]: repeat each head `count` times."""
    heads = x.shape.dims[2] // width
    return _expanded(net, x, (heads, 1, width), (heads, count, width))


def all_of(net: DecoderBuilder, x: Tensor, count: int, width: int) -> Tensor:
    """Tile all heads `count` times."""
    heads = x.shape.dims[2] // width
    return _expanded(net, x, (1, heads, width), (count, heads, width))


def _expanded(
    net: DecoderBuilder, x: Tensor, once: tuple[int, int, int], often: tuple[int, int, int]
) -> Tensor:
    seq = x.shape.dims[1]
    x = x.reshape(1, seq, *once).expand(1, seq, *often)
    return x.reshape(1, seq, often[0] * often[1], often[2])
