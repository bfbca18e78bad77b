"""Convolutions of 8-bit integers with channels last: ops that the layout pass puts into graphs.

x is `[B, *n, C]` with a multiple of four channels. `pack_channels_last_int8` cuts the filters of
each group into panels as `pack_channels_last` does, with four channels of a column beside each
other, `[panel][tap][channel / 4][column][4]`; or as 16-bit numbers, the even channels before the
odd ones, `[panel][tap][channel / 4][vector][2][lane][2]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from rlx.backends.cpu.layouts.channels_last import (
    channels_first,
    channels_last,
    pack_plain,
    plain_size,
)
from rlx.errors import ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import i8, i16
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops.conv_integer import ConvInteger, QLinearConv
from rlx.ir.shape import Shape


@op("pack_channels_last_int8", runs_in_prepare=True)
class PackChannelsLastInt8(Op):
    """Filters `[O, C/groups, *kernel]` in i8, packed; C/groups is a multiple of four."""

    groups: int
    width: int
    lanes: int
    halves: bool

    def infer(self, w: Shape) -> Shape:
        dims = w.static_dims
        if dims[1] % 4:
            raise ShapeError("channels are not in fours", got=w, where=self.name)
        size = plain_size(dims, self.groups, "gemm", self.width, self.lanes)
        return Shape((size,), i16 if self.halves else i8)

    def reference(self, w: Array) -> Array:
        out, channels, *kernel = w.shape
        words = np.ascontiguousarray(
            np.moveaxis(w.reshape(out, channels // 4, 4, *kernel), 2, -1)
        ).view(np.int32)[..., 0]  # a column's word is moved as one number
        packed = pack_plain(words, self.groups, self.width, self.lanes)
        if not self.halves:
            return packed.view(np.int8)
        fours = packed.view(np.int8).reshape(-1, self.lanes, 2, 2)
        return np.ascontiguousarray(np.moveaxis(fours, 3, 1)).astype(np.int16).reshape(-1)


@op("conv_channels_last_int8", is_anchor=True)
class ConvChannelsLastInt8(Op):
    """`conv_integer`, or `qlinear_conv` where there is `quantized`, with filters packed.

    Operands: x, filters, the sum of each column's weights in i32, x_zero, then, for `quantized`,
    scale and y_zero, and a bias if it has one; and with a residual, which has channels last, also
    r_zero, factors and sum_zero.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    width: int
    lanes: int
    halves: bool
    w: Shape
    quantized: bool = False
    activation: str = "none"
    has_bias: bool = False
    has_residual: bool = False

    @property
    def plain(self) -> ConvInteger | QLinearConv:
        """The convolution with channels first."""
        given = (self.stride, self.padding, self.dilation, self.groups)
        return QLinearConv(*given, self.activation) if self.quantized else ConvInteger(*given)

    def infer(
        self, x: Shape, filters: Shape, sums: Shape, x_zero: Shape, *rest: Shape
    ) -> Shape:  # fmt: skip
        more = self._in_order(rest, channels_first)
        return channels_last(self.plain.infer(channels_first(x), self.w, x_zero, *more))

    def reference(
        self, x: Array, filters: Array, sums: Array, x_zero: Array, *rest: Array
    ) -> Array:  # fmt: skip
        more = self._in_order(rest, lambda r: np.moveaxis(r, -1, 1))
        made = self.plain.reference(np.moveaxis(x, -1, 1), unpack(self, filters), x_zero, *more)
        return np.moveaxis(made, 1, -1)

    def _in_order(self, rest: Sequence[Any], channels_first: Callable[[Any], Any]) -> list[Any]:
        """The operands after x_zero as `plain` takes them."""
        more = list(rest)
        if self.has_residual:
            if not self.has_bias:
                more.insert(2, None)
            more[3] = channels_first(more[3])
        return more

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        flops = outputs[0].num_elements * (2 * prod(self.w.static_dims[1:]))
        traffic: Dim = 0
        for shape in (*inputs, outputs[0]):
            traffic = traffic + shape.size_bytes
        return Cost(flops, traffic)


def unpack(record: ConvChannelsLastInt8, filters: Array) -> Array:
    """The weight that `filters` hold."""
    if record.halves:
        parts = filters.astype(np.int8).reshape(-1, 2, record.lanes, 2)
        filters = np.ascontiguousarray(np.moveaxis(parts, 1, 3)).reshape(-1)
    out, channels, *kernel = record.w.static_dims
    words = np.ascontiguousarray(filters).view(np.int32)
    dims = (out, channels // 4, *kernel)
    number = np.arange(1, 1 + prod(dims), dtype=np.int64).reshape(dims)
    places = pack_plain(number, record.groups, record.width, record.lanes)
    found = np.zeros(number.size + 1, np.int32)
    found[places] = words  # element 0 collects the padding
    fours = found[1:].reshape(*dims, 1).view(np.int8)
    return np.moveaxis(fours, -1, 2).reshape(record.w.static_dims)
