"""Pooling and resizing of `[B, C, *n]` with one or two spatial axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType, f64, i64
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import cast, compute, require_float, rounded, size_value, wide
from rlx.ir.ops.conv import (
    Window,
    make_window,
    padded,
    require_positive,
    spatial_axes,
    window_counts,
    window_taps,
    windows,
)
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


_MOST_REPEATED = 16


class _Pool(Op):
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]

    def check(self) -> None:
        require_positive(f"{self.name}.kernel", self.kernel)
        require_positive(f"{self.name}.padding", self.padding, 0)
        if self.stride:
            require_positive(f"{self.name}.stride", self.stride)

    def window(self, rank: int) -> Window:
        """The geometry over `rank` spatial axes; the default stride is the kernel size."""
        kernel = self.kernel * rank if len(self.kernel) == 1 else self.kernel
        if len(kernel) != rank:
            raise AttributeValueError(
                "kernel does not fit the spatial axes", got=kernel, expected=f"1 or {rank} numbers"
            )
        found = make_window(kernel, self.stride or kernel, self.padding, (1,))
        if any(p >= k for p, k in zip(found.low + found.high, kernel * 2, strict=True)):
            raise AttributeValueError(
                "padding of a whole window", got=self.padding, expected=f"less than {kernel}"
            )
        return found

    def counts(self, x: Shape) -> Shape:
        window = self.window(spatial_axes(x, "x"))
        return x.with_dims((*x.dims[:2], *window_counts(x.dims[2:], window)))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        taps = prod(self.window(inputs[0].rank - 2).kernel)
        traffic = inputs[0].size_bytes + outputs[0].size_bytes
        return Cost(outputs[0].num_elements * taps, traffic)


@op("max_pool")
class MaxPool(_Pool):
    """The largest element of each window; NaN wins, padding never does."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = (0,)

    def infer(self, x: Shape) -> Shape:
        if not (x.dtype.is_float or x.dtype.is_integer):
            raise DTypeError("x cannot be ordered", got=x, expected="a float or integer type")
        return self.counts(x)

    def reference(self, x: Array) -> Array:
        wide = compute(x)
        rank = x.ndim - 2
        lowest = -np.inf if wide.dtype.kind == "f" else np.iinfo(wide.dtype).min
        view = windows(wide, self.window(rank), lowest)
        return view.max(axis=tuple(range(-rank, 0))).astype(x.dtype)

    def decompose(self, g: Graph, x: Value) -> Any:
        window, element = self.window(x.shape.rank - 2), x.shape.dtype
        lowest = float(np.iinfo(element.numpy).min) if element.is_integer else -np.inf
        return reduce(g.maximum, window_taps(g, padded(g, x, window, lowest), window))


