"""Integer dot products of block formats with one scale per block: Q4_0 to Q8_0, int8, int4, …"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rlx.backends.cpu.kernels.qgemm.dot import DotLoop, MicroTile
from rlx.backends.cpu.layouts.quant_rows import BIAS, RUN
from rlx.backends.cpu.layouts.quant_tiles import LINE, TILE_COLUMNS, column_tile_layout
from rlx.ir.quant.scheme import QuantScheme
from rlx.llvm.builder import Function, Value, f32, i8
from rlx.llvm.dequant_formats import (
    KVALUES_IQ4NL,
    KVALUES_MXFP4,
    half_e8m0,
    half_ue4m3,
)
from rlx.support.records import dataclass

BIASED = 1.5 * 2.0**23  # the float whose bits are BIAS


@dataclass
class WeightBlock:
    """One block of a column tile: its words and its fields."""

    words: Value
    fields: list[Value]


class ColumnTile:
    """A column tile of weights, and the quantised rows of k columns it is multiplied with."""

    def __init__(self, f: Function, scheme: QuantScheme, base: Value, x: Value, k: Value) -> None:
        # Without blocks the whole row is one; the layout of its fields does not depend on k.
        layout = column_tile_layout(scheme, scheme.block or scheme.block_size * 16)
        assert layout is not None
        self.f, self.layout, self.base, self.x, self.k = f, layout, base, x, k

    def block(self, b: Value) -> WeightBlock:
        f, layout = self.f, self.layout
        inside = b & layout.group - 1
        base = f.gep(self.base, b.udiv(layout.group), layout.group_bytes)
        offsets = layout.field_offsets
        fields = [
            f.gep(f.gep(base, at), inside, TILE_COLUMNS * size)
            for at, size in zip(offsets, layout.fields, strict=False)
        ]
        return WeightBlock(f.gep(f.gep(base, offsets[-1]), inside, LINE * layout.words), fields)


class Format(ABC):
    """Emits a scheme's dot products for one tile. `kind` and `block` are the layout of its rows."""

    kind: str
    block: int  # 0 where the whole row is one block
    takes_pairs = False
    """Whether steps 2g and 2g + 1 of its loops read words 2g and 2g + 1 of some even word on."""

    @abstractmethod
    def emit(self, t: MicroTile, column_tile: ColumnTile, out: Value, stride: int) -> None:
        """The f32 results of a whole column tile, stored to `out`, `stride` columns to a row."""


Codes = Callable[[MicroTile, Value, Value, int], list[Value]]
"""(tile, words, step, vector of columns): the streams of codes of a line."""


