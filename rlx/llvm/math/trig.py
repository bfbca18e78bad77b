"""sin, cos, tan, atan and atan2."""

from __future__ import annotations

import math
import struct
from functools import cache
from itertools import pairwise

from rlx.llvm.builder import Function, Value, f32, f64, i32, i64, vec
from rlx.llvm.math.real import F32, F64, exact_sum, nan_like, polynomial, product_error, real

# π/2 in parts: of 33 bits each, so that products with counts below 2^20 are exact, and of 53
_PARTS_33 = (
    1.5707963267341256,
    6.077100506303966e-11,
    2.0222662487111665e-21,
    8.4784276603689e-32,
)
_PARTS_53 = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33)

# (sin r - r) / r³ and (cos r - 1 + r²/2) / r⁴ as functions of r², |r| <= π/4
_SIN_F32 = (-0.16666654946029763, 0.00833217818749357, -0.00019517296217100207)
_COS_F32 = (0.04166664688553338, -0.0013887368236927783, 2.443851710083156e-05)
_SIN_F64 = (
    -0.16666666666666632,
    0.008333333333322434,
    -0.00019841269829821547,
    2.7557313696280837e-06,
    -2.505075875644824e-08,
    1.589683112288505e-10,
)
_COS_F64 = (
    0.0416666666666666,
    -0.001388888888887425,
    2.4801587289551245e-05,
    -2.755731437028706e-07,
    2.087572550821884e-09,
    -1.1359755173928278e-11,
)
# (atan q - q) / q³ as a function of q², |q| <= tan(π/8)
_ATAN_F32 = (
    -0.33333315592034285,
    0.1999849337408351,
    -0.14243907974035006,
    0.10596364651370453,
    -0.06084235392954112,
)
_ATAN_F64 = (
    -0.33333333333333326,
    0.1999999999999774,
    -0.14285714285395526,
    0.11111111088593913,
    -0.09090908158234463,
    0.07692283046884049,
    -0.06666230768832249,
    0.05877059190638833,
    -0.052186352750619495,
    0.04504455407581483,
    -0.0334949097596405,
    0.015215375726770348,
)

_FAST_LIMIT = 2.0**17
_F64_LIMIT = 1e6


def sin(x: Value) -> Value:
    """Sine. Error below 1.8 ulp for every x; −0 of −0."""
    sine, cosine, quadrant = _waves(x)
    return x.fn.select(x.eq(0.0), x, _quarter(sine, cosine, quadrant))


def cos(x: Value) -> Value:
    """Cosine; errors as for sin."""
    sine, cosine, quadrant = _waves(x)
    return _quarter(sine, cosine, quadrant + 1)


def tan(x: Value) -> Value:
    """Tangent. Error below 3.5 ulp; −0 of −0."""
    f = x.fn
    sine, cosine, quadrant = _waves(x)
    odd = (quadrant & 1).ne(0)
    return f.select(x.eq(0.0), x, f.select(odd, -cosine, sine) / f.select(odd, sine, cosine))


def _quarter(sine: Value, cosine: Value, quadrant: Value) -> Value:
    """sin(r + quadrant · π/2)."""
    f = sine.fn
    wave = f.select((quadrant & 1).ne(0), cosine, sine)
    sign = (quadrant & 2) << (30 if wave.type.scalar is f32 else 62)
    return (wave.bits() ^ sign).bits(wave.type)


def _waves(x: Value) -> tuple[Value, Value, Value]:
    """(sin r, cos r, n) with x = n π/2 + r; n as an integer of x's width."""
    f, k = x.fn, real(x, "sin")
    if k is F32:
        r, count = _reduce_f32(x)
        sines: tuple[float, ...] = _SIN_F32
        cosines: tuple[float, ...] = _COS_F32
    else:
        r, count = _reduce_f64(x)
        sines, cosines = _SIN_F64, _COS_F64
    z = r * r
    sine = f.fma(z * r, polynomial(z, sines), r)
    cosine = f.fma(z * z, polynomial(z, cosines), f.fma(z, f.const(-0.5, x.type), 1.0))
    return sine, cosine, count


