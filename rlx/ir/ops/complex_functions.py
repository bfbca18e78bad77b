"""Functions of complex numbers, as formulas on their real and imaginary parts.

A formula takes and gives parts in f64, so that results in c64 are exact to a rounding or two, and
those in c128 lose no digits to cancellation. Values at infinities, NaN, signed zeros and along
branch cuts are those of C99, which the array API standard asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.ir.dtype import f64

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value

Parts = tuple["Value", "Value"]
ComplexFormula = Callable[["Graph", "Value", "Value"], Parts]

_INF = math.inf
_STEEP = 300.0  # from here on sinh and cosh of a real part are e^|x| / 2, taken as two factors


def apply_formula(g: Graph, formula: ComplexFormula, x: Value) -> Value:
    """The function of a complex x, in its element type."""
    part = x.shape.dtype.part
    re, im = formula(g, g.cast(g.real(x), f64), g.cast(g.imag(x), f64))
    return g.complex(g.cast(re, part), g.cast(im, part))


def _either(g: Graph, test: str, a: Value, b: Value) -> Value:
    return g.logical_or(g.apply(test, a), g.apply(test, b))


def _number(g: Graph, x: float) -> Value:
    return g.constant(x, f64)


def _cis_times(g: Graph, size: Value, a: Value, b: Value) -> Parts:
    """size · (cos b + i·sin b) for size = e^a: 0 at a = −inf, real where b is 0."""
    nowhere = g.logical_not(g.is_finite(b))
    re = g.where(g.logical_and(nowhere, g.is_inf(a)), size, size * g.cos(b))
    gone = g.logical_and(nowhere, g.eq(a, -_INF))
    im = g.where(g.logical_or(g.eq(b, 0.0), gone), g.where(gone, _number(g, 0.0), b),
                 size * g.sin(b))  # fmt: skip
    return re, im


def _exp(g: Graph, a: Value, b: Value) -> Parts:
    root = g.exp(a * 0.5)  # e^a overflows before e^a · sin b does
    half = _cis_times(g, root, a, b)
    near = _cis_times(g, g.exp(a), a, b)
    steep = g.logical_and(g.gt(a, 700.0), g.lt(a, _INF))
    return g.where(steep, half[0] * root, near[0]), g.where(steep, half[1] * root, near[1])


def _expm1(g: Graph, a: Value, b: Value) -> Parts:
    re, im = _exp(g, a, b)
    sine = g.sin(b * 0.5)
    near = g.expm1(a) * g.cos(b) - sine * sine * 2.0
    re = g.where(g.lt(g.abs(a), 700.0), near, re - 1.0)
    return g.where(g.eq(re, 0.0), _number(g, 0.0), re), im  # never −0


def _log(g: Graph, a: Value, b: Value) -> Parts:
    x, y = g.abs(a), g.abs(b)
    most, least = g.maximum(x, y), g.minimum(x, y)
    near = g.log1p((most - 1.0) * (most + 1.0) + least * least) * 0.5
    around = g.logical_and(g.gt(most, 0.5), g.lt(most, 2.0))
    return g.where(around, near, g.log(g.hypot(a, b))), g.atan2(b, a)


def _log1p(g: Graph, a: Value, b: Value) -> Parts:
    near = g.log1p(a * (a + 2.0) + b * b) * 0.5
    around = g.logical_and(g.lt(g.abs(a), 0.5), g.lt(g.abs(b), 0.5))
    far, angle = _log(g, a + 1.0, b)
    return g.where(around, near, far), angle


def _scaled_log(factor: float) -> ComplexFormula:
    def formula(g: Graph, a: Value, b: Value) -> Parts:
        re, im = _log(g, a, b)
        return re * factor, im * factor

    return formula


def _sqrt(g: Graph, a: Value, b: Value) -> Parts:
    most = g.maximum(g.abs(a), g.abs(b))
    # hypot of the parts neither overflows nor loses digits of denormals
    large, small = g.gt(most, 2.0**1000), g.lt(most, 2.0**-960)
    one = _number(g, 1.0)
    scale = g.where(large, _number(g, 2.0**-4), g.where(small, _number(g, 2.0**108), one))
    back = g.where(large, _number(g, 4.0), g.where(small, _number(g, 2.0**-54), one))
    x, y = a * scale, b * scale
    root = g.sqrt((g.abs(x) + g.hypot(x, y)) * 0.5)
    other = g.abs(y) / (root * 2.0)
    left = g.lt(a, 0.0)
    re = g.where(left, other, root) * back
    im = g.copysign(g.where(left, root, other), b) * back
    zero = g.eq(most, 0.0)
    re, im = g.where(zero, _number(g, 0.0), re), g.where(zero, b, im)
    # a real x has a real root, or none; an infinite part decides
    still = g.copysign(b - b, b)  # 0, or NaN of NaN
    endless = g.is_inf(a)
    re = g.where(endless, g.where(left, g.abs(still), _number(g, _INF)), re)
    im = g.where(endless, g.where(left, g.copysign(_number(g, _INF), b), still), im)
    upright = g.is_inf(b)
    return g.where(upright, _number(g, _INF), re), g.where(upright, b, im)


def _sign(g: Graph, a: Value, b: Value) -> Parts:
    most = g.maximum(g.abs(a), g.abs(b))
    divisor = g.where(g.eq(most, 0.0), _number(g, 1.0), most)
    endless = g.eq(most, _INF)  # the direction of an infinite part; of two it is unknown

    def scaled(p: Value) -> Value:
        direction = g.where(g.is_inf(p), g.copysign(_number(g, 1.0), p), p * 0.0)
        return g.where(endless, direction, p / divisor)

    x, y = scaled(a), scaled(b)
    size = g.where(_both_infinite(g, a, b), _number(g, math.nan), g.sqrt(x * x + y * y))
    zero, nothing = g.eq(most, 0.0), _number(g, 0.0)
    return g.where(zero, nothing, x / size), g.where(zero, nothing, y / size)


def _both_infinite(g: Graph, a: Value, b: Value) -> Value:
    return g.logical_and(g.is_inf(a), g.is_inf(b))


def _sinh(g: Graph, a: Value, b: Value) -> Parts:
    return _hyperbolic(g, a, b, "sinh", "cosh")


def _hyperbolic(g: Graph, a: Value, b: Value, first: str, second: str) -> Parts:
    """first(a)·cos b + i·second(a)·sin b, of sinh and cosh, with either first."""
    cosine, sine = g.cos(b), g.sin(b)
    root = g.exp(g.abs(a) * 0.5)  # e^|a| overflows before the product does
    one = _number(g, 1.0)
    signs = [g.copysign(one, a) if name == "sinh" else one for name in (first, second)]
    real, imaginary = g.apply(first, a), g.apply(second, a)
    steep = g.logical_and(g.gt(g.abs(a), _STEEP), g.lt(g.abs(a), _INF))
    re = g.where(steep, root * 0.5 * cosine * root * signs[0], real * cosine)
    im = g.where(steep, root * 0.5 * sine * root * signs[1], imaginary * sine)
    nowhere = g.logical_not(g.is_finite(b))
    return _hyperbolic_limits(g, (a, b), (re, im), (real, signs[1]), nowhere)


def _hyperbolic_limits(
    g: Graph, x: Parts, y: Parts, given: tuple[Value, Value], nowhere: Value
) -> Parts:
    """The products of `_hyperbolic` where 0 · inf or 0 · NaN would be NaN."""
    (a, b), (re, im), (first, sign) = x, y, given
    flat = g.eq(first, 0.0)  # sinh 0
    re = g.where(g.logical_and(nowhere, g.logical_or(flat, g.is_inf(a))), first, re)
    im = g.where(g.eq(b, 0.0), b * sign, im)
    # the imaginary part of cosh is sinh 0 · sin b
    level = g.logical_and(nowhere, g.logical_and(g.eq(a, 0.0), g.ne(first, 0.0)))
    return re, g.where(level, _number(g, 0.0), im)


def _cosh(g: Graph, a: Value, b: Value) -> Parts:
    return _hyperbolic(g, a, b, "cosh", "sinh")


def _tanh(g: Graph, a: Value, b: Value) -> Parts:
    """With t = tan b and s = sinh a: (√(1 + s²)·s·(1 + t²) + i·t) / (1 + (1 + t²)·s²)."""
    tangent, s = g.tan(b), g.sinh(a)
    beta = tangent * tangent + 1.0
    below = beta * s * s + 1.0
    re, im = beta * g.sqrt(s * s + 1.0) * s / below, tangent / below
    far = g.gt(g.abs(a), 22.0)
    edge = g.sin(b) * g.cos(b) * 4.0 * g.exp(g.abs(a) * -2.0)
    # at ∞ + iy it is 0 with the sign of y, as the array API asks, and not that of sin 2y
    zero = _number(g, 0.0)
    end = g.where(g.is_finite(b), g.copysign(zero, b), zero)
    edge = g.where(g.is_inf(a), end, edge)
    re = g.where(far, g.copysign(edge * 0.0 + 1.0, a), re)  # NaN where edge is
    im = g.where(far, edge, im)
    re = g.where(g.logical_and(g.eq(a, 0.0), g.logical_not(g.is_finite(b))), a, re)
    return re, g.where(g.eq(b, 0.0), b, im)


# -- inverse functions: Kahan, "Branch cuts for complex elementary functions" ---------------------


def _roots(g: Graph, a: Value, b: Value) -> tuple[Parts, Parts]:
    """√(1 − x) and √(1 + x); −b keeps the sign of a zero."""
    return _sqrt(g, 1.0 - a, -b), _sqrt(g, a + 1.0, b)


def _asin(g: Graph, a: Value, b: Value) -> Parts:
    (lr, li), (rr, ri) = _roots(g, a, b)
    re = g.atan2(a, lr * rr - li * ri)
    im = g.where(g.eq(b, 0.0), g.copysign(g.abs(g.asinh(lr * ri - li * rr)), b),
                 g.asinh(lr * ri - li * rr))  # fmt: skip
    endless = _either(g, "is_inf", a, b)
    re = g.where(endless, g.atan2(a, g.abs(b)), re)
    im = g.where(endless, g.copysign(_number(g, _INF), b), im)
    return g.where(g.eq(a, 0.0), a, re), im


def _acos(g: Graph, a: Value, b: Value) -> Parts:
    (lr, li), (rr, ri) = _roots(g, a, b)
    re = g.atan2(lr, rr) * 2.0
    im = g.asinh(rr * li - ri * lr)
    im = g.where(g.eq(b, 0.0), g.copysign(im, -b), im)
    endless = _either(g, "is_inf", a, b)
    re = g.where(endless, g.atan2(g.abs(b), a), re)
    im = g.where(endless, g.copysign(_number(g, _INF), -b), im)
    upright = g.logical_and(g.eq(a, 0.0), g.is_nan(b))
    return g.where(upright, _number(g, math.pi / 2), re), im


def _acosh(g: Graph, a: Value, b: Value) -> Parts:
    re, im = _acos(g, a, b)
    return g.abs(im), g.copysign(re, b)


def _atanh(g: Graph, a: Value, b: Value) -> Parts:
    x, y = g.abs(a), g.abs(b)
    from_one = 1.0 - x
    near = g.log1p(x * 4.0 / (from_one * from_one + y * y)) * 0.25
    angle = g.atan2(b * 2.0, from_one * (x + 1.0) - b * b) * 0.5
    # beside the pole b² is 0, and far out a² and b² are infinite
    pole = g.logical_and(g.eq(x, 1.0), g.logical_and(g.lt(y, 1e-100), g.gt(y, 0.0)))
    near = g.where(pole, (math.log(2) - g.log(y)) * 0.5, near)
    far = g.gt(g.maximum(x, y), 1e9)
    size = g.hypot(a, b)
    near = g.where(far, x / size / size, near)
    angle = g.where(far, g.copysign(_number(g, math.pi / 2), b), angle)
    endless = _either(g, "is_inf", a, b)
    re = g.copysign(g.where(endless, _number(g, 0.0), near), a)
    im = g.where(endless, g.copysign(_number(g, math.pi / 2), b), angle)
    re = g.where(g.eq(a, 0.0), a, re)
    return re, g.where(g.is_nan(b), b, im)


def _turned(formula: ComplexFormula) -> ComplexFormula:
    """f(x) = −i·h(i·x), which makes sin of sinh, and asinh of asin the other way round."""

    def turned(g: Graph, a: Value, b: Value) -> Parts:
        re, im = formula(g, -b, a)
        return im, -re

    return turned


def _turned_back(formula: ComplexFormula) -> ComplexFormula:
    """f(x) = i·h(−i·x)"""

    def turned(g: Graph, a: Value, b: Value) -> Parts:
        re, im = formula(g, b, -a)
        return -im, re

    return turned


def _cos(g: Graph, a: Value, b: Value) -> Parts:
    return _cosh(g, -b, a)


COMPLEX: dict[str, ComplexFormula] = {
    "exp": _exp,
    "expm1": _expm1,
    "log": _log,
    "log1p": _log1p,
    "log2": _scaled_log(1 / math.log(2)),
    "log10": _scaled_log(1 / math.log(10)),
    "sqrt": _sqrt,
    "sign": _sign,
    "sinh": _sinh,
    "cosh": _cosh,
    "tanh": _tanh,
    "sin": _turned(_sinh),
    "cos": _cos,
    "tan": _turned(_tanh),
    "asin": _asin,
    "acos": _acos,
    "atan": _turned(_atanh),
    "asinh": _turned_back(_asin),
    "acosh": _acosh,
    "atanh": _atanh,
}
"""The elementwise ops of one tensor that take complex numbers by a formula."""


def power(g: Graph, a: Value, b: Value) -> Value:
    """a^b = e^(b·ln a); exact for the exponents 0, 1 and 2, and 0 for a base of 0."""
    part = a.shape.dtype.part
    ar, ai, br, bi = (g.cast(p(x), f64) for x in (a, b) for p in (g.real, g.imag))
    lr, li = _log(g, ar, ai)
    re, im = _exp(g, br * lr - bi * li, br * li + bi * lr)
    is_real = g.eq(bi, 0.0)
    zero, one = _number(g, 0.0), _number(g, 1.0)

    def choose(test: Value, real: Value, imaginary: Value) -> None:
        nonlocal re, im
        re, im = g.where(test, real, re), g.where(test, imaginary, im)

    choose(g.logical_and(is_real, g.eq(br, 1.0)), ar, ai)
    choose(g.logical_and(is_real, g.eq(br, 2.0)), ar * ar - ai * ai, ar * ai * 2.0)
    origin = g.logical_and(g.eq(ar, 0.0), g.eq(ai, 0.0))
    choose(g.logical_and(origin, g.gt(br, 0.0)), zero, zero)
    choose(g.logical_and(is_real, g.eq(br, 0.0)), one, zero)
    return g.complex(g.cast(re, part), g.cast(im, part))


# -- what NumPy gives, where that differs from C99 or the array API ------------------------------


def _numpy_log1p(x: Any) -> Any:
    """NumPy adds 1 to complex numbers first: more digits make up for it."""
    return np.log1p(x.astype(np.clongdouble) if x.dtype.kind == "c" else x)


def _numpy_expm1(x: Any) -> Any:
    """Of a complex −0 the real part is +0, as the array API asks."""
    y = np.array(np.expm1(x))
    if x.dtype.kind == "c":
        y.real = np.where(y.real == 0, np.abs(y.real), y.real)
    return y


def _numpy_tanh(x: Any) -> Any:
    """Of a complex ∞ + iy the imaginary part is 0 with the sign of y, as the array API asks."""
    y = np.array(np.tanh(x))
    if x.dtype.kind == "c":
        at_end = np.isinf(x.real) & np.isfinite(x.imag)
        y.imag = np.where(at_end, np.copysign(0.0, x.imag), y.imag)
    return y


NUMPY = {"expm1": _numpy_expm1, "log1p": _numpy_log1p, "tanh": _numpy_tanh}
