"""Shared by the functions: constants per type, polynomials, exact sums and products, table lookup.

Polynomials are minimax fits (Remez exchange, 60 digits) of the functions named beside them.
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
