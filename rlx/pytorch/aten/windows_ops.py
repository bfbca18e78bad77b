"""Pooling and resizing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import UnsupportedError
from rlx.ir.dtype import f64, i64
from rlx.ir.node import Value
from rlx.ir.ops.conv import make_window, padded, window_taps
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering

Numbers = tuple[int, ...]


def _spread(given: Any, rank: int) -> Numbers:
    numbers = [int(n) for n in given] if isinstance(given, (list, tuple)) else [int(given)]
    return tuple(numbers * rank if len(numbers) == 1 else numbers)


def _geometry(
    low: Lowering, x: Value, out: Value | Any, kernel: Any, stride: Any, padding: Any,
    ceil_mode: bool,
) -> tuple[Numbers, Numbers, Numbers]:  # fmt: skip
    """Kernel, stride and padding, before and behind: with `ceil_mode` there is more behind."""
    rank = len(kernel) if isinstance(kernel, (list, tuple)) and len(kernel) > 1 else x.shape.rank
    rank = min(rank, x.shape.rank - 1, 2)
    size, pads = _spread(kernel, rank), _spread(padding, rank)
    step = _spread(stride, rank) if stride else size
    behind = []
    for i in range(rank):
        n, count = x.shape.dims[-rank + i], out[-rank + i]
        floor = (n + (2 * pads[i] - size[i])) // step[i] + 1
        more = 0
        if ceil_mode and floor != count:  # one window more, which begins inside x or its padding
            span = (low.number(count, "pooling") - 1) * step[i] + size[i]
            more = span - low.number(n, "pooling") - 2 * pads[i]
        behind.append(pads[i] + more)
    return size, step, (*pads, *behind)


def _adopted(low: Lowering, made: Value) -> Value:
    """The result with PyTorch's rank. Its sizes are quotients of quotients, which PyTorch writes in
    another form: from here on that form means these dims."""
    value = low.node.meta["val"]
    shape = (value[0] if isinstance(value, (tuple, list)) else value).shape
    rank = len(shape)
    dims = made.shape.dims[-rank:]
    for ours, theirs in zip(dims, shape, strict=True):
        low.sizes.adopt(theirs, ours)
    return low.reshape(made, dims)


def _with_batch(low: Lowering, x: Value, rank: int) -> Value:
    return x if x.shape.rank == rank + 2 else low.reshape(x, (1, *x.shape.dims))


@aten("max_pool2d.default", "max_pool1d.default")
def max_pool(
    low: Lowering, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Value:  # fmt: skip
    if set(_spread(dilation, 1)) != {1}:
        raise UnsupportedError("pooling with holes", where="max_pool", got=dilation)
    size, step, pads = _geometry(low, x, low.out.dims, kernel, stride, padding, ceil_mode)
    made = low.g.max_pool(_with_batch(low, x, len(size)), kernel=size, stride=step, padding=pads)
    return _adopted(low, made)


@aten("max_pool2d_with_indices.default")
def max_pool_with_indices(
    low: Lowering, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Value, Value | None]:  # fmt: skip
    """With the place of each largest element in its image, where that is asked for."""
    y = max_pool(low, x, kernel, stride, padding, dilation, ceil_mode)
    if not low.uses(1):
        return y, None
    size, step, pads = _geometry(low, x, low.out.dims, kernel, stride, padding, ceil_mode)
    g, batched = low.g, _with_batch(low, x, 2)
    window = make_window(size, step, pads, (1,))
    height, width = batched.shape.dims[2:]
    index = g.reshape(g.iota((height * width,), dtype=i64), shape=(1, 1, height, width))
    places = list(window_taps(g, padded(g, index, window, -1.0), window))
    taps = list(window_taps(g, padded(g, batched, window, float("-inf")), window))
    largest, found = low.reshape(y, (*batched.shape.dims[:2], *y.shape.dims[-2:])), None
    for tap, place in reversed(list(zip(taps, places, strict=True))):  # the first wins
        hit = g.logical_or(g.eq(tap, largest), g.ne(tap, tap))
        found = place if found is None else g.where(hit, place, found)
    assert found is not None
    found = low.expand(found, largest.shape.dims)
    return y, low.reshape(found, low.out.dims)


@aten("max_pool2d_with_indices_backward.default")
def max_pool_backward(
    low: Lowering, gradient: Value, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, indices: Value,
) -> Value:  # fmt: skip
    size, step, pads = _geometry(low, x, gradient.shape.dims, kernel, stride, padding, ceil_mode)
    images, cotangent = _with_batch(low, x, 2), _with_batch(low, gradient, 2)
    made = low.g.max_pool_backward(images, cotangent, kernel=size, stride=step, padding=pads)
    return low.reshape(made, x.shape.dims)


@aten("avg_pool2d.default", "avg_pool1d.default")
def avg_pool(
    low: Lowering, x: Value, kernel: Any, stride: Any = (), padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: Any = None,
) -> Value:  # fmt: skip
    size, step, pads = _geometry(low, x, low.out.dims, kernel, stride, padding, ceil_mode)
    rank = len(size)
    if pads[:rank] != pads[rank:] and (count_include_pad or divisor_override):
        raise UnsupportedError("a window that ends behind the padding", where="avg_pool",
                               got="ceil_mode", expected="count_include_pad=False")  # fmt: skip
    made = low.g.avg_pool(
        _with_batch(low, x, rank), kernel=size, stride=step, padding=pads,
        count_include_pad=bool(count_include_pad) or bool(divisor_override),
    )  # fmt: skip
    if divisor_override:
        made = low.g.mul(made, int(np.prod(size)) / divisor_override)
    return _adopted(low, made)


@aten("avg_pool2d_backward.default")
def avg_pool_backward(
    low: Lowering, gradient: Value, x: Value, kernel: Any, stride: Any, padding: Any,
    ceil_mode: bool, count_include_pad: bool, divisor_override: Any,
) -> Value:  # fmt: skip
    from rlx.pytorch.aten.gradient_ops import pulled_back

    size, step, pads = _geometry(low, x, gradient.shape.dims, kernel, stride, padding, ceil_mode)
    if divisor_override or pads[:2] != pads[2:]:
        raise UnsupportedError("a divisor of its own", where="avg_pool2d_backward",
                               got=divisor_override)  # fmt: skip
    made = low.g.avg_pool(_with_batch(low, x, 2), kernel=size, stride=step, padding=pads,
                          count_include_pad=bool(count_include_pad))  # fmt: skip
    found = pulled_back(low, made.node, _with_batch(low, gradient, 2))[0]
    return low.reshape(found, x.shape.dims)


# -- adaptive ---------------------------------------------------------------------------------


@aten(
    "_adaptive_avg_pool2d.default", "adaptive_avg_pool2d.default", "adaptive_avg_pool1d.default",
    "_adaptive_avg_pool3d.default", "adaptive_avg_pool3d.default",
)  # fmt: skip
def adaptive_avg_pool(low: Lowering, x: Value, counts: Sequence[Any]) -> Value:
    """Means over as many bins as the result has elements, axis by axis."""
    rank = len(counts)
    axes = range(x.shape.rank - rank, x.shape.rank)
    targets = [low.out.dims[a] for a in axes]
    if all(n == 1 for n in targets):
        return low.g.mean(x, axis=tuple(axes), keepdims=True)
    for axis, target in zip(axes, targets, strict=True):
        x = _bins(low, x, axis, target)
    return x


def _bins(low: Lowering, x: Value, axis: int, target: Any) -> Value:
    size = x.shape.dims[axis]
    if size == target:
        return x
    dims, number = x.shape.dims, low.number(target, "adaptive_avg_pool2d")
    part = size // number
    if part * number == size:
        split = low.reshape(x, (*dims[:axis], number, part, *dims[axis + 1 :]))
        return low.g.mean(split, axis=(axis + 1,))
    return _weighted(low, x, axis, _bin_weights(low.number(size, "adaptive_avg_pool2d"), number))


def _bin_weights(size: int, count: int) -> np.ndarray[Any, Any]:
    """Row i has 1 / k at the k elements of bin i: ⌊i·n / count⌋ … ⌈(i + 1)·n / count⌉ − 1."""
    made = np.zeros((count, size))
    for i in range(count):
        first, end = i * size // count, -(-(i + 1) * size // count)
        made[i, first:end] = 1 / (end - first)
    return made


def _weighted(low: Lowering, x: Value, axis: int, weights: np.ndarray[Any, Any]) -> Value:
    """Sums along an axis by the rows of a matrix: a product."""
    order = [a for a in range(x.shape.rank) if a != axis] + [axis]
    last = low.g.transpose(x, axes=order)
    matrix = low.g.constant(weights.T.astype(x.shape.dtype.numpy), x.shape.dtype)
    made = low.g.matmul(last, matrix)
    return low.g.transpose(made, axes=[order.index(a) for a in range(x.shape.rank)])


# -- resizing ---------------------------------------------------------------------------------


def _require_whole(low: Lowering, x: Value, scales: Any) -> None:
    """PyTorch computes with a given scale; that is ours where it is the ratio of the sizes."""
    for i, scale in enumerate(scales or ()):
        n, size = x.shape.dims[2 + i], low.out.dims[2 + i]
        if scale is None or (isinstance(n, int) and isinstance(size, int) and n * scale == size):
            continue
        if float(scale).is_integer() and n * int(scale) == size:
            continue
        raise UnsupportedError("a scale that is not the ratio of the sizes", where="upsample",
                               got=scale, expected=f"{size} / {n}")  # fmt: skip


@aten("upsample_nearest2d.vec", "upsample_nearest1d.vec")
def upsample_nearest(low: Lowering, x: Value, size: Any, scales: Any) -> Value:
    _require_whole(low, x, scales)
    return low.g.resize(x, sizes=low.out.dims[2:], mode="nearest")


@aten("upsample_bilinear2d.vec", "upsample_linear1d.vec")
def upsample_bilinear(
    low: Lowering, x: Value, size: Any, align_corners: bool, scales: Any
) -> Value:
    _require_whole(low, x, scales)
    return low.g.resize(x, sizes=low.out.dims[2:], mode="linear", align_corners=bool(align_corners))


@aten("upsample_bicubic2d.vec")
def upsample_bicubic(low: Lowering, x: Value, size: Any, align_corners: bool, scales: Any) -> Value:
    """Four neighbours along each axis by Keys' kernel with a = −3/4: two products."""
    _require_whole(low, x, scales)
    for axis in (2, 3):
        n = low.number(x.shape.dims[axis], "upsample_bicubic2d")
        count = low.number(low.out.dims[axis], "upsample_bicubic2d")
        x = _weighted(low, x, axis, _cubic_weights(n, count, bool(align_corners)))
    return x


def _cubic_weights(n: int, count: int, align_corners: bool) -> np.ndarray[Any, Any]:
    made = np.zeros((count, n), f64.numpy)
    scale = (n - 1) / max(count - 1, 1) if align_corners else n / count
    for i, tap in product(range(count), range(-1, 3)):
        at = i * scale if align_corners else (i + 0.5) * scale - 0.5
        base = int(np.floor(at))
        away = abs(at - (base + tap))
        a = -0.75
        if away <= 1:
            weight = (a + 2) * away**3 - (a + 3) * away**2 + 1
        else:
            weight = a * away**3 - 5 * a * away**2 + 8 * a * away - 4 * a
        made[i, min(max(base + tap, 0), n - 1)] += weight
    return made
