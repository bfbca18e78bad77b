"""Depthwise convolutions of 8-bit integers with channels last.

A block is `vector` channels, one for each byte of a register. Blocks lie side by side; the last one
ends with the channels, and shares some with the one before it. Four columns of an image are
interleaved into words, one for each channel: the words of a block are four registers, in units of
128 bits, register q having the channels 4·q … of each unit's sixteen.

A word serves all windows of a tile that it is under. For each row of taps, pixel of the tile and
word there is a word of weights, with zeros for columns that are not in the pixel's window:
`[block][row][pixel][word][channel in order of the registers][4]`, or two of 16-bit numbers, the
even columns before the odd ones, `[…][word][register][2][lane][2]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from rlx.backends.cpu.layouts.channels_last import channels_first, channels_last
from rlx.errors import ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import i8, i16
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops.conv_integer import QLinearConv
from rlx.ir.shape import Shape
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Tile:
    """How the windows of a row of taps lie in words: `pixels` windows of a row of the result."""

    taps: int
    stride: int
    dilation: int
    pixels: int

    @classmethod
    def of(cls, taps: int, stride: int, dilation: int, most: int) -> Tile:
        """As many pixels as the words under one window serve."""
        span = (taps - 1) * dilation + 1
        left = -(-span // 4) * 4 - span
        return cls(taps, stride, dilation, min(left // stride + 1, most))

    @property
    def columns(self) -> int:
        return (self.pixels - 1) * self.stride + (self.taps - 1) * self.dilation + 1

    @property
    def words(self) -> int:
        return -(-self.columns // 4)

    def taps_of(self, pixel: int, word: int) -> list[int]:
        """The tap that each column of a word is under for a pixel; −1 where it is under none."""
        found = []
        for column in range(4 * word, 4 * word + 4):
            tap, between = divmod(column - pixel * self.stride, self.dilation)
            found.append(tap if not between and 0 <= tap < self.taps else -1)
        return found

    def uses(self, pixel: int, word: int) -> bool:
        return max(self.taps_of(pixel, word)) >= 0


def block_starts(channels: int, vector: int) -> list[int]:
    """The first channel of each block."""
    return [min(c, channels - vector) for c in range(0, channels, vector)]


def register_order(vector: int) -> Array:
    """The channels of a block in the order of its registers' words."""
    return np.arange(vector).reshape(-1, 4, 4).transpose(1, 0, 2).reshape(-1)


def pack(w: Array, tile: Tile, vector: int) -> Array:
    """Weights [C, 1, *kernel] as words of i8."""
    channels, rows = w.shape[0], prod(w.shape[2:-1])
    taps = w.reshape(channels, rows, tile.taps)
    padded = np.concatenate([taps, np.zeros((channels, rows, 1), w.dtype)], axis=2)  # tap −1
    order = register_order(vector)
    blocks = [padded[start : start + vector][order] for start in block_starts(channels, vector)]
    columns = [
        [tile.taps_of(p, word) for word in range(tile.words)] for p in range(tile.pixels)
    ]  # fmt: skip
    found = np.stack(blocks)[..., np.array(columns)]  # [block, channel, row, pixel, word, 4]
    return np.ascontiguousarray(found.transpose(0, 2, 3, 4, 1, 5)).reshape(-1)


@op("pack_depthwise_int8", runs_in_prepare=True)
class PackDepthwiseInt8(Op):
    """Filters `[C, 1, *kernel]` in i8, packed."""

    tile: tuple[int, ...]  # the fields of a `Tile`
    vector: int
    halves: bool

    def infer(self, w: Shape) -> Shape:
        channels, one, *kernel = w.static_dims
        if one != 1 or channels < self.vector:
            raise ShapeError("not filters of a depthwise convolution", got=w, where=self.name)
        made = Tile(*self.tile)
        blocks, rows = -(-channels // self.vector), prod(kernel[:-1])
        size = blocks * rows * made.pixels * made.words * self.vector * 4
        return Shape((size,), i16 if self.halves else i8)

    def reference(self, w: Array) -> Array:
        packed = pack(w, Tile(*self.tile), self.vector)
        if not self.halves:
            return packed
        lanes = self.vector // 4
        fours = packed.reshape(-1, lanes, 2, 2)  # … register, lane, pair, half
        return np.ascontiguousarray(np.moveaxis(fours, 3, 1)).astype(np.int16).reshape(-1)


@op("depthwise_channels_last_int8", is_anchor=True)
class DepthwiseChannelsLastInt8(Op):
    """A depthwise `qlinear_conv` with filters packed.

    Operands: x, filters, the sum of each channel's weights in i32, x_zero, scale, y_zero, and a
    bias if it has one.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    tile: tuple[int, ...]
    vector: int
    halves: bool
    w: Shape
    activation: str = "none"
    has_bias: bool = False

    @property
    def plain(self) -> QLinearConv:
        """The convolution with channels first."""
        groups = self.w.static_dims[0]
        return QLinearConv(self.stride, self.padding, self.dilation, groups, self.activation)

    def infer(
        self, x: Shape, filters: Shape, sums: Shape, x_zero: Shape, *rest: Shape
    ) -> Shape:  # fmt: skip
        return channels_last(self.plain.infer(channels_first(x), self.w, x_zero, *rest))

    def reference(
        self, x: Array, filters: Array, sums: Array, x_zero: Array, *rest: Array
    ) -> Array:  # fmt: skip
        made = self.plain.reference(np.moveaxis(x, -1, 1), unpack(self, filters), x_zero, *rest)
        return np.moveaxis(made, 1, -1)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        flops = outputs[0].num_elements * (2 * prod(self.w.static_dims[1:]))
        traffic: Dim = 0
        for shape in (*inputs, outputs[0]):
            traffic = traffic + shape.size_bytes
        return Cost(flops, traffic)


def unpack(record: DepthwiseChannelsLastInt8, filters: Array) -> Array:
    """The weight that `filters` hold."""
    if record.halves:
        parts = filters.astype(np.int8).reshape(-1, 2, record.vector // 4, 2)
        filters = np.ascontiguousarray(np.moveaxis(parts, 1, 3)).reshape(-1)
    dims = record.w.static_dims
    number = np.arange(1, 1 + prod(dims), dtype=np.int64).reshape(dims)
    places = pack(number, Tile(*record.tile), record.vector)
    w = np.zeros(number.size + 1, np.int8)
    w[places] = filters  # element 0 collects the padding
    return w[1:].reshape(dims)
