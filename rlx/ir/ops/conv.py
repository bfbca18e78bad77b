"""Convolutions over one or two spatial axes, channels first; and the causal depthwise one.

`conv` is what machine learning calls convolution: the kernel is not flipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    cast,
    compute,
    require_float,
    require_rank,
    require_same,
    rounded,
    upcast,
    wide,
)
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


class Window(NamedTuple):
    """Per spatial axis: kernel size, stride, padding before and after, dilation."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def span(self) -> tuple[int, ...]:
        """The receptive field: input positions that one window covers."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))


def make_window(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Window:
    """The window of a kernel; stride, padding and dilation may be one number for all axes.

    Padding is one number per axis (the same on both sides), or all the lows, then all the highs.
    """
    rank = len(kernel)
    if len(padding) == 2 * rank:
        low, high = padding[:rank], padding[rank:]
    else:
        low = high = _per_axis(padding, rank, "padding")
    return Window(
        kernel, _per_axis(stride, rank, "stride"), low, high, _per_axis(dilation, rank, "dilation")
    )


def _per_axis(values: tuple[int, ...], rank: int, what: str) -> tuple[int, ...]:
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
        free = n + (window.low[axis] + window.high[axis] - window.span[axis])
        if isinstance(free, int) and free < 0:
            raise ShapeError(
                "the kernel is larger than the padded input", got=f"{n} along spatial axis {axis}",
                expected=f"at least {window.span[axis]} with padding",
            )  # fmt: skip
        counts.append(free // window.stride[axis] + 1)
    return tuple(counts)


def windows(x: Array, window: Window, fill: float) -> Array:
    """`x [B, C, *n]` as `[B, C, *counts, *kernel]`: a view of every window of the padded x."""
    rank = len(window.kernel)
    pads = [(0, 0), (0, 0), *zip(window.low, window.high, strict=True)]
    padded = np.pad(x, pads, constant_values=fill)
    axes = tuple(range(2, 2 + rank))
    view = np.lib.stride_tricks.sliding_window_view(padded, window.span, axis=axes)
    strides = [slice(None, None, s) for s in window.stride]
    taps = [slice(None, None, d) for d in window.dilation]
    return view[(slice(None), slice(None), *strides, *taps)]


def _add_bias(y: Array, bias: Array | None) -> Array:
    if bias is None:
        return y
    return y + compute(bias).reshape(len(bias), *[1] * (y.ndim - 2))


def padded(g: Graph, x: Value, window: Window, fill: float) -> Value:
    """`x [B, C, *n]` with its spatial axes padded."""
    low, high = (0, 0, *window.low), (0, 0, *window.high)
    return g.pad(x, low=low, high=high, value=fill) if any(low + high) else x


def window_taps(g: Graph, x: Value, window: Window) -> Iterator[Value]:
    """For each tap of the kernel, the input elements it multiplies: [B, C, *counts]."""
    for tap in product(*map(range, window.kernel)):
        starts: list[int] = [0, 0]
        stops: list[int | None] = [None, None]
        for position, spacing, span in zip(tap, window.dilation, window.span, strict=True):
            start = position * spacing
            rest = span - 1 - start  # span of the taps after this one
            starts.append(start)
            stops.append(-rest if rest else None)
        steps = (1, 1, *window.stride)
        yield g.slice(x, starts=tuple(starts), stops=tuple(stops), steps=steps)


@op("conv", runs_in_low_precision=True)
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
        # [B, G, C/G, *counts, *kernel] -> [G, B·counts, C/G·kernel]: one matmul per group
        view = view.reshape(batch, self.groups, w.shape[1], *view.shape[2:])
        view = np.moveaxis(view, (1, 2), (0, 2 + rank))
        view = view.reshape(self.groups, batch * prod(counts), taps)
        per_group = out // self.groups
        y = view @ w.reshape(self.groups, per_group, taps).swapaxes(1, 2)
        y = y.reshape(self.groups, batch, prod(counts), per_group).transpose(1, 0, 3, 2)
        return rounded(_add_bias(y.reshape(batch, out, *counts), bias), dtype)

    def decompose(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Any:
        """im2col: one matmul of [G, O/G, C/G·taps] with [B, G, C/G·taps, windows]."""
        window = self.window(w.shape.dims)
        result = _result_type(x, w, bias)
        taps = list(window_taps(g, padded(g, wide(g, x), window, 0.0), window))
        batch, _, *counts = taps[0].shape.dims
        num_windows = taps[0].shape.with_dims(counts).num_elements
        out, per_group = w.shape.dims[:2]
        shifted = [
            g.reshape(t, shape=(batch, self.groups, per_group, 1, num_windows)) for t in taps
        ]
        columns = g.concat(*shifted, axis=3)
        columns = g.reshape(columns, shape=(batch, self.groups, per_group * len(taps), num_windows))
        dims = (self.groups, out // self.groups, per_group * prod(window.kernel))
        weight = g.reshape(wide(g, w), shape=dims)
        y = g.reshape(g.matmul(weight, columns), shape=(batch, out, *counts))
        if bias is not None:
            y = g.add(y, g.reshape(wide(g, bias), shape=(out, *[1] * len(counts))))
        return cast(g, y, result)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """A multiply and an add per output element and tap."""
        taps = prod(inputs[1].dims[1:], start=1)
        return Cost(outputs[0].num_elements * taps * 2, _traffic(inputs, outputs))


def dilated(g: Graph, x: Value, axis: int, factor: int) -> Value:
    """x with `factor - 1` zeros between neighbours along an axis."""
    if factor == 1:
        return x
    dims = x.shape.dims
    n = dims[axis]
    y = g.reshape(x, shape=(*dims[: axis + 1], 1, *dims[axis + 1 :]))
    high = tuple(factor - 1 if i == axis + 1 else 0 for i in range(x.shape.rank + 1))
    y = g.pad(y, low=(0,) * len(high), high=high)
    y = g.reshape(y, shape=(*dims[:axis], n * factor, *dims[axis + 1 :]))
    return g.narrow(y, axis=axis, start=0, length=n * factor - (factor - 1))


def _padded_or_cropped(g: Graph, x: Value, axis: int, low: int, high: int) -> Value:
    """An axis padded with zeros at both ends; negative counts crop."""
    zeros = [tuple(max(n, 0) if i == axis else 0 for i in range(x.shape.rank)) for n in (low, high)]
    if any(map(any, zeros)):
        x = g.pad(x, low=zeros[0], high=zeros[1])
    if low < 0 or high < 0:
        length = x.shape.dims[axis] + min(low, 0) + min(high, 0)
        x = g.narrow(x, axis=axis, start=max(-low, 0), length=length)
    return x


@op("conv_transpose", runs_in_low_precision=True)
class ConvTranspose(Op):
    """Transposed convolution: every element of `x [B, C, *n]` adds a scaled kernel to the output.

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
        return _per_axis(self.output_padding, rank, "output_padding")

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
            target = [
                slice(start, start + (n[a] - 1) * win.stride[a] + 1, win.stride[a])
                for a, start in enumerate(t * d for t, d in zip(tap, win.dilation, strict=True))
            ]
            y[(..., *target)] += part.reshape(*y.shape[:2], *n)
        crop = [slice(win.low[a], full[a] - win.high[a]) for a in range(rank)]
        return rounded(_add_bias(y[(..., *crop)], bias), dtype)

    def decompose(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Any:
        """A convolution of the dilated x with the flipped kernel."""
        rank = x.shape.rank - 2
        window, extra = self.window(w.shape.dims), self.extra(rank)
        result = _result_type(x, w, bias)
        y = wide(g, x)
        for i, stride in enumerate(window.stride):
            reach = window.span[i] - 1
            y = dilated(g, y, i + 2, stride)
            low, high = reach - window.low[i], reach - window.high[i] + extra[i]
            y = _padded_or_cropped(g, y, i + 2, low, high)
        c, out, *kernel = w.shape.dims
        weight = g.flip(wide(g, w), axis=tuple(range(2, 2 + rank)))
        weight = g.reshape(weight, shape=(self.groups, c // self.groups, out, *kernel))
        weight = g.transpose(weight, axes=(0, 2, 1, *range(3, 3 + rank)))
        weight = g.reshape(weight, shape=(out * self.groups, c // self.groups, *kernel))
        rest = [] if bias is None else [wide(g, bias)]
        made = g.conv(y, weight, *rest, dilation=window.dilation, groups=self.groups)
        return cast(g, made, result)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """A multiply and an add per input element and tap."""
        taps = prod(inputs[1].dims[1:], start=1)
        return Cost(inputs[0].num_elements * taps * 2, _traffic(inputs, outputs))


@op("depthwise_conv1d_causal")
class DepthwiseConv1dCausal(Op):
    """y[b, s, c] = Σ_j w[c, j] · (left_pad ⧺ x)[b, s + j, c]: no token sees a later one.

    `x [B, S, C]`, `w [C, K]` (the last tap is the token itself), `left_pad [B, K−1, C]` the
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
        extended = np.concatenate([left_pad, x], axis=1)
        y = np.zeros(x.shape, np.result_type(x, w, left_pad))
        for j in range(w.shape[1]):
            y += extended[:, j : j + x.shape[1]] * w[:, j]
        return rounded(y, dtype)

    def decompose(self, g: Graph, x: Value, w: Value, left_pad: Value) -> Any:
        channels, taps = w.shape.dims
        length = x.shape.dims[1]
        extended = g.concat(wide(g, left_pad), wide(g, x), axis=1)
        y: Any = None
        for j in range(int(taps)):  # type: ignore[arg-type]  # inference ensures an int
            tap = g.reshape(g.narrow(wide(g, w), axis=1, start=j, length=1), shape=(channels,))
            term = g.mul(g.narrow(extended, axis=1, start=j, length=length), tap)
            y = term if y is None else g.add(y, term)
        return cast(g, y, _result_type(x, w, left_pad))

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


def _result_type(*tensors: Shape | Value | Array | None) -> DType:
    return promote(*[DType.of(t.dtype) for t in tensors if t is not None])


def _traffic(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Dim:
    total: Dim = 0
    for shape in (*inputs, *outputs):
        total = total + shape.size_bytes
    return total
