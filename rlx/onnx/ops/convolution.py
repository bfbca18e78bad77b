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
    if any(n < 0 for n in (*low, *high)):
        x, low, high = _trimmed(x, low, high), [max(n, 0) for n in low], [max(n, 0) for n in high]
    operands = (x, w) if bias is None else (x, w, bias)
    return graph_op(
        "conv", *operands, stride=tuple(strides), padding=(*low, *high), dilation=tuple(dilations),
        groups=groups,
    )  # fmt: skip


def _trimmed(x: Array, low: list[int], high: list[int]) -> Array:
    """`x` without what negative padding takes away."""
    pairs = zip(x.shape[2:], low, high, strict=True)
    cut = [slice(max(-a, 0), n - max(-b, 0)) for n, a, b in pairs]
    return x[(slice(None), slice(None), *cut)]


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


@op("ConvTranspose")
def conv_transpose(node: Call, x: Array, w: Array, bias: Array | None = None) -> Array:
    kernel = tuple([int(n) for n in w.shape[2:]])
    rank = len(kernel)
    strides = tuple(node.ints("strides", None) or (1,) * rank)
    dilations = tuple(node.ints("dilations", None) or (1,) * rank)
    extra = tuple(node.ints("output_padding", None) or (0,) * rank)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    low, high = _transposed_pads(node, x.shape[2:], strides, spans, extra)
    groups = node.int("group", 1)
    if rank > 2 or any(n < 0 for n in (*low, *high)):
        return _stretched(x, w, bias, strides, dilations, low, high, extra, groups)
    operands = (x, w) if bias is None else (x, w, bias)
    return graph_op(
        "conv_transpose", *operands, stride=strides, padding=(*low, *high), dilation=dilations,
        groups=groups, output_padding=extra,
    )  # fmt: skip


def _transposed_pads(
    node: Call, sizes: Any, strides: Any, spans: Any, extra: Any
) -> tuple[list[int], list[int]]:
    rank = len(strides)
    wanted = node.ints("output_shape", None)
    how = node.text("auto_pad", "NOTSET")
    if wanted is None and how in ("NOTSET", "VALID"):
        pads = (node.ints("pads", None) if how == "NOTSET" else None) or (0,) * (2 * rank)
        return list(pads[:rank]), list(pads[rank:])
    target = wanted[-rank:] if wanted else [int(n) * s for n, s in zip(sizes, strides, strict=True)]
    low, high = [], []
    for n, s, span, more, size in zip(sizes, strides, spans, extra, target, strict=True):
        total = (int(n) - 1) * s + span + more - size
        if total < 0:  # what is missing is behind
            first = 0
        elif how != "SAME_UPPER" and how != "NOTSET":
            first = total - total // 2
        else:
            first = total // 2
        low.append(first)
        high.append(total - first)
    return low, high


def _stretched(
    x: Array, w: Array, bias: Array | None, strides: Any, dilations: Any, low: Any, high: Any,
    extra: Any, groups: int,
) -> Array:  # fmt: skip
    """A transposed convolution as a convolution: zeros between elements, the kernel flipped."""
    rank = x.ndim - 2
    for axis, s in enumerate(strides, 2):
        if s > 1:
            n = x.shape[axis]
            wide = xp.expand_dims(x, axis + 1)
            wide = graph_op(
                "pad", wide, low=(0,) * wide.ndim,
                high=tuple([s - 1 if a == axis + 1 else 0 for a in range(wide.ndim)]), value=0.0,
            )  # fmt: skip
            shape = (*x.shape[:axis], n * s, *x.shape[axis + 1 :])
            key = [slice(None)] * x.ndim
            key[axis] = slice(0, n * s - (s - 1))
            x = xp.reshape(wide, shape)[tuple(key)]
    flipped = xp.flip(w, axis=tuple(range(2, w.ndim)))
    parts = xp.reshape(flipped, (groups, w.shape[0] // groups, *w.shape[1:]))
    turned = xp.reshape(xp.moveaxis(parts, 2, 1), (-1, w.shape[0] // groups, *w.shape[2:]))
    spans = [(int(k) - 1) * d for k, d in zip(w.shape[2:], dilations, strict=True)]
    before = [span - n for span, n in zip(spans, low, strict=True)]
    after = [span - n + e for span, n, e in zip(spans, high, extra, strict=True)]
    return convolved(x, turned, bias, (1,) * rank, dilations, before, after, groups)
