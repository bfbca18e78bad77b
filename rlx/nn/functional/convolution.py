"""Convolutions over one, two or three spatial axes, channels first: x [B, C, …], PyTorch's weights.

Three axes are sums of convolutions over two: one for each tap along the depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.nn.functional.operands import ArrayLike, Sizes, call, fixed, per_axis, require_rank
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array

Axes = int | Sequence[int]


class Geometry(NamedTuple):
    """How a kernel moves over the spatial axes; `low` and `high` pad them."""

    stride: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def inner(self) -> dict[str, Any]:
        """The attributes of the op over the last two axes."""
        padding = (*self.low[-2:], *self.high[-2:])
        return {
            "stride": self.stride[-2:], "padding": padding, "dilation": self.dilation[-2:],
            "groups": self.groups,
        }  # fmt: skip


def geometry_of(
    weight: Array, rank: int, stride: Axes, padding: Axes | str, dilation: Axes, groups: int,
    where: str,
) -> Geometry:  # fmt: skip
    """How a weight [O, C/groups, kernel…] moves; "same" and "valid" are paddings too."""
    strides, spaces = per_axis(stride, rank, where), per_axis(dilation, rank, where)
    kernel = tuple([int(n) for n in weight.shape[2:]])
    if padding == "valid":
        low = high = (0,) * rank
    elif padding == "same":
        if set(strides) != {1}:
            raise AttributeValueError(
                "padding 'same' takes a stride of 1", where=where, got=strides
            )
        total = [d * (k - 1) for d, k in zip(spaces, kernel, strict=True)]
        low, high = tuple([t // 2 for t in total]), tuple([t - t // 2 for t in total])
    elif isinstance(padding, str):
        raise AttributeValueError(
            "unknown padding", where=where, got=repr(padding), expected="numbers, same or valid"
        )
    else:
        low = high = per_axis(padding, rank, where)
    return Geometry(strides, low, high, spaces, int(groups))


def _fixed(
    g: Graph, x: Value, w: Value, bias: Value | None, sizes: tuple[Sizes, int, int]
) -> tuple[Value, Value, Value | None]:
    weight, channels, out = sizes
    x = fixed(g, x, (None, channels, *[None] * (x.shape.rank - 2)))
    return x, fixed(g, w, weight), None if bias is None else fixed(g, bias, (out,))


def _conv(
    g: Graph, x: Value, w: Value, bias: Value | None, geometry: Geometry,
    sizes: tuple[Sizes, int, int],
) -> Any:  # fmt: skip
    return conv_values(g, *_fixed(g, x, w, bias, sizes), geometry)


def conv_values(g: Graph, x: Value, w: Value, bias: Value | None, geometry: Geometry) -> Any:
    """The convolution of values of a graph, over one, two or three axes."""
    more = () if bias is None else (bias,)
    if x.shape.rank < 5:
        return g.conv(x, w, *more, **geometry.inner())
    return _deep(g, x, w, bias, geometry)


def _deep(g: Graph, x: Value, w: Value, bias: Value | None, geometry: Geometry) -> Any:
    """Slices along the depth go to the batch axis."""
    stride, space = geometry.stride[0], geometry.dilation[0]
    low, high = (0, 0, geometry.low[0], 0, 0), (0, 0, geometry.high[0], 0, 0)
    x = g.pad(x, low, high) if any(low + high) else x
    batch, channels, depth, *plane = x.shape.dims
    taps = w.shape.dims[2]
    assert isinstance(taps, int)  # weights have sizes that are numbers
    count = (depth - space * (taps - 1) - 1) // stride + 1
    parts = []
    for tap in range(taps):
        stop = [None, None, None if tap == taps - 1 else space * (tap + 1 - taps), None, None]
        seen = g.slice(x, (0, 0, tap * space, 0, 0), stop, (1, 1, stride, 1, 1))
        rows = g.transpose(seen, (0, 2, 1, 3, 4))
        rows = g.reshape(rows, (batch * count, channels, *plane))
        kernel = g.reshape(
            g.narrow(w, axis=2, start=tap, length=1), (*w.shape.dims[:2], *w.shape.dims[3:])
        )
        parts.append(g.conv(rows, kernel, **geometry.inner()))
    y = reduce(g.add, parts)
    out, *after = y.shape.dims[1:]
    y = g.transpose(g.reshape(y, (batch, count, out, *after)), (0, 2, 1, 3, 4))
    return y if bias is None else g.add(y, g.reshape(bias, (out, 1, 1, 1)))


def _run(
    build: Any, where: str, rank: int, operands: tuple[ArrayLike, ArrayLike, ArrayLike | None],
    geometry: tuple[Axes, Axes | str, Axes, int], transposed: bool, *options: Any,
) -> Array:  # fmt: skip
    x = require_rank(operands[0], (rank + 2,), where, f"[batch, channels] and {rank} spatial axes")
    w = require_rank(operands[1], (rank + 2,), where, f"a weight with {rank + 2} axes")
    found = geometry_of(w, rank, *geometry, where)
    channels, sizes = int(x.shape[1]), tuple([int(n) for n in w.shape])
    expected = sizes[0] if transposed else sizes[1] * found.groups
    if channels != expected:
        raise ShapeError(
            "channels of x do not fit the weight", where=where, got=channels, expected=expected
        )
    out = sizes[1] * found.groups if transposed else sizes[0]
    if operands[2] is not None and int(as_array(operands[2]).shape[0]) != out:
        raise ShapeError("the bias does not fit", where=where, got=str(as_array(operands[2]).shape),
                         expected=f"[{out}]")  # fmt: skip
    return call(build, [x, w, operands[2]], found, (sizes, channels, out), *options)


def conv1d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Axes = 1,
    padding: Axes | str = 0, dilation: Axes = 1, groups: int = 1,
) -> Array:  # fmt: skip
    """x [B, C, n] with a weight [O, C / groups, k]; padding by numbers, "same" or "valid"."""
    geometry = (stride, padding, dilation, groups)
    return _run(_conv, "conv1d", 1, (x, weight, bias), geometry, False)


def conv2d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Axes = 1,
    padding: Axes | str = 0, dilation: Axes = 1, groups: int = 1,
) -> Array:  # fmt: skip
    """x [B, C, h, w] with a weight [O, C / groups, kh, kw]."""
    geometry = (stride, padding, dilation, groups)
    return _run(_conv, "conv2d", 2, (x, weight, bias), geometry, False)


def conv3d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Axes = 1,
    padding: Axes | str = 0, dilation: Axes = 1, groups: int = 1,
) -> Array:  # fmt: skip
    """x [B, C, d, h, w] with a weight [O, C / groups, kd, kh, kw]."""
    geometry = (stride, padding, dilation, groups)
    return _run(_conv, "conv3d", 3, (x, weight, bias), geometry, False)


# -- transposed -------------------------------------------------------------------------------


def _transposed(
    g: Graph, x: Value, w: Value, bias: Value | None, geometry: Geometry,
    sizes: tuple[Sizes, int, int], extra: tuple[int, ...],
) -> Any:  # fmt: skip
    return transposed_values(g, *_fixed(g, x, w, bias, sizes), geometry, extra)


def transposed_values(
    g: Graph, x: Value, w: Value, bias: Value | None, geometry: Geometry, extra: tuple[int, ...]
) -> Any:
    """The transposed convolution of values of a graph; `extra` is the output padding."""
    more = () if bias is None else (bias,)
    inner = {**geometry.inner(), "output_padding": extra[-2:]}
    if x.shape.rank < 5:
        return g.conv_transpose(x, w, *more, **inner)
    batch, channels, depth, *plane = x.shape.dims
    rows = g.reshape(g.transpose(x, (0, 2, 1, 3, 4)), (batch * depth, channels, *plane))
    stride, space, taps = geometry.stride[0], geometry.dilation[0], w.shape.dims[2]
    assert isinstance(taps, int)
    length = (depth - 1) * stride + space * (taps - 1) + 1 + extra[0]
    parts = []
    for tap in range(taps):
        kernel = g.reshape(
            g.narrow(w, axis=2, start=tap, length=1), (*w.shape.dims[:2], *w.shape.dims[3:])
        )
        y = g.conv_transpose(rows, kernel, **inner)
        out, *after = y.shape.dims[1:]
        y = g.transpose(g.reshape(y, (batch, depth, out, *after)), (0, 2, 1, 3, 4))
        parts.append(_spread(g, y, stride, tap * space, space * (taps - 1 - tap) + extra[0]))
    y = reduce(g.add, parts)
    low, high = geometry.low[0], geometry.high[0]
    y = g.narrow(y, axis=2, start=low, length=length - low - high)
    return y if bias is None else g.add(y, g.reshape(bias, (out, 1, 1, 1)))


def _spread(g: Graph, y: Value, stride: int, before: int, after: int) -> Value:
    """Axis 2 with stride − 1 zeros between neighbours, and zeros at both ends."""
    a, b, depth, *plane = y.shape.dims
    if stride > 1:
        y = g.reshape(y, (a, b, depth, 1, *plane))
        y = g.pad(y, (0,) * 6, (0, 0, 0, stride - 1, 0, 0))
        y = g.reshape(y, (a, b, depth * stride, *plane))
        y = g.narrow(y, axis=2, start=0, length=depth * stride - (stride - 1))
    return g.pad(y, (0, 0, before, 0, 0), (0, 0, after, 0, 0)) if before + after else y


def conv_transpose1d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Axes = 1,
    padding: Axes = 0, output_padding: Axes = 0, groups: int = 1, dilation: Axes = 1,
) -> Array:  # fmt: skip
    """The transposed convolution of x [B, C, n] with a weight [C, O / groups, k]."""
    geometry, extra = (
        (stride, padding, dilation, groups),
        per_axis(output_padding, 1, "output_padding"),
    )
    return _run(_transposed, "conv_transpose1d", 1, (x, weight, bias), geometry, True, extra)


def conv_transpose2d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Axes = 1,
    padding: Axes = 0, output_padding: Axes = 0, groups: int = 1, dilation: Axes = 1,
) -> Array:  # fmt: skip
    """The transposed convolution of x [B, C, h, w] with a weight [C, O / groups, kh, kw]."""
    geometry, extra = (
        (stride, padding, dilation, groups),
        per_axis(output_padding, 2, "output_padding"),
    )
    return _run(_transposed, "conv_transpose2d", 2, (x, weight, bias), geometry, True, extra)


def conv_transpose3d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, stride: Axes = 1,
    padding: Axes = 0, output_padding: Axes = 0, groups: int = 1, dilation: Axes = 1,
) -> Array:  # fmt: skip
    """The transposed convolution of x [B, C, d, h, w] with a weight [C, O / groups, kd, kh, kw]."""
    geometry, extra = (
        (stride, padding, dilation, groups),
        per_axis(output_padding, 3, "output_padding"),
    )
    return _run(_transposed, "conv_transpose3d", 3, (x, weight, bias), geometry, True, extra)
