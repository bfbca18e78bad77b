"""Complex arithmetic on pairs of f32."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlx.backends.cpu.kernels.loops.registers import Complex, Element
from rlx.llvm.builder import Function, Value, f32, f64


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
    is_infinite = f.abs(a.re).eq(math.inf) | f.abs(a.im).eq(math.inf)
    return f.select(is_infinite, math.inf, size)


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
}
