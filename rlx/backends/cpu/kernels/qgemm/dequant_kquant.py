"""Dequantisation of k-quant superblocks: 256 weights in sub-blocks with integer scales."""

from __future__ import annotations

from rlx.backends.cpu.kernels.qgemm.dequant_block import Block, Offset, dequantizes
from rlx.llvm.builder import Value, f32, i8, vec


@dequantizes("Q2_K")
def q2_k(b: Block) -> None:
    f, d, low = b.f, b.half(80), b.half(82)
    for h in f.range(0, 2):
        for half in range(2):
            raw = b.raw(h * 32 + (16 + 16 * half), 16)
            for p in range(4):
                code = b.byte(h * 8 + (2 * p + half))
                scale, minimum = (code & 15).to(f32) * d, (code >> 4).to(f32) * low
                b.put(h * 128 + (32 * p + 16 * half), raw >> 2 * p & 3, scale, minimum)


@dequantizes("Q3_K")
def q3_k(b: Block) -> None:
    f = b.f
    scales = b.spill(_six_bits_in_three(b, 96).to(f32) * f.splat(b.half(108), 16))
    for h in f.range(0, 2):
        for half in range(2):
            raw = b.raw(h * 32 + (32 + 16 * half), 16)
            top = b.shift_right(b.raw(16 * half, 16), h * 4)
            for p in range(4):
                q = (raw >> 2 * p & 3 | (top >> p & 1) << 2) - 4
                place = 2 * p + half
                b.put(h * 128 + 16 * place, q, b.reload(scales, h * 8 + place), signed=True)


def _six_bits_in_three(b: Block, at: int) -> Value:
    """Sixteen signed scales in twelve bytes: nibbles of eight, then pairs of bits of four."""
    f = b.f
    low = f.concat(*b.nibbles(at, 8))
    pairs = b.raw(at + 8, 4)
    a, c = (f.concat(pairs >> i & 3, pairs >> i + 2 & 3) for i in (0, 4))
    return (low | f.concat(a, c) << 4) - 32


@dequantizes("Q4_K")
def q4_k(b: Block) -> None:
    scales, minima = scale_min(b)
    for c in b.f.range(0, 4):
        for i, q in enumerate(b.nibbles(c * 32 + 16, 32)):
            s = c * 2 + i
            b.put(c * 64 + 32 * i, q, b.reload(scales, s), b.reload(minima, s))


@dequantizes("Q5_K")
def q5_k(b: Block) -> None:
    scales, minima = scale_min(b)
    top = b.raw(16, 32)
    for c in b.f.range(0, 4):
        bits = b.shift_right(top, c * 2)
        for i, q in enumerate(b.nibbles(c * 32 + 48, 32)):
            s = c * 2 + i
            five = q | (bits >> i & 1) << 4
            b.put(c * 64 + 32 * i, five, b.reload(scales, s), b.reload(minima, s))


def scale_min(b: Block) -> tuple[Value, Value]:
    """Eight 6-bit scales and minima from the twelve bytes after d and dmin, multiplied, in memory.

    Bytes 0-3 hold the first four scales and 4-7 the first four minima, in their low six bits.
    Bytes 8-11 hold the low nibbles of the last four (scale below, minimum above); the two bits
    on top of bytes 0-7 complete them.
    """
    f = b.f
    reload = []
    last = b.raw(12, 4)
    for i, low in enumerate((last & 15, last >> 4)):
        first = b.raw(4 + 4 * i, 4)
        six = f.concat(first & 63, low | first >> 2 & 0x30)
        reload.append(b.spill(six.to(f32) * f.splat(b.half(2 * i), 8)))
    return reload[0], reload[1]


@dequantizes("Q6_K")
def q6_k(b: Block) -> None:
    f, d = b.f, b.half(208)
    for h in f.range(0, 2):
        for half in range(2):
            top = b.raw(h * 32 + (128 + 16 * half), 16)
            for i in range(2):
                low = b.raw(h * 64 + (32 * i + 16 * half), 16)
                for j, q in enumerate((low & 15, low >> 4)):
                    p = i + 2 * j
                    place = 2 * p + half
                    six = (q | (top >> 2 * p & 3) << 4) - 32
                    scale = _signed(b, h * 8 + (192 + place)) * d
                    b.put(h * 128 + 16 * place, six, scale, signed=True)


def _signed(b: Block, at: Offset) -> Value:
    return b.f.load(b.src, i8, at).to(f32)


@dequantizes("Q8_K")
def q8_k(b: Block) -> None:
    f = b.f
    d = f.load(b.src, f32, align=1)
    for i in f.range(0, 256, 32):
        b.put(i, f.load(b.src, vec(32, i8), i + 4), d, signed=True)
