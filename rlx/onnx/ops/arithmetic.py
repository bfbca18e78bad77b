"""Elementwise arithmetic, functions and activations."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.table import op

_UNARY = {
    "Abs": xp.abs, "Acos": xp.acos, "Acosh": xp.acosh, "Asin": xp.asin, "Asinh": xp.asinh,
    "Atan": xp.atan, "Atanh": xp.atanh, "BitwiseNot": xp.bitwise_invert, "Ceil": xp.ceil,
    "Cos": xp.cos, "Cosh": xp.cosh, "Erf": xp.erf, "Exp": xp.exp, "Floor": xp.floor,
    "IsNaN": xp.isnan, "Log": xp.log, "Neg": xp.negative, "Not": xp.logical_not,
    "Reciprocal": xp.reciprocal, "Relu": xp.relu, "Round": xp.round, "Sigmoid": xp.sigmoid,
    "Sign": xp.sign, "Sin": xp.sin, "Sinh": xp.sinh, "Softplus": xp.softplus, "Sqrt": xp.sqrt,
    "Tan": xp.tan, "Tanh": xp.tanh,
}  # fmt: skip
_BINARY: dict[str, Any] = {
    "And": xp.logical_and, "BitwiseAnd": xp.bitwise_and, "BitwiseOr": xp.bitwise_or,
    "BitwiseXor": xp.bitwise_xor, "Mul": xp.multiply, "Or": xp.logical_or, "Sub": xp.subtract,
    "Add": xp.add, "Xor": xp.logical_xor,
}  # fmt: skip


def _unary(function: Any) -> Any:
    return lambda node, x: function(x)


def _binary(function: Any) -> Any:
    return lambda node, a, b: function(a, b)


for _name, _one in _UNARY.items():
    op(_name)(_unary(_one))
for _name, _two in _BINARY.items():
    op(_name)(_binary(_two))


@op("Div")
def div(node: Call, a: Array, b: Array) -> Array:
    if a.dtype.kind == "uint":
        return xp.floor_divide(a, b)
    if a.dtype.kind == "int":  # towards zero
        quotient = xp.floor_divide(a, b)
        inexact = xp.not_equal(quotient * b, a)
        return xp.where(xp.logical_and(inexact, xp.less(quotient, 0)), quotient + 1, quotient)
    return xp.divide(a, b)


@op("Pow")
def power(node: Call, a: Array, b: Array) -> Array:
    if a.dtype is b.dtype:
        return xp.pow(a, b)
    if a.dtype.is_float:
        return xp.pow(a, b.astype(a.dtype))
    wide = xp.float64
    found = xp.pow(a.astype(wide), b.astype(wide))
    whole = xp.round(found)  # what is whole but for rounding is not cut to the number below
    close = xp.less(xp.abs(found - whole), 1e-12 * xp.abs(whole))
    return xp.where(close, whole, found).astype(a.dtype)


@op("Mod")
def mod(node: Call, a: Array, b: Array) -> Array:
    if not node.int("fmod", 0):
        return xp.remainder(a, b)
    if a.dtype.is_integer:  # the sign of a
        found = xp.remainder(xp.abs(a), xp.abs(b)) if a.dtype.kind == "int" else xp.remainder(a, b)
        return xp.where(xp.less(a, 0), -found, found) if a.dtype.kind == "int" else found
    wide = a.astype(xp.float32) if a.dtype.bytes < 4 else a
    other = b.astype(wide.dtype)
    return (wide - xp.trunc(wide / other) * other).astype(a.dtype)


@op("Max")
def maximum(node: Call, *tensors: Array) -> Array:
    return _folded(xp.maximum, tensors)


@op("Min")
def minimum(node: Call, *tensors: Array) -> Array:
    return _folded(xp.minimum, tensors)


@op("Sum")
def total(node: Call, *tensors: Array) -> Array:
    return _folded(xp.add, tensors)


@op("Mean")
def mean(node: Call, *tensors: Array) -> Array:
    return _folded(xp.add, tensors) / len(tensors)


def _folded(function: Any, tensors: Any) -> Array:
    result = tensors[0]
    for x in tensors[1:]:
        result = function(result, x)
    return result  # type: ignore[no-any-return]


@op("Clip", since=11)
def clip(node: Call, x: Array, low: Array | None = None, high: Array | None = None) -> Array:
    x = x if low is None else xp.maximum(x, low)
    return x if high is None else xp.minimum(x, high)


@op("Clip", since=6)
def clip_6(node: Call, x: Array) -> Array:
    low, high = node.float("min", -3.4028234663852886e38), node.float("max", 3.4028234663852886e38)
    return xp.clip(x, low, high)


@op("BitShift")
def bit_shift(node: Call, a: Array, b: Array) -> Array:
    if node.text("direction") == "LEFT":
        return xp.bitwise_left_shift(a, b)
    return xp.bitwise_right_shift(a, b)


@op("IsInf")
def is_inf(node: Call, x: Array) -> Array:
    found = xp.isinf(x)
    if not node.int("detect_negative", 1):
        return xp.logical_and(found, xp.greater(x, 0))
    if not node.int("detect_positive", 1):
        return xp.logical_and(found, xp.less(x, 0))
    return found


# -- activations ----------------------------------------------------------------------------------


@op("Celu")
def celu(node: Call, x: Array) -> Array:
    alpha = node.float("alpha", 1.0)
    return xp.maximum(x, 0.0) + xp.minimum(alpha * xp.expm1(x / alpha), 0.0)


@op("Elu")
def elu(node: Call, x: Array) -> Array:
    return graph_op("elu", x, alpha=float(node.float("alpha", 1.0)))


@op("Gelu")
def gelu(node: Call, x: Array) -> Array:
    return xp.gelu_tanh(x) if node.text("approximate", "none") == "tanh" else xp.gelu(x)


@op("HardSigmoid")
def hard_sigmoid(node: Call, x: Array) -> Array:
    slope, middle = node.float("alpha", 0.2), node.float("beta", 0.5)
    if middle == 0.5 and abs(6 * slope - 1) < 1e-6:  # of MobileNet
        return graph_op("hard_sigmoid", x)
    return xp.clip(slope * x + middle, 0.0, 1.0)


@op("HardSwish")
def hard_swish(node: Call, x: Array) -> Array:
    return graph_op("hard_swish", x)


@op("LeakyRelu")
def leaky_relu(node: Call, x: Array) -> Array:
    return graph_op("leaky_relu", x, alpha=float(node.float("alpha", 0.01)))


@op("Mish")
def mish(node: Call, x: Array) -> Array:
    return x * xp.tanh(xp.softplus(x))


@op("PRelu", since=6)
def prelu_6(node: Call, x: Array, slope: Array) -> Array:
    """The slopes of a vector are those of channels."""
    if slope.ndim == 1 and x.ndim > 2 and slope.shape[0] != 1:
        slope = xp.reshape(slope, (-1, *[1] * (x.ndim - 2)))
    return prelu(node, x, slope)


@op("PRelu", since=7)
def prelu(node: Call, x: Array, slope: Array) -> Array:
    return xp.where(xp.less(x, 0), x * slope, x)


@op("Selu")
def selu(node: Call, x: Array) -> Any:
    alpha = node.float("alpha", 1.67326319217681884765625)
    gamma = node.float("gamma", 1.05070102214813232421875)
    return gamma * xp.where(xp.greater(x, 0), x, alpha * xp.expm1(xp.minimum(x, 0.0)))


@op("Shrink")
def shrink(node: Call, x: Array) -> Array:
    bias, lambd = node.float("bias", 0.0), node.float("lambd", 0.5)
    low = xp.where(xp.less(x, -lambd), x + bias, xp.zeros_like(x))
    return xp.where(xp.greater(x, lambd), x - bias, low)


@op("Softsign")
def softsign(node: Call, x: Array) -> Array:
    return x / (1.0 + xp.abs(x))


@op("Swish")
def swish(node: Call, x: Array) -> Array:
    alpha = node.float("alpha", 1.0)
    return xp.silu(x) if alpha == 1.0 else x * xp.sigmoid(alpha * x)


@op("ThresholdedRelu")
def thresholded_relu(node: Call, x: Array) -> Array:
    return xp.where(xp.greater(x, node.float("alpha", 1.0)), x, xp.zeros_like(x))


@op("Identity", raw=True)
def identity(node: Call, x: Any) -> Any:
    return x


@op("Einsum")
def einsum(node: Call, *tensors: Array) -> Array:
    return xp.einsum(node.text("equation").replace(" ", ""), *tensors)


@op("CumSum", known=(1,))
def cumulative_sum(node: Call, x: Array, axis: Any) -> Array:
    return _running("cumsum", node, x, axis)


@op("CumProd", known=(1,))
def cumulative_product(node: Call, x: Array, axis: Any) -> Array:
    return _running("cumprod", node, x, axis)


def _running(name: str, node: Call, x: Array, axis: Any) -> Array:
    at = int(np.asarray(axis).reshape(-1)[0])
    exclusive, reverse = bool(node.int("exclusive", 0)), bool(node.int("reverse", 0))
    return graph_op(name, x, axis=at % x.ndim, exclusive=exclusive, reverse=reverse)
