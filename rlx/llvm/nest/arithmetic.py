"""Integer and complex arithmetic on elements in registers."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from rlx.ir.dtype import DType
from rlx.llvm import math
from rlx.llvm.builder import Function, Value, f32, f64
from rlx.llvm.nest.registers import Complex, Element


def floor_div(f: Function, a: Value, b: Value, dtype: DType) -> Value:
    """floor(a / b); 0 where b is 0."""
    zero = b.eq(0)
    if dtype.kind == "uint":
        return f.select(zero, 0, a.udiv(f.select(zero, 1, b)))
    quotient, rest = _divided(f, a, b)
    lower = rest.ne(0) & ((rest ^ b) < 0)
    return f.select(zero, 0, f.select(lower, quotient - 1, quotient))


def mod(f: Function, a: Value, b: Value, dtype: DType) -> Value:
    """a - b * floor(a / b); 0 where b is 0."""
    zero = b.eq(0)
    if dtype.kind == "uint":
        return f.select(zero, 0, a.urem(f.select(zero, 1, b)))
    _, rest = _divided(f, a, b)
    moved = f.select(rest.ne(0) & ((rest ^ b) < 0), rest + b, rest)
    return f.select(zero, 0, moved)


def _divided(f: Function, a: Value, b: Value) -> tuple[Value, Value]:
    """Quotient towards 0 and remainder. Dividing the least integer by -1 traps on some machines, so
    -1 and 0 never reach the division."""
    special = (b + 1).ult(2)
    safe = f.select(special, 1, b)
    quotient = a // safe
    rest = a - quotient * safe
    return f.select(special, -a, quotient), f.select(special, 0, rest)


def shift_left(f: Function, a: Value, b: Value, dtype: DType) -> Value:
    """0 where b is not in 0 … bits - 1."""
    inside = b.ult(dtype.bits)
    return f.select(inside, a << f.select(inside, b, 0), 0)


def shift_right(f: Function, a: Value, b: Value, dtype: DType) -> Value:
    """Arithmetic for signed types; all sign where b is too far."""
    inside = b.ult(dtype.bits)
    if dtype.kind == "uint":
        return f.select(inside, a >> f.select(inside, b, 0), 0)
    return a.ashr(f.select(inside, b, dtype.bits - 1))


def power(f: Function, a: Value, b: Value, dtype: DType) -> Value:
    """a^b, wrapping; for b < 0 the quotient 1 / a^-b, truncated."""
    one = f.const(1, a.type)
    signed = dtype.kind == "int"
    exponent = f.max(b, 0) if signed else b

    def square(_: Value, result: Value, base: Value, left: Value) -> list[Value]:
        odd = (left & 1).ne(0)
        return [f.select(odd, result * base, result), base * base, left >> 1]

    whole, _, _ = f.loop(0, dtype.bits, 1, [one, a, exponent], square)
    if not signed:
        return whole
    unit = f.select((b & 1).eq(0), one, a)
    small = f.select(f.abs(a).eq(1), unit, 0)
    return f.select(b < 0, small, whole)


def clamp(f: Function, x: Value, low: int, high: int, dtype: DType) -> Value:
    least, most = (f.umax, f.umin) if dtype.kind == "uint" else (f.max, f.min)
    return most(least(x, low), high)


def add(f: Function, a: Complex, b: Complex) -> Complex:
    return Complex(a.re + b.re, a.im + b.im)


def sub(f: Function, a: Complex, b: Complex) -> Complex:
    return Complex(a.re - b.re, a.im - b.im)


def mul(f: Function, a: Complex, b: Complex) -> Complex:
    return Complex(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


def div(f: Function, a: Complex, b: Complex) -> Complex:
    """Smith's algorithm: scaled by the larger part of b, so that no intermediate overflows."""
    swap = f.abs(b.re) < f.abs(b.im)
    large, small = f.select(swap, b.im, b.re), f.select(swap, b.re, b.im)
    is_zero = b.re.eq(0.0) & b.im.eq(0.0)
    ratio = f.select(is_zero, 0.0, small / large)
    scale = large + small * ratio
    x, y = f.select(swap, a.im, a.re), f.select(swap, a.re, a.im)
    re = (x + y * ratio) / scale
    im = (y - x * ratio) / scale
    return Complex(re, f.select(swap, -im, im))


def magnitude(f: Function, a: Complex) -> Value:
    """√(re² + im²), in f64 so that the squares fit; infinite if either part is, even beside NaN."""
    re, im = a.re.to(f64), a.im.to(f64)
    size = f.sqrt(re * re + im * im).to(f32)
    is_infinite = f.abs(a.re).eq(inf) | f.abs(a.im).eq(inf)
    return f.select(is_infinite, inf, size)


def equal(f: Function, a: Complex, b: Complex) -> Value:
    return a.re.eq(b.re) & a.im.eq(b.im)


BINARY: dict[str, Callable[[Function, Complex, Complex], Element]] = {
    "add": add,
    "sub": sub,
    "mul": mul,
    "div": div,
    "eq": equal,
    "ne": lambda f, a, b: ~equal(f, a, b),
}

UNARY: dict[str, Callable[[Function, Complex], Element]] = {
    "neg": lambda f, a: Complex(-a.re, -a.im),
    "square": lambda f, a: mul(f, a, a),
    "abs": magnitude,
    "real": lambda f, a: a.re,
    "imag": lambda f, a: a.im,
    "logical_not": lambda f, a: a.re.eq(0.0) & a.im.eq(0.0),
    "is_nan": lambda f, a: a.re.is_nan() | a.im.is_nan(),
    "round": lambda f, a: Complex(math.round_even(a.re), math.round_even(a.im)),
}
