"""exp, exp2, expm1, log, log1p, pow, and what is built on them: tanh, sigmoid, softplus, erf, GELU.

GELU is x · Φ(x), Φ being the normal distribution. In f32 it is relu(x) - a · Φ(-a) with a = |x|,
which keeps the digits of both tails. The two fits of Φ(-a) are Remez exchanges for the relative
error (below Φ = 1/1000 the second for the absolute one).
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
    """ln(1 + x), accurate near 0; −0 of −0. Error below 2 ulp; -inf at -1, NaN below."""
    f = x.fn
    with f.exact():
        rounded = x + 1.0
        lost = x - (rounded - 1.0)
    correction = f.select((x > -1.0) & (x < math.inf), lost / rounded, 0.0)
    return f.copysign(log(rounded) + correction, x)


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
    """e^x for x <= 0, as in a softmax. Error below 1.2 ulp, in f32 |x| / 21 more with a fused
    multiply-add; denormal results are flushed or denormal, never normal."""
    f, k = x.fn, real(x, "exp")
    if has_lookup(x):
        return _exp_by_table(x)
    x = f.max_fast(f.const(-k.bias * math.log(2), x.type), x)  # there the power's bits are all 0
    magic = k.magic + k.bias  # so that the low bits are the exponent of the power
    with f.exact():
        shifted = f.fma(x, f.const(1 / math.log(2), x.type), magic)
        whole = shifted - magic
        once = k is F32 and f.target.fma  # see `_exp_by_table`
        r = f.fma(whole, f.const(-math.log(2), x.type), x) if once else _remainder(x, whole, k)
    power = (shifted.bits() << k.mantissa).bits(x.type)
    p = f.fma(r * r, polynomial(r, k.exp), r)  # e^r - 1
    return f.fma(power, p, power)


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
    """e^x - 1, accurate near 0; −0 of −0. Error below 2.2 ulp."""
    f, k = x.fn, real(x, "expm1")
    sign, x = x, _clamped(x, k.expm1_low, k.exp_high)
    count, whole, r = _reduce(x, k)
    p = f.fma(r * r, polynomial(r, k.exp), r)  # e^r - 1
    # e^x - 1 = 2^n ((e^r - 1) + (1 - 2^-n)); beyond the mantissa 2^-n may as well be 0.
    inverse = (f.max(k.bias - count, 0) << k.mantissa).bits(x.type)
    return f.copysign(_scaled(p + (1.0 - inverse), count, whole, k), sign)


def tanh(x: Value) -> Value:
    """Hyperbolic tangent. Error below 3 ulp."""
    f, k = x.fn, real(x, "tanh")
    # -e / (2 + e) with e = e^u - 1, u = -2 |x|: below this bound the result is 1, and no power of
    # two is denormal
    u = f.max_fast(f.const(-(k.mantissa + 4) * math.log(2), x.type), f.abs(x) * -2.0)
    magic = k.magic + k.bias  # so that the low bits are the exponent of the power
    with f.exact():
        shifted = f.fma(u, f.const(1 / math.log(2), x.type), magic)
        r = _remainder(u, shifted - magic, k)
    power = (shifted.bits() << k.mantissa).bits(x.type)
    p = f.fma(r * r, polynomial(r, k.exp), r)  # e^r - 1
    e = f.fma(power, p, power - 1.0)
    return f.copysign(e / (-2.0 - e), x)


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
        r = _remainder(x, whole, k)
    return shifted.bits() - f.const(k.magic, x.type).bits(), whole, r


def _remainder(x: Value, whole: Value, k: Real) -> Value:
    """x - whole · ln 2."""
    r = x.fn.fma(whole, x.fn.const(-k.ln2[0], x.type), x)
    return x.fn.fma(whole, x.fn.const(-k.ln2[1], x.type), r)


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


# erf(x) / x - 1 as a function of x², |x| <= 1/2
_ERF_F32 = (
    0.128379165620598,
    -0.37612609223667914,
    0.11282835271569361,
    -0.0267579482391008,
    0.004719453056469901,
)
_ERF_F64 = (
    0.1283791670955126,
    -0.37612638903183476,
    0.11283791670925356,
    -0.026866170632882276,
    0.005223977372828914,
    -0.000854829772841322,
    0.00012053333513484928,
    -1.4845799367641735e-05,
    1.4725264315146004e-06,
)
# (1 + 2 z) e^(z²) erfc(z) as a function of (z - K) / (z + K), z >= 0, and K
_ERFC_F32 = (
    2.0,
    (
        1.276978393229211,
        -0.09276398027872089,
        -0.16603142500674667,
        0.1640553383323747,
        -0.05420417919734331,
        -0.008059806831267861,
        0.008630956995204931,
        0.0013130693523863536,
        -0.0012288558215806228,
        -0.00039971383462928783,
    ),
)
_ERFC_F64 = (
    4.0, (        1.2329951186255526, -0.1396211168405632, 0.015379652102606677,
    0.06809705425476363, -0.1010390660355873, 0.09373283499621257, -0.06633036582773441,
    0.0371675155656646, -0.01619773388426558, 0.005031969787446134, -0.0007577744242515464,
    -0.00019925601515028183, 0.00015062629637130004, -2.4400271180120026e-05,
    -1.123397877770834e-05, 5.709088022586259e-06, 3.132460465891132e-07, -8.200964018618296e-07,
    5.574325335080055e-08, 1.0160516628604477e-07, -8.255395346313087e-09, -8.466161832193778e-09,
    ),
)  # fmt: skip


def erf(x: Value) -> Value:
    """Error function. Error below 2.2 ulp."""
    f, k = x.fn, real(x, "erf")
    size = f.abs(x)
    small = f.fma(x, polynomial(x * x, _ERF_F32 if k is F32 else _ERF_F64), x)
    large = f.copysign(1.0 - erfc_of(size, size, 1.0), x)
    return f.select(size < 0.5, small, large)


def erfc(x: Value) -> Value:
    """1 - erf(x), accurate where that is tiny. Error below 8 ulp."""
    f = x.fn
    size = f.abs(x)
    tail = erfc_of(size, size, 1.0)
    return f.select(x < 0.0, 2.0 - tail, tail)


def erfc_of(z: Value, x: Value, factor: float) -> Value:
    """erfc(z) for z >= 0, where z² = factor · x², the latter being the number given exactly."""
    f, k = z.fn, real(z, "erfc")
    center, coefficients = _ERFC_F32 if k is F32 else _ERFC_F64
    # Beyond this the exponential is 0 whatever the rest is; infinities would give NaN below.
    limit = f.const(math.sqrt(-k.exp_low) + 1.0, z.type)
    z = f.min_fast(limit, z)
    x = f.min_fast(f.const(math.sqrt(-k.exp_low / factor) + 1.0, z.type), x)
    square = x * x
    lost = product_error(x, x, square) * factor
    gauss = exp(square * -factor)
    gauss = f.fma(gauss, -lost, gauss)
    near, far = z + center, f.fma(z, f.const(2.0, z.type), 1.0)
    inverse = 1.0 / (near * far)
    q = (z - center) * far * inverse
    return gauss * (polynomial(q, coefficients) * near * inverse)


# Φ(-a) as a piecewise polynomial in a - centre: 16 intervals, of width 1/4 up to 2 and 1/2 up to
# 6. The last one ends in exactly 0: a line from 0 to Φ(-6) is subtracted from it.
_LIMIT = 6 - 2.0**-21  # the largest number below 6
# fmt: off
_CENTRES = (
    0.0, 0.375, 0.625, 0.875, 1.125, 1.375, 1.625, 1.875,
    2.25, 2.75, 3.25, 3.75, 4.25, 4.75, 5.25, _LIMIT,
)
_PIECES = (
    (0.5, 0.35383025, 0.26598552, 0.19078696, 0.13029452, 0.08456572, 0.05208128, 0.03039636,
     0.012224467, 0.0029797624, 5.77026e-04, 8.841787e-05, 1.0688702e-05, 1.0171156e-06,
     7.605348e-08, 0.0),
    (-0.39894226, -0.37185508, -0.32816097, -0.272055, -0.21187665, -0.15501226, -0.10653827,
     -0.06878628, -0.031739734, -0.009093568, -0.0020290238, -3.525788e-04, -4.7712558e-05,
     -5.028103e-06, -4.1262356e-07, -8.087451e-09),
    (-1.3120788e-06, 0.06972247, 0.102549866, 0.1190237, 0.11918043, 0.106570944, 0.086562485,
     0.06448732, 0.035709113, 0.012503903, 0.0032968568, 6.608825e-04, 1.013253e-04,
     1.192912e-05, 1.0814467e-06, 1.6799392e-08),
    (0.06651241, 0.053259883, 0.033328254, 0.010626754, -0.009380036, -0.023009408, -0.029131118,
     -0.028839594, -0.021485467, -0.009946047, -0.0032354475, -7.687277e-04, -1.3609114e-04,
     -1.8165434e-05, -1.842284e-06, -5.126859e-08),
    (-1.5413722e-04, -0.01655207, -0.022224525, -0.022100786, -0.017194774, -0.009854406,
     -0.0026171156, 0.002738466, 0.0060471096, 0.004742766, 0.0020945985, 6.2096305e-04,
     1.3116717e-04, 2.0312225e-05, 2.3435846e-06, -2.0047933e-08),
    (-0.009558303, -0.0067008254, -0.0021818331, 0.002294683, 0.0052730497, 0.006137509,
     0.0051836157, 0.0032617552, 4.1525118e-04, -0.0011114916, -8.429834e-04, -3.2943685e-04,
     -8.373774e-05, -1.4887407e-05, -1.9150177e-06, -1.7872198e-07),
)
# fmt: on

# Φ(-a)^(1/4) / (a - 6.75) as a function of a - 3.375, 0 <= a <= 6.75
_ROOT_LIMIT = 6.75
_ROOT = (
    -0.041068221439548275,
    0.025139003985968585,
    -0.004671205820313083,
    -0.0005934129989435415,
    0.0003209263606025966,
    -1.931751641569129e-05,
    -1.0174762320413635e-05,
    1.5862963313674025e-06,
    1.0125167220763406e-07,
    -7.757245334251199e-08,
    -7.979473995555802e-09,
)


def gelu(x: Value) -> Value:
    """x · Φ(x) = x · (1 + erf(x / √2)) / 2.

    f32: error below 16 ulp for x > -3, below 1.5e-7 · max(|x|, 1) everywhere; rising beyond its
    minimum on both sides, and 0 below -6.75 (where it is -5e-11).
    f64: error below 1e-14, or |x| times the smallest denormal.
    """
    f, k = x.fn, real(x, "gelu")
    size = f.abs(x)
    if k is not F32:
        below = erfc_of(size * math.sqrt(0.5), size, 0.5) * 0.5
        return x * f.select(x < 0.0, below, 1.0 - below)
    size, below = _by_intervals(size) if has_lookup(x) else _by_root(size)
    with f.exact():
        half = x * 0.5
        relu = half + f.abs(half)  # NaN for -inf, as in the op's formula
    return f.fma(-size, below, relu)


def normal_cdf(x: Value) -> Value:
    """Φ(x) = (1 + erf(x / √2)) / 2. Error below 8 ulp; in f32 16 for x > -3, and 4e-7 below."""
    f, k = x.fn, real(x, "normal_cdf")
    size = f.abs(x)
    if k is F32:
        _, below = _by_intervals(size) if has_lookup(x) else _by_root(size)
    else:
        below = erfc_of(size * math.sqrt(0.5), size, 0.5) * 0.5
    return f.select(x < 0.0, below, 1.0 - below)


def _by_intervals(size: Value) -> tuple[Value, Value]:
    """(a limited, Φ(-a)), coefficients being looked up in registers."""
    f = size.fn
    a = f.min_fast(f.const(_LIMIT, size.type), size)
    with f.exact():
        # The last bit of the exponent of a + 2 and three of its mantissa are the interval's number.
        piece = (a + 2.0).bits() >> 20
        t = a - lookup(_CENTRES, piece)
    total = lookup(_PIECES[-1], piece)
    for row in _PIECES[-2::-1]:
        total = f.fma(t, total, lookup(row, piece))
    return a, total


def _by_root(size: Value) -> tuple[Value, Value]:
    """(a limited, Φ(-a)) as the fourth power of a polynomial, which is smoother and ends in 0."""
    f = size.fn
    a = f.min_fast(f.const(_ROOT_LIMIT, size.type), size)
    with f.exact():
        t = a - _ROOT_LIMIT / 2
    root = polynomial(t, _ROOT) * (a - _ROOT_LIMIT)
    square = root * root
    return a, square * square
