"""Integer dot products of the grid formats: eight (or four) weights are a point of a codebook.

Points are looked up by loads from a table in the L1 cache, one for each index, and joined to
vectors of eight weights of `lanes / 2` columns. One row is multiplied with them as they come; signs
go to the row's codes. For more rows a block is unpacked (`unpacked_gemm`) to unsigned codes, in
lines of four weights of every column. Sums over a block are the same integers either way:

    gain * sum(scale * codes * x) - offset * sum(scale * sum of x)

of its sub-blocks, with the offset of the codes. Words of a block lie as `layouts.quant_grids`
describes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.kernels.qgemm.block_formats import ColumnTile, WeightBlock
from rlx.backends.cpu.kernels.qgemm.dot import FourWay, MicroTile, Pairwise
from rlx.backends.cpu.kernels.qgemm.kquant_superblock import (
    SUMS_OF_16,
    SUMS_OF_32,
    KQuantFormat,
)
from rlx.backends.cpu.layouts.quant_grids import GRID_WORDS, RUNS
from rlx.backends.cpu.layouts.quant_tiles import LINE, TILE_COLUMNS
from rlx.ir.quant.iq import grid
from rlx.llvm.builder import Value, f32, f64, i8, i16, i32, i64, vec
from rlx.support.records import dataclass

_GROUPS = 4  # of eight weights in a run of 32
_PSIGN = {4: "llvm.x86.ssse3.psign.b.128", 8: "llvm.x86.avx2.psign.b"}  # by lanes


@dataclass(frozen=True)
class HighBits:
    """A plane of `width` bits of every index, which begins at `word`; they become bits `up` on."""

    word: int
    width: int
    up: int = 8


@dataclass(frozen=True)
class GridLayout:
    """Where the words of a block lie: runs of 32 weights from word `first` on, each with a line of
    indices (or two) from `index` on, and a line of signs at `signs`."""

    scheme: str
    book: str  # the name of its codebook
    first: int
    index: int = 0
    signs: int = 1
    high: tuple[HighBits, ...] = ()

    @property
    def size(self) -> int:
        """Weights of a point."""
        return grid(self.book).itemsize

    @property
    def index_lines(self) -> int:
        """Lines of indices of a run."""
        return 8 // self.size

    @property
    def pitch(self) -> int:
        """Words of a run."""
        return (GRID_WORDS[self.scheme].words - self.first) // RUNS

    @property
    def points(self) -> npt.NDArray[np.int16]:
        """The coordinates of all points, in order."""
        return grid(self.book).view(np.int8).astype(np.int16)


class Indices:
    """The indices of a block: bytes of the tile, or half words in memory where they have more."""

    def __init__(self, t: MicroTile, layout: GridLayout, w: Value) -> None:
        self.t, self.layout, self.w = t, layout, w
        self.columns = t.lanes // 2  # of a part of the column tile: eight weights of each
        self.wide = t.f.alloca(2 * RUNS * LINE * layout.index_lines) if layout.high else None
        if self.wide is not None:
            for s in t.f.range(0, RUNS):
                self._widen(s, t.f.gep(self.wide, s, 2 * LINE * layout.index_lines))

    def run(self, s: Value) -> Value:
        """Where run s begins."""
        return self.t.f.gep(self.w, s * self.layout.pitch + self.layout.first, LINE)

    def vectors(self, s: Value, table: Value) -> Callable[[int, int], Value]:
        """(part, group): eight weights of every column of the part, as the table has them."""
        f, layout = self.t.f, self.layout
        if self.wide is None:
            base, type_ = f.gep(self.run(s), LINE * layout.index), i8
        else:
            base, type_ = f.gep(self.wide, s, 2 * LINE * layout.index_lines), i16
        element, each = (f64, 1) if layout.size == 8 else (f32, 2)

        def points(part: int, group: int) -> Value:
            out = f.const(0.0, vec(self.columns * each, element))
            for e in range(self.columns * each):
                line, byte = divmod(group * each + e % each, 4)
                column = part * self.columns + e // each
                at = (TILE_COLUMNS * 4 * line + 4 * column + byte) * type_.bytes
                place = f.gep(table, f.load(base, type_, at).to(i64, signed=False), element)
                out = f.insert(out, f.load(place, element, align=1), e)
            return out.bits(self.t.dot.bytes)

        return points

    def _widen(self, s: Value, to: Value) -> None:
        """Indices of run s as half words."""
        f, t, layout = self.t.f, self.t, self.layout
        lines, run = range(layout.index_lines), self.run(s)
        count = 4 * self.columns
        for part in range(2 * t.vectors):
            found = [
                f.load(run, vec(count, i8), LINE * (layout.index + line) + count * part)
                for line in lines
            ]
            wide = [raw.to(i16, signed=False) for raw in found]
            for high in layout.high:
                span = 4 * layout.index_lines * high.width  # bits of a run
                bits = self._repeated(high.word, s, span, part)
                for line in lines:
                    shifts = [high.up - high.width * (4 * line + i) for i in range(4)]
                    moved = bits << f.const(shifts * self.columns, bits.type)
                    mask = (1 << high.width) - 1 << high.up
                    wide[line] = wide[line] | moved & mask
            for line in lines:
                f.store(wide[line], to, 2 * (LINE * line + count * part))

    def word(self, word: int, s: Value, span: int, part: int) -> Value:
        """The bits of run s, `span` of them, in the low bits of each column of a part."""
        f, at = self.t.f, s * span
        line = f.gep(self.w, (at >> 5) + word, LINE)
        words = f.load(line, vec(self.columns, i32), 4 * self.columns * part)
        return words >> f.splat((at & 31).to(i32), self.columns)

    def _repeated(self, word: int, s: Value, span: int, part: int) -> Value:
        """The same for four half words of each column."""
        halves = self.word(word, s, span, part).bits(vec(2 * self.columns, i16))
        picks = [2 * c for c in range(self.columns) for _ in range(4)]
        return self.t.f.shuffle(halves, None, picks)


class GridFormat(KQuantFormat):
    """Base of the grid formats. `direct` says that one row is multiplied, not a block unpacked.

    `starts`, where it is set, is where a block's starts of 16-bit sums are stored (see
    `raised_dot`): codes are signed then."""

    takes_pairs = False
    layout: GridLayout
    most: int  # the largest code, or magnitude, of the vectors that multiply one row
    offset: int  # of codes
    scale_of_d: float
    direct = False
    starts: Value | None = None

    def emit(self, t: MicroTile, column_tile: ColumnTile, out: Value, stride: int) -> None:
        self.direct = True
        super().emit(t, column_tile, out, stride)

    # -- scales -----------------------------------------------------------------------------

    @abstractmethod
    def sub_scales(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        """The scale of each sub-block, in every column."""

    def factors(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        """What the sum of x of each sub-block is multiplied by, but for -offset."""
        if self.direct:
            return [self.load_scale(t, t.f.i64(i), v) for i in range(self.sub_blocks)]
        return self.sub_scales(t, w, v)

    def unpack(self, t: MicroTile, w: Value, v: int) -> None:
        # Pairs of i16, where these are what multiplies.
        both = self.direct and isinstance(t.dot, Pairwise)
        for i, scale in enumerate(self.sub_scales(t, w, v)):
            self.store_scale(t, i, v, scale | scale << 16 if both else scale)

    def pairs(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        factors = self.factors(t, w, v)
        order = [(a + b, a + b + 2) for a in range(0, len(factors), 4) for b in (0, 1)]
        return [factors[a] & 0xFFFF | factors[b] << 16 for a, b in order]

    def scales(self, t: MicroTile, w: WeightBlock, v: int) -> tuple[Value, Value]:
        d = t.f16_field(w.fields[0], v) * self.scale_of_d
        return d, d

    def value(self, t: MicroTile, sums: Value, total: Value, d: Value, dmin: Value) -> Value:
        return (sums - total * self.offset).to(f32) * d

    # -- weights ----------------------------------------------------------------------------

    @abstractmethod
    def book(self) -> npt.NDArray[np.int16]:
        """The points of the table."""

    @abstractmethod
    def codes(self, t: MicroTile, at: Indices, s: Value, points: Value, p: int, g: int) -> Value:
        """Points of group g of run s as unsigned codes."""

    def operands(
        self, t: MicroTile, at: Indices, s: Value, points: Value, x: Value, p: int, g: int
    ) -> tuple[Value, Value]:
        """What is multiplied for one row: unsigned codes, and signed ones of x."""
        return self.codes(t, at, s, points, p, g), x

    def dots(self, t: MicroTile, w: Value, x: Value) -> list[Value]:
        f, at = t.f, Indices(t, self.layout, w)
        table = f.module.table(f, self.book().astype(np.uint8).tobytes())
        if self.direct:
            return self._row_dots(t, at, table, x)
        for s in f.range(0, RUNS):
            vectors = at.vectors(s, table)
            for v in t.columns:
                for g in range(_GROUPS):
                    both = [self.codes(t, at, s, vectors(p, g), p, g) for p in (2 * v, 2 * v + 1)]
                    lines = [line.bits(t.dot.bytes) for line in _halves(t, both)]
                    for i, line in enumerate(lines):
                        place = t.rows_at(x, s * (2 * _GROUPS) + (2 * g + i))
                        f.store(line, place, 4 * t.lanes * v)
                    if self.starts is not None:
                        place = f.gep(self.starts, s * _GROUPS + g, LINE)
                        f.store(_start(t, lines), place, 4 * t.lanes * v)
        return t.zeros()

    def _row_dots(self, t: MicroTile, at: Indices, table: Value, x: Value) -> list[Value]:
        f = t.f
        sums = f.carry([f.const(0, t.dot.sums)] * (2 * t.vectors))
        for s in sums.range(0, RUNS):
            if t.ahead:
                for i in range(self.layout.pitch):
                    f.prefetch(at.run(s), t.ahead + LINE * i)
            vectors, mine, out = at.vectors(s, table), f.gep(x, s, 32), list(sums.values)
            for p in range(2 * t.vectors):
                terms = []
                for g in range(_GROUPS):
                    eight = f.splat(f.load(mine, i64, 8 * g, align=4), at.columns)
                    given = vectors(p, g), eight.bits(t.dot.bytes)
                    terms.append(self.operands(t, at, s, *given, p, g))
                out[p] = self._accumulate(t, out[p], terms, s, p)
            sums.values = out
        found = sums.values
        return [_sum_pairs(t, found[2 * v : 2 * v + 2]) for v in t.columns]

    def _accumulate(
        self, t: MicroTile, total: Value, terms: list[tuple[Value, Value]], s: Value, p: int
    ) -> Value:
        """Add the products of a run, times its scale (or its two)."""
        parts = self.sub_blocks // RUNS
        for i in range(parts):
            scale = self._scale(t, s * parts + i, p)
            some = terms[i * _GROUPS // parts : (i + 1) * _GROUPS // parts]
            if isinstance(t.dot, FourWay):
                dot = t.f.const(0, t.dot.sums)
                for codes, x in some:
                    dot = t.dot.step(dot, codes, x)
                total = total + dot * scale
                continue
            assert isinstance(t.dot, Pairwise)
            safe = min(len(some), 0x7FFF // (2 * 127 * self.most))
            safe -= len(some) % safe
            for j in range(0, len(some), safe):
                products = [t.dot.multiply(*term) for term in some[j : j + safe]]
                total = t.dot.pairs(total, _sum(products), scale)
        return total

    def _scale(self, t: MicroTile, sub: Value, p: int) -> Value:
        """The scale of a sub-block for the columns of a part, each in two lanes."""
        f, columns = t.f, t.lanes // 2
        row = f.gep(self.table, sub, 4 * TILE_COLUMNS)
        found = f.load(row, vec(columns, i32), 4 * columns * p)
        return f.shuffle(found, None, [c for c in range(columns) for _ in range(2)])


def _start(t: MicroTile, lines: Sequence[Value]) -> Value:
    """What takes off the 128 that rows have added from the sum of two lines."""
    assert isinstance(t.dot, Pairwise)
    ones = t.f.const(1, t.dot.bytes)
    return -(_sum([t.dot.multiply(ones, line) for line in lines]) << 7)


def _sum(values: Sequence[Value]) -> Value:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _halves(t: MicroTile, parts: Sequence[Value]) -> list[Value]:
    """The first four weights of every column of two parts, and the last four."""
    a, b = (part.bits(t.dot.sums) for part in parts)
    return [t.f.shuffle(a, b, range(i, 2 * t.lanes, 2)) for i in range(2)]


def _sum_pairs(t: MicroTile, parts: Sequence[Value]) -> Value:
    first, second = _halves(t, parts)
    return first + second


def _odd(word: Value, i: int, bits: int) -> Value:
    """2 s + 1 of nibble i, whose low `bits` bits are s."""
    doubled = word >> 4 * i - 1 if i else word << 1
    return doubled & (1 << bits) - 1 << 1 | 1


class SignedGrid(GridFormat):
    """IQ2 and IQ3: magnitudes with signs. Codes are `offset` plus or minus the magnitude.

    Where magnitudes are all odd (`halved`), codes are half of that, rounded up: so many bits less.
    """

    def __init__(
        self,
        layout: GridLayout,
        bits: int,
        most: int,
        scale_of_d: float,
        sub_blocks: int = 8,
        step: int = 1,
        halved: bool = False,
    ) -> None:
        self.layout, self.bits, self.most = layout, bits, most
        self.offset = most
        self.scale_of_d, self.sub_blocks = scale_of_d, sub_blocks
        self.sums = SUMS_OF_32 if sub_blocks == 8 else SUMS_OF_16
        self.step, self.halved = step, halved
        self.magnitude = 0 if halved or most < 43 else most

    def sub_scales(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        words = [t.word(w, i, v) for i in range(self.sub_blocks // 8)]
        return [_odd(word, i, 4) for word in words for i in range(8)]

    def factors(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        return [] if self.direct else super().factors(t, w, v)

    def value(self, t: MicroTile, sums: Value, total: Value, d: Value, dmin: Value) -> Value:
        doubled = self.halved and not self.direct
        return super().value(t, sums << 1 if doubled else sums, total, d, dmin)

    def book(self) -> npt.NDArray[np.int16]:
        halved = self.halved and not self.direct
        return self.layout.points // (2 if halved else self.step)

    def codes(self, t: MicroTile, at: Indices, s: Value, points: Value, p: int, g: int) -> Value:
        minus = self._minus(t, at, s, p, g)
        if self.halved:
            return (points ^ minus) + (self.most + 1) // 2
        signed = (points ^ minus) - minus
        return signed if self.starts is not None else signed + self.most

    def operands(
        self, t: MicroTile, at: Indices, s: Value, points: Value, x: Value, p: int, g: int
    ) -> tuple[Value, Value]:
        f = t.f
        if isinstance(t.dot, Pairwise) and t.lanes in _PSIGN:
            signs = self._minus(t, at, s, p, g) | 1
            return points, f.intrinsic(_PSIGN[t.lanes], t.dot.bytes, x, signs)
        return points, f.select(self._is_minus(t, at, s, p, g), -x, x)

    def _minus(self, t: MicroTile, at: Indices, s: Value, p: int, g: int) -> Value:
        """-1 where a weight is negative, else 0."""
        return -self._is_minus(t, at, s, p, g).to(i8, signed=False)

    def _is_minus(self, t: MicroTile, at: Indices, s: Value, p: int, g: int) -> Value:
        f, size = t.f, 4 * at.columns
        given = f.load(at.run(s), vec(size, i8), LINE * self.layout.signs + size * p)
        bytes_ = f.shuffle(given, None, [4 * c + g for c in range(at.columns) for _ in range(8)])
        bits = f.const([1 << i for i in range(8)] * at.columns, bytes_.type)
        return (bytes_ & bits).eq(bits)


class IQ1S(GridFormat):
    """Codes 0, 1 and 2; the offset of a run is 1 plus or minus an eighth, as bit 3 of its nibble
    says, and a factor of the sums of x, not of their total. Sums are eight times as large."""

    layout = GridLayout("IQ1_S", "IQ1_S", 4, high=(HighBits(1, 2), HighBits(3, 1, 10)))
    bits, most, offset, scale_of_d = 2, 2, 1, 0.125

    def sub_scales(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        word = t.word(w, 0, v)
        return [_odd(word, i, 3) for i in range(RUNS)]

    def factors(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        word = t.word(w, 0, v)
        downs = [word >> 4 * i + 2 & 2 for i in range(RUNS)]
        scales = self.sub_scales(t, w, v)
        return [scale * (down + 7) for scale, down in zip(scales, downs, strict=True)]

    def value(self, t: MicroTile, sums: Value, total: Value, d: Value, dmin: Value) -> Value:
        return super().value(t, sums << 3, total, d, dmin)

    def book(self) -> npt.NDArray[np.int16]:
        return self.layout.points // 8 + 1

    def codes(self, t: MicroTile, at: Indices, s: Value, points: Value, p: int, g: int) -> Value:
        return points


class IQ1M(GridFormat):
    """Codes are nine plus eight times -1, 0 or 1, plus or minus 1, by a bit for eight weights.
    Scales of three bits are in two planes; the f16 is the low half of a word."""

    layout = GridLayout("IQ1_M", "IQ1_S", 6, high=(HighBits(2, 2), HighBits(4, 1, 10)))
    bits, most, offset, scale_of_d = 5, 18, 9, 0.125
    sub_blocks, sums = 16, SUMS_OF_16

    def sub_scales(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        top, low = t.word(w, 0, v), t.word(w, 1, v)
        found = []
        for i in range(16):
            pair = low << 1 if i == 0 else low >> 2 * i - 1
            found.append(pair & 6 | top >> 13 + i & 8 | 1)
        return found

    def scales(self, t: MicroTile, w: WeightBlock, v: int) -> tuple[Value, Value]:
        d = t.low_f16(t.word(w.words, 0, v)) * self.scale_of_d
        return d, d

    def book(self) -> npt.NDArray[np.int16]:
        return self.layout.points + 9

    def codes(self, t: MicroTile, at: Indices, s: Value, points: Value, p: int, g: int) -> Value:
        f = t.f
        downs = at.word(5, s, _GROUPS, p)
        twice = f.shuffle(downs, None, [c for c in range(at.columns) for _ in range(2)])
        down = -(twice & 1 << g).eq(1 << g).to(i32, signed=False)
        return points + (down.bits(points.type) | 1)


_IQ2 = partial(SignedGrid, bits=7, most=43, scale_of_d=0.125)
_IQ3 = partial(GridLayout, index=1, signs=0)

GRID_FORMATS: dict[str, Callable[[], GridFormat]] = {
    "IQ2_XXS": partial(_IQ2, GridLayout("IQ2_XXS", "IQ2_XXS", 1)),
    "IQ2_XS": partial(
        _IQ2, GridLayout("IQ2_XS", "IQ2_XS", 3, high=(HighBits(2, 1),)), sub_blocks=16
    ),
    "IQ2_S": partial(_IQ2, GridLayout("IQ2_S", "IQ2_S", 4, high=(HighBits(2, 2),)), sub_blocks=16),
    "IQ3_XXS": partial(
        SignedGrid, _IQ3("IQ3_XXS", "IQ3_XXS", 1), bits=6, most=31, scale_of_d=0.5, step=2
    ),
    "IQ3_S": partial(
        SignedGrid,
        _IQ3("IQ3_S", "IQ3_S", 3, high=(HighBits(1, 1),)),
        bits=4,
        most=15,
        scale_of_d=1.0,
        halved=True,
    ),
    "IQ1_S": IQ1S,
    "IQ1_M": IQ1M,
}
