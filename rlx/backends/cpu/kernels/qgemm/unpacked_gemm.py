"""Quantised GEMM of many rows on unpacked weights.

Dot products take so few instructions, or unpacking so many, that to unpack codes for every tile of
rows would be a good part of the work: a few blocks of a column tile are unpacked into the L1 cache,
and all row tiles run on them. An unpacked block is lines of 16 columns: for each word of codes a
line of bytes, or two of i16 pairs where codes have 8 bits and the dot product is `pmaddubsw`; then
its scales and minima. A row that is one single block is unpacked in pieces, and its sums stay
integers until its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rlx.backends.cpu.kernels.qgemm.block_formats import (
    BlockFormat,
    ColumnTile,
    Format,
    SharedScaleFormat,
    Ternary,
    WeightBlock,
)
from rlx.backends.cpu.kernels.qgemm.dot import (
    DotLoop,
    Index,
    Maddubs,
    MicroTile,
    Vnni,
    Widened,
    dot_kind,
)
from rlx.backends.cpu.kernels.qgemm.dot_arm import Dotprod
from rlx.backends.cpu.kernels.qgemm.grid_formats import GridFormat
from rlx.backends.cpu.kernels.qgemm.kquant_superblock import KQuantFormat, SixteenSubBlocks
from rlx.backends.cpu.kernels.qgemm.quantize_rows import tile_width
from rlx.backends.cpu.kernels.qgemm.raised_dot import (
    ROWS,
    RaisedDot,
    starts_each_sum,
    takes_raised_rows,
)
from rlx.backends.cpu.layouts.quant_rows import RowLayout
from rlx.backends.cpu.layouts.quant_tiles import LINE, TILE_COLUMNS
from rlx.ir.quant.scheme import QuantScheme
from rlx.llvm.builder import Function, Module, Value, f32, i16, i64, ptr, vec
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_CACHE = 16 << 10  # bytes of unpacked blocks: they and a tile's rows stay in the L1 cache
ACC_ROWS = 256  # rows whose accumulators stay in memory while the blocks of a column tile pass by
_VECTORS = 2  # vectors of columns of a micro-tile: more accumulators would leave no registers
_PIECE = 16  # codes of a piece of a row without blocks


class StoreCodes(Widened):
    """A "dot product" that stores codes where the real one would read rows."""

    taken = 0
    """What codes are stored without; it returns the sums of those then."""

    def __init__(self, f: Function, planes: int) -> None:
        super().__init__(f, 1, f.target.lanes(32))
        self.planes, self.signed_bytes = planes, planes == 2

    def accumulate(self, loop: DotLoop, sums: Sequence[Value]) -> list[Value]:
        f, totals = self.f, self.f.carry(sums)
        for g in totals.range(0, loop.groups):
            out = list(totals.values)
            for s, codes in enumerate(loop.codes(g)):
                place = f.gep(loop.x(g, s), 4 * self.lanes * loop.columns[s])
                scale = None if loop.scales is None else loop.scales[s]
                if self.taken:
                    codes, at = codes - self.taken, loop.columns[s]
                    pairs = self.multiply(f.const(1, self.bytes), codes)
                    out[at] = self.pairs(out[at], pairs, self.factor(scale))
                for p, part in enumerate(self.stored(codes)):
                    # products of i16 codes and their scales fit i16
                    kept = part if self.planes == 1 or scale is None else part * self.factor(scale)
                    f.store(kept, place, p * LINE)
            totals.values = out
        return totals.values

    def stored(self, codes: Value) -> list[Value]:
        """The planes of a line."""
        return _widened(codes) if self.planes == 2 else [codes]


def _widened(codes: Value) -> list[Value]:
    """Signed bytes 0 and 2, and 1 and 3, of every lane as pairs of i16."""
    halves = codes.bits(vec(codes.type.bytes // 2, i16))
    return [(halves << 8).ashr(8), halves.ashr(8)]


class UnpackTile(MicroTile):
    """Reads weights as any micro-tile does, and stores their codes where its rows would lie."""

    def __init__(self, f: Function, codes: UnpackedCodes) -> None:
        super().__init__(f, 1, TILE_COLUMNS // f.target.lanes(32), f.i64(0))
        self.dot = codes.store(f)
        self.word_bytes = LINE * codes.planes

    def rows_at(self, base: Value, index: Index) -> Value:
        return self.f.gep(base, index, self.word_bytes)

    def put(self, values: Sequence[Value], base: Value, line: int) -> None:
        """Store a line: one value for each vector of columns."""
        for v, value in enumerate(values):
            self.f.store(value, base, LINE * line + 4 * self.lanes * v)


@dataclass
class UnpackedCodes:
    """The codes of an unpacked block of `words` words, each in `planes` lines."""

    words: int
    bits: int
    planes: int

    @staticmethod
    def of(words: int, bits: int, target: Target) -> UnpackedCodes:
        return UnpackedCodes(words, bits, 2 if bits == 8 and dot_kind(target) is Maddubs else 1)

    def store(self, f: Function) -> StoreCodes:
        """The "dot product" that stores them."""
        return StoreCodes(f, self.planes)

    @property
    def lines(self) -> int:
        return self.words * self.planes

    def dot_loop(
        self, t: MicroTile, w: Value, x: Value, count: Index, scales: Sequence[Value] | None = None
    ) -> DotLoop:
        """The dot products of `count` words; `scales` has an entry per vector of columns. Planes
        are words of their own: they follow each other in the codes and in the rows."""
        return DotLoop(
            count * self.planes,
            self.bits,
            lambda g: [t.line(w, g, v) for v in t.columns],
            lambda g, s: t.rows_at(x, g),
            list(t.columns),
            scales,
        )


@dataclass
class UnpackedSpan:
    """Some unpacked blocks, and the same blocks of a tile's rows."""

    blocks: Value
    x: Value
    count: Value