def _reduce_f32(x: Value) -> tuple[Value, Value]:
    """Range reduction: Cody–Waite in f64; Payne–Hanek with a table of 2/π for large lanes."""
    f = x.fn
    size = f.abs(x)

    def near() -> list[Value]:
        r, count = _cody_waite(x.to(f64))
        return [r.to(f32), count.to(i32)]

    def far() -> list[Value]:
        r, count = near()
        wide, quarters = _payne_hanek(x)
        large = size >= _FAST_LIMIT
        return [f.select(large, wide, r), f.select(large, quarters, count)]

    r, count = f.if_(f.any(size >= _FAST_LIMIT), far, near)
    return f.select(size < math.inf, r, nan_like(x)), count


def _cody_waite(x: Value) -> tuple[Value, Value]:
    """r and n of an f64: Cody–Waite, n times the parts of π/2 subtracted. The first difference is
    exact; with FMA, parts after the second matter only where those two cancel."""
    f = x.fn
    with f.exact():
        shifted = f.fma(x, f.const(2 / math.pi, x.type), F64.magic)
        whole = shifted - F64.magic
        if f.target.fma:
            r = x
            for part in _PARTS_53:
                r = f.fma(whole, f.const(-part, x.type), r)
        else:  # shorter parts: what the second difference loses, and the third, are some ulp of r
            first, second, third, fourth = (whole * part for part in _PARTS_33)
            r, lost = exact_sum(x - first, -second)
            r = r + (lost - (third + fourth))
    return r, shifted.bits()


def _payne_hanek(x: Value) -> tuple[Value, Value]:
    """r and n of a large f32: Payne–Hanek, its mantissa times (2^e · 2/π mod 4) from a table."""
    f = x.fn
    bits = f.abs(x).bits()
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(f64)
    row = f.min(f.max((bits >> 23) - _TABLE_FIRST, 0), _TABLE_ROWS - 1) * 3
    table = f.module.table(f, _two_over_pi_table())
    parts = [mantissa * _lookup(f, table, row + i) for i in range(3)]
    with f.exact():
        turn = parts[0] * 0.25
        high = parts[0] - ((turn + F64.magic) - F64.magic) * 4.0
        rest = high + parts[1]
        shifted = rest + F64.magic
        whole = shifted - F64.magic
        fraction = (rest - whole) + parts[2]
    r = fraction * (math.pi / 2)
    sign = x.bits() >> 31
    count = shifted.bits().to(i32)
    signed = f.select(sign.ne(0), -r, r)
    return signed.to(f32), f.select(sign.ne(0), 0 - count, count)


def _reduce_f64(x: Value) -> tuple[Value, Value]:
    """Range reduction: Cody–Waite; Payne–Hanek in integers for large lanes."""
    f = x.fn
    size = f.abs(x)

    def far() -> list[Value]:
        r, count = _cody_waite(x)
        wide, quarters = _payne_hanek_f64(x)
        large = size >= _F64_LIMIT
        return [f.select(large, wide, r), f.select(large, quarters, count)]

    r, count = f.if_(f.any(size >= _F64_LIMIT), far, lambda: list(_cody_waite(x)))
    return f.select(size < math.inf, r, nan_like(x)), count


def _payne_hanek_f64(x: Value) -> tuple[Value, Value]:
    """r and n of a large f64: its mantissa times 192 bits of 2/π, those from the bit on that counts
    two turns. 64 of them may be 0 before the first digit of r."""
    f, low = x.fn, (1 << 32) - 1
    bits = f.abs(x).bits()
    exponent = f.min(f.max(bits >> 52, _FIRST_F64), 2046)
    mantissa = (bits & (1 << 52) - 1) | (1 << 52)
    at, shift = (exponent - _FIRST_F64) >> 5, (exponent - _FIRST_F64) & 31
    table = f.module.table(f, _two_over_pi_digits())
    digits = [_digit(f, table, at + i) for i in range(7)]
    pairs = pairwise(digits)
    limbs = [((a << 32 | b) >> (32 - shift)) & low for a, b in pairs][::-1]
    m0, m1, carry = mantissa & low, mantissa >> 32, f.const(0, bits.type)
    product: list[Value] = []
    for j, limb in enumerate(limbs):
        p = m0 * limb
        q = m1 * limbs[j - 1] if j else f.const(0, bits.type)
        total = (p & low) + (q & low) + carry
        product.append(total & low)
        carry = (total >> 32) + (p >> 32) + (q >> 32)
    high, rest = product[5] << 32 | product[4], product[3] << 32 | product[2]
    r = _fraction_of_turn(f, (high << 2).ashr(2), rest)
    count = (high >> 62) + (high >> 61 & 1)
    negative = x.bits() < 0
    return f.select(negative, -r, r), f.select(negative, 0 - count, count)


