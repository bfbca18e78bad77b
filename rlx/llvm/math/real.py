"""Shared by the functions: constants per type, polynomials, exact sums and products, table lookup.

Polynomials are minimax fits (Remez exchange, 60 digits) of the functions named beside them.

Whole numbers: floor, ceil, trunc, round to even; and remainders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.errors import CodegenError
from rlx.llvm.builder import Type, Value, f32, f64, i32, i64, vec
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Real:
    """Constants of f32 or f64."""

    scalar: Type
    integer: Type
    mantissa: int
    bias: int
    magic: float
    """1.5 * 2^mantissa: adding it leaves the nearest whole number in the low bits."""
    ln2: tuple[float, float]
    """ln 2 in two parts; the first times any exponent is exact."""
    exp_low: float
    """Below this exp is 0."""
    exp_high: float
    """Above this exp is infinite."""
    expm1_low: float
    """Below this expm1 is -1."""
    exp: tuple[float, ...]
    """(e^r - 1 - r) / r² for |r| <= ln 2 / 2"""


F32 = Real(
    scalar=f32,
    integer=i32,
    mantissa=23,
    bias=127,
    magic=1.5 * 2**23,
    ln2=(0.693145751953125, 1.4286068203094173e-06),
    exp_low=-104.0,
    exp_high=89.0,
    expm1_low=-18.0,
    exp=(
        0.5000000061746598,
        0.16666543122586142,
        0.0416662824591732,
        0.008366571407214286,
        0.0013946427191896765,
    ),
)

F64 = Real(
    scalar=f64,
    integer=i64,
    mantissa=52,
    bias=1023,
    magic=1.5 * 2**52,
    ln2=(0.6931471805598903, 5.497923018708371e-14),
    exp_low=-746.0,
    exp_high=710.0,
    expm1_low=-39.0,
    exp=(
        0.5000000000000006,
        0.16666666666666685,
        0.0416666666665741,
        0.00833333333331466,
        0.0013888888932255732,
        0.00019841269902890445,
        2.4801504569956914e-05,
        2.755722807211586e-06,
        2.762628366843684e-07,
        2.5114437595071767e-08,
    ),
)


def real(x: Value, op: str) -> Real:
    """The constants for x's type."""
    if x.type.scalar is f32:
        return F32
    if x.type.scalar is f64:
        return F64
    raise CodegenError(
        "works on f32 and f64",
        where=op,
        got=x.type.name,
        hint="convert with x.to(f32) first",
    )


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """c0 + c1 x + c2 x² + ..., by Horner's rule.

    Long ones as even and odd parts: a CPU waits for chains of dependent operations, and cannot hold
    enough vectors in flight to fill the time.
    """
    f = x.fn
    if len(coefficients) >= 7:
        square = x * x
        odd = polynomial(square, coefficients[1::2])
        return f.fma(x, odd, polynomial(square, coefficients[::2]))
    total = f.const(coefficients[-1], x.type)
    for c in coefficients[-2::-1]:
        total = f.fma(x, total, c)
    return total


def power_of_two(n: Value, k: Real) -> Value:
    """2^n as a float, for exponents n of normal numbers; n = -bias gives 0."""
    return (n + k.bias << k.mantissa).bits(n.type.with_scalar(k.scalar))


def product_error(a: Value, b: Value, p: Value) -> Value:
    """a * b - p exactly, p being the rounded product."""
    f = a.fn
    if f.target.fma:
        return f.fma(a, b, -p)
    with f.exact():
        ah, bh = _upper_half(a), _upper_half(b)
        al, bl = a - ah, b - bh
        return ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _upper_half(x: Value) -> Value:
    """x with the lower half of its mantissa cleared."""
    clear = 12 if x.type.scalar is f32 else 27
    return (x.bits() & -(1 << clear)).bits(x.type)


def exact_sum(a: Value, b: Value) -> tuple[Value, Value]:
    """(rounded sum, what the rounding lost); a and b in any order."""
    with a.fn.exact():
        total = a + b
        other = total - a
        return total, (a - (total - other)) + (b - other)


def nan_like(x: Value) -> Value:
    return x.fn.const(math.nan, x.type)


TABLE_SIZE = 16  # floats of a table in a vector register


def has_lookup(x: Value) -> bool:
    """Whether the target has table lookup for vectors of this type."""
    return x.fn.target.avx512 and x.type.scalar is f32 and x.type.lanes <= TABLE_SIZE


def lookup(table: tuple[float, ...], index: Value) -> Value:
    """table[index & 15] in each lane."""
    f, lanes, wide = index.fn, index.type.lanes, vec(TABLE_SIZE, f32)
    if lanes == 1:
        index = f.splat(index, TABLE_SIZE)
    elif lanes < TABLE_SIZE:
        index = f.shuffle(index, None, [min(i, lanes - 1) for i in range(TABLE_SIZE)])
    found = f.intrinsic("llvm.x86.avx512.permvar.sf.512", wide, f.const(table, wide), index)
    return found if lanes == TABLE_SIZE else f.slice(found, 0, lanes)


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
