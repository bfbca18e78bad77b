"""Convolutions as one product over shifted copies of the input; pooling; resizing by lookup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product
from math import prod
from typing import Any

import numpy as np

from rlx.ir.blocks import conv as blocks
from rlx.ir.blocks._parts import cast, wide
from rlx.ir.dim import Dim
from rlx.ir.dtype import f64, i64, promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops.conv import Window
from rlx.passes.common.reduce import size_value
from rlx.passes.common.registry import common


def _padded(g: Graph, x: Value, window: Window, fill: float) -> Value:
    """`x [B, C, *n]` with its spatial axes padded."""
    low, high = (0, 0, *window.low), (0, 0, *window.high)
    return g.pad(x, low=low, high=high, value=fill) if any(low + high) else x


def _taps(g: Graph, x: Value, window: Window) -> Iterator[Value]:
    """For each place in the kernel, the elements that meet it: [B, C, *counts]."""
    for tap in product(*map(range, window.kernel)):
        starts: list[int] = [0, 0]
        stops: list[int | None] = [None, None]
        for place, spacing, span in zip(tap, window.dilation, window.span, strict=True):
            start = place * spacing
            rest = span - 1 - start  # what the later places reach over
            starts.append(start)
            stops.append(-rest if rest else None)
        steps = (1, 1, *window.stride)
        yield g.slice(x, starts=tuple(starts), stops=tuple(stops), steps=steps)


@common("conv")
def conv(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x, w, *bias = inputs
    window = op.window(w.shape.dims)
    result = promote(*[v.shape.dtype for v in inputs])
    taps = list(_taps(g, _padded(g, wide(g, x), window, 0.0), window))
    batch, _, *counts = taps[0].shape.dims
    places = taps[0].shape.with_dims(counts).num_elements
    out, per_group = w.shape.dims[:2]
    # [B, G, C/G, taps, places] · [G, O/G, C/G·taps]
    shifted = [g.reshape(t, shape=(batch, op.groups, per_group, 1, places)) for t in taps]
    joined = g.concat(*shifted, axis=3)
    joined = g.reshape(joined, shape=(batch, op.groups, per_group * len(taps), places))
    weight = g.reshape(
        wide(g, w), shape=(op.groups, out // op.groups, per_group * prod(window.kernel))
    )
    y = g.reshape(g.matmul(weight, joined), shape=(batch, out, *counts))
    if bias:
        y = g.add(y, g.reshape(wide(g, bias[0]), shape=(out, *[1] * len(counts))))
    return cast(g, y, result)


@common("conv_transpose")
def conv_transpose(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    """A plain convolution with the kernel turned round, over x with zeros between its elements."""
    x, w, *bias = inputs
    rank = x.shape.rank - 2
    window, extra = op.window(w.shape.dims), op.extra(rank)
    result = promote(*[v.shape.dtype for v in inputs])
    y = wide(g, x)
    for i, step in enumerate(window.stride):
        y = _stretched(g, y, i + 2, step)
        y = _fringed(
            g,
            y,
            i + 2,
            window.span[i] - 1 - window.low[i],
            window.span[i] - 1 - window.high[i] + extra[i],
        )
    c, out, *kernel = w.shape.dims
    weight = g.flip(wide(g, w), axis=tuple(range(2, 2 + rank)))
    weight = g.reshape(weight, shape=(op.groups, c // op.groups, out, *kernel))
    weight = g.transpose(weight, axes=(0, 2, 1, *range(3, 3 + rank)))
    weight = g.reshape(weight, shape=(out * op.groups, c // op.groups, *kernel))
    made = g.conv(
        y, weight, *[wide(g, b) for b in bias], dilation=window.dilation, groups=op.groups
    )
    return cast(g, made, result)


def _stretched(g: Graph, x: Value, axis: int, step: int) -> Value:
    """`step - 1` zeros between neighbours along an axis."""
    if step == 1:
        return x
    dims = x.shape.dims
    n = dims[axis]
    y = g.reshape(x, shape=(*dims[: axis + 1], 1, *dims[axis + 1 :]))
    high = tuple(step - 1 if i == axis + 1 else 0 for i in range(x.shape.rank + 1))
    y = g.pad(y, low=(0,) * len(high), high=high)
    y = g.reshape(y, shape=(*dims[:axis], n * step, *dims[axis + 1 :]))
    return g.narrow(y, axis=axis, start=0, length=n * step - (step - 1))


def _fringed(g: Graph, x: Value, axis: int, low: int, high: int) -> Value:
    """Zeros added at both ends of an axis, or elements taken away where a count is negative."""
    zeros = [tuple(max(n, 0) if i == axis else 0 for i in range(x.shape.rank)) for n in (low, high)]
    if any(map(any, zeros)):
        x = g.pad(x, low=zeros[0], high=zeros[1])
    if low < 0 or high < 0:
        length = x.shape.dims[axis] + min(low, 0) + min(high, 0)
        x = g.narrow(x, axis=axis, start=max(-low, 0), length=length)
    return x


@common("depthwise_conv1d_causal")
def depthwise_conv1d_causal(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    return blocks.DepthwiseConv1dCausal().fusable(g, *inputs)


@common("max_pool")
def max_pool(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (x,) = inputs
    window = op.window(x.shape.rank - 2)
    element = x.shape.dtype
    lowest = float(np.iinfo(element.numpy).min) if element.is_integer else -np.inf
    return reduce(g.maximum, _taps(g, _padded(g, x, window, lowest), window))


@common("avg_pool")
def avg_pool(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x = wide(g, inputs[0])
    window = op.window(x.shape.rank - 2)
    total = reduce(g.add, _taps(g, _padded(g, x, window, 0.0), window))
    number: Value = g.constant(prod(window.kernel), x.shape.dtype)
    if not op.count_include_pad:
        ones = g.expand(g.constant(1, x.shape.dtype), shape=(1, 1, *x.shape.dims[2:]))
        number = reduce(g.add, _taps(g, _padded(g, ones, window, 0.0), window))
    return cast(g, g.div(total, number), inputs[0].shape.dtype)


@common("resize")
def resize(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (x,) = inputs
    y = x if op.mode == "nearest" else wide(g, x)
    for axis, size in enumerate(op.sizes, start=2):
        y = _nearest(g, y, axis, size) if op.mode == "nearest" else _linear(g, op, y, axis, size)
    return cast(g, y, x.shape.dtype)


def _nearest(g: Graph, x: Value, axis: int, size: Dim) -> Any:
    place = g.iota(shape=(size,), dtype=i64)
    n, count = size_value(g, x.shape.dims[axis], place), size_value(g, size, place)
    return g.gather(x, g.floor_div(g.mul(place, n), count), axis=axis)


def _linear(g: Graph, op: Any, x: Value, axis: int, size: Dim) -> Any:
    """Between the elements below and above each position, which is f64."""
    place = cast(g, g.iota(shape=(size,), dtype=i64), f64)
    n, count = size_value(g, x.shape.dims[axis], place), size_value(g, size, place)
    one = g.constant(1, f64)
    last = g.maximum(g.sub(n, one), g.constant(0, f64))
    if op.align_corners:
        at = g.mul(place, g.div(g.sub(n, one), g.maximum(g.sub(count, one), one)))
    else:
        at = g.sub(g.div(g.mul(g.add(place, 0.5), n), g.maximum(count, one)), 0.5)
        at = g.minimum(g.maximum(at, g.constant(0, f64)), last)
    below = g.minimum(g.floor(at), last)
    above = g.minimum(g.add(below, one), last)
    dims = (size, *[1] * (x.shape.rank - axis - 1))
    part = g.reshape(cast(g, g.sub(at, below), x.shape.dtype), shape=dims)
    low, high = (g.gather(x, cast(g, i, i64), axis=axis) for i in (below, above))
    return g.add(g.mul(low, g.sub(1.0, part)), g.mul(high, part))
