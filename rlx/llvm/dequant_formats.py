"""Dequantisation of one block of every block format, and the table of its emitters.

Blocks with one scale or a few 8-bit ones (Q4_0 to Q8_1, Q1_0, TQ1_0, fp4), k-quant superblocks (256
weights in sub-blocks with integer scales), and codebooks: of scalars, and grids of eight (or four)
weights.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from rlx.ir.quant.iq import grid
from rlx.llvm.builder import Function, Value, f16, f32, i8, i16, i32, vec

Emitter = Callable[["Block"], None]
DEQUANTIZERS: dict[str, Emitter] = {}

Offset = Value | int


def dequantizes(*names: str) -> Callable[[Emitter], Emitter]:
    """Register an emitter for block types."""

    def register(emitter: Emitter) -> Emitter:
        DEQUANTIZERS.update(dict.fromkeys(names, emitter))
        return emitter

    return register


class Block:
    """The block being dequantised: its address, and where its weights go."""

    def __init__(self, f: Function, src: Value, out: Value) -> None:
        self.f, self.src, self.out = f, src, out

    def raw(self, at: Offset, count: int) -> Value:
        return self.f.load(self.src, vec(count, i8), at)

    def byte(self, at: Offset) -> Value:
        """An unsigned byte, as i32."""
        return self.f.load(self.src, i8, at).to(i32, signed=False)

    def word(self, at: Offset, bits: int = 32) -> Value:
        """An unsigned word of 16 or 32 bits, as i32; blocks are not aligned."""
        type_ = vec(bits // 8, i8)
        raw = self.f.load(self.src, type_, at).bits(i32 if bits == 32 else f16.as_int)
        return raw.to(i32, signed=False)

    def half(self, at: Offset) -> Value:
        """An f16, as f32."""
        return self.f.load(self.src, f16, at, align=1).to(f32)

    def nibbles(self, at: Offset, count: int) -> tuple[Value, Value]:
        both = self.raw(at, count)
        return both & 15, both >> 4

    def put(
        self,
        at: Offset,
        q: Value,
        scale: Value,
        minimum: Value | None = None,
        signed: bool = False,
    ) -> None:
        """Weights at..: q * scale - minimum."""
        lanes = q.type.lanes
        value = q if q.type.is_float else q.to(f32, signed=signed)
        value = value * self.f.splat(scale, lanes)
        if minimum is not None:
            value = value - self.f.splat(minimum, lanes)
        self.write(at, value)

    def write(self, at: Offset, values: Value) -> None:
        """Store weights at.. of the block."""
        self.f.store(values, self.f.gep(self.out, at, 4))

    def spill(self, values: Value) -> Value:
        """Store a vector to memory, so that a loop can index its lanes."""
        place = self.f.alloca(values.type.bytes)
        self.f.store(values, place)
        return place

    def reload(self, place: Value, index: Offset) -> Value:
        return self.f.load(self.f.gep(place, index, 4), f32)

    def table(self, data: bytes) -> Value:
        return self.f.module.table(self.f, data)

    def shift_right(self, raw: Value, count: Value) -> Value:
        """Bytes shifted right by up to 7 bits; bits of the next byte come in at the top."""
        words = raw.bits(vec(raw.type.lanes // 4, i32))
        return (words >> self.f.splat(count.to(i32), words.type.lanes)).bits(raw.type)


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


__all__ = ["KVALUES_MXFP4", "bits_of", "half_e8m0", "half_ue4m3", "put_codebook"]


KVALUES_IQ4NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dequantizes("IQ4_NL")
def iq4_nl(b: Block) -> None:
    d = b.half(0)
    put_codebook(b, KVALUES_IQ4NL, [(16 * i, q, d) for i, q in enumerate(b.nibbles(2, 16))])


@dequantizes("IQ4_XS")
def iq4_xs(b: Block) -> None:
    f, d, high = b.f, b.half(0), b.word(2, 16)
    for s in f.range(0, 8):
        s32 = s.to(i32)
        low = b.byte((s >> 1) + 4) >> (s32 & 1) * 4 & 15
        scale = (low | (high >> s32 * 2 & 3) << 4) - 32
        runs = enumerate(b.nibbles(s * 16 + 8, 16))
        put_codebook(b, KVALUES_IQ4NL, [(s * 32 + 16 * i, q, scale.to(f32) * d) for i, q in runs])


class _Grid:
    """Points of a grid, with signs or a shift, written eight weights at a time."""

    def __init__(self, b: Block, name: str) -> None:
        table = grid(name)
        self.b, self.f, self.size = b, b.f, table.itemsize
        self.table = b.table(table.tobytes())

    def point(self, index: Value) -> Value:
        return self.f.load(self.f.gep(self.table, index, self.size), vec(self.size, i8), align=1)

    def put_signed(self, at: Offset, point: Value, signs: Value, scale: Value) -> None:
        """scale * ±point; a set bit of `signs` is a minus."""
        wide = point.to(f32)
        self.b.put(at, self.f.select(bits_of(self.f, signs), -wide, wide), scale)

    def put_shifted(self, at: Offset, index: Value, down: Value, scale: Value) -> None:
        """scale * (point ± 1/8): the grid is stored times 8."""
        step = self.f.select(down, self.f.const(-1, i8), 1)
        q = self.point(index) + self.f.splat(step, 8)
        self.b.put(at, q, scale * 0.125, signed=True)


def _even_parity(b: Block, signs: Value) -> Value:
    """Seven sign bits; the eighth makes the number of minus signs even."""
    low = signs & 127
    return low | (b.f.popcount(low) & 1) << 7


def _quarters(scale: Value) -> Value:
    return (scale.to(f32) + 0.5) * 0.25


@dequantizes("IQ2_XXS")
def iq2_xxs(b: Block) -> None:
    f, d, points = b.f, b.half(0), _Grid(b, "IQ2_XXS")
    for g in f.range(0, 8):
        aux = b.word(g * 8 + 6)
        scale = d * _quarters(aux >> 28)
        for i in range(4):
            point = points.point(b.byte(g * 8 + (2 + i)))
            points.put_signed(g * 32 + 8 * i, point, _even_parity(b, aux >> 7 * i), scale)


@dequantizes("IQ2_XS")
def iq2_xs(b: Block) -> None:
    f, d, points = b.f, b.half(0), _Grid(b, "IQ2_XS")
    for g in f.range(0, 32):
        code = b.word(g * 2 + 2, 16)
        scale = d * _quarters(_nibble(b, 66, g >> 1))
        points.put_signed(g * 8, points.point(code & 511), _even_parity(b, code >> 9), scale)


@dequantizes("IQ2_S")
def iq2_s(b: Block) -> None:
    f, d, points = b.f, b.half(0), _Grid(b, "IQ2_S")
    for g in f.range(0, 32):
        high = b.byte((g >> 2) + 66) >> (g.to(i32) & 3) * 2 & 3
        point = points.point(b.byte(g + 2) | high << 8)
        scale = d * _quarters(_nibble(b, 74, g >> 1))
        points.put_signed(g * 8, point, b.byte(g + 34), scale)


def _nibble(b: Block, at: int, index: Value) -> Value:
    """Nibble `index` of bytes from `at` on, low ones first."""
    return b.byte((index >> 1) + at) >> (index.to(i32) & 1) * 4 & 15


@dequantizes("IQ3_XXS")
def iq3_xxs(b: Block) -> None:
    f, d, points = b.f, b.half(0), _Grid(b, "IQ3_XXS")
    for g in f.range(0, 8):
        aux = b.word(g * 4 + 66)
        scale = d * (_quarters(aux >> 28) * 2.0)
        for i in range(4):
            first, second = (points.point(b.byte(g * 8 + (2 + 2 * i + j))) for j in range(2))
            point = f.concat(first, second)
            points.put_signed(g * 32 + 8 * i, point, _even_parity(b, aux >> 7 * i), scale)


@dequantizes("IQ3_S")
def iq3_s(b: Block) -> None:
    f, d, points = b.f, b.half(0), _Grid(b, "IQ3_S")
    for g in f.range(0, 32):
        top = b.byte((g >> 2) + 66) >> (g.to(i32) & 3) * 2
        first, second = (
            points.point(b.byte(g * 2 + (2 + j)) | (top >> j & 1) << 8) for j in range(2)
        )
        scale = d * (_nibble(b, 106, g >> 2) * 2 + 1).to(f32)
        points.put_signed(g * 8, f.concat(first, second), b.byte(g + 74), scale)


@dequantizes("IQ1_S")
def iq1_s(b: Block) -> None:
    f, d, points = b.f, b.half(0), _Grid(b, "IQ1_S")
    for g in f.range(0, 8):
        word = b.word(g * 2 + 34, 16)
        scale = d * ((word >> 12 & 7) * 2 + 1).to(f32)
        for i in range(4):
            index = b.byte(g * 4 + (2 + i)) | (word >> 3 * i & 7) << 8
            points.put_shifted(g * 32 + 8 * i, index, word > 0x7FFF, scale)


@dequantizes("IQ1_M")
def iq1_m(b: Block) -> None:
    """The f16 scale lies in the top nibbles of the four words of scales, lowest first."""
    f, points = b.f, _Grid(b, "IQ1_S")
    words = [b.word(48 + 2 * i, 16) >> 12 << 4 * i for i in range(4)]
    d = (words[0] | words[1] | words[2] | words[3]).to(i16).bits(f16).to(f32)
    for g in f.range(0, 32):
        s = (g >> 1).to(i32)
        word = b.word((g >> 3) * 2 + 48, 16)
        scale = d * ((word >> (s & 3) * 3 & 7) * 2 + 1).to(f32)
        high = _nibble(b, 32, g)
        index = b.byte(g) | (high & 7) << 8
        points.put_shifted(g * 8, index, (high & 8).ne(0), scale)
