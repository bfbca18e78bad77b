"""Convolutions and pooling."""

from __future__ import annotations

from typing import Any

import rlx.numpy as xp
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.table import op


def windows(
    node: Call, kernel: tuple[int, ...], sizes: tuple[Any, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], list[Any], list[Any]]:
    """Strides, dilations and the padding before and after of each spatial axis."""
    rank = len(kernel)
    strides = node.ints("strides", None) or (1,) * rank
    dilations = node.ints("dilations", None) or (1,) * rank
    how = node.text("auto_pad", "NOTSET")
    if how == "VALID":
        return strides, dilations, [0] * rank, [0] * rank
    if how in ("SAME_UPPER", "SAME_LOWER"):
        low, high = [], []
        for k, s, d, n in zip(kernel, strides, dilations, sizes, strict=True):
            count = (n + (s - 1)) // s
            total: Any = (count - 1) * s + (k - 1) * d + 1 - n
            total = total if total > 0 else 0
            small = total // 2
            low.append(small if how == "SAME_UPPER" else total - small)
            high.append(total - small if how == "SAME_UPPER" else small)
        return strides, dilations, [int(n) for n in low], [int(n) for n in high]
    pads = node.ints("pads", None) or (0,) * (2 * rank)
    if len(pads) != 2 * rank or len(strides) != rank or len(dilations) != rank:
        raise node.fault("attributes do not fit the kernel", got=f"pads {list(pads)}")
    return strides, dilations, list(pads[:rank]), list(pads[rank:])


def pad_spatial(x: Array, low: list[Any], high: list[Any], value: float = 0.0) -> Array:
    if not any([*low, *high]):
        return x
    return graph_op("pad", x, low=(0, 0, *low), high=(0, 0, *high), value=value)


@op("Conv")
def conv(node: Call, x: Array, w: Array, bias: Array | None = None) -> Array:
    kernel = tuple([int(n) for n in w.shape[2:]])
    strides, dilations, low, high = windows(node, kernel, x.shape[2:])
    return convolved(x, w, bias, strides, dilations, low, high, node.int("group", 1))


def convolved(
    x: Array, w: Array, bias: Array | None, strides: tuple[int, ...], dilations: tuple[int, ...],
    low: list[Any], high: list[Any], groups: int,
) -> Array:  # fmt: skip
    """A convolution over one, two or three spatial axes."""
    rank = x.ndim - 2
    if rank > 2:
        return _conv_3d(x, w, bias, strides, dilations, low, high, groups)
    if low != high:
        x, low = pad_spatial(x, low, high), [0] * rank
    operands = (x, w) if bias is None else (x, w, bias)
    return graph_op(
        "conv", *operands, stride=strides, padding=tuple(low), dilation=dilations, groups=groups
    )


def _conv_3d(
    x: Array, w: Array, bias: Array | None, strides: tuple[int, ...], dilations: tuple[int, ...],
    low: list[Any], high: list[Any], groups: int,
) -> Array:  # fmt: skip
    """The sum over the first kernel axis of convolutions of slices over the others."""
    x = pad_spatial(x, [low[0], *[0] * (len(low) - 1)], [high[0], *[0] * (len(high) - 1)])
    count = (x.shape[2] - (int(w.shape[2]) - 1) * dilations[0] - 1) // strides[0] + 1
    total: Any = None
    for k in range(int(w.shape[2])):
        start = k * dilations[0]
        part = x[:, :, start : start + (count - 1) * strides[0] + 1 : strides[0]]
        moved = xp.moveaxis(part, 2, 1)
        flat = xp.reshape(moved, (x.shape[0] * count, *moved.shape[2:]))
        made = convolved(
            flat, w[:, :, k], None, strides[1:], dilations[1:], low[1:], high[1:], groups
        )
        total = made if total is None else total + made
    made = xp.moveaxis(xp.reshape(total, (x.shape[0], count, *total.shape[1:])), 1, 2)
    if bias is None:
        return made
    return made + xp.reshape(bias, (1, -1, *[1] * (made.ndim - 2)))


@op("GlobalAveragePool")
def global_average_pool(node: Call, x: Array) -> Array:
    return xp.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True)


@op("GlobalMaxPool")
def global_max_pool(node: Call, x: Array) -> Array:
    return xp.max(x, axis=tuple(range(2, x.ndim)), keepdims=True)
