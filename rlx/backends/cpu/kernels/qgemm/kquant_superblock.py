"""Integer dot products of k-quant superblocks: 256 weights in sub-blocks with small integer scales.

A superblock adds  d * sum(scale * dot) - dmin * sum(minimum * sum of codes), times the scale of the
row's block. Where codes have an offset, scale * offset takes the place of the minimum. Sums over
sub-blocks are integers and exact.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

from rlx.backends.cpu.kernels.qgemm.block_formats import ColumnTile, Format, WeightBlock
from rlx.backends.cpu.kernels.qgemm.dot import DotLoop, Index, MicroTile
from rlx.llvm.builder import Value, f32, i16, vec
from rlx.llvm.dequant_formats import KVALUES_IQ4NL

_SCALE, SUMS_OF_16, SUMS_OF_32 = 64, 65, 73  # word offsets in a row's superblock

Dots = Callable[[Value, int], Value]
"""(row, vector of columns): sum(scale * dot)."""


class KQuantFormat(Format):
    """Base of the k-quant formats. Sub-block scales are unpacked into memory, `[sub][column]`.

    An object serves one tile: it knows where in that function's memory they are.
    """

    kind, block = "superblock", 256
    takes_pairs = True
    bits: int
    sub_blocks = 8
    sums = SUMS_OF_32
    codes_bytes = 256  # of a row's superblock
    magnitude = 0  # the largest |code - offset| where that and a scale make the weight, else 0

    def emit(self, t: MicroTile, column_tile: ColumnTile, out: Value, stride: int) -> None:
        f = t.f
        t.write(t.float_zeros(), out, stride)
        self.table = f.alloca(4 * t.lanes * t.vectors * self.sub_blocks)
        self.buffer = f.alloca(4 * t.lanes * t.vectors * t.rows)
        for b in f.range(0, column_tile.k.udiv(256)):
            x = f.gep(column_tile.x, b, (256 + 52) * t.rows)
            self._block(t, column_tile.block(b), x, out, stride)

    def _block(self, t: MicroTile, w: WeightBlock, x: Value, out: Value, stride: int) -> None:
        f = t.f
        for v in t.columns:
            self.unpack(t, w.words, v)
        for at, value in enumerate(t.dot.rows_of(self.dots(t, w.words, x))):
            f.store(value, self.buffer, 4 * t.lanes * at)

        def dots(i: Value, v: int) -> Value:
            row = f.gep(self.buffer, i, 4 * t.lanes)
            return f.load(row, t.dot.sums, 4 * t.lanes * t.rows * v)

        self.add_scaled(t, w, x, dots, out, stride)

    def add_scaled(
        self, t: MicroTile, w: WeightBlock, x: Value, dots: Dots, out: Value, stride: int
    ) -> None:
        """Add a superblock's sums, scaled, to the f32 sums in memory."""
        f = t.f
        pairs = [self.pairs(t, w.words, v) for v in t.columns]
        scales = [self.scales(t, w, v) for v in t.columns]
        # Not unrolled over rows: that would be most of the code and saves nothing.
        meta = f.gep(x, (self.codes_bytes - 256) * t.rows)
        for i in f.range(0, t.rows):
            mine = f.gep(meta, i, 4)
            factor = t.x_float(mine, _SCALE, 0)
            sums = [t.x(mine, self.sums + p, 0) for p in range(len(pairs[0]))]
            for v in t.columns:
                total = t.dot.sum_of_pairs(pairs[v], sums)
                value = self.value(t, dots(i, v), total, *scales[v])
                place = f.gep(t.place(out, stride, v, 0), i, 4 * stride)
                f.store(f.fma(value, factor, f.load(place, value.type)), place)

    def value(self, t: MicroTile, sums: Value, total: Value, d: Value, dmin: Value) -> Value:
        """d * sums - dmin * total, the second product rounded: alike in every tile."""
        return t.f.fma(sums.to(f32), d, -(total.to(f32) * dmin))

    @abstractmethod
    def unpack(self, t: MicroTile, w: Value, v: int) -> None:
        """Unpack the sub-block scales of vector v into the table."""

    @abstractmethod
    def pairs(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        """The factors of the sums of codes (minima or scales), as pairs of i16."""

    @abstractmethod
    def scales(self, t: MicroTile, w: WeightBlock, v: int) -> tuple[Value, Value]:
        """(d, dmin) of every column; dmin is unused where codes have an offset."""

    @abstractmethod
    def dots(self, t: MicroTile, w: Value, x: Value) -> list[Value]:
        """sum(scale * dot) for every vector and row."""

    # -- sub-block scales -------------------------------------------------------------------

    def store_scale(self, t: MicroTile, sub: Index, v: int, scale: Value) -> None:
        at = t.f.gep(self.table, sub, 4 * t.lanes * t.vectors)
        t.f.store(scale, at, 4 * t.lanes * v)

    def load_scale(self, t: MicroTile, sub: Value, v: int) -> Value:
        at = t.f.gep(self.table, sub, 4 * t.lanes * t.vectors)
        return t.f.load(at, t.dot.sums, 4 * t.lanes * v)

    def store_scale_bytes(
        self, t: MicroTile, first: Index, v: int, word: Value, signed: bool = False
    ) -> None:
        """Four sub-block scales from the bytes of every lane."""
        for j in range(4):
            if signed:
                scale = (word << 24 - 8 * j).ashr(24)
            else:
                scale = word >> 8 * j & 255
            self.store_scale(t, first + j, v, scale)


def byte_pairs(t: MicroTile, word: Value, signed: bool = False) -> list[Value]:
    """Bytes (0, 2) and (1, 3) of every lane as pairs of i16."""
    if not signed:
        return [word & 0x00FF00FF, word >> 8 & 0x00FF00FF]
    halves = word.bits(vec(2 * t.lanes, i16))
    return [p.bits(t.dot.sums) for p in ((halves << 8).ashr(8), halves.ashr(8))]


class Q4K(KQuantFormat):
    """Q4_K, base of Q5_K: (d, dmin), then eight 6-bit scales and minima in three words."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def unpack(self, t: MicroTile, w: Value, v: int) -> None:
        first, last = t.word(w, 1, v), t.word(w, 3, v)
        self.store_scale_bytes(t, 0, v, first & 0x3F3F3F3F)
        self.store_scale_bytes(t, 4, v, last & 0x0F0F0F0F | first >> 2 & 0x30303030)

    def pairs(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        first, last = t.word(w, 2, v), t.word(w, 3, v)
        minima = [first & 0x3F3F3F3F, last >> 4 & 0x0F0F0F0F | first >> 2 & 0x30303030]
        return [p for m in minima for p in byte_pairs(t, m)]

    def scales(self, t: MicroTile, w: WeightBlock, v: int) -> tuple[Value, Value]:
        both = t.word(w.words, 0, v)
        return t.low_f16(both), t.low_f16(both >> 16)

    def dots(self, t: MicroTile, w: Value, x: Value) -> list[Value]:
        sides = t.group_streams([0, 1])

        def pair(c: Value, *sums: Value) -> list[Value]:
            result = list(sums)
            for group in sides:
                result = t.dot.accumulate(self._dot_loop(t, w, x, c, group), result)
            return result

        return t.f.loop(0, 4, 1, t.zeros(), pair)

    def _dot_loop(self, t: MicroTile, w: Value, x: Value, c: Value, sides: list[int]) -> DotLoop:
        """The low or high nibbles (or both) of eight lines: sub-blocks 2c and 2c + 1."""
        line, begin = self.lines(t, c), c * 16

        def codes(g: Value) -> list[Value]:
            return [q for v in t.columns for q in self.codes(t, w, line(g), g, c, v, sides)]

        return DotLoop(
            8,
            self.bits,
            codes,
            lambda g, s: t.rows_at(x, begin + g + 8 * sides[s % len(sides)]),
            [v for v in t.columns for _ in sides],
            [self.load_scale(t, c * 2 + side, v) for v in t.columns for side in sides],
        )

    def lines(self, t: MicroTile, c: Value) -> Callable[[Value], Value]:
        """Where line g of sub-blocks 2c and 2c + 1 is."""
        first = c * 8 + 4
        return lambda g: first + g

    def codes(
        self, t: MicroTile, w: Value, line: Value, g: Value, c: Value, v: int, sides: list[int]
    ) -> list[Value]:
        raw = t.streamed(w, line, v) if sides[0] == 0 else t.line(w, line, v)
        both = t.nibbles(raw)
        return [both[side] for side in sides]


def behind_high_bits(t: MicroTile, scales: int, part: Value) -> Callable[[Value], Value]:
    """Where line g of a part of eight lines is: those of the first alternate with lines of high
    bits (see `quant_tiles`), which begin behind `scales` lines."""
    f, is_first = t.f, part.eq(0)
    first = f.select(is_first, f.i64(scales + 1), part * 8 + (scales + 8))
    step = f.select(is_first, f.i64(2), f.i64(1))
    return lambda g: first + g * step


class Q5K(Q4K):
    """Q5_K: bit s of byte j of eight lines is the high bit of weight j of sub-block s."""

    def lines(self, t: MicroTile, c: Value) -> Callable[[Value], Value]:
        return behind_high_bits(t, 4, c)

    def codes(
        self, t: MicroTile, w: Value, line: Value, g: Value, c: Value, v: int, sides: list[int]
    ) -> list[Value]:
        low = super().codes(t, w, line, g, c, v, sides)
        top = t.shifted(t.word(w, g * 2 + 4, v), c * 2).bits(low[0].type)
        return [q | (top >> side & 1) << 4 for q, side in zip(low, sides, strict=True)]


class SixteenSubBlocks(KQuantFormat):
    """Q2_K, Q3_K, Q6_K: 16 sub-blocks; each half of a superblock is four planes of 32 weights."""

    sub_blocks, sums = 16, SUMS_OF_16
    bits, offset, magnitude = 6, 32, 32

    def value(self, t: MicroTile, sums: Value, total: Value, d: Value, dmin: Value) -> Value:
        return (sums - (total << self.offset.bit_length() - 1)).to(f32) * d

    def dots(self, t: MicroTile, w: Value, x: Value) -> list[Value]:
        groups = t.group_streams([0, 2, 1, 3])

        def quarter(q: Value, *sums: Value) -> list[Value]:
            result = list(sums)
            for planes in groups:
                result = t.dot.accumulate(self._dot_loop(t, w, x, q, planes), result)
            return result

        return t.f.loop(0, 4, 1, t.zeros(), quarter)

    def _dot_loop(self, t: MicroTile, w: Value, x: Value, q: Value, planes: list[int]) -> DotLoop:
        """Quarter q of a superblock: 16 weights of each plane of half q / 2."""
        half, part = q >> 1, q & 1
        begin, first = half * 32 + part * 4, half * 8 + part
        line = self.lines(t, half)

        def codes(g: Value) -> list[Value]:
            g = part * 4 + g
            return [c for v in t.columns for c in self.codes(t, w, line(g), half, g, v, planes)]

        return DotLoop(
            4,
            self.bits,
            codes,
            lambda g, s: t.rows_at(x, begin + g + 8 * planes[s % len(planes)]),
            [v for v in t.columns for _ in planes],
            [self.load_scale(t, first + 2 * p, v) for v in t.columns for p in planes],
        )

    @abstractmethod
    def lines(self, t: MicroTile, half: Value) -> Callable[[Value], Value]:
        """Where line g (of 8) of a half is."""

    @abstractmethod
    def codes(
        self, t: MicroTile, w: Value, line: Value, half: Value, g: Value, v: int, planes: list[int]
    ) -> list[Value]:
        """Codes of word g (of 8) of some planes of a half; its first line is given."""


class Q6K(SixteenSubBlocks):
    """Q6_K: signed scales, then triples of lines: two of low nibbles, one of high bits."""

    def unpack(self, t: MicroTile, w: Value, v: int) -> None:
        for i in t.f.range(0, 4):
            self.store_scale_bytes(t, i * 4, v, t.word(w, i, v), signed=True)

    def pairs(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        return [p for i in range(4) for p in byte_pairs(t, t.word(w, i, v), signed=True)]

    def scales(self, t: MicroTile, w: WeightBlock, v: int) -> tuple[Value, Value]:
        d = t.f16_field(w.fields[0], v)
        return d, d

    def lines(self, t: MicroTile, half: Value) -> Callable[[Value], Value]:
        first = half * 24 + 4
        return lambda g: first + g * 3

    def codes(
        self, t: MicroTile, w: Value, line: Value, half: Value, g: Value, v: int, planes: list[int]
    ) -> list[Value]:
        sides = list(dict.fromkeys(p & 1 for p in planes))
        low = {i: t.nibbles(t.streamed(w, line + i, v)) for i in sides}
        top = t.streamed(w, line + 2, v) if 0 in sides else t.line(w, line + 2, v)
        words = top.bits(t.dot.sums)
        moved = {0: words << 4, 1: words << 2, 2: words, 3: words >> 2}
        return [low[p & 1][p >> 1] | moved[p].bits(top.type) & 0x30 for p in planes]


class Q3K(SixteenSubBlocks):
    """Q3_K: sixteen 6-bit scales in 12 bytes, then high bits of eight planes, then bit pairs."""

    bits, offset, magnitude = 3, 4, 4

    def _scales(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        """Words of four signed scales."""
        a, b, top = (t.word(w, i, v) for i in range(3))
        found = []
        for i, (word, shift) in enumerate(((a, 0), (b, 0), (a, 4), (b, 4))):
            six = word >> shift & 0x0F0F0F0F | (top >> 2 * i & 0x03030303) << 4
            found.append((six.bits(t.dot.bytes) - 32).bits(t.dot.sums))
        return found

    def unpack(self, t: MicroTile, w: Value, v: int) -> None:
        for i, word in enumerate(self._scales(t, w, v)):
            self.store_scale_bytes(t, 4 * i, v, word, signed=True)

    def pairs(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        return [p for word in self._scales(t, w, v) for p in byte_pairs(t, word, signed=True)]

    def scales(self, t: MicroTile, w: WeightBlock, v: int) -> tuple[Value, Value]:
        d = t.f16_field(w.fields[0], v)
        return d, d

    def lines(self, t: MicroTile, half: Value) -> Callable[[Value], Value]:
        return behind_high_bits(t, 3, half)

    def codes(
        self, t: MicroTile, w: Value, line: Value, half: Value, g: Value, v: int, planes: list[int]
    ) -> list[Value]:
        low = t.streamed(w, line, v) if planes[0] == 0 else t.line(w, line, v)
        top = t.shifted(t.word(w, g * 2 + 3, v), half * 4).bits(low.type)
        return [low >> 2 * p & 3 | (top >> p & 1) << 2 for p in planes]


class Q2K(SixteenSubBlocks):
    """Q2_K: sixteen bytes of scale and minimum, bit pairs, then (d, dmin)."""

    bits, magnitude = 2, 0

    def value(self, t: MicroTile, sums: Value, total: Value, d: Value, dmin: Value) -> Value:
        return KQuantFormat.value(self, t, sums, total, d, dmin)

    def unpack(self, t: MicroTile, w: Value, v: int) -> None:
        for i in t.f.range(0, 4):
            self.store_scale_bytes(t, i * 4, v, t.word(w, i, v) & 0x0F0F0F0F)

    def pairs(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        minima = [t.word(w, i, v) >> 4 & 0x0F0F0F0F for i in range(4)]
        return [p for word in minima for p in byte_pairs(t, word)]

    def scales(self, t: MicroTile, w: WeightBlock, v: int) -> tuple[Value, Value]:
        both = t.word(w.words, 20, v)
        return t.low_f16(both), t.low_f16(both >> 16)

    def lines(self, t: MicroTile, half: Value) -> Callable[[Value], Value]:
        first = half * 8 + 4
        return lambda g: first + g

    def codes(
        self, t: MicroTile, w: Value, line: Value, half: Value, g: Value, v: int, planes: list[int]
    ) -> list[Value]:
        raw = t.streamed(w, line, v) if planes[0] == 0 else t.line(w, line, v)
        return [raw >> 2 * p & 3 for p in planes]


class IQ4XS(KQuantFormat):
    """IQ4_XS: codes index a codebook; 6-bit scales, low nibbles in a word, high bits beside d."""

    bits = 8

    def _scale(self, t: MicroTile, w: Value, s: int, v: int) -> Value:
        top, low = t.word(w, 0, v) >> 16, t.word(w, 1, v)
        return (low >> 4 * s & 15 | (top >> 2 * s & 3) << 4) - 32

    def unpack(self, t: MicroTile, w: Value, v: int) -> None:
        for s in range(8):
            self.store_scale(t, s, v, self._scale(t, w, s, v))

    def pairs(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        scales = [self.load_scale(t, t.f.i64(s), v) for s in range(8)]
        order = [(a + b, a + b + 2) for a in (0, 4) for b in (0, 1)]
        return [scales[a] & 0xFFFF | scales[b] << 16 for a, b in order]

    def scales(self, t: MicroTile, w: WeightBlock, v: int) -> tuple[Value, Value]:
        d = t.low_f16(t.word(w.words, 0, v))
        return d, d

    def value(self, t: MicroTile, sums: Value, total: Value, d: Value, dmin: Value) -> Value:
        offset = t.dot.byte_offset
        if offset:
            sums = sums - (total << offset.bit_length() - 1)
        return sums.to(f32) * d

    def dots(self, t: MicroTile, w: Value, x: Value) -> list[Value]:
        def sub(s: Value, *sums: Value) -> list[Value]:
            scales = [self.load_scale(t, s, v) for v in t.columns]
            loop = DotLoop(
                4,
                self.bits,
                partial(self._codes, t, w, s * 4 + 2),
                lambda g, stream: t.rows_at(x, s * 8 + g + 4 * (stream % 2)),
                [v for v in t.columns for _ in range(2)],
                [scales[v] for v in t.columns for _ in range(2)],
            )
            return t.dot.accumulate(loop, sums)

        return t.f.loop(0, 8, 1, t.zeros(), sub)

    def _codes(self, t: MicroTile, w: Value, line: Value, g: Value) -> list[Value]:
        book = [c + t.dot.byte_offset for c in KVALUES_IQ4NL]
        return [
            t.dot.lookup(book, n) for v in t.columns for n in t.nibbles(t.streamed(w, line + g, v))
        ]


KQUANT_FORMATS: dict[str, Callable[[], KQuantFormat]] = {
    "Q2_K": Q2K,
    "Q3_K": Q3K,
    "Q4_K": partial(Q4K, 4),
    "Q5_K": partial(Q5K, 5),
    "Q6_K": Q6K,
    "IQ4_XS": IQ4XS,
}
