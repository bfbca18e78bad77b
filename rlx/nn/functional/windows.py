"""Pooling, resizing, padding and shuffling of x [B, C, …] with one, two or three spatial axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlx.errors import OptionError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.nn.functional.operands import (
    ArrayLike,
    Sizes,
    call,
    fixed,
    per_axis,
    require_option,
    require_rank,
    sizes_of,
)
from rlx.numpy.array import Array, Tracer
from rlx.numpy.dispatch import as_array
from rlx.numpy.trace import Size, dim_of

Axes = int | Sequence[int]
Numbers = tuple[int, ...]


def _by_depth(
    g: Graph, x: Value, plane: Callable[[Value], Any], depth: Callable[[Value], Any]
) -> Any:
    """Pooling over three axes: over the last two, then over the depth."""
    batch, channels, d, *_ = x.shape.dims
    rows = g.reshape(g.transpose(x, (0, 2, 1, 3, 4)), (batch * d, channels, *x.shape.dims[3:]))
    y = plane(rows)
    height, width = y.shape.dims[2:]
    y = g.reshape(y, (batch, d, channels, height * width))
    y = g.reshape(g.transpose(y, (0, 3, 2, 1)), (batch * height * width, channels, d))
    y = depth(y)
    y = g.reshape(y, (batch, height, width, channels, y.shape.dims[2]))
    return g.transpose(y, (0, 3, 4, 1, 2))


def _pool(
    g: Graph, x: Value, op: str, kernel: Numbers, stride: Numbers, padding: Numbers,
    options: tuple[bool, ...],
) -> Any:  # fmt: skip
    def over(axes: slice) -> Callable[[Value], Any]:
        parts = kernel[axes], stride[axes], padding[axes]
        return lambda v: getattr(g, op)(v, *parts, *options)

    if x.shape.rank == 5:
        return _by_depth(g, x, over(slice(1, 3)), over(slice(0, 1)))
    return over(slice(None))(x)


def _pooled(
    x: ArrayLike, rank: int, op: str, kernel: Axes, stride: Axes | None, padding: Axes,
    *options: bool,
) -> Array:  # fmt: skip
    where = f"{op}{rank}d"
    made = require_rank(x, (rank + 2,), where, f"[batch, channels] and {rank} spatial axes")
    window = per_axis(kernel, rank, where)
    step = window if stride is None else per_axis(stride, rank, where)
    return call(_pool, [made], op, window, step, per_axis(padding, rank, where), options)


def max_pool1d(
    x: ArrayLike, kernel_size: Axes, stride: Axes | None = None, padding: Axes = 0
) -> Array:
    """The largest element of each window of x [B, C, n]; the stride is the window by default."""
    return _pooled(x, 1, "max_pool", kernel_size, stride, padding)


def max_pool2d(
    x: ArrayLike, kernel_size: Axes, stride: Axes | None = None, padding: Axes = 0
) -> Array:
    """The largest element of each window of x [B, C, h, w]."""
    return _pooled(x, 2, "max_pool", kernel_size, stride, padding)


def max_pool3d(
    x: ArrayLike, kernel_size: Axes, stride: Axes | None = None, padding: Axes = 0
) -> Array:
    """The largest element of each window of x [B, C, d, h, w]."""
    return _pooled(x, 3, "max_pool", kernel_size, stride, padding)


def avg_pool1d(
    x: ArrayLike, kernel_size: Axes, stride: Axes | None = None, padding: Axes = 0,
    count_include_pad: bool = True,
) -> Array:  # fmt: skip
    """The mean of each window of x [B, C, n]; padding counts as zeros, or not at all."""
    return _pooled(x, 1, "avg_pool", kernel_size, stride, padding, count_include_pad)


def avg_pool2d(
    x: ArrayLike, kernel_size: Axes, stride: Axes | None = None, padding: Axes = 0,
    count_include_pad: bool = True,
) -> Array:  # fmt: skip
    """The mean of each window of x [B, C, h, w]."""
    return _pooled(x, 2, "avg_pool", kernel_size, stride, padding, count_include_pad)


def avg_pool3d(
    x: ArrayLike, kernel_size: Axes, stride: Axes | None = None, padding: Axes = 0,
    count_include_pad: bool = True,
) -> Array:  # fmt: skip
    """The mean of each window of x [B, C, d, h, w]."""
    return _pooled(x, 3, "avg_pool", kernel_size, stride, padding, count_include_pad)


# -- adaptive ---------------------------------------------------------------------------------


def _bins(g: Graph, size: Dim, count: int) -> tuple[Value, Value]:
    """Which elements of an axis fall into each bin: first and end, [count, 1]. Bin i has elements
    ⌊i·n / count⌋ … ⌈(i + 1)·n / count⌉ − 1."""
    at = g.iota((count, 1), dtype=i64)
    n = g.dim_value(size, dtype=i64)
    first = g.floor_div(g.mul(at, n), count)
    end = g.floor_div(g.add(g.mul(g.add(at, 1), n), count - 1), count)
    return first, end


def _adaptive(
    g: Graph, x: Value, axes: Numbers, counts: Numbers, even: tuple[bool, ...], sizes: Sizes,
    largest: bool,
) -> Any:  # fmt: skip
    x = fixed(g, x, sizes)
    for axis, count, is_even in zip(axes, counts, even, strict=True):
        x = (_even_bins if is_even else _uneven_bins)(g, x, axis, count, largest)
    return x


def _even_bins(g: Graph, x: Value, axis: int, count: int, largest: bool) -> Any:
    """Bins that do not overlap: an axis in `count` parts."""
    dims = x.shape.dims
    parts = g.reshape(x, (*dims[:axis], count, dims[axis] // count, *dims[axis + 1 :]))
    return (g.max if largest else g.mean)(parts, axis=(axis + 1,))


def _uneven_bins(g: Graph, x: Value, axis: int, count: int, largest: bool) -> Any:
    dtype, rank = x.shape.dtype, x.shape.rank
    last = g.transpose(x, _last(rank, axis))
    *lead, size = last.shape.dims
    row = g.reshape(last, (*lead, 1, size))
    first, end = _bins(g, size, count)
    position = g.iota((size,), dtype=i64)
    inside = g.logical_and(g.ge(position, first), g.lt(position, end))
    if largest:
        y = g.max(g.where(inside, row, float("-inf")), axis=(-1,))
    else:
        total = g.sum(g.where(inside, row, 0.0), axis=(-1,))
        y = g.div(total, g.reshape(g.cast(g.sub(end, first), dtype), (count,)))
    return g.transpose(y, _back(rank, axis))


def _last(rank: int, axis: int) -> Numbers:
    return (*[a for a in range(rank) if a != axis], axis)


def _back(rank: int, axis: int) -> Numbers:
    order = _last(rank, axis)
    return tuple([order.index(a) for a in range(rank)])


def _adapted(x: ArrayLike, rank: int, output_size: Any, largest: bool) -> Array:
    where = f"adaptive_{'max' if largest else 'avg'}_pool{rank}d"
    made = require_rank(x, (rank + 2,), where, f"[batch, channels] and {rank} spatial axes")
    given = (output_size,) * rank if isinstance(output_size, int) else tuple(output_size)
    if len(given) != rank or any(n is not None and n < 1 for n in given):
        raise ShapeError("not an output size", where=where, got=output_size)
    pairs = [(a + 2, n) for a, n in enumerate(given) if n is not None]
    if not pairs:
        return made
    axes, counts = zip(*pairs, strict=True)
    even = tuple([bool(made.shape[a] % n == 0) for a, n in pairs])
    # inside a trace the sizes stay symbolic: what divides them is a guard
    sizes = (None,) * made.ndim if isinstance(made, Tracer) else sizes_of(made, *axes)
    return call(_adaptive, [made], axes, counts, even, sizes, largest)


def adaptive_avg_pool1d(x: ArrayLike, output_size: int) -> Array:
    """Means over as many windows as the output has elements, x [B, C, n]."""
    return _adapted(x, 1, output_size, False)


def adaptive_avg_pool2d(x: ArrayLike, output_size: int | Sequence[int | None]) -> Array:
    """Means over as many windows as the output has elements, x [B, C, h, w]; None keeps an axis."""
    return _adapted(x, 2, output_size, False)


def adaptive_avg_pool3d(x: ArrayLike, output_size: int | Sequence[int | None]) -> Array:
    """Means over as many windows as the output has elements, x [B, C, d, h, w]."""
    return _adapted(x, 3, output_size, False)


def adaptive_max_pool1d(x: ArrayLike, output_size: int) -> Array:
    """The largest elements of as many windows as the output has elements, x [B, C, n]."""
    return _adapted(x, 1, output_size, True)


def adaptive_max_pool2d(x: ArrayLike, output_size: int | Sequence[int | None]) -> Array:
    """The largest elements of as many windows as the output has elements, x [B, C, h, w]."""
    return _adapted(x, 2, output_size, True)


# -- sizes ------------------------------------------------------------------------------------


def _resize(g: Graph, x: Value, *options: Any) -> Any:
    *sizes, mode, align = options
    return g.resize(x, tuple(sizes), mode=mode, align_corners=align)


def interpolate(
    x: ArrayLike, size: int | Sequence[int] | None = None, scale_factor: int | None = None,
    mode: str = "nearest", align_corners: bool = False,
) -> Array:  # fmt: skip
    """The spatial axes of x [B, C, …] (one or two) brought to a size, or to a multiple.

    "nearest" takes element ⌊i·n / size⌋, "linear" (or "bilinear") interpolates.
    """
    made = require_rank(x, (3, 4), "interpolate", "[batch, channels] and 1 or 2 spatial axes")
    require_option(mode, ("nearest", "linear", "bilinear"), "interpolate.mode")
    if (size is None) == (scale_factor is None):
        raise OptionError("a size or a scale_factor", where="interpolate", got=repr(size))
    if scale_factor is not None:
        wanted: tuple[Any, ...] = tuple([n * scale_factor for n in made.shape[2:]])
    elif isinstance(size, (int, Size)):
        wanted = (size,) * (made.ndim - 2)
    else:
        assert size is not None
        wanted = tuple(size)
    kind = "nearest" if mode == "nearest" else "linear"
    dims = [dim_of(n) for n in wanted]
    return call(_resize, [made], *dims, kind, bool(align_corners))


def _pad(g: Graph, x: Value, low: Numbers, high: Numbers, value: float, mode: str) -> Any:
    return g.pad(x, low, high, value=value, mode=mode)


def pad(x: ArrayLike, padding: Sequence[int], mode: str = "constant", value: float = 0.0) -> Array:
    """Elements added around the last axes: (low, high) of the last axis, then of the one before, as
    in PyTorch. Modes: constant, reflect, replicate (or edge)."""
    made = as_array(x)
    if len(padding) % 2 or len(padding) > 2 * made.ndim or any(n < 0 for n in padding):
        raise ShapeError(
            "not pairs of padding", where="pad", got=tuple(padding),
            expected=f"(low, high) for up to {made.ndim} axes, from the last one on",
        )  # fmt: skip
    require_option(mode, ("constant", "reflect", "replicate", "edge"), "pad.mode")
    low, high = [0] * made.ndim, [0] * made.ndim
    for i in range(len(padding) // 2):
        low[-1 - i], high[-1 - i] = padding[2 * i], padding[2 * i + 1]
    chosen = "edge" if mode == "replicate" else mode
    return call(_pad, [made], tuple(low), tuple(high), float(value), chosen)


def _shuffle(g: Graph, x: Value, factor: int, up: bool, sizes: Sizes) -> Any:
    x = fixed(g, x, sizes)
    batch, channels, height, width = x.shape.dims
    if up:
        out = channels // (factor * factor)
        y = g.reshape(x, (batch, out, factor, factor, height, width))
        y = g.transpose(y, (0, 1, 4, 2, 5, 3))
        return g.reshape(y, (batch, out, height * factor, width * factor))
    y = g.reshape(x, (batch, channels, height // factor, factor, width // factor, factor))
    y = g.transpose(y, (0, 1, 3, 5, 2, 4))
    dims = (batch, channels * factor * factor, height // factor, width // factor)
    return g.reshape(y, dims)


def pixel_shuffle(x: ArrayLike, upscale_factor: int) -> Array:
    """[B, C·r², h, w] as [B, C, h·r, w·r]."""
    made = require_rank(x, (4,), "pixel_shuffle", "[batch, channels, height, width]")
    return call(_shuffle, [made], int(upscale_factor), True, sizes_of(made, 1))


def pixel_unshuffle(x: ArrayLike, downscale_factor: int) -> Array:
    """[B, C, h·r, w·r] as [B, C·r², h, w]."""
    made = require_rank(x, (4,), "pixel_unshuffle", "[batch, channels, height, width]")
    return call(_shuffle, [made], int(downscale_factor), False, sizes_of(made, 2, 3))
