"""Convolutions over one or two spatial axes, channels first; and the causal depthwise one.

`conv` is what machine learning calls convolution: the kernel is not flipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    compute,
    require_float,
    require_rank,
    require_same,
    rounded,
    upcast,
)
from rlx.ir.shape import Shape


class Window(NamedTuple):
    """Per spatial axis: kernel size, step, padding before and after, spacing of the taps."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def span(self) -> tuple[int, ...]:
        """Input positions one kernel reaches over."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))


def make_window(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Window:
    """Attributes written shortly, spread over the axes of `kernel`.

    One number serves every axis. Padding is one number per axis (the same on both sides), or all
    the lows, then all the highs.
    """
    rank = len(kernel)
    if len(padding) == 2 * rank:
        low, high = padding[:rank], padding[rank:]
    else:
        low = high = _spread(padding, rank, "padding")
    return Window(
        kernel, _spread(stride, rank, "stride"), low, high, _spread(dilation, rank, "dilation")
    )


def _spread(values: tuple[int, ...], rank: int, what: str) -> tuple[int, ...]:
    if len(values) == 1:
        return values * rank
    if len(values) != rank:
        raise AttributeValueError(
            f"{what} does not fit the spatial axes", got=values, expected=f"1 or {rank} numbers"
        )
    return values


def require_positive(where: str, values: tuple[int, ...], least: int = 1) -> None:
    if not values or min(values) < least:
        raise AttributeValueError("out of range", where=where, got=values, expected=f"{least} up")


def spatial_axes(x: Shape, what: str) -> int:
    """How many axes follow batch and channels: 1 or 2."""
    if x.rank not in (3, 4):
        raise ShapeError(
            f"{what} has the wrong rank", got=x,
            expected="[batch, channels, n] or [batch, channels, height, width]",
        )  # fmt: skip
    return x.rank - 2


def window_counts(dims: Sequence[Dim], window: Window) -> tuple[Dim, ...]:
    """How many windows fit along each axis: (n + low + high − span) // stride + 1."""
    counts = []
    for axis, n in enumerate(dims):
        room = n + (window.low[axis] + window.high[axis] - window.span[axis])
        if isinstance(room, int) and room < 0:
            raise ShapeError(
                "the kernel is larger than the padded input", got=f"{n} along spatial axis {axis}",
                expected=f"at least {window.span[axis]} with padding",
            )  # fmt: skip
        counts.append(room // window.stride[axis] + 1)
    return tuple(counts)


def windows(x: Array, window: Window, fill: float) -> Array:
    """`x [B, C, *n]` as `[B, C, *counts, *kernel]`: every window, without a copy once padded."""
    rank = len(window.kernel)
    pads = [(0, 0), (0, 0), *zip(window.low, window.high, strict=True)]
    padded = np.pad(x, pads, constant_values=fill)
    axes = tuple(range(2, 2 + rank))
    view = np.lib.stride_tricks.sliding_window_view(padded, window.span, axis=axes)
    steps = [slice(None, None, s) for s in window.stride]
    taps = [slice(None, None, d) for d in window.dilation]
    return view[(slice(None), slice(None), *steps, *taps)]


def _add_bias(y: Array, bias: Array | None) -> Array:
    if bias is None:
        return y
    return y + compute(bias).reshape(len(bias), *[1] * (y.ndim - 2))


@op("conv")
class Conv(Op):
    """`x [B, C, *n]` with `w [O, C/groups, *kernel]`, plus bias `[O]`; 1-D and 2-D."""

    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1

    def check(self) -> None:
        _check_attributes(self)

    def window(self, w: Sequence[Dim]) -> Window:
        """The geometry, from the dimensions of the weight."""
        return make_window(_kernel(w), self.stride, self.padding, self.dilation)

    def infer(self, x: Shape, w: Shape, bias: Shape | None = None) -> Shape:
        _require_operands(x, w)
        out = w.dims[0]
        require_same(w.dims[1] * self.groups, x.dims[1], "channels of x and w")
        if isinstance(out, int) and out % self.groups:
            raise ShapeError("output channels do not split into groups", got=w, expected=self)
        _require_bias(bias, out)
        counts = window_counts(x.dims[2:], self.window(w.dims))
        return Shape((x.dims[0], out, *counts), _result_type(x, w, bias))

    def reference(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        dtype = _result_type(x, w, bias)
        x, w = upcast(x, w)
        view = windows(x, self.window(w.shape), 0)
        batch, out, rank = len(x), len(w), x.ndim - 2
        counts, taps = view.shape[2 : 2 + rank], prod(w.shape[1:])
        # [B, G, C/G, *counts, *kernel] -> [G, B·counts, C/G·kernel]: one product per group
        view = view.reshape(batch, self.groups, w.shape[1], *view.shape[2:])
        view = np.moveaxis(view, (1, 2), (0, 2 + rank))
        view = view.reshape(self.groups, batch * prod(counts), taps)
        per_group = out // self.groups
        y = view @ w.reshape(self.groups, per_group, taps).swapaxes(1, 2)
        y = y.reshape(self.groups, batch, prod(counts), per_group).transpose(1, 0, 3, 2)
        return rounded(_add_bias(y.reshape(batch, out, *counts), bias), dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """A multiplication and an addition per output element and tap."""
        taps = prod(inputs[1].dims[1:], start=1)
        return Cost(outputs[0].num_elements * taps * 2, _traffic(inputs, outputs))


@op("conv_transpose")
class ConvTranspose(Op):
    """The transpose of `conv`: every element of `x [B, C, *n]` stamps the kernel on the output.

    `w` is `[C, O/groups, *kernel]`. An output axis has
    (n − 1)·stride + dilation·(kernel − 1) + 1 − low − high + output_padding elements.
    """

    stride: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    dilation: tuple[int, ...] = (1,)
    groups: int = 1
    output_padding: tuple[int, ...] = (0,)

    def check(self) -> None:
        _check_attributes(self)
        require_positive("conv_transpose.output_padding", self.output_padding, 0)

    def window(self, w: Sequence[Dim]) -> Window:
        """The geometry, from the dimensions of the weight."""
        return make_window(_kernel(w), self.stride, self.padding, self.dilation)

    def extra(self, rank: int) -> tuple[int, ...]:
        """`output_padding` for each of `rank` axes."""
        return _spread(self.output_padding, rank, "output_padding")

    def infer(self, x: Shape, w: Shape, bias: Shape | None = None) -> Shape:
        rank = _require_operands(x, w)
        require_same(w.dims[0], x.dims[1], "channels of x and w")
        if isinstance(x.dims[1], int) and x.dims[1] % self.groups:
            raise ShapeError("input channels do not split into groups", got=x, expected=self)
        out = w.dims[1] * self.groups
        _require_bias(bias, out)
        win, extra = self.window(w.dims), self.extra(rank)
        sizes = []
        for axis, n in enumerate(x.dims[2:]):
            grown = (n - 1) * win.stride[axis] + win.span[axis]
            size = grown + (extra[axis] - win.low[axis] - win.high[axis])
            if isinstance(size, int) and (size < 1 or n == 0):
                raise ShapeError("nothing is left of the output", got=size, expected="1 or more")
            sizes.append(size)
        return Shape((x.dims[0], out, *sizes), _result_type(x, w, bias))

    def reference(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        dtype = _result_type(x, w, bias)
        x, w = upcast(x, w)
        win, rank = self.window(w.shape), x.ndim - 2
        extra, n = self.extra(rank), x.shape[2:]
        per_group = x.shape[1] // self.groups
        xg = x.reshape(len(x), self.groups, per_group, prod(n))
        wg = w.reshape(self.groups, per_group, w.shape[1], *win.kernel)
        full = [(n[a] - 1) * win.stride[a] + win.span[a] + extra[a] for a in range(rank)]
        y: Array = np.zeros((len(x), w.shape[1] * self.groups, *full), np.result_type(x, w))
        for tap in product(*map(range, win.kernel)):
            part = wg[(..., *tap)].swapaxes(1, 2) @ xg  # [G, O/G, C/G] · [B, G, C/G, n]
            place = [
                slice(start, start + (n[a] - 1) * win.stride[a] + 1, win.stride[a])
                for a, start in enumerate(t * d for t, d in zip(tap, win.dilation, strict=True))
            ]
            y[(..., *place)] += part.reshape(*y.shape[:2], *n)
        crop = [slice(win.low[a], full[a] - win.high[a]) for a in range(rank)]
        return rounded(_add_bias(y[(..., *crop)], bias), dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """A multiplication and an addition per input element and tap it stamps."""
        taps = prod(inputs[1].dims[1:], start=1)
        return Cost(inputs[0].num_elements * taps * 2, _traffic(inputs, outputs))


@op("depthwise_conv1d_causal")
class DepthwiseConv1dCausal(Op):
    """y[b, s, c] = Σ_j w[c, j] · (left_pad ⧺ x)[b, s + j, c]: no token sees a later one.

    `x [B, S, C]`, `w [C, K]` (its last tap meets the token itself), `left_pad [B, K−1, C]` the
    tokens before.
    """

    def infer(self, x: Shape, w: Shape, left_pad: Shape) -> Shape:
        for shape, rank, what in ((x, 3, "x"), (w, 2, "w"), (left_pad, 3, "left_pad")):
            require_float(shape, what)
            require_rank(shape, rank, what)
        taps = w.dims[1]
        if not isinstance(taps, int) or taps < 1:
            raise ShapeError("the kernel size is a positive int", got=w, expected="[channels, K]")
        require_same(w.dims[0], x.dims[2], "channels of w")
        for axis, size in enumerate((x.dims[0], taps - 1, x.dims[2])):
            require_same(left_pad.dims[axis], size, f"left_pad axis {axis}")
        return x.with_dtype(promote(x.dtype, w.dtype, left_pad.dtype))

    def reference(self, x: Array, w: Array, left_pad: Array) -> Array:
        dtype = _result_type(x, w, left_pad)
        x, w, left_pad = upcast(x, w, left_pad)
        joined = np.concatenate([left_pad, x], axis=1)
        y = np.zeros(x.shape, np.result_type(x, w, left_pad))
        for j in range(w.shape[1]):
            y += joined[:, j : j + x.shape[1]] * w[:, j]
        return rounded(y, dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return Cost(outputs[0].num_elements * inputs[1].dims[1] * 2, _traffic(inputs, outputs))


def _check_attributes(record: Conv | ConvTranspose) -> None:
    require_positive(f"{record.name}.stride", record.stride)
    require_positive(f"{record.name}.dilation", record.dilation)
    require_positive(f"{record.name}.padding", record.padding, 0)
    require_positive(f"{record.name}.groups", (record.groups,))


def _kernel(w: Sequence[Dim]) -> tuple[int, ...]:
    sizes = []
    for k in w[2:]:
        if not isinstance(k, int) or k < 1:
            raise ShapeError("a kernel size is a positive int", got=k)
        sizes.append(k)
    return tuple(sizes)


def _require_operands(x: Shape, w: Shape) -> int:
    require_float(x, "x")
    require_float(w, "w")
    rank = spatial_axes(x, "x")
    require_rank(w, x.rank, "w")
    return rank


def _require_bias(bias: Shape | None, channels: Dim) -> None:
    if bias is not None:
        require_float(bias, "bias")
        require_rank(bias, 1, "bias")
        require_same(bias.dims[0], channels, "bias")


def _result_type(*tensors: Shape | Array | None) -> DType:
    return promote(*[DType.of(t.dtype) for t in tensors if t is not None])


def _traffic(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Dim:
    total: Dim = 0
    for shape in (*inputs, *outputs):
        total = total + shape.size_bytes
    return total
