"""Inverse trigonometric and hyperbolic functions, a row each, as in elementwise.py.

Their decompositions keep the digits near 0 and do not overflow where the result is finite.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.ir.ops.elementwise import unary

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value

_LARGE = 1e9  # from here on x² + 1 and x² − 1 are x² in f64, and x² is finite in f32
_STEEP = 20.0  # from here on sinh x is e^x / 2 in f64


def _across(g: Graph, x: Value) -> Value:
    """√(1 − x²); NaN beyond 1."""
    return g.sqrt((1.0 - x) * (x + 1.0))


def _sinh_formula(g: Graph, x: Value) -> Any:
    size = g.abs(x)
    less = g.expm1(size)
    near = (less + less / (less + 1.0)) * 0.5
    root = g.exp(size * 0.5)  # e^x overflows before sinh x does
    return g.copysign(g.where(g.lt(size, _STEEP), near, root * 0.5 * root), x)


def _cosh_formula(g: Graph, x: Value) -> Any:
    root = g.exp(g.abs(x) * 0.5)  # e^x overflows before cosh x does
    return root * 0.5 * root + 0.5 / (root * root)


def _asinh_formula(g: Graph, x: Value) -> Any:
    size = g.abs(x)
    square = size * size
    near = g.log1p(size + square / (g.sqrt(square + 1.0) + 1.0))
    return g.copysign(g.where(g.lt(size, _LARGE), near, g.log(size) + math.log(2)), x)


def _asinh_slope(g: Graph, x: Value, y: Value) -> Any:
    if x.shape.dtype.is_complex:
        return 1.0 / g.sqrt(x * x + 1.0)
    return 1.0 / g.hypot(x, g.constant(1.0, x.shape.dtype))  # x² may overflow


def _acosh_formula(g: Graph, x: Value) -> Any:
    above = x - 1.0
    near = g.log1p(above + g.sqrt(above) * g.sqrt(above + 2.0))
    return g.where(g.lt(x, _LARGE), near, g.log(x) + math.log(2))


def _atanh_formula(g: Graph, x: Value) -> Any:
    size = g.abs(x)
    return g.copysign(g.log1p((size + size) / (1.0 - size)) * 0.5, x)


_GROUP: dict[str, Any] = {"group": "elementwise"}

unary(
    "asin", np.arcsin, "the angle in −π/2 … π/2 whose sine is x; NaN beyond 1",
    lambda g, x: g.atan2(x, _across(g, x)),
    derivative=lambda g, x, y: 1.0 / _across(g, x), **_GROUP,
)  # fmt: skip
unary(
    "acos", np.arccos, "the angle in 0 … π whose cosine is x; NaN beyond 1",
    lambda g, x: g.atan2(_across(g, x), x),
    derivative=lambda g, x, y: -1.0 / _across(g, x), **_GROUP,
)  # fmt: skip
unary(
    "atan", np.arctan, "the angle in −π/2 … π/2 whose tangent is x",
    lambda g, x: g.atan2(x, g.constant(1.0, x.shape.dtype)),
    derivative=lambda g, x, y: 1.0 / (x * x + 1.0), **_GROUP,
)  # fmt: skip
unary(
    "sinh",
    np.sinh,
    "(e^x − e^−x) / 2",
    _sinh_formula,
    derivative=lambda g, x, y: g.cosh(x),
    **_GROUP,
)
unary(
    "cosh",
    np.cosh,
    "(e^x + e^−x) / 2",
    _cosh_formula,
    derivative=lambda g, x, y: g.sinh(x),
    **_GROUP,
)
unary(
    "asinh",
    np.arcsinh,
    "ln(x + √(x² + 1))",
    _asinh_formula,
    derivative=_asinh_slope,
    **_GROUP,
)
unary(
    "acosh",
    np.arccosh,
    "ln(x + √(x² − 1)); NaN below 1",
    _acosh_formula,
    derivative=lambda g, x, y: 1.0 / (g.sqrt(x - 1.0) * g.sqrt(x + 1.0)),
    **_GROUP,
)
unary(
    "atanh", np.arctanh, "ln((1 + x) / (1 − x)) / 2; ±inf at ±1, NaN beyond",
    _atanh_formula,
    derivative=lambda g, x, y: 1.0 / ((1.0 - x) * (x + 1.0)), **_GROUP,
)  # fmt: skip
