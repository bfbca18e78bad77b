"""Quantised tensors: linear scales and zero points, products of whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.ir.dtype import f32, i32, u8
from rlx.numpy.array import Array
from rlx.numpy.trace import Size
from rlx.onnx.call import Call
from rlx.onnx.interpreter import as_array
from rlx.onnx.ops.casts import converted
from rlx.onnx.ops.convolution import convolved, windows
from rlx.onnx.table import op
from rlx.onnx.values import is_number_type, shape_of, type_of

_EXACT = 2**24  # whole numbers that f32 has all of


def scale_for(node: Call, given: Any, shape: Any, axis: int, block: int = 0) -> Any:
    """A scale or zero point against the tensor: one, one an element of an axis, or one a block."""
    found = shape_of(given)
    if all(type(n) is int and n == 1 for n in found) and not block:
        return xp.reshape(as_array(given), ())
    made = as_array(given)
    axis = axis % len(shape)
    if len(found) == 1 and not block:
        return xp.reshape(made, tuple([-1 if a == axis else 1 for a in range(len(shape))]))
    if not block:  # the same rank: blocks of whole parts
        return made
    wide = xp.repeat(made, block, axis=axis)
    key = [slice(None)] * len(shape)
    key[axis] = slice(0, shape[axis])
    return wide[tuple(key)]


@op("QuantizeLinear", raw=True)
def quantize_linear(node: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    to = np.dtype(np.uint8)
    if zero is not None:
        to = type_of(zero)
    elif node.int("output_dtype", 0):
        to = node.element_type("output_dtype")
    shape, axis, block = shape_of(x), node.int("axis", 1), node.int("block_size", 0)
    work = node.dtype("precision") if node.int("precision", 0) else f32
    values = as_array(x).astype(work)
    scaled = values / scale_for(node, scale, shape, axis, block).astype(work)
    if to.kind in "iu" and is_number_type(to):
        limits = np.iinfo(to)
        low, high = float(limits.min), float(limits.max)
        made = xp.round(scaled.astype(f32))
        if zero is not None:
            made = made + scale_for(node, zero, shape, axis, block).astype(f32)
        return converted(node, xp.clip(made, low, high), to)
    if "int" in to.name:
        bits = int(to.name[-1])
        low, high = (
            (0, 2**bits - 1) if to.name[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        )
        made = xp.round(scaled.astype(f32))
        if zero is not None:
            made = made + _zero(node, zero, shape, axis, block)
        return converted(node, xp.clip(made, low, high), to)
    return converted(node, scaled, to)  # small floats, whose zero point is 0


def _zero(node: Call, zero: Any, shape: Any, axis: int, block: int) -> Any:
    return scale_for(node, converted(node, zero, np.dtype(np.float32)), shape, axis, block)


@op("DequantizeLinear", raw=True)
def dequantize_linear(node: Call, x: Any, scale: Any, zero: Any = None) -> Any:
    kind = as_array(scale).dtype
    to = node.dtype("output_dtype") if node.int("output_dtype", 0) else kind
    shape, axis, block = shape_of(x), node.int("axis", 1), node.int("block_size", 0)
    work = np.dtype(np.int32) if type_of(x).kind in "iu" and is_number_type(type_of(x)) else (
        np.dtype(np.float32))  # fmt: skip
    values = as_array(converted(node, x, work))
    if zero is not None and "float" not in type_of(x).name:
        offset = scale_for(node, converted(node, zero, work), shape, axis, block)
        values = values - offset
    factor = scale_for(node, scale, shape, axis, block)
    return (values.astype(f32) * factor.astype(f32)).astype(to)


@op("DynamicQuantizeLinear")
def dynamic_quantize_linear(node: Call, x: Array) -> Any:
    low = xp.minimum(xp.min(x), 0.0)
    high = xp.maximum(xp.max(x), 0.0)
    scale = (high - low) / 255.0
    safe = xp.where(xp.equal(scale, 0), xp.ones_like(scale), scale)
    zero = xp.clip(xp.round(-low / safe), 0.0, 255.0)
    made = xp.clip(xp.round(x / safe) + zero, 0.0, 255.0)
    return made.astype(u8), scale, zero.astype(u8)


# -- products -------------------------------------------------------------------------------------


def _centred(x: Array, zero: Array | None, rows: bool) -> Array:
    """x minus its zero point, in i32. A vector of zero points counts for rows or for columns."""
    wide = x.astype(i32)
    if zero is None:
        return wide
    offset = zero.astype(i32)
    if offset.ndim == 1 and rows and x.ndim > 1:
        offset = xp.expand_dims(offset, -1)
    return wide - offset


@op("MatMulInteger")
def matmul_integer(
    node: Call, a: Array, b: Array, a_zero: Array | None = None, b_zero: Array | None = None
) -> Array:
    return product_of_integers(_centred(a, a_zero, True), _centred(b, b_zero, False))


def product_of_integers(a: Array, b: Array) -> Array:
    """A product of i32 matrices of 9-bit numbers: in f32 where its sums are exact there."""
    depth = a.shape[-1]
    if not isinstance(depth, Size) and depth * 256 * 256 <= _EXACT:
        return xp.matmul(a.astype(f32), b.astype(f32)).astype(i32)
    return xp.matmul(a, b)


@op("QLinearMatMul")
def qlinear_matmul(
    node: Call, a: Array, a_scale: Array, a_zero: Array, b: Array, b_scale: Array, b_zero: Array,
    y_scale: Array, y_zero: Array,
) -> Array:  # fmt: skip
    total = product_of_integers(_centred(a, a_zero, True), _centred(b, b_zero, False))
    rows = xp.expand_dims(a_scale, -1) if a_scale.ndim == 1 and a.ndim > 1 else a_scale
    factor = rows.astype(f32) * b_scale.astype(f32)
    return requantized(total.astype(f32) * factor / y_scale.astype(f32), y_zero)


def requantized(x: Array, zero: Array) -> Array:
    """x rounded, moved by the zero point, in the zero point's type."""
    limits = np.iinfo(zero.dtype.numpy)
    made = xp.round(x) + zero.astype(f32)
    return xp.clip(made, float(limits.min), float(limits.max)).astype(zero.dtype)