@dataclass
class BlockFormat(Format):
    """Weights (code - offset) * scale + minimum, one scale per block of k.

    A line holds `streams` streams of codes (low and high nibbles); the activations of the second
    begin `spread` words after those of the first, and each step advances by `pace` words.
    """

    kind = "block"
    block: int
    codes: Codes
    scale: Callable[[MicroTile, WeightBlock, int], Value]
    steps: int
    bits: int
    offset: int = 0  # a power of two; -1: what the target adds to signed bytes
    minimum: Callable[[MicroTile, WeightBlock, int, Value], Value] | None = None
    streams: int = 1
    spread: int = 0
    pace: int = 1

    @property
    def takes_pairs(self) -> bool:  # type: ignore[override]
        return self.pace == 1 and self.spread % 2 == 0

    def emit(self, t: MicroTile, column_tile: ColumnTile, out: Value, stride: int) -> None:
        f = t.f
        if not self.block:
            sums = self._block(t, column_tile, f.i64(0), t.float_zeros())
        else:
            count = column_tile.k.udiv(self.block)
            carried = f.carry(t.float_zeros())
            for b in carried.range(0, count):
                carried.values = self._block(t, column_tile, b, carried.values)
            sums = carried.values
        t.write(sums, out, stride)

    def _block(
        self, t: MicroTile, column_tile: ColumnTile, b: Value, sums: list[Value]
    ) -> list[Value]:
        f, rows = t.f, t.rows
        w, x, meta = self.weight_block(column_tile, b), column_tile.x, column_tile.k.udiv(4)
        steps: Value | int = self.steps
        if self.block:
            x = f.gep(x, b, (self.block + 12) * rows)
            meta = f.i64(self.block // 4)
        else:
            steps = column_tile.k.udiv(4 * self.streams)
        ints = self.start(t, x, meta)
        for loop in self.dot_loops(t, w, x, steps):
            ints = t.dot.accumulate(loop, ints)
        return self.scaled(t, w, x, meta, ints, sums)

    def weight_block(self, column_tile: ColumnTile, b: Value) -> WeightBlock:
        return column_tile.block(b)

    def dot_loops(
        self, t: MicroTile, w: WeightBlock, x: Value, steps: Value | int
    ) -> list[DotLoop]:
        """The dot products of a block."""
        loop = DotLoop(
            steps,
            self.bits,
            lambda g: [c for v in t.columns for c in self.codes(t, w.words, g, v)],
            lambda g, s: t.rows_at(x, g * self.pace + (s % self.streams) * self.spread),
            [v for v in t.columns for _ in range(self.streams)],
        )
        return [loop]

    def scaled(
        self,
        t: MicroTile,
        w: WeightBlock,
        x: Value,
        meta: Value,
        ints: list[Value],
        sums: list[Value],
    ) -> list[Value]:
        """The f32 sums plus a block's integer sums, scaled."""
        f, rows, out = t.f, t.rows, list(sums)
        for v in t.columns:
            scale = self.scale(t, w, v)
            minimum = self.minimum(t, w, v, scale) if self.minimum else None
            for i in range(rows):
                at = v * rows + i
                by = t.dot.tile_column(scale, i) * t.tile_float(x, meta, i)
                out[at] = f.fma(ints[at].to(f32), by, out[at])
                if minimum is not None:
                    least = t.dot.tile_column(minimum, i)
                    out[at] = f.fma(least, t.tile_float(x, meta + 2, i), out[at])
        return out

    def start(self, t: MicroTile, x: Value, meta: Value) -> list[Value]:
        """-offset * (sum of the row's codes): corrects codes stored with an offset."""
        offset = t.dot.byte_offset if self.offset < 0 else self.offset
        if not offset:
            return t.zeros()
        shift = offset.bit_length() - 1
        each = [t.dot.tile_row(t.rows_at(x, meta + 1), i) << shift for i in range(t.rows)]
        return each * t.vectors


class NVFP4(BlockFormat):
    """NVFP4: a line of four scales of 16 weights, then two lines of codes for each of them."""

    takes_pairs = False

    def __init__(self) -> None:
        codes = _codebook(KVALUES_MXFP4, 16)
        super().__init__(16, codes, _ue4m3, 2, 5, offset=16, streams=2, spread=2)

    def weight_block(self, column_tile: ColumnTile, b: Value) -> WeightBlock:
        f, part = column_tile.f, b & 3
        whole = column_tile.block(b >> 2).words
        # The scale is the low byte of a word that begins `part` bytes on.
        return WeightBlock(f.gep(f.gep(whole, LINE), part, 2 * LINE), [f.gep(whole, part)])


class Segment(NamedTuple):
    """Lines of a block with one arrangement: stream s of line g has the activations of word
    `x + g + s * steps`."""

    line: int
    steps: int
    streams: int
    x: int


class Ternary(BlockFormat):
    """TQ1_0 and TQ2_0: codes 0, 1, 2 for -1, 0, 1, under one scale for 256 weights."""

    takes_pairs = False

    def __init__(self, codes: TernaryCodes, segments: Sequence[Segment]) -> None:
        super().__init__(256, _bytes, _f16_field, 0, 2, offset=1)
        self.ternary, self.segments = codes, segments

    def dot_loops(
        self, t: MicroTile, w: WeightBlock, x: Value, steps: Value | int
    ) -> list[DotLoop]:
        return [self._dot_loop(t, w, x, segment) for segment in self.segments]

    def _dot_loop(self, t: MicroTile, w: WeightBlock, x: Value, part: Segment) -> DotLoop:
        def codes(g: Value) -> list[Value]:
            lines = [t.streamed(w.words, g + part.line, v) for v in t.columns]
            return [c for line in lines for c in self.ternary(t, line, part.streams)]

        return DotLoop(
            part.steps,
            self.bits,
            codes,
            lambda g, s: t.rows_at(x, g + (part.x + (s % part.streams) * part.steps)),
            [v for v in t.columns for _ in range(part.streams)],
        )


TernaryCodes = Callable[[MicroTile, Value, int], list[Value]]
"""(tile, line, streams): the streams of codes of a line."""


def _bit_pairs(t: MicroTile, line: Value, streams: int) -> list[Value]:
    return [line >> 2 * s & 3 for s in range(streams)]


def _trits(t: MicroTile, line: Value, streams: int) -> list[Value]:
    """A byte / 256 is a fraction whose base-3 digits are the codes. It is kept less 128, so that
    its digit, floor(3 * byte / 256), needs signed comparisons alone."""
    rest, found = line ^ 0x80, []
    for s in range(streams):
        if s:
            rest = rest + rest + rest
        found.append((rest > -43).to(i8) + (rest > 42).to(i8))
    return found


@dataclass
class SharedScaleFormat(Format):
    """Q8_0 with rows whose scale is shared by several blocks: one operation less per block.

    Integer sums start from the bits of a large float (see `BIAS`), so that they need no conversion.
    """

    kind = "shared"
    takes_pairs = True
    block: int

    def emit(self, t: MicroTile, column_tile: ColumnTile, out: Value, stride: int) -> None:
        f, runs = t.f, self.block // RUN
        sums = f.carry(t.float_zeros())
        for b in sums.range(0, column_tile.k.udiv(self.block)):
            x = f.gep(column_tile.x, b, (self.block + 4 + 4 * runs) * t.rows)
            meta = self.block // 4
            parts = f.carry(t.float_zeros())
            for j in parts.range(0, runs):
                w = column_tile.block(b * runs + j)
                parts.values = self._run(t, w, x, j, meta, parts.values)
            scales = [t.tile_float(x, meta, i) for i in range(t.rows)] * t.vectors
            terms = zip(parts.values, scales, sums.values, strict=True)
            sums.values = [f.fma(*three) for three in terms]
        t.write(sums.values, out, stride)

    def _run(
        self, t: MicroTile, w: WeightBlock, x: Value, j: Value, meta: int, sums: Sequence[Value]
    ) -> list[Value]:
        f = t.f
        loop = DotLoop(
            RUN // 4,
            8,
            lambda g: [_bytes(t, w.words, g, v)[0] for v in t.columns],
            lambda g, s: t.rows_at(x, j * (RUN // 4) + g),
            list(t.columns),
        )
        start = [f.const(BIAS, t.dot.sums)] * t.rows
        if t.dot.byte_offset:
            start = [t.dot.tile_row(t.rows_at(x, j + (meta + 1)), i) for i in range(t.rows)]
        ints = t.dot.accumulate(loop, start * t.vectors)
        scales = [
            t.dot.tile_column(t.f16_field(w.fields[0], v), i)
            for v in t.columns
            for i in range(t.rows)
        ]
        with f.exact():
            numbers = [value.bits(t.floating) - BIASED for value in ints]
        return [f.fma(*three) for three in zip(numbers, scales, sums, strict=True)]


def _nibbles(first: int) -> Codes:
    def codes(t: MicroTile, w: Value, g: Value, v: int) -> list[Value]:
        return t.nibbles(t.streamed(w, g + first, v))

    return codes


def _five_bits(first: int) -> Codes:
    """A word of high bits (byte b has bit g for weight 4g + b), then nibbles."""

    def codes(t: MicroTile, w: Value, g: Value, v: int) -> list[Value]:
        low, high = t.nibbles(t.streamed(w, g + (first + 1), v))
        top = t.shifted(t.word(w, first, v), g).bits(low.type)
        return [low | (top & 1) << 4, high | (top & 16)]

    return codes


def _codebook(table: tuple[int, ...], offset: int) -> Codes:
    def codes(t: MicroTile, w: Value, g: Value, v: int) -> list[Value]:
        shift = offset if offset >= 0 else t.dot.byte_offset
        values = [c + shift for c in table]
        return [t.dot.lookup(values, n) for n in t.nibbles(t.streamed(w, g, v))]

    return codes


def _bytes(t: MicroTile, w: Value, g: Value, v: int) -> list[Value]:
    return [t.dot.encode_bytes(t.streamed(w, g, v))]


def _f16_field(t: MicroTile, w: WeightBlock, v: int) -> Value:
    return t.f16_field(w.fields[0], v)


def _f16_inside(t: MicroTile, w: WeightBlock, v: int) -> Value:
    return t.low_f16(t.word(w.words, 0, v))


def _minimum_inside(t: MicroTile, w: WeightBlock, v: int, scale: Value) -> Value:
    return t.low_f16(t.word(w.words, 0, v) >> 16)


def _e8m0_field(t: MicroTile, w: WeightBlock, v: int) -> Value:
    return half_e8m0(t.f, t.byte_field(w.fields[0], v, signed=False))


def _ue4m3(t: MicroTile, w: WeightBlock, v: int) -> Value:
    return half_ue4m3(t.f, t.word(w.fields[0], 0, v) & 255)


def _float_field(t: MicroTile, w: WeightBlock, v: int) -> Value:
    return t.f32_field(w.fields[0], v)


def _zero_point(signed: bool) -> Callable[..., Value]:
    def minimum(t: MicroTile, w: WeightBlock, v: int, scale: Value) -> Value:
        return -(t.byte_field(w.fields[1], v, signed).to(f32) * scale)

    return minimum


_halved = partial(BlockFormat, steps=4, streams=2, spread=4)

BLOCKS: dict[str, BlockFormat] = {
    "Q4_0": _halved(32, _nibbles(0), _f16_field, bits=4, offset=8),
    "Q4_1": _halved(32, _nibbles(1), _f16_inside, bits=4, minimum=_minimum_inside),
    "Q5_0": _halved(32, _five_bits(0), _f16_field, bits=5, offset=16),
    "Q5_1": _halved(32, _five_bits(1), _f16_inside, bits=5, minimum=_minimum_inside),
    "Q8_0": BlockFormat(32, _bytes, _f16_field, steps=8, bits=8, offset=-1),
    "IQ4_NL": _halved(32, _codebook(KVALUES_IQ4NL, -1), _f16_field, bits=8, offset=-1),
    "MXFP4": _halved(32, _codebook(KVALUES_MXFP4, 16), _e8m0_field, bits=5, offset=16),
    "NVFP4": NVFP4(),
    "TQ1_0": Ternary(_trits, [Segment(0, 8, 5, 0), Segment(8, 4, 5, 40), Segment(12, 1, 4, 60)]),
    "TQ2_0": Ternary(_bit_pairs, [Segment(0, 8, 4, 0), Segment(8, 8, 4, 32)]),
}


def integer_format(scheme: QuantScheme) -> BlockFormat:
    """int8 and int4, with a scale (and a zero point) for each block or for the whole row."""
    block, asym = scheme.block or 0, scheme.has_zero_point
    if scheme.packed_dtype == "i8":
        minimum = _zero_point(signed=True) if asym else None
        return BlockFormat(block, _bytes, _float_field, block // 4, 8, offset=-1, minimum=minimum)
    minimum = _zero_point(signed=False) if asym else None
    return BlockFormat(
        block,
        _nibbles(0),
        _float_field,
        block // 8,
        4,
        offset=0 if asym else 8,
        minimum=minimum,
        streams=2,
        spread=1,
        pace=2,
    )
