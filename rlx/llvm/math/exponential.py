"""exp, exp2, expm1, and functions built on them: tanh, sigmoid, silu, softplus.

pow.

log and log1p.
"""

from __future__ import annotations

import math
import struct

from rlx.llvm.builder import Value, f32, f64, i8, i16, i32
from rlx.llvm.math.real import (
    F32,
    F64,
    TABLE_SIZE,
    Real,
    exact_sum,
    has_lookup,
    lookup,
    nan_like,
    polynomial,
    power_of_two,
    product_error,
    real,
    split_whole,
)

# (ln(1 + f) - f + f²/2) / f³ for sqrt(1/2) <= 1 + f <= sqrt(2)
_LOG_F32 = (
    0.3333331677962809,
    -0.250007965214505,
    0.20002282978994557,
    -0.1662497090284061,
    0.14181411220613094,
    -0.13125281185966972,
    0.12879251952658077,
    -0.07865539014192921,
)
# (2 atanh(s) - 2 s) / s³ as a function of s², s = f / (2 + f)
LOG_F64 = (
    0.6666666666666734,
    0.39999999999414904,
    0.2857142874234491,
    0.22222198577037386,
    0.1818356414565588,
    0.15314054785991285,
    0.14795910356792882,
)


def log(x: Value) -> Value:
    """ln x. Error below 1.5 ulp, for denormal x too; -inf at 0, NaN below."""
    f, k = x.fn, real(x, "log")
    exponent, mantissa = split(x, k)
    fraction = mantissa - 1.0
    half_square = fraction * fraction * 0.5
    if k is F32:
        cube = fraction * fraction * fraction
        tail = f.fma(cube, polynomial(fraction, _LOG_F32), -half_square)
        tail = f.fma(exponent, f.const(k.ln2[1], x.type), tail)
        result = f.fma(exponent, f.const(k.ln2[0], x.type), fraction + tail)
    else:
        s = fraction / (fraction + 2.0)
        z = s * s
        tail = s * f.fma(z, polynomial(z, LOG_F64), half_square)
        tail = f.fma(exponent, f.const(k.ln2[1], x.type), tail)
        result = f.fma(exponent, f.const(k.ln2[0], x.type), fraction - (half_square - tail))
    result = f.select(x < math.inf, result, x)
    return f.select(x > 0.0, result, f.select(x.eq(0.0), -math.inf, nan_like(x)))


def log1p(x: Value) -> Value:
    """ln(1 + x), accurate near 0. Error below 2 ulp; -inf at -1, NaN below."""
    f = x.fn
    with f.exact():
        rounded = x + 1.0
        lost = x - (rounded - 1.0)
    correction = f.select((x > -1.0) & (x < math.inf), lost / rounded, 0.0)
    return log(rounded) + correction


def split(x: Value, k: Real) -> tuple[Value, Value]:
    """(e as a float, m) with x = m 2^e and sqrt(1/2) <= m < sqrt(2), for positive finite x."""
    f = x.fn
    tiny = x < 2.0 ** (1 - k.bias)
    scale = float(k.mantissa + 1)
    bits = f.select(tiny, x * 2.0**scale, x).bits()
    root = f.const(math.sqrt(0.5), x.type).bits()
    count = (bits - root).ashr(k.mantissa)
    mantissa = (bits - (count << k.mantissa)).bits(x.type)
    if x.type.scalar is f32:
        exponent = count.to(f32)
    else:
        # AVX2 has no conversion from 64-bit integers: put the count into the bits of a float.
        magic = f.const(k.magic, x.type)
        exponent = (count + magic.bits()).bits(x.type) - k.magic
    return f.select(tiny, exponent - scale, exponent), mantissa


def _sixteenth(k: int) -> float:
    """2^(k / 16) as a float whose bits lack k of the 16 steps to the next exponent."""
    (bits,) = struct.unpack("<i", struct.pack("<f", 2 ** (k / TABLE_SIZE)))
    (found,) = struct.unpack("<f", struct.pack("<i", bits - (k << 19)))
    return float(found)


_SIXTEENTHS = tuple(_sixteenth(k) for k in range(TABLE_SIZE))
_EXP_TINY = (0.5000161863604956, 0.16667057664698406)  # (e^r - 1 - r) / r² for |r| <= ln 2 / 32


def exp(x: Value) -> Value:
    """e^x. Error below 1.2 ulp, denormal results included."""
    f, k = x.fn, real(x, "exp")
    count, whole, r = _reduce(_clamped(x, k.exp_low, k.exp_high), k)
    return _scaled(f.fma(r * r, polynomial(r, k.exp), r) + 1.0, count, whole, k)


def exp_down(x: Value) -> Value:
    """e^x for x <= 0, as in a softmax. Error below 1.2 ulp, |x| / 21 more with table lookup (f32 on
    AVX-512); denormal results are flushed or denormal, never normal."""
    f, k = x.fn, real(x, "exp")
    if has_lookup(x):
        return _exp_by_table(x)
    x = f.max_fast(f.const(-k.bias * math.log(2), x.type), x)
    count, _, r = _reduce(x, k)
    return (f.fma(r * r, polynomial(r, k.exp), r) + 1.0) * power_of_two(count, k)