def _conv_operands(
    x: Array, w: Array, x_zero: Array | None, w_zero: Array | None
) -> tuple[Array, Array]:
    """Centred operands, in f32 where the sums are exact there, else in f64."""
    depth = 1
    for n in w.shape[1:]:
        depth *= int(n)
    work = xp.float32 if depth * 256 * 256 <= _EXACT else xp.float64
    if w_zero is not None and w_zero.ndim == 1:
        w_zero = xp.reshape(w_zero, (-1, *[1] * (w.ndim - 1)))
    return _centred(x, x_zero, False).astype(work), _centred(w, w_zero, False).astype(work)


def _convolved(node: Call, x: Array, w: Array) -> Array:
    kernel = tuple([int(n) for n in w.shape[2:]])
    strides, dilations, low, high = windows(node, kernel, x.shape[2:])
    return convolved(x, w, None, strides, dilations, low, high, node.int("group", 1))


@op("ConvInteger")
def conv_integer(
    node: Call, x: Array, w: Array, x_zero: Array | None = None, w_zero: Array | None = None
) -> Array:
    return _convolved(node, *_conv_operands(x, w, x_zero, w_zero)).astype(i32)


@op("QLinearConv")
def qlinear_conv(
    node: Call, x: Array, x_scale: Array, x_zero: Array, w: Array, w_scale: Array, w_zero: Array,
    y_scale: Array, y_zero: Array, bias: Array | None = None,
) -> Array:  # fmt: skip
    centred = _centred(x, x_zero, False).astype(f32)
    zero = xp.reshape(w_zero, (-1, *[1] * (w.ndim - 1))) if w_zero.ndim == 1 else w_zero
    weights = _centred(w, zero, False).astype(f32)
    total = _convolved(node, centred, weights)
    column = (1, -1, *[1] * (x.ndim - 2))
    if bias is not None:
        total = total + xp.reshape(bias.astype(f32), column)
    scale = x_scale.astype(f32) * w_scale.astype(f32) / y_scale.astype(f32)
    scale = xp.reshape(scale, column) if scale.ndim == 1 and scale.shape[0] != 1 else (
        xp.reshape(scale, ()))  # fmt: skip
    return requantized(total * scale, xp.reshape(y_zero, ()))