def _fraction_of_turn(f: Function, high: Value, rest: Value) -> Value:
    """(high · 2^−62 + rest · 2^−126) · π/2, to the last digit."""
    high = high + (rest >> 63)  # the rest counts down from there, so that little cancels
    with f.exact():
        head = high.to(f64)
        tail = (high - head.to(i64)).to(f64) + rest.to(f64) * 2.0**-64
        near = head * _PARTS_53[0]
        error = product_error(head, f.const(_PARTS_53[0], head.type), near)
        error = error + (head * _PARTS_53[1] + tail * _PARTS_53[0])
        return (near + error) * 2.0**-62


def _digit(f: Function, table: Value, index: Value) -> Value:
    """A digit of 32 bits, as an i64."""
    if index.type.lanes == 1:
        return f.load(f.gep(table, index, i32), i32).to(i64, signed=False)
    return f.gather(table, index, vec(index.type.lanes, i32)).to(i64, signed=False)


_FIRST_F64 = 1023 + 19  # the exponent of 2^19, the power of two below the limit


@cache
def _two_over_pi_digits() -> bytes:
    """2/π · 2^(1042 − 1075) in digits of 32 bits, from the bit that counts two turns on."""
    digits = 40
    places = 32 * digits - 2
    two_over_pi = (1 << 2 * places + 1) // _pi(places)
    return struct.pack(
        f"<{digits}I",
        *[(two_over_pi >> (1075 - _FIRST_F64)) >> 32 * (digits - 1 - i) & 0xFFFFFFFF
          for i in range(digits)],
    )  # fmt: skip


def _lookup(f: Function, table: Value, index: Value) -> Value:
    if index.type.lanes == 1:
        return f.load(f.gep(table, index, f64), f64)
    return f.gather(table, index, vec(index.type.lanes, f64))


_TABLE_FIRST = 127 + 17
_TABLE_ROWS = 255 - _TABLE_FIRST


@cache
def _two_over_pi_table() -> bytes:
    """For each exponent e of a large f32: 2^(e - 150) · 2/π mod 4, in three parts of 28 bits."""
    places = 400
    two_over_pi = (1 << 2 * places + 1) // _pi(places)
    data = b""
    for exponent in range(_TABLE_FIRST, 255):
        shift = exponent - 150
        scaled = two_over_pi << shift if shift >= 0 else two_over_pi >> -shift
        rest = scaled % (4 << places)
        for part in range(3):
            unit = places - 26 - 28 * part
            digits, rest = divmod(rest, 1 << unit)
            data += struct.pack("<d", math.ldexp(digits, -26 - 28 * part))
    return data


def _pi(places: int) -> int:
    """π · 2^places, by Machin's formula 16 atan(1/5) - 4 atan(1/239)."""

    def atan_inverse(n: int) -> int:
        power = (1 << places + 32) // n
        total, k = 0, 0
        while power:
            total += (-power if k % 2 else power) // (2 * k + 1)
            power //= n * n
            k += 1
        return total

    return 4 * (4 * atan_inverse(5) - atan_inverse(239)) >> 32


def atan(x: Value) -> Value:
    """Arc tangent. Error below 3 ulp."""
    return atan2(x, x.fn.const(1.0, x.type))


def atan2(y: Value, x: Value) -> Value:
    """The angle of the point (x, y), in (-π, π]. Error below 3.5 ulp; all quadrants, zeros and
    infinities as in C."""
    f, k = y.fn, real(y, "atan2")
    coefficients = _ATAN_F32 if k is F32 else _ATAN_F64
    above, across = f.abs(y), f.abs(x)
    low, high = f.min(above, across), f.max(above, across)
    shrink = f.select(high > 2.0 ** (k.bias - 2), f.const(0.25, y.type), 1.0)
    low, high = low * shrink, high * shrink
    steep = low > high * math.tan(math.pi / 8)
    q = f.select(steep, low - high, low) / f.select(steep, low + high, high)
    q = f.select(high.eq(0.0) | low.eq(math.inf), 0.0, q)
    z = q * q
    angle = f.fma(z * q, polynomial(z, coefficients), q)
    diagonal = f.const(math.pi / 4, y.type)
    angle = angle + f.select(steep | low.eq(math.inf), diagonal, 0.0)
    angle = f.select(above > across, math.pi / 2 - angle, angle)
    angle = f.select(x.bits() < 0, math.pi - angle, angle)
    return f.copysign(angle, y)
