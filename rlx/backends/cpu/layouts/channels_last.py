"""Convolutions and pooling with channels last: ops that the layout pass puts into whole graphs.

x is `[B, *n, C]`, so that a pixel is a row: a 1×1 convolution is a GEMM as it lies, others are a
GEMM whose rows are found through a table of pointers, and the vectors of depthwise convolution and
pooling are along the channels. `pack_channels_last` cuts the filters of each group into panels of
`width` columns, `[panel][tap][channel][column]`; the last panel is as wide as it needs, in whole
vectors of `lanes`. Filters of a depthwise convolution are `[tap][channel]`. Winograd's have 16
points behind the plain ones, `[panel][point][channel][column]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import f32
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import compute, quiet
from rlx.ir.ops.activation import activate, activation_flops, require_activation
from rlx.ir.ops.conv import Conv
from rlx.ir.ops.pool import AvgPool, MaxPool
from rlx.ir.shape import Shape

FORMS = ("gemm", "depthwise", "winograd")


def channels_last(shape: Shape) -> Shape:
    """`[B, C, *n]` as `[B, *n, C]`."""
    batch, channels, *spatial = shape.dims
    return shape.with_dims((batch, *spatial, channels))


def channels_first(shape: Shape) -> Shape:
    """`[B, *n, C]` as `[B, C, *n]`."""
    batch, *spatial, channels = shape.dims
    return shape.with_dims((batch, channels, *spatial))


def panel_widths(filters: int, width: int, lanes: int) -> list[int]:
    """Columns of each panel of one group's filters."""
    whole, rest = divmod(-(-filters // lanes) * lanes, width)
    return [width] * whole + [rest] * (rest > 0)


def plain_size(w: Sequence[int], groups: int, form: str, width: int, lanes: int) -> int:
    """Elements of packed filters, without those of Winograd."""
    if form == "depthwise":
        return prod(w)
    return groups * sum(panel_widths(w[0] // groups, width, lanes)) * prod(w[1:])


def _panels(w: Array, width: int, lanes: int) -> Array:
    """w [..., terms, filters] as `[..., panel, term, column]`, flat but for the leading axes."""
    *lead, terms, filters = w.shape
    widths = panel_widths(filters, width, lanes)
    padded = np.zeros((*lead, terms, sum(widths)), w.dtype)
    padded[..., :filters] = w
    edges = np.cumsum([0, *widths])
    parts = [padded[..., a:b].reshape(*lead, -1) for a, b in pairwise(edges)]
    return np.concatenate(parts, axis=-1)


def pack_plain(w: Array, groups: int, width: int, lanes: int) -> Array:
    """Filters [O, C/groups, *kernel] in panels."""
    grouped = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    terms = np.moveaxis(grouped, (1, 2), (-1, -2)).reshape(groups, -1, grouped.shape[1])
    return _panels(terms, width, lanes).reshape(-1)


def _transformed(g: Array, axis: int) -> Array:
    """Winograd's G g along an axis, for F(2, 3)."""
    g0, g1, g2 = np.moveaxis(g, axis, 0)
    half = g.dtype.type(0.5)
    return np.stack([g0, (g0 + g1 + g2) * half, (g0 - g1 + g2) * half, g2], axis)


def pack_winograd(w: Array, width: int, lanes: int) -> Array:
    """G g Gᵀ of 3×3 filters [O, C, 3, 3], `[panel][point][channel][column]`."""
    points = _transformed(_transformed(w, 2), 3)  # [O, C, 4, 4]
    terms = points.transpose(2, 3, 1, 0).reshape(-1, len(w))  # [16·C, O]
    return _panels(terms, width, lanes)


@op("pack_channels_last", runs_in_prepare=True)
class PackChannelsLast(Op):
    """Filters `[O, C/groups, *kernel]` of a convolution in f32, packed in the form named."""

    groups: int
    form: str
    width: int
    lanes: int

    def check(self) -> None:
        require_form(self.form, self.name)

    def infer(self, w: Shape) -> Shape:
        dims = w.static_dims
        size = plain_size(dims, self.groups, self.form, self.width, self.lanes)
        if self.form == "winograd":
            size += plain_size((*dims[:2], 16), 1, self.form, self.width, self.lanes)
        return Shape((size,), f32)

    def reference(self, w: Array) -> Array:
        w = compute(w).astype(np.float32)
        if self.form == "depthwise":
            return np.ascontiguousarray(w.reshape(len(w), -1).T).reshape(-1)
        packed = pack_plain(w, self.groups, self.width, self.lanes)
        if self.form != "winograd":
            return packed
        with quiet():
            return np.concatenate([packed, pack_winograd(w, self.width, self.lanes)])


def require_form(form: str, where: str) -> None:
    if form not in FORMS:
        expected = ", ".join(FORMS)
        raise AttributeValueError("unknown form", where=where, got=form, expected=expected)


@op("conv_channels_last", is_anchor=True)
class ConvChannelsLast(Op):
    """activation(conv + bias + residual), with filters from `pack_channels_last` of `w`."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    form: str
    width: int
    lanes: int
    w: Shape
    activation: str = "none"
    has_bias: bool = False
    has_residual: bool = False

    def check(self) -> None:
        require_form(self.form, self.name)
        require_activation(self.activation, self.name)

    @property
    def plain(self) -> Conv:
        """The convolution with channels first."""
        return Conv(self.stride, self.padding, self.dilation, self.groups)

    def extras(self, *given: Any) -> tuple[Any, Any]:
        """The operands after the filters as (bias, residual)."""
        there = [t for t in given if t is not None]
        if len(there) != self.has_bias + self.has_residual:
            raise ShapeError(
                "operands and flags disagree", where=self.name, got=f"{len(there)} after filters",
                expected=f"has_bias={self.has_bias}, has_residual={self.has_residual}",
            )  # fmt: skip
        return there[0] if self.has_bias else None, there[-1] if self.has_residual else None

    def infer(
        self, x: Shape, filters: Shape, bias: Shape | None = None, residual: Shape | None = None
    ) -> Shape:
        bias, residual = self.extras(bias, residual)
        out = channels_last(self.plain.infer(channels_first(x), self.w, bias))
        if residual is not None and not residual.same_dims(out):
            raise ShapeError("residual does not fit the result", got=residual, expected=out)
        return out

    def reference(
        self, x: Array, filters: Array, bias: Array | None = None, residual: Array | None = None
    ) -> Array:
        bias, residual = self.extras(bias, residual)
        w = unpack(self, filters)
        with quiet():
            y = self.plain.reference(np.moveaxis(x, -1, 1), w, bias)
            y = np.moveaxis(y, 1, -1)
            return activate(self.activation, y if residual is None else y + residual)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        flops = outputs[0].num_elements * (2 * prod(self.w.static_dims[1:]) + self.has_residual)
        traffic: Dim = self.w.size_bytes
        for shape in (inputs[0], *inputs[2:], outputs[0]):
            traffic = traffic + shape.size_bytes
        return Cost(flops + activation_flops(self.activation, outputs[0]), traffic)


def unpack(record: ConvChannelsLast, filters: Array) -> Array:
    """The weight that `filters` hold."""
    dims = record.w.static_dims
    number = np.arange(1, 1 + prod(dims), dtype=np.float64).reshape(dims)
    if record.form == "depthwise":
        places = np.ascontiguousarray(number.reshape(len(number), -1).T).reshape(-1)
    else:
        places = pack_plain(number, record.groups, record.width, record.lanes)
    w = np.zeros(number.size + 1, filters.dtype)
    w[places.astype(np.int64)] = filters[: places.size]  # element 0 collects the padding
    return w[1:].reshape(dims)


@op("pool_channels_last")
class PoolChannelsLast(Op):
    """`max_pool` or `avg_pool` of `x [B, *n, C]`."""

    largest: bool
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    count_include_pad: bool = True

    @property
    def plain(self) -> MaxPool | AvgPool:
        """The op with channels first."""
        given = (self.kernel, self.stride, self.padding)
        return MaxPool(*given) if self.largest else AvgPool(*given, self.count_include_pad)

    def infer(self, x: Shape) -> Shape:
        return channels_last(self.plain.infer(channels_first(x)))

    def reference(self, x: Array) -> Array:
        return np.moveaxis(self.plain.reference(np.moveaxis(x, -1, 1)), 1, -1)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        taps = prod(self.plain.window(inputs[0].rank - 2).kernel)
        traffic = inputs[0].size_bytes + outputs[0].size_bytes
        return Cost(outputs[0].num_elements * taps, traffic)
