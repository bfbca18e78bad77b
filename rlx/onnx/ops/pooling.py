"""Pooling over windows and over all positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import rlx.numpy as xp
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.ops.convolution import windows
from rlx.onnx.table import op

MOST_TAPS = 4096


class Window(NamedTuple):
    """Where a kernel is put: padding, and how many windows each axis has."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    low: list[int]
    high: list[int]
    counts: list[Any]
    more: list[Any]  # elements past the padding that the last window covers, by ceil_mode

    @property
    def is_plain(self) -> bool:
        """Whether the pooling ops of graphs have this window."""
        fits = len(self.kernel) <= 2 and all(d == 1 for d in self.dilations)
        return fits and all(type(n) is int and n == 0 for n in self.more)


def window_of(node: Call, sizes: tuple[Any, ...]) -> Window:
    kernel = tuple(node.ints("kernel_shape"))
    if len(kernel) != len(sizes) or any(k < 1 for k in kernel):
        raise node.fault("a kernel that does not fit", got=list(kernel), expected=len(sizes))
    strides, dilations, low, high = windows(node, kernel, sizes)
    counts, more = [], []
    up = node.int("ceil_mode", 0)
    rows = zip(sizes, kernel, strides, dilations, low, high, strict=True)
    for n, k, s, d, a, b in rows:
        span = (k - 1) * d + 1
        room = n + (a + b - span)
        count = (room + (s - 1 if up else 0)) // s + 1
        if up:  # a window begins inside the tensor or the padding before it
            count = count - 1 if (count - 1) * s >= n + a else count
        extra = (count - 1) * s + span - (n + a + b)
        more.append(extra if up and extra > 0 else 0)
        counts.append(count)
    return Window(kernel, strides, dilations, low, high, counts, more)


def taps(x: Array, window: Window, value: Any, outside: Any = None) -> Iterator[Array]:
    """For each element of the kernel, what it meets in every window."""
    if math.prod(window.kernel) > MOST_TAPS:
        window_size = math.prod(window.kernel)
        raise ValueError(f"a window of {window_size} elements")
    wide = _padded(x, window.low, window.high, value)
    if any(not (type(n) is int and n == 0) for n in window.more):
        wide = _padded(wide, [0] * len(window.low), window.more, value if outside is None
                       else outside)  # fmt: skip
    for offsets in product(*map(range, window.kernel)):
        key: list[Any] = [slice(None), slice(None)]
        rows = zip(offsets, window.dilations, window.strides, window.counts, strict=True)
        for k, d, s, count in rows:
            key.append(slice(k * d, k * d + (count - 1) * s + 1, s))
        yield wide[tuple(key)]


def _axis_by_axis(combine: Any, x: Array, window: Window, value: Any) -> Any:
    """Windows folded along one axis after the other."""
    rank = len(window.kernel)
    for axis in range(rank):

        def one(given: Any, nothing: Any, axis: int = axis) -> list[Any]:
            return [n if i == axis else nothing for i, n in enumerate(given)]

        part = Window(
            tuple(one(window.kernel, 1)), tuple(one(window.strides, 1)),
            tuple(one(window.dilations, 1)), one(window.low, 0), one(window.high, 0),
            [n if i == axis else x.shape[i + 2] for i, n in enumerate(window.counts)],
            one(window.more, 0),
        )  # fmt: skip
        made: Any = None
        for tap in taps(x, part, value):
            made = tap if made is None else combine(made, tap)
        x = made
    return x


def _padded(x: Array, low: list[Any], high: list[Any], value: Any) -> Array:
    from rlx.numpy.trace import Size

    if any(isinstance(n, Size) for n in high):
        for axis, n in enumerate(high, 2):
            shape = list(x.shape)
            shape[axis] = n
            x = xp.concat([x, xp.full(tuple(shape), value, dtype=x.dtype)], axis=axis)
        return x
    if not any([*low, *high]):
        return x
    return graph_op("pad", x, low=(0, 0, *low), high=(0, 0, *high), value=value)


@op("AveragePool")
def average_pool(node: Call, x: Array) -> Any:
    window = window_of(node, x.shape[2:])
    counted = bool(node.int("count_include_pad", 0))
    if window.is_plain and x.dtype.is_float:
        return graph_op(
            "avg_pool", x, kernel=window.kernel, stride=tuple(window.strides),
            padding=(*window.low, *window.high), count_include_pad=counted,
        )  # fmt: skip
    total = _axis_by_axis(xp.add, x, window, 0.0)
    ones = xp.ones((1, 1, *x.shape[2:]), dtype=x.dtype)
    padded = _padded(ones, window.low, window.high, 1.0) if counted else ones
    plain = window._replace(low=[0] * len(window.low), high=[0] * len(window.high))
    return total / _axis_by_axis(xp.add, padded, plain if counted else window, 0.0)


@op("MaxPool")
def max_pool(node: Call, x: Array) -> Any:
    window = window_of(node, x.shape[2:])
    if window.is_plain and not node.wants(1):
        return graph_op(
            "max_pool", x, kernel=window.kernel, stride=tuple(window.strides),
            padding=(*window.low, *window.high),
        )  # fmt: skip
    lowest = -np.inf if x.dtype.is_float else int(np.iinfo(x.dtype.numpy).min)
    if not node.wants(1):
        return _axis_by_axis(xp.maximum, x, window, lowest)
    return _with_positions(node, x, window, lowest)


def _with_positions(node: Call, x: Array, window: Window, lowest: Any) -> tuple[Array, Array]:
    """The greatest elements, and where each is in the flat tensor."""
    spatial = x.shape[2:]
    order = range(len(spatial))
    numbers = xp.zeros(spatial, dtype=xp.int64)
    axes = order if not node.int("storage_order", 0) else reversed(order)
    for axis in axes:
        shape = [1] * len(spatial)
        shape[axis] = -1
        numbers = numbers * spatial[axis] + xp.reshape(xp.arange(spatial[axis]), tuple(shape))
    per = 1
    for n in spatial:
        per = per * n
    base = xp.reshape(xp.arange(x.shape[0] * x.shape[1]) * per, (*x.shape[:2], *[1] * len(spatial)))
    flat = base + numbers
    best: Any = None
    where: Any = None
    for tap, at in zip(taps(x, window, lowest), taps(flat, window, -1), strict=True):
        if best is None:
            best, where = tap, at
        else:
            better = xp.logical_or(
                xp.greater(tap, best), xp.logical_and(xp.less(where, 0), xp.greater_equal(at, 0))
            )
            best, where = xp.where(better, tap, best), xp.where(better, at, where)
    return best, where


@op("LpPool")
def lp_pool(node: Call, x: Array) -> Array:
    p, window = node.int("p", 2), window_of(node, x.shape[2:])
    return xp.pow(_axis_by_axis(xp.add, xp.pow(xp.abs(x), float(p)), window, 0.0), 1.0 / p)


@op("GlobalAveragePool")
def global_average_pool(node: Call, x: Array) -> Array:
    return graph_op("mean", x, axis=tuple(range(2, x.ndim)), keepdims=True)


@op("GlobalMaxPool")
def global_max_pool(node: Call, x: Array) -> Array:
    return graph_op("max", x, axis=tuple(range(2, x.ndim)), keepdims=True)


@op("GlobalLpPool")
def global_lp_pool(node: Call, x: Array) -> Array:
    p = float(node.int("p", 2))
    powers = xp.pow(xp.abs(x), p)
    return xp.pow(graph_op("sum", powers, axis=tuple(range(2, x.ndim)), keepdims=True), 1.0 / p)
