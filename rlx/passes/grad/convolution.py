"""Convolutions and max pooling: backward by a convolution with flipped filters, and by ops of their
own. Forward mode is linear in the images and in the filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops.conv import Window
from rlx.passes.grad.rules import (
    DECOMPOSED_FORWARD,
    MULTILINEAR,
    Grads,
    add_any,
    in_type,
    jvp,
    unbroadcast,
    vjp,
)

Values = Sequence[Value]
MULTILINEAR |= {"conv_weight_backward"}
DECOMPOSED_FORWARD |= {"max_pool"}


@vjp("conv")
def _conv(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x, w, *bias), (ct,) = inputs, grads
    found = [
        in_type(g, _of_images(op, g, x, w, ct), x.shape.dtype),
        in_type(g, _of_filters(op, g, x, w, ct), w.shape.dtype),
    ]
    if bias:
        ones = (ct.shape.dims[1], *[1] * (ct.shape.rank - 2))
        sums = unbroadcast(g, ct, bias[0].shape.with_dims(ones))
        found.append(g.reshape(sums, shape=bias[0].shape.dims))
    return found


def _of_filters(op: Any, g: Graph, x: Value, w: Value, ct: Value) -> Value:
    given = {name: getattr(op, name) for name in ("stride", "padding", "dilation", "groups")}
    made: Value = g.conv_weight_backward(x, ct, kernel=op.window(w.shape.dims).kernel, **given)
    return made


def _of_images(op: Any, g: Graph, x: Value, w: Value, ct: Value) -> Value:
    """With a stride of one and one group a convolution with flipped filters, for which devices
    have their fastest code; else a transposed one. A stride may leave elements at the end that no
    window has seen: `output_padding` makes room for them."""
    window = op.window(w.shape.dims)
    reach = [span - 1 for span in window.span]
    low = [r - n for r, n in zip(reach, window.low, strict=True)]
    high = [r - n for r, n in zip(reach, window.high, strict=True)]
    axes = tuple(range(2, w.shape.rank))
    if op.groups == 1 and set(window.stride) == {1} and min(low + high) >= 0:
        flipped = g.transpose(g.flip(w, axis=axes), axes=(1, 0, *axes))
        return g.conv(ct, flipped, padding=(*low, *high), dilation=window.dilation)
    made = g.conv_transpose(
        ct, w, stride=window.stride, padding=(*window.low, *window.high),
        dilation=window.dilation, groups=op.groups, output_padding=_unseen(window),
    )  # fmt: skip
    for axis, size in zip(axes, x.shape.dims[2:], strict=True):
        made = g.narrow(made, axis=axis, start=0, length=size)
    return made


def _unseen(window: Window) -> tuple[int, ...]:
    """The most elements behind the last window of an axis."""
    return tuple(s - 1 for s in window.stride)


@jvp("conv")
def _conv_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    (x, w, *_), (dx, dw, *rest) = inputs, tangents
    total: Value | None = None
    for images, filters in ((dx, w), (x, dw)):
        if images is not None and filters is not None:
            total = add_any(g, total, g.append_node(op, [images, filters]).output)
    if rest and rest[0] is not None:
        like = outputs[0].shape
        column = g.reshape(rest[0], shape=(like.dims[1], *[1] * (like.rank - 2)))
        total = add_any(g, total, g.expand(column, shape=like.dims))
    return [None if total is None else in_type(g, total, outputs[0].shape.dtype)]


@vjp("conv_weight_backward")
def _filters(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    """It is linear in the images as their convolution is, and in the cotangents."""
    (x, dy), (ct,) = inputs, grads
    dx = _of_images(op.forward, g, x, ct, dy)
    ddy = g.append_node(op.forward, [x, ct]).output
    return [in_type(g, dx, x.shape.dtype), in_type(g, ddy, dy.shape.dtype)]


@vjp("max_pool")
def _max_pool(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,), (ct,) = inputs, grads
    return [in_type(g, g.max_pool_backward(x, ct, **op.attributes()), x.shape.dtype)]
