"""Random words as numbers of a distribution: builders on the values of a graph.

Each takes the four words of a block, so that an element costs one block whatever its type. Numbers
of 16 bits are computed in f32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.ir.dtype import DType, bf16, f16, f32, f64, i32, i64, u64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.random.words import joined

Words = Sequence[Value]


def wide_type(dtype: DType) -> DType:
    """The type that numbers of `dtype` are computed in."""
    return f64 if dtype is f64 else f32


def _shifted(g: Graph, x: Value, by: int) -> Value:
    return g.shift_right(x, g.constant(np.array(by, x.shape.dtype.numpy)))


def unit(g: Graph, w: Words, dtype: DType) -> Value:
    """Uniform in [0, 1): as many random bits as the type has digits, so no rounding reaches 1."""
    if dtype is f64:
        whole = _shifted(g, joined(g, w[0], w[1]), 11)
        return g.mul(g.cast(g.cast(whole, i64), f64), 2.0**-53)
    digits = {f16: 11, bf16: 8}.get(dtype, 24)
    whole = g.cast(_shifted(g, w[0], 32 - digits), i32)  # signed: a vector instruction
    return g.cast(g.mul(g.cast(whole, f32), 2.0**-digits), dtype)


def open_unit(g: Graph, w: Words, dtype: DType) -> Value:
    """Uniform in (0, 1], for logarithms: small numbers keep all their digits."""
    if dtype is f64:
        whole = g.cast(g.cast(_shifted(g, joined(g, w[0], w[1]), 1), i64), f64)
        return g.add(g.mul(whole, 2.0**-63), 2.0**-64)
    return g.add(g.mul(g.cast(w[0], f32), 2.0**-32), 2.0**-33)


def normal(g: Graph, w: Words, dtype: DType) -> Value:
    """Box–Muller: the radius from one half of the words, the angle from the other."""
    radius = g.sqrt(g.mul(g.log(open_unit(g, w[:2], dtype)), -2.0))
    if dtype is f64:
        turn, scale = g.cast(g.cast(joined(g, w[2], w[3]), i64), f64), math.pi * 2.0**-63
    else:
        turn, scale = g.cast(g.cast(w[1], i32), f32), math.pi * 2.0**-31
    return g.mul(radius, g.cos(g.mul(turn, scale)))


def exponential(g: Graph, w: Words, dtype: DType) -> Value:
    """−ln u of a uniform u in (0, 1]."""
    return g.neg(g.log(open_unit(g, w, dtype)))


def gumbel(g: Graph, w: Words, dtype: DType) -> Value:
    """−ln of an exponential number, which is not 0."""
    least = 2.0**-65 if dtype is f64 else 2.0**-34
    return g.neg(g.log(g.maximum(exponential(g, w, dtype), least)))


def integers(g: Graph, w: Words, span: int) -> Value:
    """0 … span − 1 as u64, up to all of its numbers."""
    if span >= 2**64:
        return joined(g, w[0], w[1])
    return scaled_words(g, w, g.constant(np.uint64(span)), span <= 2**32)


def scaled_words(g: Graph, w: Words, factor: Value, is_short: bool) -> Value:
    """The high part of random bits · factor, a u64, of up to 2³² where `is_short`.

    From 64 bits for a factor of 32, from 128 for one of 64: no number is likelier than another by
    more than one part in 2³².
    """
    if is_short:
        low = _shifted(g, g.mul(g.cast(w[1], u64), factor), 32)
        return _shifted(g, g.add(g.mul(g.cast(w[0], u64), factor), low), 32)
    top, bottom = joined(g, w[0], w[1]), joined(g, w[2], w[3])
    part, carried = g.mul(top, factor), _high_product(g, bottom, factor)
    carry = g.cast(g.lt(g.add(part, carried), part), u64)
    return g.add(_high_product(g, top, factor), carry)


def _high_product(g: Graph, x: Value, factor: Value) -> Value:
    """The high 64 bits of x · factor, by words."""
    mask = g.constant(np.uint64(0xFFFFFFFF))
    low, high = g.bitwise_and(factor, mask), _shifted(g, factor, 32)
    x_low, x_high = g.bitwise_and(x, mask), _shifted(g, x, 32)
    first = _shifted(g, g.mul(x_low, low), 32)
    second = g.add(g.mul(x_high, low), first)
    third = g.add(g.mul(x_low, high), g.bitwise_and(second, mask))
    return g.add(g.add(g.mul(x_high, high), _shifted(g, second, 32)), _shifted(g, third, 32))


# M. Giles, "Approximating the erfinv function", GPU Computing Gems 2, 2011: f32, by powers of
# w = −ln(1 − x²), w < 5 and beyond
_CENTRE = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
           -0.00125372503, -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip
_TAIL = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
         -0.0076224613, 0.00943887047, 1.00167406, 2.83297682)  # fmt: skip


def erfinv(g: Graph, x: Value, dtype: DType) -> Value:
    """The inverse of erf, infinite at ±1."""
    w = g.neg(g.log(g.mul(g.sub(1.0, x), g.add(x, 1.0))))
    centre, tail = g.sub(w, 2.5), g.sub(g.sqrt(w), 3.0)
    y = g.where(g.lt(w, 5.0), _polynomial(g, _CENTRE, centre), _polynomial(g, _TAIL, tail))
    y = g.mul(y, x)
    if dtype is f64:  # two steps of Halley's method
        for _ in range(2):
            slope = g.mul(g.exp(g.neg(g.square(y))), 2 / math.sqrt(math.pi))
            off = g.div(g.sub(g.erf(y), x), slope)
            y = g.sub(y, g.div(off, g.add(g.mul(y, off), 1.0)))
    edge = g.copysign(g.constant(np.array(math.inf, dtype.numpy)), x)
    return g.where(g.ge(g.abs(x), 1.0), edge, y)


def _polynomial(g: Graph, coefficients: Sequence[float], x: Value) -> Value:
    y = g.add(g.mul(x, coefficients[0]), coefficients[1])
    for c in coefficients[2:]:
        y = g.add(g.mul(y, x), c)
    return y
