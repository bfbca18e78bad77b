"""The functions of one real number, by the name of their op: what kernels apply on the way."""

from __future__ import annotations

from collections.abc import Callable

from rlx.errors import CodegenError
from rlx.llvm import math
from rlx.llvm.builder import Value

Unary = Callable[[Value], Value]


def relu(x: Value) -> Value:
    return x.fn.max(x, 0.0)


def leaky_relu(x: Value, alpha: float = 0.01) -> Value:
    return x.fn.select(x < 0.0, x * alpha, x)


def elu(x: Value, alpha: float = 1.0) -> Value:
    return x.fn.select(x < 0.0, math.expm1(x) * alpha, x)


def clamp(x: Value, low: float = float("-inf"), high: float = float("inf")) -> Value:
    """NaN stays NaN."""
    return x.fn.min(x.fn.max(x, low), high)


def sign(x: Value) -> Value:
    """-1, 0 or 1; NaN of NaN."""
    one = x.fn.const(1.0, x.type)
    return x.fn.select(x.fn.compare("one", x, 0.0), x.fn.copysign(one, x), x)


def gelu_quick(x: Value) -> Value:
    return x * math.sigmoid(x * 1.702)


ACTIVATIONS: dict[str, Unary] = {
    **math.UNARY,
    "none": lambda x: x,
    "neg": lambda x: -x,
    "abs": lambda x: x.fn.abs(x),
    "square": lambda x: x * x,
    "sign": sign,
    "relu": relu,
    "leaky_relu": leaky_relu,
    "elu": elu,
    "clamp": clamp,
    "gelu_quick": gelu_quick,
}


def activate(name: str, x: Value) -> Value:
    """The activation called `name` of a float vector."""
    function = ACTIVATIONS.get(name)
    if function is None:
        raise CodegenError(
            "no code for this activation", where="activate", got=name, expected=list(ACTIVATIONS)
        )
    return function(x)
