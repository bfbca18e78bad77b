"""Matrix products and convolutions of 8-bit integers.

Constant weights that fit i8 without their zero point are multiplied as bytes: a product of matrices
is a convolution with one tap there. Anything else is multiplied as floats, which have the sums
exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.ir.dtype import f32, f64, i8, i32, u8
from rlx.ir.ops.conv_integer import EXACT_TERMS
from rlx.numpy.array import Array, Tracer
from rlx.numpy.trace import Size
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.ops.convolution import convolved, windows
from rlx.onnx.ops.quantization import requantized
from rlx.onnx.table import op

OWN = "rlx"  # the domain of operators that only fusion makes
_EXACT = EXACT_TERMS // 2  # of numbers of 9 bits


# -- operands -------------------------------------------------------------------------------------


def _centred(x: Array, zero: Array | None, rows: bool) -> Array:
    """x minus its zero point, in i32. A vector of zero points counts for rows or for columns."""
    wide = x.astype(i32)
    if zero is None:
        return wide
    offset = zero.astype(i32)
    if offset.ndim == 1 and rows and x.ndim > 1:
        offset = xp.expand_dims(offset, -1)
    return wide - offset


def _signed_weights(w: Array, zero: Array | None) -> Array | None:
    """Constant weights minus their zero point, if that fits i8; the zero point broadcasts."""
    if isinstance(w, Tracer) or isinstance(zero, Tracer) or w.dtype not in (i8, u8):
        return None
    offset = np.zeros((), np.int32) if zero is None else np.asarray(zero).astype(np.int32)
    if w.dtype is i8 and not offset.any():
        return w
    centred = np.asarray(w).astype(np.int32) - offset
    if centred.size and (centred.min() < -128 or centred.max() > 127):
        return None
    return Array(centred.astype(np.int8))


def _one_zero(x: Array, zero: Array | None) -> Array | None:
    """The zero point of bytes x as a scalar; None where x is something else, or has several."""
    if x.dtype not in (i8, u8):
        return None
    if zero is None:
        return xp.zeros((), dtype=x.dtype)
    if zero.dtype is not x.dtype or any(isinstance(n, Size) or n != 1 for n in zero.shape):
        return None
    return xp.reshape(zero, ())


# -- products of matrices -------------------------------------------------------------------------


def integer_product(a: Array, a_zero: Array | None, b: Array, b_zero: Array | None = None) -> Array:
    """The product of matrices of bytes without their zero points, in i32."""
    operands = _matrix_operands(a, a_zero, b, b_zero)
    if operands is not None:
        return _rows_again(graph_op("conv_integer", *operands), a)
    left, right = _centred(a, a_zero, True), _centred(b, b_zero, False)
    depth = a.shape[-1]
    if not isinstance(depth, Size) and depth <= _EXACT:
        return xp.matmul(left.astype(f32), right.astype(f32)).astype(i32)
    return xp.matmul(left, right)


def _matrix_operands(
    a: Array, a_zero: Array | None, b: Array, b_zero: Array | None
) -> tuple[Array, Array, Array] | None:
    """Rows of `a` as pixels, columns of `b` as filters, and the zero point."""
    zero, weights = _one_zero(a, a_zero), _signed_weights(b, b_zero)
    if zero is None or weights is None or b.ndim != 2 or a.ndim < 2:
        return None
    pixels = xp.matrix_transpose(xp.reshape(a, (1, -1, a.shape[-1])))
    filters = np.ascontiguousarray(np.asarray(weights).T)[..., np.newaxis]
    return pixels, Array(filters), zero


def _rows_again(pixels: Array, a: Array) -> Array:
    return xp.reshape(xp.matrix_transpose(pixels), (*a.shape[:-1], pixels.shape[1]))


@op("MatMulInteger")
def matmul_integer(
    node: Call, a: Array, b: Array, a_zero: Array | None = None, b_zero: Array | None = None
) -> Array:
    return integer_product(a, a_zero, b, b_zero)


@op("QLinearMatMul")
def qlinear_matmul(
    node: Call, a: Array, a_scale: Array, a_zero: Array, b: Array, b_scale: Array, b_zero: Array,
    y_scale: Array, y_zero: Array,
) -> Array:  # fmt: skip
    operands = _matrix_operands(a, a_zero, b, b_zero)
    is_row_scale = a_scale.ndim == 1 and a.ndim > 1
    if operands is not None and not (is_row_scale and a_scale.shape[0] != 1) and y_zero.ndim == 0:
        scale = a_scale.astype(f32) * b_scale.astype(f32) / y_scale.astype(f32)
        each = xp.broadcast_to(xp.reshape(scale, (-1,)), (b.shape[1],))
        return _rows_again(graph_op("qlinear_conv", *operands, each, y_zero), a)
    total = integer_product(a, a_zero, b, b_zero)
    rows = xp.expand_dims(a_scale, -1) if is_row_scale else a_scale
    factor = rows.astype(f32) * b_scale.astype(f32)
    return requantized(total.astype(f32) * factor / y_scale.astype(f32), y_zero)


# -- convolutions ---------------------------------------------------------------------------------


class _Geometry:
    """Attributes of a convolution, and how it is computed."""

    def __init__(self, node: Call, x: Array, w: Array) -> None:
        kernel = tuple([int(n) for n in w.shape[2:]])
        self.at = windows(node, kernel, x.shape[2:])
        self.groups = node.int("group", 1)
        self.is_plain = x.ndim in (3, 4) and all(n >= 0 for n in (*self.at[2], *self.at[3]))
        self.column = (1, -1, *[1] * (x.ndim - 2))

    def integers(self, name: str, *operands: Array, **more: Any) -> Array:
        strides, dilations, low, high = self.at
        return graph_op(
            name, *operands, stride=tuple(strides), padding=(*low, *high),
            dilation=tuple(dilations), groups=self.groups, **more,
        )  # fmt: skip

    def floats(self, x: Array, w: Array, x_zero: Array | None, w_zero: Array | None) -> Array:
        """Sums in f32 where it has them exactly, else in f64."""
        depth = 1
        for n in w.shape[1:]:
            depth *= int(n)
        work = f32 if depth <= _EXACT else f64
        image, filters = (_centred(t, z, False) for t, z in ((x, x_zero), (w, w_zero)))
        return convolved(image.astype(work), filters.astype(work), None, *self.at, self.groups)


def _by_filter(w: Array, zero: Array | None) -> Array | None:
    """A zero point for each filter, against the weights."""
    if zero is None or zero.ndim == 0:
        return zero
    return xp.reshape(zero, (-1, *[1] * (w.ndim - 1)))


@op("ConvInteger")
def conv_integer(
    node: Call, x: Array, w: Array, x_zero: Array | None = None, w_zero: Array | None = None
) -> Array:
    shape, w_zero = _Geometry(node, x, w), _by_filter(w, w_zero)
    zero, weights = _one_zero(x, x_zero), _signed_weights(w, w_zero)
    if shape.is_plain and zero is not None and weights is not None:
        return shape.integers("conv_integer", x, weights, zero)
    return shape.floats(x, w, x_zero, w_zero).astype(i32)


@op("QLinearConv")
def qlinear_conv(
    node: Call, x: Array, x_scale: Array, x_zero: Array, w: Array, w_scale: Array, w_zero: Array,
    y_scale: Array, y_zero: Array, bias: Array | None = None,
) -> Array:  # fmt: skip
    operands = (x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias)
    return _quantised_conv(node, operands, node.text("activation", "none").lower())


@op("QLinearConvAdd", domain=OWN)
def qlinear_conv_add(
    node: Call, x: Array, x_scale: Array, x_zero: Array, w: Array, w_scale: Array, w_zero: Array,
    y_scale: Array, y_zero: Array, bias: Array | None, other: Array, other_scale: Array,
    other_zero: Array, sum_scale: Array, sum_zero: Array,
) -> Array:  # fmt: skip
    """A quantised convolution and another tensor, dequantised, added and quantised again; the
    activation follows the sum. `fuse_quantized` makes it of networks in QDQ form."""
    activation = node.text("activation", "none").lower()
    operands = (x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias)
    plain = _quantised_conv(node, operands, "none")
    zeros = [xp.reshape(z, ()) for z in (y_zero, other_zero, sum_zero)]
    factors = [xp.reshape(s.astype(f32), ()) for s in (y_scale, other_scale, sum_scale)]
    if plain.shape == other.shape:
        residual = (other, zeros[1], xp.stack(factors), zeros[2])
        made = _integer_conv(node, operands, activation, residual)
        if made is not None:
            return made
    pairs = zip((plain, other), zeros[:2], factors[:2], strict=True)
    own, its = ((t.astype(f32) - z.astype(f32)) * s for t, z, s in pairs)
    total = (own + its) / factors[2]
    return requantized(xp.maximum(total, 0.0) if activation == "relu" else total, zeros[2])


def _quantised_conv(node: Call, operands: tuple[Any, ...], activation: str) -> Array:
    made = _integer_conv(node, operands, activation)
    if made is not None:
        return made
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = operands
    shape = _Geometry(node, x, w)
    total = shape.floats(x, w, x_zero, _by_filter(w, w_zero))
    if bias is not None:
        total = total + xp.reshape(bias.astype(total.dtype), shape.column)
    scale = xp.reshape(_filter_scales(w, x_scale, w_scale, y_scale), shape.column)
    total = total.astype(f32) * scale
    total = xp.maximum(total, 0.0) if activation == "relu" else total
    return requantized(total, xp.reshape(y_zero, ()))


def _integer_conv(
    node: Call, operands: tuple[Any, ...], activation: str, residual: tuple[Array, ...] = ()
) -> Array | None:
    """The convolution on integers; None where its weights or axes do not allow that."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = operands
    shape = _Geometry(node, x, w)
    zero, weights = _one_zero(x, x_zero), _signed_weights(w, _by_filter(w, w_zero))
    if not shape.is_plain or zero is None or weights is None:
        return None
    if bias is None and residual:
        bias = Array(np.zeros(int(w.shape[0]), np.int32))
    more = (() if bias is None else (bias,)) + residual
    return shape.integers(
        "qlinear_conv", x, weights, zero, _filter_scales(w, x_scale, w_scale, y_scale),
        xp.reshape(y_zero, ()), *more, activation=activation,
    )  # fmt: skip


def _filter_scales(w: Array, x_scale: Array, w_scale: Array, y_scale: Array) -> Array:
    """What the sums of each filter are multiplied by."""
    scale = x_scale.astype(f32) * w_scale.astype(f32) / y_scale.astype(f32)
    return xp.broadcast_to(xp.reshape(scale, (-1,)), (w.shape[0],))