def _exp_by_table(x: Value) -> Value:
    """exp_down in f32 as 2^(n / 16) e^r, |r| <= ln 2 / 32: the fractional power of two comes from a
    table, and the integer part of n / 16 is added to its exponent."""
    f, k = x.fn, F32
    x = f.max_fast(f.const(-k.bias * math.log(2), x.type), x)  # there the power's bits are all 0
    with f.exact():
        shifted = f.fma(x, f.const(16 / math.log(2), x.type), k.magic)
        whole = shifted - k.magic
        # ln 2 as one f32 is off by 2.75e-9 of itself only: four ulp for x = -87, one for x = -20
        r = f.fma(whole, f.const(-math.log(2) / 16, x.type), x)
    n = shifted.bits()
    power = (lookup(_SIXTEENTHS, n).bits() + (n << 19)).bits(x.type)
    p = f.fma(r * r, polynomial(r, _EXP_TINY), r)  # e^r - 1
    return f.fma(power, p, power)


def exp2(x: Value) -> Value:
    """2^x. Error below 1.2 ulp."""
    f, k = x.fn, real(x, "exp2")
    x = _clamped(x, k.exp_low / math.log(2), k.bias + 1.5)
    with f.exact():
        shifted = x + k.magic
        whole = shifted - k.magic
        r = (x - whole) * math.log(2)
    count = shifted.bits() - f.const(k.magic, x.type).bits()
    return _scaled(f.fma(r * r, polynomial(r, k.exp), r) + 1.0, count, whole, k)


def expm1(x: Value) -> Value:
    """e^x - 1, accurate near 0. Error below 2.2 ulp."""
    f, k = x.fn, real(x, "expm1")
    x = _clamped(x, k.expm1_low, k.exp_high)
    count, whole, r = _reduce(x, k)
    p = f.fma(r * r, polynomial(r, k.exp), r)  # e^r - 1
    # e^x - 1 = 2^n ((e^r - 1) + (1 - 2^-n)); beyond the mantissa 2^-n may as well be 0.
    inverse = (f.max(k.bias - count, 0) << k.mantissa).bits(x.type)
    return _scaled(p + (1.0 - inverse), count, whole, k)


def tanh(x: Value) -> Value:
    """Hyperbolic tangent. Error below 3 ulp."""
    f = x.fn
    e = expm1(f.abs(x) * -2.0)
    return f.copysign(-e / (e + 2.0), x)


def sigmoid(x: Value) -> Value:
    """1 / (1 + e^-x). Error below 2.5 ulp, also where the result is tiny."""
    f = x.fn
    e = exp(-f.abs(x))
    return f.select(x < 0.0, e, 1.0) / (e + 1.0)


def silu(x: Value) -> Value:
    """x · sigmoid(x). Error below 3 ulp, or |x| times the smallest denormal."""
    return x * sigmoid(x)


def softplus(x: Value) -> Value:
    """ln(1 + e^x). Error below 2.5 ulp."""
    f = x.fn
    return f.max(x, 0.0) + log1p(exp(-f.abs(x)))


def gelu_tanh(x: Value) -> Value:
    """x · (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2. Error below 25 ulp for x > -4; below, where
    the result vanishes, up to 250 ulp (f64: 2000)."""
    f = x.fn
    inner = x * f.fma(x * x, f.const(0.044715, x.type), 1.0)
    return x * sigmoid(inner * (2 * math.sqrt(2 / math.pi)))


def _clamped(x: Value, low: float, high: float) -> Value:
    """x within the bounds; NaN stays."""
    f = x.fn
    x = f.max_fast(f.const(low, x.type), x)
    return f.min_fast(f.const(high, x.type), x)


def _reduce(x: Value, k: Real) -> tuple[Value, Value, Value]:
    """(n as an integer, n as a float, x - n ln 2) with |x - n ln 2| <= ln 2 / 2."""
    f = x.fn
    with f.exact():
        shifted = f.fma(x, f.const(1 / math.log(2), x.type), k.magic)
        whole = shifted - k.magic
        r = f.fma(whole, f.const(-k.ln2[0], x.type), x)
        r = f.fma(whole, f.const(-k.ln2[1], x.type), r)
    return shifted.bits() - f.const(k.magic, x.type).bits(), whole, r


def _scales_natively(x: Value) -> bool:
    return x.fn.target.avx512 and x.type.lanes * x.type.bits in (128, 256, 512)


def _scaled(p: Value, count: Value, whole: Value, k: Real) -> Value:
    """p · 2^count, also where that is denormal or infinite."""
    if _scales_natively(p):
        return _scalef(p, whole)
    half = count.ashr(1)
    return p * power_of_two(half, k) * power_of_two(count - half, k)


def _scalef(p: Value, whole: Value) -> Value:
    """AVX-512 scales by a power of two in one instruction, with every special case right."""
    f, size = p.fn, p.type.lanes * p.type.bits
    letter = "s" if p.type.bits == 32 else "d"
    args = [p, whole, p, f.const(-1, i16 if p.type.lanes == 16 else i8)]
    if size == 512:
        args.append(f.const(4, i32))  # round as usual
    return f.intrinsic(f"llvm.x86.avx512.mask.scalef.p{letter}.{size}", p.type, *args)


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
