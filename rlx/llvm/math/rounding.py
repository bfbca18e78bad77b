"""Whole numbers: floor, ceil, trunc, round to even; and remainders."""

from __future__ import annotations

import math

from rlx.llvm.builder import Value, f32, f64
from rlx.llvm.math.real import F64, nan_like, power_of_two, product_error, real


def floor(x: Value) -> Value:
    """The next whole number towards -inf. Exact."""
    if _has_rounding(x):
        return _native("floor", x)
    near = round_even(x)
    return x.fn.copysign(x.fn.select(near > x, near - 1.0, near), x)


def ceil(x: Value) -> Value:
    """The next whole number towards +inf. Exact."""
    if _has_rounding(x):
        return _native("ceil", x)
    near = round_even(x)
    return x.fn.copysign(x.fn.select(near < x, near + 1.0, near), x)


def trunc(x: Value) -> Value:
    """The next whole number towards 0. Exact."""
    if _has_rounding(x):
        return _native("trunc", x)
    return x.fn.copysign(floor(x.fn.abs(x)), x)


def round_even(x: Value) -> Value:
    """The nearest whole number, halves to the even one. Exact."""
    if _has_rounding(x):
        return _native("roundeven", x)
    f, k = x.fn, real(x, "round_even")
    size, limit = f.abs(x), 2.0**k.mantissa
    with f.exact():
        near = (size + limit) - limit
    return f.copysign(f.select(size < limit, near, size), x)


def _has_rounding(x: Value) -> bool:
    target = x.fn.target
    return not target.is_x86 or target.has("sse4.1")


def _native(name: str, x: Value) -> Value:
    real(x, name)
    return x.fn.intrinsic(f"llvm.{name}.{x.type.suffix}", x.type, x)


def fmod(x: Value, y: Value) -> Value:
    """x - y trunc(x / y), with the sign of x. Exact; NaN if y is 0 or x infinite."""
    f = x.fn
    real(x, "fmod")
    if x.type.scalar is f32:
        return fmod(x.to(f64), y.to(f64)).to(f32)
    size, by = f.abs(x), f.abs(y)
    usable = (by > 0.0) & (size < math.inf)
    start = f.select(usable, size, 0.0)
    step = f.select(usable, by, 1.0)
    [rest] = f.while_([start], lambda r: f.any(r >= step), lambda r: _take_away(r, step))
    result = f.copysign(f.select(by < math.inf, rest, size), x)
    return f.select(usable & y.eq(y), result, nan_like(x))


def _take_away(r: Value, y: Value) -> Value:
    """r less a multiple of y; at least 2^50 times smaller, or below y."""
    f = r.fn
    gap = f.max(_exponent(r) - _exponent(y) - 50, 0)
    half = gap >> 1
    unit = y * power_of_two(half, F64) * power_of_two(gap - half, F64)
    with f.exact():
        times = trunc(r / unit)
        product = times * unit
        left = (r - product) - product_error(times, unit, product)
        left = f.select(left < 0.0, left + unit, left)
    return f.select(r < y, r, left)


def _exponent(x: Value) -> Value:
    """Biased exponent of a positive f64, denormals counted as if they were normal."""
    f = x.fn
    tiny = x < 2.0**-1022
    field = f.select(tiny, x * 2.0**54, x).bits() >> 52
    return f.select(tiny, field - 54, field)


def mod(x: Value, y: Value) -> Value:
    """x - y floor(x / y), with the sign of y. Exact but for one rounding."""
    f = x.fn
    rest = fmod(x, y)
    moved = f.select(_differ(rest, y), rest + y, rest)
    return f.select(rest.eq(0.0), f.copysign(rest, y), moved)


def floor_div(x: Value, y: Value) -> Value:
    """floor(x / y) of the exact quotient; x / y where y is 0."""
    f = x.fn
    rest = fmod(x, y)
    quotient = (x - rest) / y
    quotient = f.select(_differ(rest, y), quotient - 1.0, quotient)
    near = floor(quotient)
    near = f.select(quotient - near > 0.5, near + 1.0, near)
    plain = x / y
    zero = f.select(quotient.eq(0.0), f.copysign(f.const(0.0, x.type), plain), near)
    return f.select(y.eq(0.0), plain, zero)


def _differ(rest: Value, y: Value) -> Value:
    """Is the remainder there, and of the other sign than y?"""
    return rest.ne(0.0) & ((rest.bits() ^ y.bits()) < 0)


def split_whole(x: Value) -> tuple[Value, Value]:
    """(is x a whole number, is it an odd one)."""
    half = x * 0.5
    whole = round_even(x).eq(x)
    return whole, whole & round_even(half).ne(half)
