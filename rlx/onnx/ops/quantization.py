"""Quantised tensors: linear scales and zero points."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.ir.dtype import f32, u8
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.interpreter import as_array
from rlx.onnx.ops.casts import converted
from rlx.onnx.table import op
from rlx.onnx.values import is_number_type, shape_of, type_of


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


def requantized(x: Array, zero: Array) -> Array:
    """x rounded, moved by the zero point, in the zero point's type."""
    limits = np.iinfo(zero.dtype.numpy)
    made = xp.round(x) + zero.astype(f32)
    return xp.clip(made, float(limits.min), float(limits.max)).astype(zero.dtype)
