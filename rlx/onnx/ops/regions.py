"""Regions of images: overlapping boxes, pooling of regions, windows put together or taken apart."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.numpy.array import Array
from rlx.numpy.trace import Size
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.ops.convolution import windows
from rlx.onnx.ops.gather_scatter import scattered
from rlx.onnx.ops.layout import size_list
from rlx.onnx.table import op


@op("NonMaxSuppression", since=10, on_host=True)
def non_max_suppression(
    node: Call, boxes: Any, scores: Any, most: Any = None, overlap: Any = None, least: Any = None
) -> Any:
    """Rows (batch, class, box): the best boxes of each class that do not overlap a better one."""
    limit = 0 if most is None else int(np.reshape(most, -1)[0])
    threshold = 0.0 if overlap is None else float(np.reshape(overlap, -1)[0])
    floor = -np.inf if least is None else float(np.reshape(least, -1)[0])
    if boxes.ndim != 3 or scores.ndim != 3 or scores.shape[2] != boxes.shape[1]:
        raise node.fault("boxes and scores do not fit", got=[list(boxes.shape), list(scores.shape)])
    corners = _corners(boxes, node.int("center_point_box", 0))
    rows = [
        (b, c, i)
        for b, c in product(range(scores.shape[0]), range(scores.shape[1]))
        for i in _kept(corners[b], scores[b, c], limit, threshold, floor)
    ]
    return np.array(rows, np.int64).reshape(-1, 3)


def _corners(boxes: Any, centred: int) -> Any:
    """(y1, x1, y2, x2), the lesser first."""
    if centred:
        x, y, width, height = np.moveaxis(boxes, -1, 0)
        return np.stack([y - height / 2, x - width / 2, y + height / 2, x + width / 2], -1)
    a, b = boxes[..., :2], boxes[..., 2:]
    return np.concatenate([np.minimum(a, b), np.maximum(a, b)], -1)


def _kept(boxes: Any, scores: Any, most: int, threshold: float, floor: float) -> list[int]:
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] > floor]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    while len(order) and len(kept) < most:
        best, order = order[0], order[1:]
        kept.append(int(best))
        low = np.maximum(boxes[best, :2], boxes[order, :2])
        high = np.minimum(boxes[best, 2:], boxes[order, 2:])
        shared = np.prod(np.maximum(high - low, 0), axis=-1)
        union = area[best] + area[order] - shared
        with np.errstate(all="ignore"):
            ratio = np.where(union > 0, shared / union, 0)
        order = order[ratio <= threshold]
    return kept


# -- regions --------------------------------------------------------------------------------------


@op("RoiAlign", since=10)
def roi_align(node: Call, x: Array, rois: Array, batch: Array) -> Array:
    """Each cell of a region is the mean (or the greatest) of places between elements."""
    height, width = node.int("output_height", 1), node.int("output_width", 1)
    ratio = node.int("sampling_ratio", 0)
    default = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    shift = 0.5 if node.text("coordinate_transformation_mode", default) == "half_pixel" else 0.0
    corners = rois * float(node.float("spatial_scale", 1.0)) - shift
    x1, y1, x2, y2 = (corners[:, i] for i in range(4))
    spans = [y2 - y1, x2 - x1]
    if not shift:
        spans = [xp.maximum(s, 1.0) for s in spans]
    if ratio <= 0:
        return _adaptive(node, x, (y1, x1), spans, batch, (height, width))
    axes = [
        _samples(start, span, count, ratio)
        for start, span, count in zip((y1, x1), spans, (height, width), strict=True)
    ]
    values = _bilinear(x, axes[0], axes[1], batch)  # [regions, h, r, w, r, channels]
    if node.text("mode", "avg") == "max":
        made = graph_op("max", values[0], axis=(2, 4), keepdims=False)
    else:
        made = graph_op("mean", values[1], axis=(2, 4), keepdims=False)
    return xp.permute_dims(made, (0, 3, 1, 2))


def _samples(start: Array, span: Array, count: int, ratio: int) -> Array:
    """Places [regions, count, ratio] along an axis."""
    cell = span / count
    grid = (xp.arange(ratio, dtype=start.dtype) + 0.5) / ratio
    index = xp.reshape(xp.arange(count, dtype=start.dtype), (-1, 1)) + grid
    return xp.reshape(start, (-1, 1, 1)) + xp.reshape(cell, (-1, 1, 1)) * index


def _bilinear(x: Array, ys: Array, xs: Array, batch: Array) -> tuple[Array, Array]:
    """(the greatest weighted neighbour, the sum of neighbours) at places ys × xs."""
    height, width = x.shape[2], x.shape[3]
    rows = xp.reshape(xp.permute_dims(x, (0, 2, 3, 1)), (-1, x.shape[1]))
    vertical, horizontal = _neighbours(ys, height), _neighbours(xs, width)
    first = xp.reshape(batch.astype(xp.int64), (-1, 1, 1, 1, 1)) * (height * width)
    best: Any = None
    total: Any = None
    for (y, wy), (z, wz) in product(vertical, horizontal):
        at = first + xp.expand_dims(y, (3, 4)) * width + xp.expand_dims(z, (1, 2))
        weight = xp.expand_dims(wy, (3, 4)) * xp.expand_dims(wz, (1, 2))
        part = graph_op("gather", rows, at, axis=0) * xp.expand_dims(weight, -1)
        best = part if best is None else xp.maximum(best, part)
        total = part if total is None else total + part
    return best, total


def _neighbours(at: Array, size: Any) -> list[tuple[Array, Array]]:
    """The elements around places on an axis with their weights, 0 outside."""
    n = size.as_array(at.dtype) if isinstance(size, Size) else float(size)
    inside = xp.logical_and(at >= -1.0, at <= n).astype(at.dtype)
    clipped = xp.minimum(xp.maximum(at, 0.0), n - 1)
    low = xp.floor(clipped)
    part = clipped - low
    high = xp.minimum(low + 1, n - 1)
    return [
        (low.astype(xp.int64), (1.0 - part) * inside), (high.astype(xp.int64), part * inside)
    ]  # fmt: skip


def _adaptive(
    node: Call, x: Array, starts: Any, spans: Any, batch: Array, counts: tuple[int, int]
) -> Array:
    """With as many places in a cell as it has elements: a number for each region."""
    from rlx.onnx.values import elements_of

    lengths = [np.asarray(elements_of(s)) for s in spans]
    origins = [np.asarray(elements_of(s)) for s in starts]
    regions = []
    for i in range(len(lengths[0])):
        axes = [
            _samples(
                Array(o[i : i + 1]), Array(n[i : i + 1]), count,
                max(int(np.ceil(n[i] / count)), 1),
            )
            for o, n, count in zip(origins, lengths, counts, strict=True)
        ]  # fmt: skip
        values = _bilinear(x, axes[0], axes[1], batch[i : i + 1])
        if node.text("mode", "avg") == "max":
            regions.append(graph_op("max", values[0], axis=(2, 4), keepdims=False))
        else:
            regions.append(graph_op("mean", values[1], axis=(2, 4), keepdims=False))
    if not regions:
        return xp.zeros((0, x.shape[1], *counts), dtype=x.dtype)
    return xp.permute_dims(xp.concat(regions, axis=0), (0, 3, 1, 2))


@op("MaxRoiPool", on_host=True)
def max_roi_pool(node: Call, x: Any, rois: Any) -> Any:
    rows, columns = node.ints("pooled_shape")
    scale = node.float("spatial_scale", 1.0)
    made = np.zeros((len(rois), x.shape[1], rows, columns), x.dtype)
    for out, roi in zip(made, rois, strict=True):
        left, top, right, bottom = np.floor(roi[1:] * scale + 0.5).astype(np.int64)
        height, width = max(bottom - top + 1, 1), max(right - left + 1, 1)
        image = x[int(roi[0])]
        for r, c in product(range(rows), range(columns)):
            y1, y2 = _cell(r, height / rows, top, image.shape[1])
            x1, x2 = _cell(c, width / columns, left, image.shape[2])
            part = image[:, y1:y2, x1:x2]
            if part.size:
                out[:, r, c] = part.max(axis=(1, 2))
    return made


def _cell(i: int, span: float, start: int, size: int) -> tuple[int, int]:
    low, high = int(np.floor(i * span)) + start, int(np.ceil((i + 1) * span)) + start
    return min(max(low, 0), size), min(max(high, 0), size)


# -- windows --------------------------------------------------------------------------------------


@op("Col2Im", since=18, known=(1, 2))
def col2im(node: Call, x: Array, image: Any, block: Any) -> Array:
    """The sum of overlapping blocks, each put where it came from."""
    sizes, kernel = size_list(image), tuple(int(n) for n in np.reshape(block, -1))
    strides, dilations, low, high = windows(node, kernel, tuple(sizes))
    channels = x.shape[1] // int(np.prod(kernel))
    wide = [n + a + b for n, a, b in zip(sizes, low, high, strict=True)]
    counts = [
        (n - (k - 1) * d - 1) // s + 1
        for n, k, d, s in zip(wide, kernel, dilations, strides, strict=True)
    ]
    parts = xp.reshape(x, (x.shape[0], channels, *kernel, *counts))
    index: Any = None
    for axis, (n, k, d, s, count) in enumerate(
        zip(wide, kernel, dilations, strides, counts, strict=True)
    ):
        shape = [1] * (2 * len(kernel))
        shape[axis] = k
        inner = xp.reshape(xp.arange(k) * d, tuple(shape))
        shape = [1] * (2 * len(kernel))
        shape[axis + len(kernel)] = -1
        at = inner + xp.reshape(xp.arange(count) * s, tuple(shape))
        index = at if index is None else index * n + at
    total = 1
    for n in wide:
        total = total * n
    rows = xp.reshape(parts, (x.shape[0] * channels, -1))
    zeros = xp.zeros((total, x.shape[0] * channels), dtype=x.dtype)
    flat = xp.reshape(xp.broadcast_to(index, (*kernel, *counts)), (-1,))
    made = scattered(zeros, flat, xp.matrix_transpose(rows), "add")
    made = xp.reshape(xp.matrix_transpose(made), (x.shape[0], channels, *wide))
    key = [slice(a, a + n) for a, n in zip(low, sizes, strict=True)]
    return made[(slice(None), slice(None), *key)]


@op("MaxUnpool", since=9, known=(2,))
def max_unpool(node: Call, x: Array, indices: Array, shape: Any = None) -> Array:
    """Elements put back where MaxPool found them; zeros elsewhere."""
    kernel = tuple(node.ints("kernel_shape"))
    strides, _, low, high = windows(node, kernel, x.shape[2:])
    inner = [
        (n - 1) * s + k - a - b
        for n, s, k, a, b in zip(x.shape[2:], strides, kernel, low, high, strict=True)
    ]
    inferred = (*x.shape[:2], *inner)
    target = inferred if shape is None else tuple(size_list(shape))
    total: Any = 1
    for n in target:
        total = total * n
    at = xp.reshape(indices.astype(xp.int64), (-1,))
    if shape is not None:  # indices count in the inferred shape
        at = _recounted(at, inferred, target)
    zeros = xp.zeros((total,), dtype=x.dtype)
    return xp.reshape(scattered(zeros, at, xp.reshape(x, (-1,)), "none"), target)


def _recounted(at: Array, before: tuple[Any, ...], after: tuple[Any, ...]) -> Array:
    parts = []
    for n in reversed(before):
        parts.append(xp.remainder(at, n))
        at = xp.floor_divide(at, n)
    total: Any = None
    for part, n in zip(reversed(parts), after, strict=True):
        total = part if total is None else total * n + part
    return total  # type: ignore[no-any-return]


@op("DeformConv", since=19)
def deform_conv(
    node: Call, x: Array, w: Array, offset: Array, bias: Array | None = None,
    mask: Array | None = None,
) -> Array:  # fmt: skip
    """A convolution whose taps are moved by offsets: columns by interpolation, then a product."""
    kernel = tuple(int(n) for n in w.shape[2:])
    if len(kernel) != 2:
        raise node.unsupported("a deformable convolution over other than two axes", len(kernel))
    strides, dilations, low, _ = windows(node, kernel, x.shape[2:])
    groups, shared = node.int("group", 1), node.int("offset_group", 1)
    taps = kernel[0] * kernel[1]
    batch, channels = x.shape[0], int(x.shape[1])
    rows, columns = offset.shape[2], offset.shape[3]
    moves = xp.reshape(offset, (batch, shared, taps, 2, rows, columns))
    places = []
    for axis, count in enumerate((rows, columns)):
        own = np.array([t[axis] for t in product(*map(range, kernel))]) * dilations[axis]
        own = own - low[axis]
        tap = xp.reshape(Array(own.astype(x.dtype.numpy)), (-1, 1, 1))
        shape = (1, -1, 1) if axis == 0 else (1, 1, -1)
        start = xp.reshape(xp.arange(count, dtype=x.dtype) * strides[axis], shape)
        places.append(moves[:, :, :, axis] + (tap + start))
    values = xp.reshape(x, (batch, shared, channels // shared, *x.shape[2:]))
    made = _at_places(values, places)  # [batch, shared, taps, rows, columns, channels / shared]
    if mask is not None:
        made = made * xp.expand_dims(xp.reshape(mask, (batch, shared, taps, rows, columns)), -1)
    made = xp.permute_dims(made, (0, 3, 4, 1, 5, 2))
    made = xp.reshape(made, (batch * rows * columns, groups, channels // groups * taps))
    outputs = int(w.shape[0])
    weights = xp.reshape(w, (groups, outputs // groups, channels // groups * taps))
    product_ = xp.matmul(xp.permute_dims(made, (1, 0, 2)), xp.matrix_transpose(weights))
    y = xp.reshape(xp.permute_dims(product_, (1, 0, 2)), (batch, rows, columns, outputs))
    y = xp.permute_dims(y, (0, 3, 1, 2))
    return y if bias is None else y + xp.reshape(bias, (1, -1, 1, 1))


def _at_places(x: Array, places: list[Array]) -> Array:
    """Interpolated elements of [batch, groups, channels, H, W] at places [batch, groups, …]."""
    batch, groups, channels, height, width = x.shape
    rows = xp.reshape(xp.permute_dims(x, (0, 1, 3, 4, 2)), (-1, channels))
    first = xp.reshape(xp.arange(batch * groups) * (height * width), (batch, groups, 1, 1, 1))
    total: Any = None
    for dy, dx in product((0, 1), (0, 1)):
        index: Any = None
        weight: Any = None
        for place, step, n in ((places[0], dy, height), (places[1], dx, width)):
            size = n.as_array(place.dtype) if isinstance(n, Size) else float(n)
            base = xp.floor(place) + step
            own = 1.0 - xp.abs(place - base)
            inside = xp.logical_and(base >= 0, base <= size - 1)
            own = xp.where(inside, own, xp.zeros_like(own))
            at = xp.minimum(xp.maximum(base, 0.0), size - 1).astype(xp.int64)
            index = at if index is None else index * n + at
            weight = own if weight is None else weight * own
        part = graph_op("gather", rows, index + first, axis=0) * xp.expand_dims(weight, -1)
        total = part if total is None else total + part
    return total  # type: ignore[no-any-return]
