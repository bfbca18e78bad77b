"""Activations and other functions of one element, in exp, tanh, erf and arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rlx.ir.blocks._parts import cast, wide
from rlx.ir.dtype import f32
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.passes.common.registry import COMMON, common


def _sigmoid(g: Graph, x: Value) -> Value:
    small = g.exp(g.neg(g.abs(x)))  # never overflows
    top = g.where(g.ge(x, 0.0), g.constant(1.0, x.shape.dtype), small)
    return g.div(top, g.add(small, 1.0))


def _gelu_tanh(g: Graph, x: Value) -> Any:
    cube = g.mul(x, g.mul(x, x))
    inner = g.mul(g.add(x, g.mul(cube, 0.044715)), 2 * math.sqrt(2 / math.pi))
    return g.mul(x, _sigmoid(g, inner))  # (1 + tanh z) / 2 = sigmoid(2z)


def _gelu(g: Graph, x: Value) -> Any:
    return g.mul(g.mul(x, 0.5), g.add(g.erf(g.mul(x, math.sqrt(0.5))), 1.0))


def _softplus(g: Graph, x: Value) -> Any:
    return g.add(g.maximum(x, 0.0), g.log1p(g.exp(g.neg(g.abs(x)))))


# functions of real numbers: integers become f32, narrow floats are computed in f32
_FLOAT: dict[str, Callable[[Graph, Value], Any]] = {
    "sigmoid": _sigmoid,
    "silu": lambda g, x: g.mul(x, _sigmoid(g, x)),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_quick": lambda g, x: g.mul(x, _sigmoid(g, g.mul(x, 1.702))),
    "softplus": _softplus,
    "reciprocal": lambda g, x: g.div(1.0, x),
    "rsqrt": lambda g, x: g.div(1.0, g.sqrt(x)),
    "tan": lambda g, x: g.div(g.sin(x), g.cos(x)),
}


def as_real(g: Graph, x: Value) -> Value:
    return wide(g, x if x.shape.dtype.is_float else cast(g, x, f32))


def _float_body(function: Callable[[Graph, Value], Any]) -> Any:
    def body(g: Graph, op: Any, inputs: Sequence[Value]) -> Value:
        x = inputs[0]
        result = x.shape.dtype if x.shape.dtype.is_float else f32
        return cast(g, function(g, as_real(g, x)), result)

    return body


for _kind, _function in _FLOAT.items():
    COMMON[_kind] = _float_body(_function)


@common("leaky_relu")
def leaky_relu(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    return _below_zero(g, inputs[0], lambda x: g.mul(x, op.alpha))


@common("elu")
def elu(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    return _below_zero(g, inputs[0], lambda x: g.mul(g.expm1(x), op.alpha))


def _below_zero(g: Graph, x: Value, function: Callable[[Value], Value]) -> Value:
    result = x.shape.dtype if x.shape.dtype.is_float else f32
    real = as_real(g, x)
    return cast(g, g.where(g.ge(real, 0.0), real, function(real)), result)


@common("relu")
def relu(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (x,) = inputs
    return g.maximum(x, g.constant(0, x.shape.dtype))


@common("clamp")
def clamp(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (x,) = inputs
    low, high = (g.constant(b, x.shape.dtype) for b in op.bounds(x.shape.dtype))
    return g.minimum(g.maximum(x, low), high)


@common("square")
def square(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    return g.mul(inputs[0], inputs[0])


@common("sign")
def sign(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (x,) = inputs
    element = x.shape.dtype
    zero, one = g.constant(0, element), g.constant(1, element)
    if element.kind == "uint":
        return g.where(g.gt(x, zero), one, zero)
    below = g.where(g.lt(x, zero), g.constant(-1, element), x)  # 0 and NaN stay
    return g.where(g.gt(x, zero), one, below)


@common("is_nan")
def is_nan(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    return g.ne(inputs[0], inputs[0])


@common("is_inf")
def is_inf(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (x,) = inputs
    if not x.shape.dtype.is_float:
        return g.ne(x, x)
    return g.eq(g.abs(wide(g, x)), math.inf)


@common("logical_not")
def logical_not(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    (x,) = inputs
    return g.eq(x, g.constant(0, x.shape.dtype))
