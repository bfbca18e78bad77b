"""Elementary functions as vector code, without calls of a math library.

Each takes and returns a Value of f32 or f64 with any number of lanes, handles denormals, infinities
and NaN, and states its error bound in ulp (units in the last place) in its docstring. The bounds
hold on every target; `tests/kernels/test_math.py` measures them.
"""

import math
from collections.abc import Callable

from rlx.llvm.builder import Value
from rlx.llvm.math.exponential import (
    erf,
    erfc,
    exp,
    exp2,
    exp_down,
    expm1,
    gelu,
    gelu_tanh,
    log,
    log1p,
    normal_cdf,
    pow,
    sigmoid,
    silu,
    softplus,
    split,
    tanh,
)
from rlx.llvm.math.real import ceil, floor, floor_div, fmod, mod, nan_like, real, round_even, trunc
from rlx.llvm.math.trig import atan, atan2, cos, sin, tan


def sqrt(x: Value) -> Value:
    """Square root, correctly rounded."""
    return x.fn.sqrt(x)


def rsqrt(x: Value) -> Value:
    """1 / √x. Error below 1.5 ulp."""
    return 1.0 / x.fn.sqrt(x)


def reciprocal(x: Value) -> Value:
    """1 / x, correctly rounded."""
    return 1.0 / x


def log2(x: Value) -> Value:
    """log₂ x, exact for powers of two. Error below 2.5 ulp; -inf at 0, NaN below."""
    f = x.fn
    exponent, mantissa = split(x, real(x, "log2"))
    result = log(mantissa) * (1 / math.log(2)) + exponent
    result = f.select(x < math.inf, result, x)
    return f.select(x > 0.0, result, f.select(x.eq(0.0), -math.inf, nan_like(x)))


UNARY: dict[str, Callable[[Value], Value]] = {
    "exp": exp,
    "exp2": exp2,
    "expm1": expm1,
    "log": log,
    "log1p": log1p,
    "log2": log2,
    "sqrt": sqrt,
    "rsqrt": rsqrt,
    "reciprocal": reciprocal,
    "sin": sin,
    "cos": cos,
    "tan": tan,
    "atan": atan,
    "tanh": tanh,
    "erf": erf,
    "erfc": erfc,
    "sigmoid": sigmoid,
    "silu": silu,
    "softplus": softplus,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "normal_cdf": normal_cdf,
    "floor": floor,
    "ceil": ceil,
    "trunc": trunc,
    "round": round_even,
}
"""Unary functions by name."""

__all__ = [
    "UNARY",
    "atan",
    "atan2",
    "ceil",
    "cos",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "exp_down",
    "expm1",
    "floor",
    "floor_div",
    "fmod",
    "gelu",
    "gelu_tanh",
    "log",
    "log1p",
    "log2",
    "mod",
    "normal_cdf",
    "pow",
    "reciprocal",
    "round_even",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "softplus",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]