class UnpackedKQuant(KQuantFormat):
    """A k-quant superblock: codes, then sub-block scales, pairs of minima, d and dmin.

    For raised rows the starts of sums take the place of the minima (see `raised_dot`): of all, or
    of every two words.
    """

    def __init__(self, fmt: KQuantFormat, target: Target) -> None:
        self.fmt, self.sub_blocks, self.sums, self.bits = fmt, fmt.sub_blocks, fmt.sums, fmt.bits
        self.unpacked = UnpackedCodes.of(64, fmt.bits, target)
        self.table_line = self.unpacked.lines
        self.pairs_line = self.start_line = self.table_line + self.sub_blocks
        self.raised = takes_raised_rows(fmt.magnitude, dot_kind(target), target)
        self.starts_each = self.raised and starts_each_sum(fmt.magnitude)
        self.has_pairs = not self.raised and self.unpacked.planes == 1
        between = 32 if self.starts_each else 1 if self.raised else self.sub_blocks // 2
        self.scale_line = self.pairs_line + between
        self.lines = self.scale_line + 2
        self.codes_bytes = 256 * self.unpacked.planes
        self.row_bytes = self.codes_bytes + 52

    def write(self, t: UnpackTile, column_tile: ColumnTile, b: Value, to: Value) -> None:
        """Unpack superblock b to `to`."""
        fmt, w = self.fmt, column_tile.block(b)
        fmt.table = t.f.gep(to, LINE * self.table_line)
        for v in t.columns:
            fmt.unpack(t, w.words, v)
        starts = t.f.gep(to, LINE * self.start_line)
        if isinstance(fmt, GridFormat):
            fmt.starts = starts if self.starts_each else None
        elif self.raised:
            assert isinstance(fmt, SixteenSubBlocks)
            assert isinstance(t.dot, StoreCodes)
            t.dot.taken = fmt.offset
        sums = fmt.dots(t, w.words, to)
        if self.raised and not self.starts_each:
            t.put([-(total << 7) for total in sums], to, self.start_line)
        self.write_factors(t, w, to)

    def write_factors(self, t: UnpackTile, w: WeightBlock, to: Value) -> None:
        """Unpack what sums are multiplied by."""
        fmt = self.fmt
        several = [fmt.pairs(t, w.words, v) if self.has_pairs else [] for v in t.columns]
        for i, pair in enumerate(zip(*several, strict=True)):
            t.put(pair, to, self.pairs_line + i)
        for i, scale in enumerate(zip(*(fmt.scales(t, w, v) for v in t.columns), strict=True)):
            t.put(scale, to, self.scale_line + i)

    def add(self, t: MicroTile, span: UnpackedSpan, out: Value, stride: int) -> None:
        f = t.f
        self.buffer = f.alloca(4 * t.lanes * t.vectors * t.rows)
        for b in f.range(0, span.count):
            w = WeightBlock(f.gep(span.blocks, b, LINE * self.lines), [])
            self._block(t, w, f.gep(span.x, b, self.row_bytes * t.rows), out, stride)

    def unpack(self, t: MicroTile, w: Value, v: int) -> None:
        """Sub-block scales are unpacked already."""

    def pairs(self, t: MicroTile, w: Value, v: int) -> list[Value]:
        count = self.sub_blocks // 2 if self.has_pairs else 0
        return [t.word(w, self.pairs_line + i, v) for i in range(count)]

    def scales(self, t: MicroTile, w: WeightBlock, v: int) -> tuple[Value, Value]:
        d, dmin = (t.word(w.words, self.scale_line + i, v).bits(t.floating) for i in range(2))
        return d, dmin

    def value(self, t: MicroTile, sums: Value, total: Value, d: Value, dmin: Value) -> Value:
        return sums.to(f32) * d if self.raised else self.fmt.value(t, sums, total, d, dmin)

    def dots(self, t: MicroTile, w: Value, x: Value) -> list[Value]:
        f, codes, count = t.f, self.unpacked, 64 // self.sub_blocks
        if codes.planes == 2:  # codes have been multiplied by their scales
            return t.dot.accumulate(codes.dot_loop(t, w, x, 64), t.zeros())

        def sub(s: Value, *sums: Value) -> list[Value]:
            scales = [t.word(w, s + self.table_line, v) for v in t.columns]
            lines = f.gep(w, s, LINE * count)
            loop = codes.dot_loop(t, lines, t.rows_at(x, s * count), count, scales)
            if isinstance(t.dot, RaisedDot) and self.starts_each:
                return t.dot.accumulate(loop, sums, self._starts(t, w, s * count))
            return t.dot.accumulate(loop, sums)

        if isinstance(t.dot, RaisedDot):
            return self._passes(t, t.dot, w, sub)
        return f.loop(0, self.sub_blocks, 1, t.zeros(), sub)

    def _starts(self, t: MicroTile, w: Value, first: Value) -> Callable[[Value], list[Value]]:
        """The starts of the 16-bit sums from word `first` + g on: one for two words."""
        assert isinstance(t.dot, RaisedDot)
        begin, halves = t.f.gep(w, first, LINE // 2), t.dot.halves

        def starts(g: Value) -> list[Value]:
            at = t.f.gep(begin, g, LINE // 2)
            return [t.line(at, self.start_line, v).bits(halves) for v in t.columns]

        return starts

    def _passes(
        self, t: MicroTile, dot: RaisedDot, w: Value, sub: Callable[..., list[Value]]
    ) -> list[Value]:
        """The sums of all rows, a few at a time."""
        f, zero = t.f, t.f.const(0, dot.sums)
        found: dict[int, Value] = {}
        for first in range(0, t.rows, ROWS):
            dot.first = first
            each = [zero if self.starts_each else t.word(w, self.start_line, v) for v in t.columns]
            start = [value for value in each for _ in range(ROWS)]
            for at, value in enumerate(f.loop(0, self.sub_blocks, 1, start, sub)):
                v, i = divmod(at, ROWS)
                found[v * t.rows + first + i] = value
        return [found[at] for at in range(len(found))]


class UnpackedBlocks(BlockFormat):
    """A block with one scale: codes, then scales, and minima if there are any."""

    def __init__(self, fmt: BlockFormat, target: Target) -> None:
        self.fmt, self.unpacked = fmt, UnpackedCodes.of(fmt.block // 4, fmt.bits, target)
        self.lines = self.unpacked.lines + (2 if fmt.minimum else 1)
        self.codes_bytes = fmt.block * self.unpacked.planes
        self.row_bytes = self.codes_bytes + 12
        super().__init__(
            fmt.block,
            fmt.codes,
            lambda t, w, v: self._line(t, w, 0, v),
            fmt.block // 4,
            fmt.bits,
            fmt.offset,
            (lambda t, w, v, scale: self._line(t, w, 1, v)) if fmt.minimum else None,
        )

    def _line(self, t: MicroTile, w: WeightBlock, i: int, v: int) -> Value:
        return t.word(w.words, self.unpacked.lines + i, v).bits(t.floating)

    def write(self, t: UnpackTile, column_tile: ColumnTile, b: Value, to: Value) -> None:
        fmt = self.fmt
        w = fmt.weight_block(column_tile, b)
        for loop in fmt.dot_loops(t, w, to, fmt.steps):
            t.dot.accumulate(loop, t.zeros())
        scales = [fmt.scale(t, w, v) for v in t.columns]
        t.put(scales, to, self.unpacked.lines)
        if fmt.minimum:
            minima = [fmt.minimum(t, w, v, scales[v]) for v in t.columns]
            t.put(minima, to, self.unpacked.lines + 1)

    def add(self, t: MicroTile, span: UnpackedSpan, out: Value, stride: int) -> None:
        f = t.f

        def block(b: Value, *sums: Value) -> list[Value]:
            w = WeightBlock(f.gep(span.blocks, b, LINE * self.lines), [])
            x, meta = f.gep(span.x, b, self.row_bytes * t.rows), f.i64(self.codes_bytes // 4)
            loop = self.unpacked.dot_loop(t, w.words, x, self.steps)
            # The correction of offsets comes last: until then registers are scarce.
            dots = t.dot.accumulate(loop, t.zeros())
            ints = [a + b for a, b in zip(dots, self.start(t, x, meta), strict=True)]
            return self.scaled(t, w, x, meta, ints, list(sums))

        start = [f.load(p, t.floating) for p in t.places(out, stride)]
        t.write(f.loop(0, span.count, 1, start, block), out, stride)


class UnpackedRow:
    """Pieces of a row that is one single block: codes alone."""

    def __init__(self, fmt: BlockFormat, target: Target) -> None:
        self.fmt, self.block = fmt, _PIECE
        self.unpacked = UnpackedCodes.of(_PIECE // 4, fmt.bits, target)
        self.row_bytes = _PIECE * self.unpacked.planes
        self.lines = self.unpacked.lines

    def write(self, t: UnpackTile, column_tile: ColumnTile, b: Value, to: Value) -> None:
        f, fmt, row = t.f, self.fmt, column_tile.block(t.f.i64(0))
        steps = _PIECE // (4 * fmt.streams)
        w = WeightBlock(f.gep(row.words, b * steps, LINE), row.fields)
        for loop in fmt.dot_loops(t, w, to, steps):
            t.dot.accumulate(loop, t.zeros())

    def add(self, t: MicroTile, span: UnpackedSpan, out: Value, stride: int) -> None:
        start = [t.f.load(p, t.dot.sums) for p in t.places(out, stride)]
        loop = self.unpacked.dot_loop(t, span.blocks, span.x, span.count * self.unpacked.words)
        t.write(t.dot.accumulate(loop, start), out, stride)

    def scale(self, t: MicroTile, column_tile: ColumnTile, out: Value, stride: int) -> None:
        """Scale a tile's integer sums to f32."""
        f, meta = t.f, column_tile.k.udiv(4) * self.unpacked.planes
        ints = [
            f.load(place, t.dot.sums) + start
            for place, start in zip(
                t.places(out, stride), self.fmt.start(t, column_tile.x, meta), strict=True
            )
        ]
        row = column_tile.block(f.i64(0))
        t.write(self.fmt.scaled(t, row, column_tile.x, meta, ints, t.float_zeros()), out, stride)


Unpacked = UnpackedKQuant | UnpackedBlocks | UnpackedRow


def takes_wide_rows(fmt: Format, target: Target) -> bool:
    """Whether the many rows that weights of a format are multiplied with are i16."""
    if not isinstance(fmt, BlockFormat | KQuantFormat) or target.num_vector_registers > 16:
        return False
    return UnpackedCodes.of(1, fmt.bits, target).planes == 2


def unpacked_format(fmt: Format, target: Target) -> Unpacked:
    """The unpacked form of a format."""
    if isinstance(fmt, KQuantFormat):
        return UnpackedKQuant(fmt, target)
    assert isinstance(fmt, BlockFormat)
    return UnpackedBlocks(fmt, target) if fmt.block else UnpackedRow(fmt, target)


def blocks_in_cache(fmt: Unpacked) -> int:
    """Blocks that the cache holds unpacked."""
    return max(1, _CACHE // (LINE * fmt.lines))


class UnpackedGemm:
    """The functions for more than one row, and the memory that they share."""

    def __init__(
        self, m: Module, scheme: QuantScheme, fmt: Format, layout: RowLayout, tiles_per_panel: int
    ) -> None:
        self.fmt, self.scheme, self.layout = unpacked_format(fmt, m.target), scheme, layout
        self.tile, self.stride = layout.tile, TILE_COLUMNS * tiles_per_panel
        self.vectors = min(_VECTORS, TILE_COLUMNS // m.target.lanes(32))
        self.unpack = self._emit_unpack(m)
        # Few rows read packed tiles, but for grids, whose codes take long to unpack.
        widths = layout.widths[1 if isinstance(fmt, GridFormat) else -1 :]
        self.adds = {rows: self._emit_add(m, rows) for rows in widths}
        self.packed_widths = layout.widths[: -len(widths)]
        self.scale = self._emit_scale(m) if isinstance(self.fmt, UnpackedRow) else None

    @staticmethod
    def of(
        m: Module, scheme: QuantScheme, fmt: Format, layout: RowLayout, tiles_per_panel: int
    ) -> UnpackedGemm | None:
        """None where tiles read packed column tiles faster."""
        if isinstance(fmt, SharedScaleFormat):  # its rows are for another target
            return None
        wide, kind = m.target.num_vector_registers > 16, dot_kind(m.target)
        pays = isinstance(fmt, KQuantFormat | Ternary)
        pays = (kind is Vnni and wide and pays) or (kind is Maddubs and not wide)
        if pays or isinstance(fmt, GridFormat):
            return UnpackedGemm(m, scheme, fmt, layout, tiles_per_panel)
        return None

    def _emit_unpack(self, m: Module) -> Function:
        """void unpack(ptr column_tile, i64 first, i64 count, ptr out): blocks of a column tile."""
        params = [("column_tile", ptr), ("first", i64), ("count", i64), ("out", ptr)]
        f = m.function("unpack", params, internal=True)
        fmt, t = self.fmt, UnpackTile(f, self.fmt.unpacked)
        column_tile = ColumnTile(f, self.scheme, f["column_tile"], f["out"], f["count"])
        for b in f.range(0, f["count"]):
            fmt.write(t, column_tile, f["first"] + b, f.gep(f["out"], b, LINE * fmt.lines))
        return f

    def _emit_add(self, m: Module, rows: int) -> Function:
        """void add(ptr blocks, ptr x, i64 count, ptr out): accumulate unpacked blocks."""
        params = [("blocks", ptr), ("x", ptr), ("count", i64), ("out", ptr)]
        f = m.function(f"add{rows}", params, internal=True)
        span = UnpackedSpan(f["blocks"], f["x"], f["count"])
        for shift in f.range(0, TILE_COLUMNS, f.target.lanes(32) * self.vectors):
            self.fmt.add(self._tile(f, rows, shift), span, f["out"], self.stride)
        return f

    def _emit_scale(self, m: Module) -> Function:
        """void scale(ptr column_tile, ptr x, i64 k, ptr out): a tile's integer sums to f32."""
        params = [("column_tile", ptr), ("x", ptr), ("k", i64), ("out", ptr)]
        f = m.function("scale", params, internal=True)
        assert isinstance(self.fmt, UnpackedRow)
        column_tile = ColumnTile(f, self.scheme, f["column_tile"], f["x"], f["k"])
        for shift in f.range(0, TILE_COLUMNS, f.target.lanes(32) * self.vectors):
            self.fmt.scale(self._tile(f, self.tile, shift), column_tile, f["out"], self.stride)
        return f

    def _tile(self, f: Function, rows: int, shift: Value) -> MicroTile:
        t = MicroTile(f, rows, self.vectors, shift)
        if isinstance(self.fmt, UnpackedKQuant) and self.fmt.raised:
            t.dot = RaisedDot(f, t.rows, t.lanes, self.fmt.fmt.magnitude)
        elif self.fmt.unpacked.planes == 2:
            t.dot = Widened(f, t.rows, t.lanes)
        elif t.dot.takes_pairs:  # rows lie word by word here
            t.dot = Dotprod(f, t.rows, t.lanes)
        return t

    def reserve(self, f: Function) -> None:
        """Allocate unpacked blocks, and accumulators of ACC_ROWS rows."""
        self.f = f
        self.blocks = f.alloca(LINE * self.fmt.lines * blocks_in_cache(self.fmt))
        self.acc = f.alloca(4 * self.stride * ACC_ROWS)

    def accumulate(
        self, column_tile: Value, s: int, x: Value, rows: Value, row: Value, k: Value
    ) -> None:
        """Accumulate `rows` rows, in whole tiles, with column tile s of a panel."""
        f, fmt = self.f, self.fmt
        count, most = k.udiv(fmt.block), blocks_in_cache(fmt)
        acc = f.gep(self.acc, 4 * TILE_COLUMNS * s)
        tiles = f.ceil_div(rows, self.tile)

        def places(i: Value) -> tuple[Value, Value]:
            tile = i * self.tile
            return f.gep(x, tile * row), f.gep(acc, tile, 4 * self.stride)

        for b in f.range(0, count, most):
            some = f.min(count - b, most)
            f.call(self.unpack, column_tile, b, some, self.blocks)
            for i in f.range(0, tiles):
                at, out = places(i)
                for size in self._widths(rows - i * self.tile):
                    first = f.gep(at, b, fmt.row_bytes * size)
                    f.call(self.adds[size], self.blocks, first, some, out)
        if self.scale is not None:
            for i in f.range(0, tiles):
                at, out = places(i)
                f.call(self.scale, column_tile, at, k, out)

    def _widths(self, left: Value) -> Iterable[int]:
        """The rows of the tile that holds `left` rows, as cases."""
        sizes = list(self.adds)
        if len(sizes) == 1:
            return sizes
        return self.f.cases(tile_width(self.f, self.layout, left), sizes)

    def clear(self, rows: Value) -> None:
        """Zero the accumulators of so many rows."""
        clear_rows(self.f, self.acc, rows, self.tile, self.stride)


def clear_rows(f: Function, acc: Value, rows: Value, tile: int, stride: int) -> None:
    """Zero the accumulators of so many rows, in whole tiles."""
    wide = vec(f.target.lanes(32), f32)
    size = f.ceil_div(rows, tile) * (4 * stride * tile)
    for at in f.range(0, size, wide.bytes):
        f.store(f.const(0.0, wide), f.gep(acc, at))
