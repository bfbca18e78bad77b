"""Dequantisation of codebook formats: scalar codebooks, and grids of eight (or four) weights."""

from __future__ import annotations

from rlx.backends.cpu.kernels.qgemm.dequant_formats import (
    Block,
    Offset,
    bits_of,
    dequantizes,
    put_codebook,
)
from rlx.ir.quant.iq import grid
from rlx.llvm.builder import Value, f16, f32, i8, i16, i32, vec

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
