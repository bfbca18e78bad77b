"""log and log1p."""

from __future__ import annotations

import math

from rlx.llvm.builder import Value, f32
from rlx.llvm.math.real import F32, Real, nan_like, polynomial, real

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
