"""Activation functions: elementwise ops of one tensor, as in elementwise.py."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.ir.op import Array, op
from rlx.ir.ops.elementwise import Derivative, FloatUnary, each, unary

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value

_erfc = each(math.erfc)
_SQRT_HALF, _SQRT_2_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)
_1_SQRT_2_PI = 1 / math.sqrt(2 * math.pi)
_activation = partial(unary, group="elementwise")


def _sigmoid(x: Any) -> Any:
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _sigmoid_formula(g: Graph, x: Value) -> Any:
    small = g.exp(-g.abs(x))  # never overflows
    top = g.where(g.ge(x, 0.0), g.constant(1.0, x.shape.dtype), small)
    return top / (small + 1.0)


def _gelu_tanh(x: Any) -> Any:
    # (1 + tanh z) / 2 = sigmoid(2z), which is exact where tanh is near −1
    return x * _sigmoid(2 * _SQRT_2_PI * (x + 0.044715 * x * x * x))


def _gelu_tanh_formula(g: Graph, x: Value) -> Any:
    return x * g.sigmoid((x + x * (x * x) * 0.044715) * (2 * _SQRT_2_PI))


def _gelu_tanh_slope(g: Graph, x: Value, y: Value) -> Any:
    inner, s = 2 * _SQRT_2_PI, g.sigmoid((x + x * (x * x) * 0.044715) * (2 * _SQRT_2_PI))
    return s + x * s * (1.0 - s) * (x * x * (3 * 0.044715 * inner) + inner)


def _silu_slope(c: float) -> Derivative:
    """Of x · sigmoid(c x)."""

    def slope(g: Graph, x: Value, y: Value) -> Any:
        s = g.sigmoid(x * c)
        return s + x * s * (1.0 - s) * c

    return slope


_activation(
    "sigmoid",
    _sigmoid,
    "1 / (1 + e^−x)",
    _sigmoid_formula,
    derivative=lambda g, x, y: y * (1.0 - y),
)
_activation(
    "silu", lambda x: x * _sigmoid(x), "x · sigmoid(x)",
    lambda g, x: x * g.sigmoid(x), derivative=_silu_slope(1.0), fuses_formula=True,
)  # fmt: skip
unary(
    "normal_cdf", lambda x: 0.5 * _erfc(x * -_SQRT_HALF), "Φ(x) = (1 + erf(x / √2)) / 2",
    lambda g, x: (g.erf(x * _SQRT_HALF) + 1.0) * 0.5,
    derivative=lambda g, x, y: g.exp(x * x * -0.5) * _1_SQRT_2_PI, group="elementwise",
)  # fmt: skip
_activation(
    "gelu", lambda x: 0.5 * x * _erfc(x * -_SQRT_HALF), "x · (1 + erf(x / √2)) / 2",
    lambda g, x: x * 0.5 * (g.erf(x * _SQRT_HALF) + 1.0),
    derivative=lambda g, x, y: g.normal_cdf(x) + x * g.exp(x * x * -0.5) * _1_SQRT_2_PI,
    fuses_formula=True,
)  # fmt: skip
_activation(
    "gelu_tanh",
    _gelu_tanh,
    "x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2",
    _gelu_tanh_formula,
    derivative=_gelu_tanh_slope,
)
_activation(
    "gelu_quick", lambda x: x * _sigmoid(1.702 * x), "x · sigmoid(1.702 x)",
    lambda g, x: x * g.sigmoid(x * 1.702), derivative=_silu_slope(1.702), fuses_formula=True,
)  # fmt: skip
_activation(
    "softplus", lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), "ln(1 + e^x)",
    lambda g, x: g.maximum(x, 0.0) + g.log1p(g.exp(-g.abs(x))),
    derivative=lambda g, x, y: g.sigmoid(x),
)  # fmt: skip


@op("leaky_relu", group="elementwise")
class LeakyRelu(FloatUnary):
    """x where x ≥ 0, else alpha · x"""

    alpha: float = 0.01

    def apply(self, x: Array) -> Array:
        return np.where(x >= 0, x, self.alpha * x)

    def formula(self, g: Graph, x: Value) -> Any:
        return g.where(g.ge(x, 0.0), x, x * self.alpha)

    def derivative(self, g: Graph, x: Value, y: Value) -> Any:
        one = g.constant(1.0, x.shape.dtype)
        return g.where(g.gt(x, 0.0), one, g.constant(self.alpha, x.shape.dtype))


@op("elu", group="elementwise")
class Elu(FloatUnary):
    """x where x ≥ 0, else alpha · (e^x − 1)"""

    alpha: float = 1.0

    def apply(self, x: Array) -> Array:
        return np.where(x >= 0, x, self.alpha * np.expm1(x))

    def formula(self, g: Graph, x: Value) -> Any:
        return g.where(g.ge(x, 0.0), x, g.expm1(x) * self.alpha)

    def derivative(self, g: Graph, x: Value, y: Value) -> Any:
        return g.where(g.gt(x, 0.0), g.constant(1.0, x.shape.dtype), y + self.alpha)


def _between(low: float, high: float, slope: float) -> Derivative:
    """The slope inside low … high, zero outside."""

    def inside(g: Graph, x: Value, y: Value) -> Any:
        there = g.logical_and(g.gt(x, low), g.lt(x, high))
        return g.where(there, g.constant(slope, x.shape.dtype), g.constant(0.0, x.shape.dtype))

    return inside


def _hard_swish_slope(g: Graph, x: Value, y: Value) -> Any:
    zero, one = (g.constant(c, x.shape.dtype) for c in (0.0, 1.0))
    inner = g.where(g.lt(x, 3.0), x * (1 / 3) + 0.5, one)
    return g.where(g.gt(x, -3.0), inner, zero)


_activation(
    "hard_sigmoid", lambda x: np.clip(x + 3, 0, 6) / 6, "(x + 3) / 6 limited to 0 … 1",
    lambda g, x: g.clamp(x + 3.0, 0.0, 6.0) / 6.0, derivative=_between(-3.0, 3.0, 1 / 6),
    fuses_formula=True,
)  # fmt: skip
_activation(
    "hard_swish", lambda x: x * (np.clip(x + 3, 0, 6) / 6), "x · hard_sigmoid(x)",
    lambda g, x: x * g.hard_sigmoid(x), derivative=_hard_swish_slope, fuses_formula=True,
)  # fmt: skip
_activation(
    "relu6", lambda x: np.clip(x, 0, 6), "x limited to 0 … 6",
    lambda g, x: g.clamp(x, 0.0, 6.0), derivative=_between(0.0, 6.0, 1.0), fuses_formula=True,
)  # fmt: skip
