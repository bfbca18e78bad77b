"""Packed weights times f32 numbers as products of integers.

32 numbers are multiples of a power of two, of 23 bits, that have three digits of 8 bits with a
sign. Quants are bytes too, of four bits after two instructions for eight of them. Four products and
their sum are one instruction, so the sums of a block of weights are exact; its scale and that of
the numbers are applied to them in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.backends.cuda.builder import BlockFunction
from rlx.ir.node import Node
from rlx.llvm.builder import Value, f16, f32, i8, i32

HAVE_BYTES = frozenset(["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"])  # what `quant_bytes` knows
_WHOLE = 256  # columns: kernels of many lanes take whole ones
DIGITS = 3
SCALE_AT = 32 * DIGITS  # in a record of 32 numbers: their scale and their sum, behind the digits
RECORD = 112  # bytes of it
_MAGIC, _MAGIC_BITS = float(3 << 22), 0x4B400000  # an f32 whose low bits are an integer
_BIAS = 0x808080  # makes digits of -128 to 127 such of 0 to 255
_LEAST_POWER = 32  # of two, as in an f32: smaller numbers are taken for 0
_LARGEST = {"Q4_K": 15, "Q5_K": 31}  # of the bytes that quants are made


def takes_bytes(node: Node) -> bool:
    """Whether a `packed_planes_matmul` has a type whose bytes kernels multiply, and rows that they
    can divide."""
    record: Any = node.op
    k = node.inputs[0].shape.dims[-1]
    return record.scheme.name in HAVE_BYTES and isinstance(k, int) and k % _WHOLE == 0


class Scale:
    """The power of two of numbers, the largest of which has these bits but for its sign."""

    def __init__(self, f: BlockFunction, largest: Value) -> None:
        self._f = f
        self._power = f.max(largest >> 23, _LEAST_POWER)  # the numbers are below 2^(power - 126)
        self._factor = ((f.i32(275) - self._power) << 23).bits(f32)

    def number(self, value: Value) -> Value:
        """A number as a multiple, of at most 2^22."""
        return self._f.fma(value, self._factor, _MAGIC).bits(i32) - _MAGIC_BITS

    def value(self) -> Value:
        power = self._power
        fine = ((power - 21) << 23).bits(f32)
        return self._f.select(power.eq(255), float("nan"), fine)


def half(f: BlockFunction, word: Value) -> Value:
    """The f16 in the low bits of a value of 32 bits."""
    return f.unpack_halves(word, f16)[0]


def digits(number: Value) -> Value:
    """The digits of a multiple, in the three lower bytes."""
    return (number + _BIAS) ^ _BIAS


def split(f: BlockFunction, values: Sequence[Value]) -> tuple[list[Value], Value, Value]:
    """The words of each digit of 32 numbers, their scale and their sum."""
    found = [v.bits(i32) & 0x7FFFFFFF for v in values]
    while len(found) > 1:
        found = [f.max(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
    scale = Scale(f, found[0])
    words, total = digit_words(f, scale, values)
    return words, scale.value(), total.to(f32) * scale.value()


def digit_words(
    f: BlockFunction, scale: Scale, values: Sequence[Value]
) -> tuple[list[Value], Value]:
    """The words of each digit of some numbers, four in a word, and the sum of the multiples."""
    planes: list[list[Value]] = [[] for _ in range(DIGITS)]
    total = f.i32(0)
    for i in range(0, len(values), 4):
        four = [scale.number(v) for v in values[i : i + 4]]
        total = total + (four[0] + four[1] + (four[2] + four[3]))
        a, b, c, d = (digits(n) for n in four)
        low, high = f.pick_bytes(a, b, 0x5140), f.pick_bytes(c, d, 0x5140)
        planes[0].append(f.pick_bytes(low, high, 0x5410))
        planes[1].append(f.pick_bytes(low, high, 0x7632))
        low, high = f.pick_bytes(a, b, 0x6262), f.pick_bytes(c, d, 0x6262)
        planes[2].append(f.pick_bytes(low, high, 0x5410))
    return [word for plane in planes for word in plane], total


def quant_bytes(
    f: BlockFunction, scheme: str, quants: Sequence[Value], high: Sequence[Value],
    own: Value | None = None,
) -> list[Value]:  # fmt: skip
    """Quants as bytes with a sign: of low nibbles, then of high ones. `high` are the words of
    higher bits; `own` says which half of 32 columns the quants are, where they are not all."""
    if scheme == "Q8_0":
        return list(quants)
    if scheme == "Q4_0":  # 16 (q - 8)
        found = [*[w << 4 for w in quants], *quants]
        return [(w & -0x0F0F0F10) ^ -0x7F7F7F80 for w in found]
    if scheme == "Q6_K":
        return _six_bits(quants, [w if own is None else w >> own * 2 for w in high])
    found = [w & 0x0F0F0F0F for w in (*quants, *[w >> 4 for w in quants])]
    if scheme == "Q5_K":
        word = high[0] if own is None else high[0] >> own * 8
        fours = [word >> (4 * i + 16 * up) & 15 for up in range(2) for i in range(len(quants))]
        found = [a | (b * 0x02040810 & 0x10101010) for a, b in zip(found, fours, strict=True)]
    return found


def _six_bits(quants: Sequence[Value], high: Sequence[Value]) -> list[Value]:
    """4 (q - 32)"""
    low = [w & 0x3C3C3C3C for w in (*[w << 2 for w in quants], *[w >> 2 for w in quants])]
    more = list[Value]()
    for nibble in range(2):  # of the low and the high nibbles of each word, its two bits
        for i in range(len(quants)):
            word, shift = high[i % 2], 6 - 4 * nibble - 2 * (i // 2)
            more.append(word << shift if shift >= 0 else word >> -shift)
    return [a | ((b & -0x3F3F3F40) ^ -0x7F7F7F80) for a, b in zip(low, more, strict=True)]


def factors(f: BlockFunction, scheme: str, pair: Value, supers: Value) -> list[Value]:
    """What the sums of groups are multiplied with, and the minimum with its sign turned if there is
    one. `supers` are what the scales of `pair` are multiples of, if they are such."""
    if scheme in ("Q8_0", "Q4_0"):
        scale = half(f, pair)
        return [scale * 0.0625 if scheme == "Q4_0" else scale]  # bytes are 16 times as large
    if scheme == "Q6_K":
        whole = half(f, supers) * 0.25
        return [whole * (pair >> shift).to(i8).to(f32) for shift in (0, 8)]
    whole, least = f.unpack_halves(supers, f16)
    small, smallest = (pair >> shift & 63 for shift in (0, 8))
    return [whole * small.to(f32), least * smallest.to(f32) * -1.0]


def add_products(
    f: BlockFunction, scheme: str, quants: Sequence[Value], scales: Sequence[Value],
    operands: Sequence[Value], total: Value,
) -> Value:  # fmt: skip
    """A sum plus the products of bytes of quants and numbers. `operands` are the words of each
    digit, the scale and the sum of the numbers."""
    *words, scale, whole = operands
    count = len(quants)
    planes = [words[i : i + count] for i in range(0, len(words), count)]
    groups = 2 if scheme == "Q6_K" else 1  # each 16 numbers have a scale, or all
    for i in range(groups):
        own = slice(count // groups * i, count // groups * (i + 1))
        found = _sum(f, scheme, quants[own], [plane[own] for plane in planes])
        total = f.fma(found, scales[i] * scale, total)
    for minimum in scales[groups:]:
        total = f.fma(minimum, whole, total)
    return total


def _sum(
    f: BlockFunction, scheme: str, quants: Sequence[Value], planes: Sequence[Sequence[Value]]
) -> Value:
    sums = list[Value]()
    for plane in planes:
        made = f.i32(0)
        for a, b in zip(quants, plane, strict=True):
            made = f.dot_bytes(a, b, made)
        sums.append(made)
    return whole_sum(f, scheme, sums, 4 * len(quants))


def whole_sum(f: BlockFunction, scheme: str, sums: Sequence[Value], count: int) -> Value:
    """The sum of so many products as an f32, of the sums of each digit."""
    low = sums[0] + (sums[1] << 8)
    if count * _LARGEST.get(scheme, 128) < 1 << 9:  # times 2^22
        return (low + (sums[2] << 16)).to(f32)
    return f.fma(sums[2].to(f32), 65536.0, low.to(f32))
