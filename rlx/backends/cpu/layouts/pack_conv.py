"""Convolution filters packed for the direct kernel, once per set of parameters.

A transposed convolution is one plain convolution per phase: outputs that are equal modulo the
stride use the same taps, and neighbours among them use neighbouring inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import gcd
from typing import NamedTuple

import numpy as np

from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f32, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import compute, quiet, rounded
from rlx.ir.ops.activation import activate, activation_flops, require_activation
from rlx.ir.ops.conv import Conv, ConvTranspose, Window
from rlx.ir.shape import Shape


class Axis(NamedTuple):
    """One phase along an axis.

    It takes `taps` taps of the kernel, from `start` on in steps of `skip`. Output i of the phase is
    output `out_first` + i·`out_step` of the op, and its tap j reads input
    i·`step` + `first` + j·`tap`.
    """

    start: int
    skip: int
    taps: int
    first: int
    tap: int
    step: int
    out_first: int = 0
    out_step: int = 1

    def outputs(self, size: Dim) -> Dim:
        """Outputs of the phase on an axis of `size`."""
        return (size - self.out_first + (self.out_step - 1)) // self.out_step

    @property
    def kernel(self) -> slice:
        return slice(self.start, self.start + self.taps * self.skip, self.skip)


def phases(record: Conv | ConvTranspose, w: Sequence[Dim]) -> list[tuple[Axis, ...]]:
    """The plain convolutions that make up the op, as one `Axis` per spatial axis."""
    window = record.window(w)
    if isinstance(record, ConvTranspose):
        return list(product(*[_transposed(window, a) for a in range(len(window.kernel))]))
    return [tuple(_plain(window, a) for a in range(len(window.kernel)))]


def _plain(window: Window, axis: int) -> Axis:
    low, spacing = window.low[axis], window.dilation[axis]
    return Axis(0, 1, window.kernel[axis], -low, spacing, window.stride[axis])


def _transposed(window: Window, axis: int) -> list[Axis]:
    """Output y uses tap t of input i where y + low = i·stride + t·dilation."""
    stride, spacing = window.stride[axis], window.dilation[axis]
    common = gcd(stride, spacing)
    skip, found = stride // common, []
    for residue in range(stride):
        place = residue + window.low[axis]
        start = next((t for t in range(skip) if (place - t * spacing) % stride == 0), None)
        if start is None:  # no tap reaches this phase
            found.append(Axis(0, 1, 0, 0, 1, 1, residue, stride))
            continue
        taps = max(-(-(window.kernel[axis] - start) // skip), 0)
        first = (place - start * spacing) // stride
        found.append(Axis(start, skip, taps, first, -(spacing // common), 1, residue, stride))
    return found


def packed_sizes(
    record: Conv | ConvTranspose, w: Sequence[int], tile: int
) -> list[tuple[tuple[Axis, ...], int]]:
    """Each phase with the number of elements of its packed filters."""
    channels, filters = w[1], w[0] // record.groups
    if isinstance(record, ConvTranspose):
        channels, filters = w[0] // record.groups, w[1]
    rows = record.groups * -(-filters // tile) * tile
    found = []
    for axes in phases(record, w):
        taps = 1
        for axis in axes:
            taps *= axis.taps
        found.append((axes, rows * taps * channels))
    return found


def pack_filters(record: Conv | ConvTranspose, w: Array, tile: int) -> Array:
    """All phases concatenated, each `[group, tile, taps…, channel, filter of the tile]`."""
    groups, kernel = record.groups, w.shape[2:]
    if isinstance(record, ConvTranspose):
        grouped = w.reshape(groups, w.shape[0] // groups, w.shape[1], *kernel).swapaxes(1, 2)
    else:
        grouped = w.reshape(groups, w.shape[0] // groups, w.shape[1], *kernel)
    filters, channels = grouped.shape[1:3]
    tiles = -(-filters // tile)
    padded = np.zeros((groups, tiles * tile, *grouped.shape[2:]), w.dtype)
    padded[:, :filters] = grouped
    split: Array = padded.reshape(groups, tiles, tile, channels, *kernel)
    parts = []
    for axes in phases(record, w.shape):
        part = split[(..., *[a.kernel for a in axes])]
        spatial = range(4, 4 + len(kernel))
        parts.append(part.transpose(0, 1, *spatial, 3, 2).reshape(-1))
    return np.concatenate(parts)


def transform_filters(w: Array, tile: int) -> Array:
    """Winograd's G g Gᵀ of 3×3 filters, `[tile][point][channel][filter of the tile]`."""
    filters, channels = w.shape[:2]
    tiles = -(-filters // tile)
    padded = np.zeros((tiles * tile, channels, 3, 3), w.dtype)
    padded[:filters] = w
    points = _filter_sums(_filter_sums(padded, 2), 3).reshape(tiles, tile, channels, 16)
    return points.transpose(0, 3, 2, 1).reshape(-1)


def _filter_sums(g: Array, axis: int) -> Array:
    """G g along an axis."""
    g0, g1, g2 = np.moveaxis(g, axis, 0)
    outer, half = g0 + g2, g.dtype.type(0.5)
    return np.stack([g0, (outer + g1) * half, (outer - g1) * half, g2], axis)


def transformed_size(w: Sequence[int], tile: int) -> int:
    """Elements of `transform_filters`."""
    return -(-w[0] // tile) * tile * w[1] * 16


class _Packed(Op):
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]
    tile: int
    winograd: bool

    @property
    def plain(self) -> Conv | ConvTranspose:
        """The unpacked op that this replaces."""
        given = (self.stride, self.padding, self.dilation, self.groups)
        return ConvTranspose(*given, self.output_padding) if self.transposed else Conv(*given)


@op("pack_conv", runs_in_prepare=True)
class PackConv(_Packed):
    """Filters of a `conv` or `conv_transpose` in tiles of `tile`, as elements of `dtype`; with
    `winograd` transformed ones behind them."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]
    tile: int
    dtype: DType = f32
    winograd: bool = False

    def infer(self, w: Shape) -> Shape:
        size = sum(n for _, n in packed_sizes(self.plain, w.static_dims, self.tile))
        more = transformed_size(w.static_dims, self.tile) if self.winograd else 0
        return Shape((size + more,), self.dtype)

    def reference(self, w: Array) -> Array:
        packed = pack_filters(self.plain, compute(w), self.tile).astype(self.dtype.numpy)
        if not self.winograd:
            return packed
        with quiet():
            transformed = transform_filters(compute(w).astype(self.dtype.numpy), self.tile)
        return np.concatenate([packed, transformed])


@op("packed_conv")
class PackedConv(_Packed):
    """activation(conv or conv_transpose) with filters from `pack_conv`; `w` is what they were."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]
    tile: int
    w: Shape
    activation: str = "none"
    winograd: bool = False

    def check(self) -> None:
        require_activation(self.activation, self.name)

    def infer(self, x: Shape, filters: Shape, bias: Shape | None = None) -> Shape:
        return self.plain.infer(x, self.w, bias)

    def reference(self, x: Array, filters: Array, bias: Array | None = None) -> Array:
        dims = self.w.static_dims
        number = np.arange(1, 1 + int(np.prod(dims)), dtype=np.float64).reshape(dims)
        places = pack_filters(self.plain, number, self.tile).astype(np.int64)
        w = np.zeros(number.size + 1, filters.dtype)
        w[places] = filters[: places.size]  # element 0 collects the padding
        types = [DType.of(t.dtype) for t in (x, bias) if t is not None]
        given = [compute(t) for t in (x, w[1:].reshape(dims), bias) if t is not None]
        with quiet():
            y = activate(self.activation, self.plain.reference(*given))
        return rounded(y, promote(self.w.dtype, *types))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        flops, traffic = self.plain.cost([inputs[0], self.w, *inputs[2:]], outputs)
        return Cost(flops + activation_flops(self.activation, outputs[0]), traffic)
