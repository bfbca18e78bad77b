"""Microsoft's quantised operators: weights of 4 and 8 bits, and whole numbers in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.ir.dtype import f32
from rlx.ir.quant.scheme import QuantScheme, decode
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.ops import quantization
from rlx.onnx.ops.integer_products import integer_product, qlinear_conv
from rlx.onnx.ops.pooling import average_pool
from rlx.onnx.ops.quantization import requantized
from rlx.onnx.ops.recurrent import lstm
from rlx.onnx.table import op
from rlx.onnx.values import Data

DOMAIN = "com.microsoft"

op("QuantizeLinear", domain=DOMAIN, raw=True)(quantization.quantize_linear)
op("DequantizeLinear", domain=DOMAIN, raw=True)(quantization.dequantize_linear)


@op("MatMulNBits", domain=DOMAIN, known=(1, 2, 3, 4))
def matmul_n_bits(
    node: Call, x: Array, packed: Data, scales: Data, zeros: Data | None = None,
    groups: Data | None = None, bias: Array | None = None,
) -> Array:  # fmt: skip
    """x · wᵀ with w in blocks of 4 or 8 bits, which are multiplied as they lie. Activations have
    8 bits then. Where `accuracy_level` asks for floats, the weights are unpacked."""
    rows, width = node.int("N"), node.int("K")
    bits, block = node.int("bits", 4), node.int("block_size")
    count = -(-width // block)
    if bits not in (4, 8):
        raise node.unsupported("weights of other than 4 or 8 bits", bits)
    if packed.size != rows * count * block * bits // 8 or scales.size != rows * count:
        raise node.fault("weights do not fit", got=[list(packed.shape), list(scales.shape)])
    if groups is not None and not np.array_equal(groups, np.arange(width) // block):
        raise node.unsupported("columns whose blocks are out of order")
    codes = _signed(np.ascontiguousarray(packed).reshape(rows, -1), bits)
    scale = np.ascontiguousarray(scales.reshape(rows, count).astype(np.float32))
    offsets = _zero_points(node, zeros, rows, count, bits)
    operands = [codes, scale] if offsets is None else [codes, scale, _signed(offsets, bits)]
    make = QuantScheme.int4 if bits == 4 else QuantScheme.int8
    scheme = make(block, symmetric=offsets is None)
    if node.int("accuracy_level", 0) in (1, 2, 3):
        weights = decode(scheme, *operands)[:, :width].astype(x.dtype.numpy)
        made = xp.matmul(x, xp.matrix_transpose(Array(weights)))
    else:
        wide = x if count * block == width else _padded(x, count * block - width)
        made = graph_op("dequant_matmul", wide, *[Array(a) for a in operands], scheme=scheme)
    return made if bias is None else made + bias


def _signed(data: Data, bits: int) -> Data:
    """Codes as our schemes have them: 8 bits are signed there."""
    if bits == 8:
        return (data.astype(np.int16) - 128).astype(np.int8)
    return np.ascontiguousarray(data)


def _zero_points(node: Call, zeros: Data | None, rows: int, count: int, bits: int) -> Data | None:
    if zeros is None:
        return None
    if zeros.dtype.kind == "f":
        found = zeros.reshape(rows, count)
        if not np.array_equal(found, np.round(found)):
            raise node.unsupported("zero points that are no whole numbers")
        return found.astype(np.uint8)
    if bits == 8:
        return np.ascontiguousarray(zeros).reshape(rows, count)
    pairs = np.ascontiguousarray(zeros).reshape(rows, -1)
    both = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(rows, -1)
    return np.ascontiguousarray(both[:, :count])


def _padded(x: Array, more: int) -> Array:
    return graph_op("pad", x, low=(0,) * x.ndim, high=(*[0] * (x.ndim - 1), more), value=0.0)


@op("DynamicQuantizeMatMul", domain=DOMAIN)
def dynamic_quantize_matmul(
    node: Call, x: Array, w: Array, scale: Array, zero: Array | None = None,
    bias: Array | None = None,
) -> Array:  # fmt: skip
    codes, own, offset = quantization.dynamic_quantize_linear(node, x)
    return matmul_integer_to_float(node, codes, w, own, scale, offset, zero, bias)


@op("MatMulIntegerToFloat", domain=DOMAIN)
def matmul_integer_to_float(
    node: Call, a: Array, b: Array, a_scale: Array, b_scale: Array, a_zero: Array | None = None,
    b_zero: Array | None = None, bias: Array | None = None,
) -> Array:  # fmt: skip
    made = integer_product(a, a_zero, b, b_zero).astype(f32) * (a_scale * b_scale)
    return made if bias is None else made + bias


@op("QGemm", domain=DOMAIN)
def quantized_gemm(
    node: Call, a: Array, a_scale: Array, a_zero: Array, b: Array, b_scale: Array, b_zero: Array,
    c: Array | None = None, y_scale: Array | None = None, y_zero: Array | None = None,
) -> Array:  # fmt: skip
    left = xp.matrix_transpose(a) if node.int("transA", 0) else a
    right = xp.matrix_transpose(b) if node.int("transB", 0) else b
    total = integer_product(left, a_zero, right, b_zero)
    total = total if c is None else total + c
    made = total.astype(f32) * (a_scale * b_scale * float(node.float("alpha", 1.0)))
    if y_scale is None or y_zero is None:
        return made
    return requantized(made / y_scale, y_zero)


# -- elementwise ----------------------------------------------------------------------------------


def _real(x: Array, scale: Array, zero: Array | None) -> Array:
    wide = x.astype(f32)
    return (wide if zero is None else wide - zero.astype(f32)) * scale


def _codes(x: Array, scale: Array, zero: Array | None, like: Array) -> Array:
    if zero is None:
        zero = xp.zeros((), dtype=like.dtype)
    return requantized(x / scale, zero)


def _binary(name: str, function: Callable[[Array, Array], Array]) -> None:
    @op(name, domain=DOMAIN)
    def compute(
        node: Call, a: Array, a_scale: Array, a_zero: Array | None, b: Array, b_scale: Array,
        b_zero: Array | None, y_scale: Array, y_zero: Array | None = None,
    ) -> Array:  # fmt: skip
        made = function(_real(a, a_scale, a_zero), _real(b, b_scale, b_zero))
        return _codes(made, y_scale, y_zero, a)


_binary("QLinearAdd", xp.add)
_binary("QLinearMul", xp.multiply)


def _unary(name: str, function: Callable[[Call, Array], Array]) -> None:
    @op(name, domain=DOMAIN)
    def compute(
        node: Call, x: Array, x_scale: Array, x_zero: Array | None, y_scale: Array,
        y_zero: Array | None = None,
    ) -> Array:  # fmt: skip
        return _codes(function(node, _real(x, x_scale, x_zero)), y_scale, y_zero, x)


_unary("QLinearSigmoid", lambda node, x: xp.sigmoid(x))
_unary(
    "QLinearLeakyRelu",
    lambda node, x: graph_op("leaky_relu", x, alpha=float(node.float("alpha", 0.01))),
)
_unary("QLinearSoftmax", lambda node, x: xp.softmax(x, axis=node.int("axis", -1)))
_unary("QLinearAveragePool", lambda node, x: _pooled(node, x, average_pool))
_unary("QLinearGlobalAveragePool", lambda node, x: _pooled(node, x, _global_mean))


def _global_mean(node: Call, x: Array) -> Array:
    return xp.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True)


def _pooled(node: Call, x: Array, function: Callable[[Call, Array], Array]) -> Array:
    if not node.int("channels_last", 0):
        return function(node, x)
    return xp.moveaxis(function(node, xp.moveaxis(x, -1, 1)), 1, -1)


@op("QLinearConcat", domain=DOMAIN)
def quantized_concat(node: Call, y_scale: Array, y_zero: Array, *parts: Array) -> Array:
    """Tensors of other scales, each with its scale and zero point behind it."""
    if not parts or len(parts) % 3:
        raise node.fault("not tensors with a scale and a zero point each", got=len(parts))
    reals = [_real(*parts[i : i + 3]) for i in range(0, len(parts), 3)]
    return _codes(xp.concat(reals, axis=node.int("axis")), y_scale, y_zero, parts[0])


@op("QLinearWhere", domain=DOMAIN)
def quantized_where(
    node: Call, condition: Array, a: Array, a_scale: Array, a_zero: Array, b: Array,
    b_scale: Array, b_zero: Array, y_scale: Array, y_zero: Array,
) -> Array:  # fmt: skip
    made = xp.where(condition, _real(a, a_scale, a_zero), _real(b, b_scale, b_zero))
    return _codes(made, y_scale, y_zero, a)


@op("QLinearConv", domain=DOMAIN)
def quantized_conv(node: Call, *operands: Array) -> Array:
    if node.int("channels_last", 0):
        raise node.unsupported("a quantised convolution with channels last")
    return qlinear_conv(node, *operands)


@op("DynamicQuantizeLSTM", domain=DOMAIN)
def quantized_lstm(
    node: Call, x: Array, w: Array, r: Array, b: Array | None, lengths: Array | None,
    h: Array | None, c: Array | None, peepholes: Array | None, w_scale: Array, w_zero: Array,
    r_scale: Array, r_zero: Array,
) -> Any:  # fmt: skip
    """Weights [directions, inputs, 4 · hidden] of 8 bits. Activations stay floats."""
    weights = []
    for codes, scale, zero in ((w, w_scale, w_zero), (r, r_scale, r_zero)):
        offset = codes.astype(f32) - _of_gates(zero).astype(f32)
        weights.append(xp.matrix_transpose(offset * _of_gates(scale)))
    return lstm(node, x, weights[0], weights[1], b, lengths, h, c, peepholes)


def _of_gates(x: Array) -> Array:
    """One number for a direction, or one for each of its columns, against [directions, …, …]."""
    return xp.reshape(x, (x.shape[0], 1, 1 if x.ndim == 1 else x.shape[1]))
