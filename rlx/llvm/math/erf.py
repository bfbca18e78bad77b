"""The error function and its complement.

GELU: x · Φ(x), Φ being the normal distribution.

In f32 it is relu(x) - a · Φ(-a) with a = |x|, which keeps the digits of both tails. The two fits of
Φ(-a) are Remez exchanges for the relative error (below Φ = 1/1000 the second for the absolute one).
"""

from __future__ import annotations

import math

from rlx.llvm.builder import Value
from rlx.llvm.math.exponential import exp
from rlx.llvm.math.real import F32, has_lookup, lookup, polynomial, product_error, real

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
    4.0,
    (
        1.2329951186255526,
        -0.1396211168405632,
        0.015379652102606677,
        0.06809705425476363,
        -0.1010390660355873,
        0.09373283499621257,
        -0.06633036582773441,
        0.0371675155656646,
        -0.01619773388426558,
        0.005031969787446134,
        -0.0007577744242515464,
        -0.00019925601515028183,
        0.00015062629637130004,
        -2.4400271180120026e-05,
        -1.123397877770834e-05,
        5.709088022586259e-06,
        3.132460465891132e-07,
        -8.200964018618296e-07,
        5.574325335080055e-08,
        1.0160516628604477e-07,
        -8.255395346313087e-09,
        -8.466161832193778e-09,
    ),
)


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

# Φ(-a)^(1/4) / (a - 6.75) as a function of 2 a / 6.75 - 1, 0 <= a <= 6.75
_ROOT_LIMIT = 6.75
_ROOT = (
    -0.041068221439548275,
    0.08484413845264398,
    -0.053207953797003715,
    -0.02281278917618306,
    0.04163902002075306,
    -0.008459022415763174,
    -0.01503719861462946,
    0.007912263827670173,
    0.0017044820099787854,
    -0.004407288917250416,
    -0.001530072590769079,
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
        relu = f.select(x > 0.0, x, x * 0.0)  # -inf · 0 is NaN, as in the op's formula
    return f.fma(-size, below, relu)


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
    t = f.fma(a, f.const(2 / _ROOT_LIMIT, size.type), -1.0)
    root = polynomial(t, _ROOT) * (a - _ROOT_LIMIT)
    square = root * root
    return a, square * square
