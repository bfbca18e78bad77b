"""The error function and its complement."""

from __future__ import annotations

import math

from rlx.llvm.builder import Value
from rlx.llvm.math.exponential import exp
from rlx.llvm.math.real import F32, polynomial, product_error, real

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
