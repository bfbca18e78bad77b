"""pow."""

from __future__ import annotations

import math

from rlx.llvm.builder import Value, f32, f64
from rlx.llvm.math.exponential import exp
from rlx.llvm.math.logarithm import LOG_F64, log, split
from rlx.llvm.math.real import F64, exact_sum, nan_like, polynomial, product_error, real
from rlx.llvm.math.rounding import split_whole


def pow(x: Value, y: Value) -> Value:
    """x^y. Error below 1 ulp (f32) and 2 ulp (f64); special cases as in C."""
    f = x.fn
    real(x, "pow")
    size = f.abs(x)
    if x.type.scalar is f32:
        result = exp(y.to(f64) * log(size.to(f64))).to(f32)
    else:
        result = _pow_f64(size, y)
    whole, odd = split_whole(y)
    zero_sign = f.const(0, x.type.as_int)
    sign = f.select(odd & (x.bits() < 0), x.bits() & _sign_bit(x), zero_sign)
    result = (result.bits() ^ sign).bits(x.type)
    outside = (x < 0.0) & (x > -math.inf) & ~whole
    result = f.select(outside, nan_like(x), result)
    one = y.eq(0.0) | x.eq(1.0) | (size.eq(1.0) & f.abs(y).eq(math.inf))
    return f.select(one, 1.0, result)


def _sign_bit(x: Value) -> int:
    return -(1 << x.type.bits - 1)


def _pow_f64(x: Value, y: Value) -> Value:
    """Through a logarithm of about 60 bits, because y multiplies its error. x >= 0."""
    f = x.fn
    high, low = _long_log(x)
    with f.exact():
        product = y * high
        rest = product_error(y, high, product) + y * low
    rest = f.select(f.abs(product) < 1000.0, rest, 0.0)
    plain = y * log(x)  # for 0 and infinity, where the long form has no meaning
    usable = (x > 0.0) & (x < math.inf)
    base = exp(f.select(usable, product, plain))
    return f.select(usable & (base < math.inf), f.fma(base, rest, base), base)


def _long_log(x: Value) -> tuple[Value, Value]:
    """ln x as an unevaluated sum, for positive finite x."""
    f = x.fn
    exponent, mantissa = split(x, F64)
    with f.exact():
        fraction = mantissa - 1.0
        near = fraction + 2.0
        near_low = fraction - (near - 2.0)
        s = fraction / near
        product = s * near
        remainder = (fraction - product) - product_error(s, near, product)
        s_low = (remainder - s * near_low) / near
        z = s * s
        tail = s * z * polynomial(z, LOG_F64)
        high, low = exact_sum(s * 2.0, tail + s_low * 2.0)
        high, more = exact_sum(exponent * F64.ln2[0], high)
        return high, low + more + exponent * F64.ln2[1]
