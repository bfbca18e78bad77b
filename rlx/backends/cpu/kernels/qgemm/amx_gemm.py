"""Quantised GEMM in AMX's tile registers, for more than one row.

A tile of sums is 16 rows times the 16 columns of a column tile. As for other targets with little
time for unpacking (see `unpacked_gemm`), some blocks of a column tile are unpacked into the L1
cache and all rows run on them: four codes of each column to a line, which is the order that the
dot products take. Codes of a full tile of rows lie row by row.

The order of sums, and each rounding, are those of AVX-512 VNNI, which a single row takes: integer
sums of a block are exact, and blocks are scaled and added by the same code. A superblock's small
scales are multiplied with its codes: products of up to 14 bits, as two planes of bytes, whose sums
are those of all its sub-blocks at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.kernels.qgemm.block_formats import (
    BlockFormat,
    ColumnTile,
    Format,
    SharedScaleFormat,
    WeightBlock,
)
from rlx.backends.cpu.kernels.qgemm.dot import MicroTile, Vnni, dot_kind
from rlx.backends.cpu.kernels.qgemm.grid_formats import IQ1S
from rlx.backends.cpu.kernels.qgemm.kquant_superblock import Q2K, Dots, KQuantFormat
from rlx.backends.cpu.kernels.qgemm.unpacked_gemm import (
    ACC_ROWS,
    StoreCodes,
    UnpackedBlocks,
    UnpackedCodes,
    UnpackedKQuant,
    UnpackedRow,
    UnpackTile,
    clear_rows,
)
from rlx.backends.cpu.layouts.quant_rows import RUN, RowLayout
from rlx.backends.cpu.layouts.quant_tiles import LINE, TILE_COLUMNS
from rlx.ir.quant.scheme import QuantScheme
from rlx.llvm.amx import NUM_TILES, TILE_BYTES, TILE_ROWS, Tiles, has_tiles
from rlx.llvm.builder import Function, Module, Value, f32, i16, i64, ptr, vec
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_CACHE = 24 << 10  # bytes of unpacked blocks: they and the rows of two tiles stay in the L1 cache
_SUMS = TILE_ROWS * LINE  # bytes of a tile of sums
_AT_ONCE = 4  # blocks whose sums are in registers: the first are scaled while the last are summed
_ONE_PLANE = (Q2K, IQ1S)  # products with scales that fit a byte
_WHOLE = [(TILE_ROWS, TILE_BYTES)] * NUM_TILES
_PARAMS = [
    ("blocks", ptr), ("x", ptr), ("next", i64), ("k", i64), ("count", i64), ("out", ptr),
]  # fmt: skip


def suits_tiles(target: Target) -> bool:
    """Whether many rows are multiplied in tile registers on the target."""
    return has_tiles(target) and target.avx512 and dot_kind(target) is Vnni


def _micro_tile(f: Function) -> MicroTile:
    """A whole tile of sums, in vector registers."""
    return MicroTile(f, TILE_ROWS, TILE_COLUMNS // f.target.lanes(32), f.i64(0))


def _sums(t: MicroTile, at: Value) -> list[Value]:
    """A stored tile of sums."""
    places = ((i, v) for v in t.columns for i in range(t.rows))
    return [t.f.load(at, t.dot.sums, LINE * i + 4 * t.lanes * v) for i, v in places]


class AmxKQuant(UnpackedKQuant):
    """A k-quant superblock: planes of codes times scales, then pairs of minima, d and dmin."""

    tiles = (2, 1)  # of rows at once
    shapes = _WHOLE

    def __init__(self, fmt: KQuantFormat, target: Target) -> None:
        super().__init__(fmt, target)
        self.planes = 1 if isinstance(fmt, _ONE_PLANE) else 2
        self.pairs_line = self.unpacked.words * self.planes
        self.scale_line = self.pairs_line + self.sub_blocks // 2
        self.lines = self.scale_line + 2
        self.tile_bytes = self.row_bytes * TILE_ROWS

    def write(self, t: UnpackTile, column_tile: ColumnTile, b: Value, to: Value) -> None:
        f, fmt, w = t.f, self.fmt, column_tile.block(b)
        codes, fmt.table = f.alloca(LINE * self.unpacked.words), f.alloca(LINE * self.sub_blocks)
        for v in t.columns:
            fmt.unpack(t, w.words, v)
        fmt.dots(t, w.words, codes)
        self._multiply_scales(t, codes, to)
        self.write_factors(t, w, to)

    def _multiply_scales(self, t: UnpackTile, codes: Value, to: Value) -> None:
        """Low bytes of codes times scales, then high ones."""
        f, words = t.f, self.unpacked.words // self.sub_blocks
        halves = vec(2 * t.lanes, i16)
        for s in f.range(0, self.sub_blocks):
            for v in t.columns:
                scale = f.load(f.gep(self.fmt.table, s, LINE), t.dot.sums, 4 * t.lanes * v)
                factor = (scale << 16 | scale & 0xFFFF).bits(halves)
                for g in f.range(0, words):
                    line = s * words + g
                    four = f.load(f.gep(codes, line, LINE), halves, 4 * t.lanes * v)
                    even, odd = (four & 0xFF) * factor, (four >> 8) * factor
                    planes = [even & 0xFF | odd << 8, even >> 8 | odd & -0x100]
                    for p in range(self.planes):
                        place = f.gep(to, line + self.unpacked.words * p, LINE)
                        f.store(planes[p], place, 4 * t.lanes * v)

    def multiply(self, f: Function, tiles: int, stride: int) -> None:
        t, planes = _micro_tile(f), range(self.planes)
        regs = Tiles(f, self.shapes)
        buffer = f.alloca(_SUMS * self.planes * tiles)
        sums = {(r, p): r * self.planes + p for r in range(tiles) for p in planes}
        for b in f.range(0, f["count"]):
            w = WeightBlock(f.gep(f["blocks"], b, LINE * self.lines), [])
            x = f.gep(f["x"], b, self.tile_bytes)
            for at in sums.values():
                regs.zero(at)
            for j in range(0, self.block, TILE_BYTES):
                for r in range(tiles):
                    regs.load(4 + r, f.gep(f.gep(x, f["next"], r), j), self.block)
                for p in planes:
                    line = j // 4 + self.unpacked.words * p
                    regs.load(6 + p, f.gep(w.words, line, LINE), LINE)
                for (r, p), at in sums.items():
                    # Rows are signed, of weights all but the low bytes.
                    regs.multiply("ss" if p else "su", at, 4 + r, 6 + p)
            for at in sums.values():
                regs.store(at, f.gep(buffer, _SUMS * at), LINE)
            for i in f.range(0, tiles):
                dots = self._dots_at(t, f.gep(buffer, i, _SUMS * self.planes))
                out = f.gep(f["out"], i, 4 * stride * TILE_ROWS)
                self.add_scaled(t, w, f.gep(x, f["next"] * i), dots, out, stride)

    def _dots_at(self, t: MicroTile, buffer: Value) -> Dots:
        """Rows of stored sums, planes added up."""

        def dots(i: Value, v: int) -> Value:
            row, at = t.f.gep(buffer, i, LINE), 4 * t.lanes * v
            low = t.f.load(row, t.dot.sums, at)
            if self.planes == 1:
                return low
            return low + (t.f.load(row, t.dot.sums, _SUMS + at) << 8)

        return dots


class _StoreSigned(StoreCodes):
    """Stores codes as signed bytes, without their offset."""

    def __init__(self, f: Function, offset: int) -> None:
        super().__init__(f, 1)
        self.offset, self.signed_bytes = offset, True

    def stored(self, codes: Value) -> list[Value]:
        return [codes - self.offset if self.offset else codes]


@dataclass
class SignedCodes(UnpackedCodes):
    """The codes of an unpacked block as signed bytes."""

    offset: int = 0

    @staticmethod
    def of_format(fmt: BlockFormat, words: int) -> SignedCodes:
        # a negative offset is the target's, whose bytes are signed here
        return SignedCodes(words, fmt.bits, 1, max(fmt.offset, 0))

    def store(self, f: Function) -> StoreCodes:
        return _StoreSigned(f, self.offset)


class _BlockTiles:
    """The registers for runs of codes with scales: their sums, two tiles of each operand."""

    def __init__(self, f: Function, shapes: Sequence[tuple[int, int]]) -> None:
        self.f, self.regs, self.turn = f, Tiles(f, shapes), 0
        self.step = shapes[_AT_ONCE][1]
        self.buffer = f.alloca(_SUMS * _AT_ONCE)

    def sum(self, at: int, w: Value, x: Value, run: int, pitch: int) -> None:
        """Store the dot products of a run of codes as sums `at`; rows lie `pitch` codes apart."""
        self.regs.zero(at)
        if run <= _AT_ONCE * self.step:
            for j in range(0, run, self.step):
                self._multiply(at, w, x, j, pitch)
        else:
            for i in self.f.range(0, run, self.step):
                self._multiply(at, w, x, i, pitch)
        self.regs.store(at, self.f.gep(self.buffer, _SUMS * at), LINE)

    def _multiply(self, at: int, w: Value, x: Value, j: Value | int, pitch: int) -> None:
        f, a = self.f, _AT_ONCE + self.turn
        self.turn ^= 1
        self.regs.load(a, f.gep(x, j), pitch)
        self.regs.load(a + 2, f.gep(w, j, LINE // 4), LINE)
        self.regs.multiply("ss", at, a, a + 2)


def _run_shapes(run: int) -> list[tuple[int, int]]:
    """Tiles of sums, of rows and of weights; a run is a multiple of the codes of k of a tile."""
    step = next(n for n in range(TILE_BYTES, 0, -4) if run % n == 0)
    return [(TILE_ROWS, LINE)] * _AT_ONCE + [(TILE_ROWS, step)] * 2 + [(step // 4, LINE)] * 2


class AmxBlocks(UnpackedBlocks):
    """A block with one scale: signed codes, then scales, and minima if there are any."""

    tiles = (1,)
    runs = 1

    def __init__(self, fmt: BlockFormat, target: Target) -> None:
        super().__init__(fmt, target)
        self.unpacked = SignedCodes.of_format(fmt, fmt.block // 4)
        self.run, self.tile_bytes = fmt.block, self.row_bytes * TILE_ROWS
        self.shapes = _run_shapes(self.run)

    def multiply(self, f: Function, tiles: int, stride: int) -> None:
        _multiply_blocks(self, f, stride)

    def add_scaled(
        self, t: MicroTile, w: Value, x: Value, sums: Value, given: Sequence[Value]
    ) -> list[Value]:
        """f32 sums plus the stored sums of a block."""
        meta, ints = t.f.i64(self.block // 4), _sums(t, sums)
        return self.scaled(t, WeightBlock(w, []), x, meta, ints, list(given))


class AmxShared:
    """Q8_0 with rows whose scale is shared by several runs: codes, then the scales of each run."""

    tiles = (1,)

    def __init__(self, fmt: SharedScaleFormat) -> None:
        self.block, self.run, self.runs = fmt.block, RUN, fmt.block // RUN
        self.shapes = _run_shapes(RUN)
        self.unpacked = UnpackedCodes(fmt.block // 4, 8, 1)
        self.lines = self.unpacked.lines + self.runs
        self.tile_bytes = (fmt.block + 4 + 4 * self.runs) * TILE_ROWS

    def write(self, t: UnpackTile, column_tile: ColumnTile, b: Value, to: Value) -> None:
        f = t.f
        for j in f.range(0, self.runs):
            w = column_tile.block(b * self.runs + j)
            for g in f.range(0, RUN // 4):
                place = f.gep(to, j * (RUN // 4) + g, LINE)
                for v in t.columns:
                    f.store(t.line(w.words, g, v), place, 4 * t.lanes * v)
            scales = [t.f16_field(w.fields[0], v) for v in t.columns]
            t.put(scales, f.gep(to, j, LINE), self.unpacked.lines)

    def multiply(self, f: Function, tiles: int, stride: int) -> None:
        _multiply_blocks(self, f, stride)

    def add_scaled(
        self, t: MicroTile, w: Value, x: Value, sums: Value, given: Sequence[Value]
    ) -> list[Value]:
        """f32 sums plus the stored sums of a block's runs."""
        f, out = t.f, list(given)
        runs = [_sums(t, f.gep(sums, _SUMS * j)) for j in range(self.runs)]
        for v in t.columns:
            scales = [
                t.word(w, self.unpacked.lines + j, v).bits(t.floating) for j in range(self.runs)
            ]
            for i in range(t.rows):
                at, part = v * t.rows + i, f.const(0.0, t.floating)
                for ints, scale in zip(runs, scales, strict=True):
                    part = f.fma(ints[at].to(f32), scale, part)
                out[at] = f.fma(part, t.tile_float(x, self.block // 4, i), out[at])
        return out


def _multiply_blocks(fmt: AmxBlocks | AmxShared, f: Function, stride: int) -> None:
    """One tile of rows times some blocks with scales, whose sums are in registers meanwhile."""
    t, regs = _micro_tile(f), _BlockTiles(f, fmt.shapes)

    def places(b: Value) -> tuple[Value, Value]:
        return f.gep(f["blocks"], b, LINE * fmt.lines), f.gep(f["x"], b, fmt.tile_bytes)

    def add(b: Value, count: int, given: Sequence[Value]) -> list[Value]:
        for q in range(count):
            w, x = places(b + q)
            for j in range(fmt.runs):
                codes = f.gep(w, LINE * (fmt.run // 4) * j), f.gep(x, fmt.run * j)
                regs.sum(q * fmt.runs + j, *codes, fmt.run, fmt.block)
        sums = f.carry(given)
        for i in sums.range(0, count):
            stored = f.gep(regs.buffer, i, _SUMS * fmt.runs)
            sums.values = fmt.add_scaled(t, *places(b + i), stored, sums.values)
        return sums.values

    at_once = max(1, _AT_ONCE // fmt.runs)
    sums = f.carry([f.load(p, t.floating) for p in t.places(f["out"], stride)])
    whole = f["count"] - f["count"].urem(at_once)
    for b in sums.range(0, whole, at_once):
        sums.values = add(b, at_once, sums.values)
    for b in sums.range(whole, f["count"]):
        sums.values = add(b, 1, sums.values)
    t.write(sums.values, f["out"], stride)


class AmxRow(UnpackedRow):
    """Pieces of a row that is one single block: signed codes, with zeros behind the last."""

    tiles = (4, 1)
    shapes = _WHOLE
    tile_bytes = TILE_BYTES  # rows of a block lie one after another

    def __init__(self, fmt: BlockFormat, target: Target) -> None:
        super().__init__(fmt, target)
        self.block = TILE_BYTES
        self.unpacked = SignedCodes.of_format(fmt, TILE_BYTES // 4)
        self.lines = self.unpacked.lines

    def write(self, t: UnpackTile, column_tile: ColumnTile, b: Value, to: Value) -> None:
        f, fmt, row = t.f, self.fmt, column_tile.block(t.f.i64(0))
        most = TILE_BYTES // (4 * fmt.streams)
        steps = f.min(column_tile.k.udiv(4 * fmt.streams) - b * most, most)
        for _ in f.when(steps < most):
            for i in f.range(0, self.lines):
                t.put([f.const(0, t.dot.sums)] * t.vectors, f.gep(to, i, LINE), 0)
        w = WeightBlock(f.gep(row.words, b * most, LINE), row.fields)
        for loop in fmt.dot_loops(t, w, to, steps):
            t.dot.accumulate(loop, t.zeros())

    def multiply(self, f: Function, tiles: int, stride: int) -> None:
        # Behind a row's last code a tile has what follows it in memory, times zeros.
        regs, rows, weights = Tiles(f, self.shapes), range(tiles), 7
        sums = [f.gep(f["out"], 4 * stride * TILE_ROWS * r) for r in rows]
        for r, at in enumerate(sums):
            regs.load(r, at, 4 * stride)
        for b in f.range(0, f["count"]):
            regs.load(weights, f.gep(f["blocks"], b, LINE * self.lines), LINE)
            for r in rows:
                x = 4 + r % 3
                regs.load(x, f.gep(f.gep(f["x"], b, TILE_BYTES), f["next"] * r), f["k"])
                regs.multiply("ss", r, x, weights)
        for r, at in enumerate(sums):
            regs.store(r, at, 4 * stride)

    def scale(self, t: MicroTile, column_tile: ColumnTile, out: Value, stride: int) -> None:
        f, meta = t.f, column_tile.k.udiv(4)
        ints = [f.load(place, t.dot.sums) for place in t.places(out, stride)]
        row = column_tile.block(f.i64(0))
        t.write(self.fmt.scaled(t, row, column_tile.x, meta, ints, t.float_zeros()), out, stride)


def _amx_format(fmt: Format, target: Target) -> AmxKQuant | AmxBlocks | AmxShared | AmxRow:
    if isinstance(fmt, SharedScaleFormat):
        return AmxShared(fmt)
    if isinstance(fmt, KQuantFormat):
        return AmxKQuant(fmt, target)
    assert isinstance(fmt, BlockFormat)
    return AmxBlocks(fmt, target) if fmt.block else AmxRow(fmt, target)


class AmxGemm:
    """The functions for more than one row, and the memory that they share."""

    packed_widths = (1,)

    def __init__(
        self, m: Module, scheme: QuantScheme, fmt: Format, layout: RowLayout, tiles_per_panel: int
    ) -> None:
        self.fmt, self.scheme, self.layout = _amx_format(fmt, m.target), scheme, layout
        self.tile, self.stride = TILE_ROWS, TILE_COLUMNS * tiles_per_panel
        self.most = max(1, _CACHE // (LINE * self.fmt.lines))
        self.unpack = self._emit_unpack(m)
        self.multiply = {tiles: self._emit_multiply(m, tiles) for tiles in self.fmt.tiles}
        self.scale = self._emit_scale(m, self.fmt) if isinstance(self.fmt, AmxRow) else None

    def _emit_unpack(self, m: Module) -> Function:
        """void unpack(ptr column_tile, i64 first, i64 count, i64 k, ptr out): blocks of a column
        tile."""
        params = [("column_tile", ptr), ("first", i64), ("count", i64), ("k", i64), ("out", ptr)]
        f = m.function("unpack", params, internal=True)
        fmt, t = self.fmt, UnpackTile(f, self.fmt.unpacked)
        column_tile = ColumnTile(f, self.scheme, f["column_tile"], f["out"], f["k"])
        for b in f.range(0, f["count"]):
            fmt.write(t, column_tile, f["first"] + b, f.gep(f["out"], b, LINE * fmt.lines))
        return f

    def _emit_multiply(self, m: Module, tiles: int) -> Function:
        """void multiply(ptr blocks, ptr x, i64 next, i64 k, i64 count, ptr out): add the products
        of unpacked blocks with some tiles of rows, `next` bytes apart."""
        f = m.function(f"multiply{tiles}", _PARAMS, internal=True)
        self.fmt.multiply(f, tiles, self.stride)
        return f

    def _emit_scale(self, m: Module, fmt: AmxRow) -> Function:
        """void scale(ptr column_tile, ptr x, i64 k, ptr out): a tile's integer sums to f32."""
        params = [("column_tile", ptr), ("x", ptr), ("k", i64), ("out", ptr)]
        f = m.function("scale", params, internal=True)
        column_tile = ColumnTile(f, self.scheme, f["column_tile"], f["x"], f["k"])
        fmt.scale(_micro_tile(f), column_tile, f["out"], self.stride)
        return f

    def reserve(self, f: Function) -> None:
        """Allocate unpacked blocks, and accumulators of ACC_ROWS rows."""
        self.f = f
        self.blocks = f.alloca(LINE * self.fmt.lines * self.most)
        self.acc = f.alloca(4 * self.stride * ACC_ROWS)

    def clear(self, rows: Value) -> None:
        """Zero the accumulators of so many rows."""
        clear_rows(self.f, self.acc, rows, self.tile, self.stride)

    def accumulate(
        self, column_tile: Value, s: int, x: Value, rows: Value, row: Value, k: Value
    ) -> None:
        """Accumulate `rows` rows, in whole tiles, with column tile s of a panel."""
        f, fmt = self.f, self.fmt
        acc = f.gep(self.acc, 4 * TILE_COLUMNS * s)
        tiles, next_ = f.ceil_div(rows, self.tile), row * self.tile
        count = f.ceil_div(k, fmt.block)
        Tiles(f, fmt.shapes).configure()
        for b in f.range(0, count, self.most):
            some = f.min(count - b, self.most)
            f.call(self.unpack, column_tile, b, some, k, self.blocks)
            done = f.i64(0)
            for size, function in self.multiply.items():
                end = tiles - (tiles - done).urem(size)
                for i in f.range(done, end, size):
                    first = f.gep(f.gep(x, i * next_), b, fmt.tile_bytes)
                    out = f.gep(acc, i, 4 * self.stride * self.tile)
                    f.call(function, self.blocks, first, next_, k, some, out)
                done = end
        if self.scale is not None:
            for i in f.range(0, tiles):
                out = f.gep(acc, i, 4 * self.stride * self.tile)
                f.call(self.scale, column_tile, f.gep(x, i * next_), k, out)
        Tiles(f, fmt.shapes).release()
