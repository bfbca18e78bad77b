"""Integer products of formats with one scale per block: what a block adds to a tile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from rlx.codegen.emit import Function, Value, f32
from rlx.codegen.qmatmul.codebooks import CURVE
from rlx.codegen.qmatmul.dot import Run
from rlx.codegen.qmatmul.legacy import FP4, half_e8m0
from rlx.codegen.qmatmul.tile import Tile
from rlx.ir.quant import QuantScheme
from rlx.ir.quant_rows import RUN
from rlx.ir.quant_strips import LINE, ROWS, strip_layout
from rlx.support.records import dataclass

BIASED = 1.5 * 2.0**23  # what the bits BIAS stand for


@dataclass
class Weights:
    """One block of a strip: its words, and the fields it has beside them."""

    words: Value
    fields: list[Value]


class Strip:
    """A strip that is multiplied with a tile of quantised rows of k columns."""

    def __init__(self, f: Function, scheme: QuantScheme, base: Value, x: Value, k: Value) -> None:
        # Without blocks the whole row is one; its fields lie the same for any number of columns.
        layout = strip_layout(scheme, scheme.block or scheme.block_size * 16)
        assert layout is not None
        self.f, self.layout, self.base, self.x, self.k = f, layout, base, x, k

    def block(self, b: Value) -> Weights:
        f, layout = self.f, self.layout
        inside = b & layout.group - 1
        base = f.gep(self.base, b.udiv(layout.group), layout.group_bytes)
        offsets = layout.field_offsets
        fields = [
            f.gep(f.gep(base, at), inside, ROWS * size)
            for at, size in zip(offsets, layout.fields, strict=False)
        ]
        return Weights(f.gep(f.gep(base, offsets[-1]), inside, LINE * layout.words), fields)


class Format(ABC):
    """A scheme's code for one tile. `kind` and `block` say how rows must be quantised."""

    kind: str
    block: int  # 0 where the whole row is one

    @abstractmethod
    def emit(self, t: Tile, strip: Strip, out: Value, stride: int) -> None:
        """The products of a whole strip, written to `out`, `stride` columns to a row."""


Codes = Callable[[Tile, Value, Value, int], list[Value]]  # block, step, vector -> streams


