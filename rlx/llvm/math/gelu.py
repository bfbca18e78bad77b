"""GELU: x · Φ(x), Φ being the normal distribution.

In f32 it is relu(x) - a · Φ(-a) with a = |x|, which keeps the digits of both tails. The two fits of
Φ(-a) are Remez exchanges for the relative error (below Φ = 1/1000 the second for the absolute one).
"""

from __future__ import annotations

import math

from rlx.llvm.builder import Value
from rlx.llvm.math.erf import erfc_of
from rlx.llvm.math.real import F32, has_lookup, lookup, polynomial, real

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