@op("avg_pool")
class AvgPool(_Pool):
    """The mean of each window; padding counts as zeros, or not at all."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = (0,)
    count_include_pad: bool = True

    def infer(self, x: Shape) -> Shape:
        require_float(x, "x")
        return self.counts(x)

    def reference(self, x: Array) -> Array:
        wide = compute(x)
        rank = x.ndim - 2
        window, axes = self.window(rank), tuple(range(-rank, 0))
        total = windows(wide, window, 0).sum(axis=axes)
        number: Any = prod(window.kernel)
        if not self.count_include_pad:
            inside = np.ones((1, 1, *x.shape[2:]), wide.dtype)
            number = windows(inside, window, 0).sum(axis=axes)
        return rounded(total / number, DType.of(x.dtype))

    def decompose(self, g: Graph, x: Value) -> Any:
        real = wide(g, x)
        window, element = self.window(x.shape.rank - 2), real.shape.dtype
        total = reduce(g.add, window_taps(g, padded(g, real, window, 0.0), window))
        number: Any = g.constant(prod(window.kernel), element)
        if not self.count_include_pad:
            ones = g.expand(g.constant(1, element), shape=(1, 1, *x.shape.dims[2:]))
            number = reduce(g.add, window_taps(g, padded(g, ones, window, 0.0), window))
        return cast(g, g.div(total, number), x.shape.dtype)


def _nearest(g: Graph, x: Value, axis: int, size: Dim) -> Any:
    index = g.iota(shape=(size,), dtype=i64)
    n, count = size_value(g, x.shape.dims[axis], index), size_value(g, size, index)
    return g.gather(x, g.floor_div(g.mul(index, n), count), axis=axis)


def _whole_factors(dims: Sequence[Dim], sizes: Sequence[Dim]) -> list[int]:
    """How often the elements of each axis stand in the result, if whole times; else nothing."""
    found = []
    for n, size in zip(dims, sizes, strict=False):
        factor = next((k for k in range(1, _MOST_REPEATED + 1) if same(n * k, size)), 0)
        if not factor or n == 0:
            return []
        found.append(factor)
    return found


def _repeated(g: Graph, x: Value, first: int, factors: Sequence[int]) -> Any:
    """Every element of the axes from `first` on `factor` times."""
    lead, rest = list(x.shape.dims[:first]), list(x.shape.dims[first + len(factors) :])
    dims = x.shape.dims[first : first + len(factors)]
    narrow = [d for n in dims for d in (n, 1)]
    wide = [d for n, k in zip(dims, factors, strict=True) for d in (n, k)]
    y = g.expand(g.reshape(x, shape=(*lead, *narrow, *rest)), shape=(*lead, *wide, *rest))
    sizes = [n * k for n, k in zip(dims, factors, strict=True)]
    return g.reshape(y, shape=(*lead, *sizes, *rest))


@op("resize")
class Resize(Op):
    """Spatial axes brought to `sizes`.

    "nearest" takes element ⌊i·n / size⌋. "linear" interpolates axis by axis at
    (i + ½)·n / size − ½, clamped to the axis; with `align_corners` at i·(n − 1) / (size − 1), so
    that first and last elements stay. Positions are f64, the weights have the type of the sums.
    """

    sizes: tuple[Dim, ...]
    mode: str = "nearest"
    align_corners: bool = False

    def check(self) -> None:
        if self.mode not in ("nearest", "linear"):
            raise AttributeValueError(
                "unknown mode", where="resize.mode", got=self.mode, expected="nearest or linear"
            )
        if self.align_corners and self.mode == "nearest":
            raise AttributeValueError("align_corners is for linear", where="resize.align_corners")
        if any(isinstance(s, int) and s < 0 for s in self.sizes):
            raise AttributeValueError("negative size", where="resize.sizes", got=self.sizes)

    def infer(self, x: Shape) -> Shape:
        if self.mode == "linear":
            require_float(x, "x")
        if len(self.sizes) != spatial_axes(x, "x"):
            raise ShapeError("sizes do not fit the spatial axes", got=self.sizes, expected=x)
        if any(n == 0 and size != 0 for n, size in zip(x.dims[2:], self.sizes, strict=True)):
            raise ShapeError("nothing to resize", got=x)
        return x.with_dims((*x.dims[:2], *self.sizes))

    def reference(self, x: Array) -> Array:
        y = compute(x)
        for axis, size in enumerate(self.sizes, start=2):
            count: Any = size
            y = self._axis(y, axis, count)
        return rounded(y, DType.of(x.dtype))

    def _axis(self, x: Array, axis: int, size: int) -> Array:
        n = x.shape[axis]
        index = np.arange(size)
        if self.mode == "nearest":
            return np.take(x, index * n // max(size, 1), axis=axis)
        if self.align_corners:
            at = index * ((n - 1) / max(size - 1, 1))
        else:
            at = np.clip((index + 0.5) * n / max(size, 1) - 0.5, 0, max(n - 1, 0))
        below = np.minimum(np.floor(at).astype(np.int64), max(n - 1, 0))
        above = np.minimum(below + 1, max(n - 1, 0))
        part = (at - below).astype(x.dtype).reshape(-1, *[1] * (x.ndim - axis - 1))
        return np.take(x, below, axis=axis) * (1 - part) + np.take(x, above, axis=axis) * part

    def decompose(self, g: Graph, x: Value) -> Any:
        return self.decompose_at(g, x, 2)

    def decompose_at(self, g: Graph, x: Value, first: int) -> Any:
        """The decomposition for spatial axes that begin at axis `first`."""
        nearest = self.mode == "nearest"
        if nearest and (factors := _whole_factors(x.shape.dims[first:], self.sizes)):
            return _repeated(g, x, first, factors)
        y = x if nearest else wide(g, x)
        for axis, size in enumerate(self.sizes, start=first):
            y = _nearest(g, y, axis, size) if nearest else self._linear(g, y, axis, size)
        return cast(g, y, x.shape.dtype)

    def _linear(self, g: Graph, x: Value, axis: int, size: Dim) -> Any:
        """Between the elements below and above each position, which is f64."""
        index = cast(g, g.iota(shape=(size,), dtype=i64), f64)
        n, count = size_value(g, x.shape.dims[axis], index), size_value(g, size, index)
        one = g.constant(1, f64)
        last = g.maximum(g.sub(n, one), g.constant(0, f64))
        if self.align_corners:
            at = g.mul(index, g.div(g.sub(n, one), g.maximum(g.sub(count, one), one)))
        else:
            at = g.sub(g.div(g.mul(g.add(index, 0.5), n), g.maximum(count, one)), 0.5)
            at = g.minimum(g.maximum(at, g.constant(0, f64)), last)
        below = g.minimum(g.floor(at), last)
        above = g.minimum(g.add(below, one), last)
        dims = (size, *[1] * (x.shape.rank - axis - 1))
        part = g.reshape(cast(g, g.sub(at, below), x.shape.dtype), shape=dims)
        low, high = (g.gather(x, cast(g, i, i64), axis=axis) for i in (below, above))
        return g.add(g.mul(low, g.sub(1.0, part)), g.mul(high, part))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Copies for nearest; three operations per element and axis for linear."""
        work = 3 * len(self.sizes) if self.mode == "linear" else 1
        traffic = inputs[0].size_bytes + outputs[0].size_bytes
        return Cost(outputs[0].num_elements * work, traffic)