@dataclass
class Blocks(Format):
    """Weights (code - offset) * scale + minimum, one scale for each block of k.

    A line of codes is `streams` streams; the activations of the second begin `spread` words behind
    those of the first, and a step goes on by `pace` words.
    """

    kind = "block"
    block: int
    codes: Codes
    scale: Callable[[Tile, Weights, int], Value]
    steps: int
    bits: int
    offset: int = 0  # a power of two; -1 stands for what bytes need
    minimum: Callable[[Tile, Weights, int, Value], Value] | None = None
    streams: int = 1
    spread: int = 0
    pace: int = 1

    def emit(self, t: Tile, strip: Strip, out: Value, stride: int) -> None:
        f = t.f
        if not self.block:
            sums = self._block(t, strip, f.i64(0), t.float_zeros())
        else:
            count = strip.k.udiv(self.block)
            sums = f.loop(
                0, count, 1, t.float_zeros(), lambda b, *s: self._block(t, strip, b, list(s))
            )
        t.write(sums, out, stride)

    def _block(self, t: Tile, strip: Strip, b: Value, sums: list[Value]) -> list[Value]:
        f, rows = t.f, t.rows
        w, x, meta = strip.block(b), strip.x, strip.k.udiv(4)
        steps: Value | int = self.steps
        if self.block:
            x = f.gep(x, b, (self.block + 12) * rows)
            meta = f.i64(self.block // 4)
        else:
            steps = strip.k.udiv(4 * self.streams)
        ints = t.dot.run(self.run(t, w, x, steps), self.start(t, x, meta))
        return self.scaled(t, w, x, meta, ints, sums)

    def run(self, t: Tile, w: Weights, x: Value, steps: Value | int) -> Run:
        """The products of a block."""
        return Run(
            steps,
            self.bits,
            lambda g: [c for v in t.columns for c in self.codes(t, w.words, g, v)],
            lambda g, s: t.rows_at(x, g * self.pace + (s % self.streams) * self.spread),
            [v for v in t.columns for _ in range(self.streams)],
        )

    def scaled(
        self, t: Tile, w: Weights, x: Value, meta: Value, ints: list[Value], sums: list[Value]
    ) -> list[Value]:
        """The sums with a block's integer ones added."""
        f, rows, out = t.f, t.rows, list(sums)
        for v in t.columns:
            scale = self.scale(t, w, v)
            low = self.minimum(t, w, v, scale) if self.minimum else None
            for i in range(rows):
                at = v * rows + i
                by = scale * t.x_float(x, meta, i)
                out[at] = f.fma(ints[at].to(f32), by, out[at])
                if low is not None:
                    out[at] = f.fma(low, t.x_float(x, meta + 2, i), out[at])
        return out

    def start(self, t: Tile, x: Value, meta: Value) -> list[Value]:
        """-offset * (sum of the row's codes): what codes that begin at 0 have too much."""
        offset = t.dot.byte_offset if self.offset < 0 else self.offset
        if not offset:
            return t.zeros()
        each = [t.x(x, meta + 1, i) << offset.bit_length() - 1 for i in range(t.rows)]
        return each * t.vectors


@dataclass
class Runs(Format):
    """Bytes of Q8_0 where rows have one scale for several blocks: an operation less for each.

    Sums begin with the bits of a large float (see `BIAS`), so that they end as one.
    """

    kind = "runs"
    block: int

    def emit(self, t: Tile, strip: Strip, out: Value, stride: int) -> None:
        f, runs = t.f, self.block // RUN

        def block(b: Value, *sums: Value) -> list[Value]:
            x = f.gep(strip.x, b, (self.block + 4 + 4 * runs) * t.rows)
            meta = self.block // 4

            def run(j: Value, *inner: Value) -> list[Value]:
                return self._run(t, strip.block(b * runs + j), x, j, meta, inner)

            parts = f.loop(0, runs, 1, t.float_zeros(), run)
            scales = [t.x_float(x, meta, i) for i in range(t.rows)] * t.vectors
            return [f.fma(*three) for three in zip(parts, scales, sums, strict=True)]

        t.write(f.loop(0, strip.k.udiv(self.block), 1, t.float_zeros(), block), out, stride)

    def _run(
        self, t: Tile, w: Weights, x: Value, j: Value, meta: int, sums: Sequence[Value]
    ) -> list[Value]:
        f = t.f
        run = Run(
            RUN // 4,
            8,
            lambda g: [_bytes(t, w.words, g, v)[0] for v in t.columns],
            lambda g, s: t.rows_at(x, j * (RUN // 4) + g),
            list(t.columns),
        )
        start = [t.x(x, j + (meta + 1), i) for i in range(t.rows)]
        ints = t.dot.run(run, start * t.vectors)
        scales = [t.halves(w.fields[0], v) for v in t.columns for _ in range(t.rows)]
        with f.exact():
            numbers = [value.bits(t.floating) - BIASED for value in ints]
        return [f.fma(*three) for three in zip(numbers, scales, sums, strict=True)]


def _nibbles(first: int) -> Codes:
    def codes(t: Tile, w: Value, g: Value, v: int) -> list[Value]:
        return t.nibbles(t.streamed(w, g + first, v))

    return codes


def _five_bits(first: int) -> Codes:
    """A word of top bits (byte b has bit g for weight 4g + b), then nibbles."""

    def codes(t: Tile, w: Value, g: Value, v: int) -> list[Value]:
        low, high = t.nibbles(t.streamed(w, g + (first + 1), v))
        top = t.shifted(t.word(w, first, v), g).bits(low.type)
        return [low | (top & 1) << 4, high | (top & 16)]

    return codes


def _looked_up(table: tuple[int, ...], offset: int) -> Codes:
    def codes(t: Tile, w: Value, g: Value, v: int) -> list[Value]:
        shift = offset if offset >= 0 else t.dot.byte_offset
        book = [c + shift for c in table]
        return [t.dot.look_up(book, n) for n in t.nibbles(t.streamed(w, g, v))]

    return codes


def _bytes(t: Tile, w: Value, g: Value, v: int) -> list[Value]:
    return [t.dot.full_bytes(t.streamed(w, g, v))]


def _half_field(t: Tile, w: Weights, v: int) -> Value:
    return t.halves(w.fields[0], v)


def _half_inside(t: Tile, w: Weights, v: int) -> Value:
    return t.low_half(t.word(w.words, 0, v))


def _minimum_inside(t: Tile, w: Weights, v: int, scale: Value) -> Value:
    return t.low_half(t.word(w.words, 0, v) >> 16)


def _power_field(t: Tile, w: Weights, v: int) -> Value:
    return half_e8m0(t.f, t.small(w.fields[0], v, signed=False))


def _float_field(t: Tile, w: Weights, v: int) -> Value:
    return t.floats(w.fields[0], v)


def _zero_point(signed: bool) -> Callable[..., Value]:
    def minimum(t: Tile, w: Weights, v: int, scale: Value) -> Value:
        return -(t.small(w.fields[1], v, signed).to(f32) * scale)

    return minimum


_halved = partial(Blocks, steps=4, streams=2, spread=4)

BLOCKS: dict[str, Blocks] = {
    "Q4_0": _halved(32, _nibbles(0), _half_field, bits=4, offset=8),
    "Q4_1": _halved(32, _nibbles(1), _half_inside, bits=4, minimum=_minimum_inside),
    "Q5_0": _halved(32, _five_bits(0), _half_field, bits=5, offset=16),
    "Q5_1": _halved(32, _five_bits(1), _half_inside, bits=5, minimum=_minimum_inside),
    "Q8_0": Blocks(32, _bytes, _half_field, steps=8, bits=8, offset=-1),
    "IQ4_NL": _halved(32, _looked_up(CURVE, -1), _half_field, bits=8, offset=-1),
    "MXFP4": _halved(32, _looked_up(FP4, 16), _power_field, bits=5, offset=16),
}


def integer_format(scheme: QuantScheme) -> Blocks:
    """int8 and int4, with a scale (and a zero point) for each block or for the whole row."""
    block, asym = scheme.block or 0, scheme.has_zero_point
    if scheme.packed_dtype == "i8":
        low = _zero_point(signed=True) if asym else None
        return Blocks(block, _bytes, _float_field, block // 4, 8, offset=-1, minimum=low)
    low = _zero_point(signed=False) if asym else None
    return Blocks(
        block,
        _nibbles(0),
        _float_field,
        block // 8,
        4,
        offset=0 if asym else 8,
        minimum=low,
        streams=2,
        spread=1,
        pace=2,
    )
