"""Dequantisation of blocks with one scale (or a few 8-bit ones): Q4_0 to Q8_1, Q1_0, TQ1_0, fp4."""

from __future__ import annotations

import struct

from rlx.backends.cpu.kernels.qgemm.dequant_block import Block, Offset, dequantizes
from rlx.llvm.builder import Function, Value, f16, f32, i16, i32, vec


@dequantizes("Q4_0")
def q4_0(b: Block) -> None:
    d = b.half(0)
    for i, q in enumerate(b.nibbles(2, 16)):
        b.put(16 * i, q - 8, d, signed=True)


@dequantizes("Q4_1")
def q4_1(b: Block) -> None:
    d, m = b.half(0), -b.half(2)
    for i, q in enumerate(b.nibbles(4, 16)):
        b.put(16 * i, q, d, m)


@dequantizes("Q5_0")
def q5_0(b: Block) -> None:
    d = b.half(0)
    for i, q in enumerate(_five_bits(b, 2)):
        b.put(16 * i, q - 16, d, signed=True)


@dequantizes("Q5_1")
def q5_1(b: Block) -> None:
    d, m = b.half(0), -b.half(2)
    for i, q in enumerate(_five_bits(b, 4)):
        b.put(16 * i, q, d, m)


def _five_bits(b: Block, at: int) -> list[Value]:
    """Two runs of 16 codes, as i32: a word of high bits, then nibbles."""
    f = b.f
    top = f.splat(b.word(at), 16)
    return [
        q.to(i32, signed=False) | (top >> f.iota(top.type, 16 * i) & 1) << 4
        for i, q in enumerate(b.nibbles(at + 4, 16))
    ]


@dequantizes("Q8_0")
def q8_0(b: Block) -> None:
    b.put(0, b.raw(2, 32), b.half(0), signed=True)


@dequantizes("Q8_1")
def q8_1(b: Block) -> None:
    b.put(0, b.raw(4, 32), b.half(0), signed=True)


@dequantizes("Q1_0")
def q1_0(b: Block) -> None:
    """A set bit is d, a clear one -d."""
    f, d = b.f, b.half(0)
    for i in f.range(0, 16):
        one = f.const(1, vec(8, i32))
        b.put(i * 8, f.select(bits_of(f, b.byte(i + 2)), one, -one), d, signed=True)


def bits_of(f: Function, byte: Value) -> Value:
    """The eight bits of an i32's low byte as a mask, the lowest first."""
    wide = f.splat(byte, 8)
    return (wide & f.const([1 << i for i in range(8)], wide.type)).ne(0)


@dequantizes("TQ1_0")
def tq1_0(b: Block) -> None:
    """A byte / 256 is a fraction whose first base-3 digits are five weights (four in the last)."""
    d, at = b.half(52), 0
    for start, width, count in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        raw = b.raw(start, width)
        for i in range(count):
            rest = (raw * 3**i).to(i16, signed=False)  # modulo 256: i digits are dropped
            b.put(at, (rest * 3 >> 8) - 1, d, signed=True)
            at += width


@dequantizes("TQ2_0")
def tq2_0(b: Block) -> None:
    f, d = b.f, b.half(64)
    for h in f.range(0, 2):
        raw = b.raw(h * 32, 32)
        for p in range(4):
            b.put(h * 128 + 32 * p, (raw >> 2 * p & 3) - 1, d, signed=True)


# The values of e2m1, doubled to be integers; scales are halved to match.
KVALUES_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dequantizes("MXFP4")
def mxfp4(b: Block) -> None:
    scale = half_e8m0(b.f, b.byte(0))
    put_codebook(b, KVALUES_MXFP4, [(16 * i, q, scale) for i, q in enumerate(b.nibbles(1, 16))])


def half_e8m0(f: Function, code: Value) -> Value:
    """2^(code - 128) of i32 codes 0 .. 255, exactly: the lowest two are subnormal."""
    tiny = f.const(0x00200000, code.type) << code
    bits = f.select(code < 2, tiny, (code - 1) << 23)
    return bits.bits(code.type.with_scalar(f32))


@dequantizes("NVFP4")
def nvfp4(b: Block) -> None:
    f = b.f
    for g in f.range(0, 4):
        scale = half_ue4m3(f, b.byte(g))
        low, high = b.nibbles(g * 8 + 4, 8)
        put_codebook(b, KVALUES_MXFP4, [(g * 16, low, scale), (g * 16 + 8, high, scale)])


def half_ue4m3(f: Function, code: Value) -> Value:
    """Unsigned e4m3, halved; bit 7 is ignored, 0x7F means 0."""
    # Its bits, put into an f16, are 2^-8 of its value.
    half = ((code & 0x7F) << 7).to(i16).bits(code.type.with_scalar(f16))
    return f.select(code.eq(0x7F), 0.0, half.to(f32) * 128.0)


def put_codebook(b: Block, book: tuple[int, ...], runs: list[tuple[Offset, Value, Value]]) -> None:
    """Weights that index a codebook: (where they go, indices as i8, scale)."""
    table = b.table(struct.pack(f"<{len(book)}f", *book))
    for at, places, scale in runs:
        lanes = places.type.lanes
        found = b.f.gather(table, places.to(i32, signed=False), vec(lanes, f32))
        b.put(at, found, scale)


__all__ = ["KVALUES_MXFP4", "bits_of", "half_e8m0", "half_ue4m3", "put_codebook"]
