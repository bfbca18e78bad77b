"""Quantisation of activations to 8 bits, in the layouts of `layouts.quant_rows`.

Rows that fill a tile are quantised together, so that one horizontal reduction serves all of them;
remainder rows one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.layouts.quant_rows import BIAS, RAISE, RUN, TINY, RowLayout
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Value, f32, i8, i16, i32, i64, vec
from rlx.llvm.horizontal import reduce_lanes
from rlx.llvm.storage import load, memory_type
from rlx.support.records import dataclass

_STEP = 16  # codes of a vector: the smallest run
RAISED = 0x01010101 * RAISE  # what turns a word of codes into one of a raised tile


def has_whole_tiles(layout: RowLayout) -> bool:
    """Whether blocks are whole runs, so that tiles of rows can be quantised together."""
    return layout.block > 0 and layout.block % RUN == 0


class TileBlock:
    """One block of all rows of a tile; `x` is the first row, others follow `stride` bytes apart."""

    def __init__(
        self, f: Function, dtype: DType, layout: RowLayout, x: Value, stride: Value, to: Value
    ) -> None:
        self.f, self.dtype, self.layout, self.to = f, dtype, layout, to
        self.tile = layout.tile
        self.codes_bytes = 2 if layout.wide else 1
        self.rows = [f.gep(x, stride * r) for r in range(self.tile)]

    def emit(self) -> None:
        f, block = self.f, self.layout.block
        self.scale, inverse = scale_and_inverse(f, self._row_maxima(), self.layout.limit)
        self.factors = [f.shuffle(inverse, None, [r] * _STEP) for r in range(self.tile)]
        self._store_meta(self.scale, 0)
        if self.layout.kind == "unsigned":
            for i in f.range(0, block, RUN):
                self._encode(i)
            return
        if self.layout.kind == "superblock":
            for half in f.range(0, 2):
                self._half_superblock(half)
            return
        if self.layout.kind == "shared":
            for i in f.range(0, block, RUN):
                self._store_meta(biased_start(add_halves(self._encode(i))), i.udiv(RUN) + 1)
            return
        sums = f.carry([f.const(0, vec(self.tile, i32))])
        for i in sums.range(0, block, RUN):
            sums.values = [sums.values[0] + add_halves(self._encode(i))]
        [total] = sums.values
        self._store_meta(-total, 1)
        self._store_meta(self.scale * total.to(f32), 2)

    def _load(self, row: int, i: Value) -> Value:
        at = self.f.gep(self.rows[row], i, memory_type(self.dtype))
        return load(self.f, at, self.dtype, _STEP, f32)

    def _row_maxima(self) -> Value:
        """Each row's max|x|. As integers, magnitudes order like floats, with NaN on top."""
        f = self.f
        tops = f.carry([f.const(0, vec(_STEP, i32))] * self.tile)
        for i in tops.range(0, self.layout.block, RUN):
            out = []
            for r, top in enumerate(tops.values):
                both = [self._load(r, i + at).bits() & 0x7FFFFFFF for at in (0, _STEP)]
                out.append(f.max(top, f.max(*both)))
            tops.values = out
        [maxima] = reduce_lanes(f, tops.values, self.tile, f.max)
        return maxima.bits(vec(self.tile, f32))

    def _encode(self, i: Value) -> list[Value]:
        """Store the codes from i on of all rows; returns the sums of every row's two runs of 16."""
        f, t = self.f, self.tile
        if self.layout.matrix:
            return self._encode_rows(i)
        words = [f.concat(*(self._words(r, i + at) for at in (0, _STEP))) for r in range(t)]
        if self.layout.paired:
            words = [w.bits(vec(w.type.lanes // 2, i64)) for w in words]
        while len(words) > 1:
            half = len(words) // 2
            words = [f.interleave(words[j], words[j + half]) for j in range(half)]
        [lines] = words
        stored = lines ^ RAISED if self.layout.raised else lines
        f.store(stored, f.gep(self.to, i * (self.codes_bytes * t)))
        lines = lines.bits(vec(8 * self.codes_bytes * t, i32))
        half = lines.type.lanes // 2
        return [self._sum(f.slice(lines, j * half, half)) for j in range(2)]

    def _encode_rows(self, i: Value) -> list[Value]:
        """As `_encode`, each row's codes together."""
        f, runs = self.f, []
        for at in (0, _STEP):
            codes = [
                encode(f, self._load(r, i + at), self.factors[r], self.layout.offset)
                for r in range(self.tile)
            ]
            for r, row in enumerate(codes):
                f.store(row.to(i8), f.gep(self.to, i + (r * self.layout.block + at)), align=1)
            runs += reduce_lanes(f, codes, self.tile)
        return runs

    def _words(self, row: int, i: Value) -> Value:
        codes = encode(self.f, self._load(row, i), self.factors[row], self.layout.offset)
        return wide_words(self.f, codes) if self.layout.wide else byte_words(codes)

    def _sum(self, lines: Value) -> Value:
        """The sum of each row's codes in some lines."""
        f, bits = self.f, 8 * self.codes_bytes
        total = lines.ashr(32 - bits)
        for shift in range(bits, 32, bits):
            total = total + (lines << shift).ashr(32 - bits)
        least = self.tile * (2 if self.layout.paired else 1)
        while total.type.lanes > least:
            half = total.type.lanes // 2
            total = f.slice(total, 0, half) + f.slice(total, half, half)
        if self.layout.paired:
            total = f.shuffle(total, None, range(0, least, 2)) + f.shuffle(
                total, None, range(1, least, 2)
            )
        return total

    def _half_superblock(self, half: Value) -> None:
        """128 codes, the sums of their runs of 16 as pairs, and those of runs of 32."""
        first, last = half * 4, half * 2
        longer: list[Value] = []
        for quarter in range(2):
            runs = []
            for group in range(2):
                runs += self._encode(half * 128 + (quarter * 2 + group) * RUN)
            for i in range(2):
                self._store_meta(pack_i16(runs[i], runs[i + 2]), first + (quarter * 2 + i + 1))
            longer += [runs[0] + runs[1], runs[2] + runs[3]]
        for i in range(2):
            self._store_meta(pack_i16(longer[i], longer[i + 2]), last + (9 + i))

    def _store_meta(self, values: Value, word: Value | int) -> None:
        """Store a metadata word of every row."""
        meta = self.f.gep(self.to, self.layout.block * self.codes_bytes * self.tile)
        self.f.store(values, self.f.gep(meta, word, 4 * self.tile))


def byte_words(codes: Value) -> Value:
    """Codes as words of four bytes."""
    return codes.to(i8).bits(vec(codes.type.lanes // 4, i32))


def wide_words(f: Function, codes: Value) -> Value:
    """Codes as i16: words of codes 0 and 2, and of codes 1 and 3, of every four."""
    lanes = codes.type.lanes
    order = [first + j for first in range(0, lanes, 4) for j in (0, 2, 1, 3)]
    return f.shuffle(codes.to(i16), None, order).bits(vec(lanes // 2, i32))


def add_halves(runs: Sequence[Value]) -> Value:
    """The sum of a run of 32 codes from those of its halves."""
    low, high = runs
    return low + high


def biased_start(total: Value) -> Value:
    """The start of a run's dot product with bytes that have 128 added."""
    return -(total << 7) + BIAS


def pack_i16(low: Value, high: Value) -> Value:
    """Two i16 in one i32."""
    return low & 0xFFFF | high << 16


def scale_and_inverse(f: Function, maximum: Value, limit: int = 127) -> tuple[Value, Value]:
    """The scale of a block and its inverse, from max|x|, for codes up to `limit`."""
    usable = ~(maximum < TINY)
    inverse = f.select(usable, f.const(float(limit), maximum.type) / maximum, 0.0)
    return f.select(usable, maximum * (1 / limit), 0.0), inverse


def encode(f: Function, numbers: Value, inverse: Value, offset: int = 0) -> Value:
    """Codes plus `offset`, as i32. Adding 1.5 * 2^23 rounds to nearest even and leaves them in the
    low bits."""
    with f.exact():
        return (numbers * inverse + 12582912.0).bits() - (BIAS - offset)


@dataclass(frozen=True)
class QuantizeRows(KernelSpec):
    """args: x, out, rows, k

    x [rows, k] becomes quantised rows. The work split is by blocks, so that all workers share the
    blocks of a single row.
    """

    x: DType
    layout: RowLayout

    @property
    def label(self) -> str:
        return f"quantize_rows {self.layout}"

    def emit(self, m: Module) -> None:
        f = m.kernel()
        x, out = f.arg(f["args"], 0), f.arg(f["args"], 1)
        rows, k = (f.arg(f["args"], i, i64) for i in (2, 3))
        layout = self.layout
        size, blocks, bytes_ = self.sizes(f, k)
        done = f.i64(0)
        if has_whole_tiles(layout):
            done = rows & -layout.tile
            self._tiles(f, x, out, done.udiv(layout.tile), k)
        lo, hi = f.split((rows - done) * blocks)
        for unit in f.range(lo, hi):
            row_index = unit.udiv(blocks)
            row, b = done + row_index, unit - row_index * blocks
            place, width = tile_of(f, layout, row, rows, blocks * bytes_)
            base = f.gep(out, place)
            inside = row & layout.tile - 1
            to = f.gep(f.gep(base, b * self.block_bytes(f, size, width) * width), inside, 4)
            source = f.gep(x, row * k + b * size, memory_type(self.x))
            self.block(f, source, to, inside, width, size)

    def _tiles(self, f: Function, x: Value, out: Value, tiles: Value, k: Value) -> None:
        """Blocks of rows that fill tiles."""
        layout = self.layout
        size, blocks, bytes_ = self.sizes(f, k)
        element = memory_type(self.x)
        lo, hi = f.split(tiles * blocks)
        for unit in f.range(lo, hi):
            tile = unit.udiv(blocks)
            first = tile * layout.tile * k + (unit - tile * blocks) * size
            to = f.gep(out, unit * (bytes_ * layout.tile))
            TileBlock(f, self.x, layout, f.gep(x, first, element), k * element.bytes, to).emit()

    def sizes(self, f: Function, k: Value) -> tuple[Value, Value, Value]:
        """Codes of a block, blocks of a row, and bytes of a block of one row of a full tile."""
        block = self.layout.block
        size = f.i64(block) if block else k
        bytes_ = self.block_bytes(f, size, f.i64(self.layout.tile))
        return size, k.udiv(size) if block else f.i64(1), bytes_

    def block_bytes(self, f: Function, size: Value, width: Value) -> Value:
        """Bytes of a block of one row of a tile of `width` rows."""
        return self._code_bytes(f, size, width) + 4 * self.layout.meta

    def _code_bytes(self, f: Function, size: Value, width: Value) -> Value:
        return f.select(width > 1, size * 2, size) if self.layout.wide else size

    def block(
        self, f: Function, x: Value, to: Value, inside: Value, width: Value, size: Value
    ) -> None:
        """One block of row `inside` of a tile; its words, or pairs of words, are stored `width`
        apart; `to` is where its first word would be."""
        wide = vec(_STEP, i32)
        codes_to, pitch = f.gep(to, inside, 4) if self.layout.paired else to, width
        if self.layout.matrix:
            full = width.eq(self.layout.tile)
            codes_to = f.gep(to, f.select(full, inside * (size - 4), 0))
            pitch = f.select(full, f.i64(1), width)

        def step(i: Value) -> Value:
            return load(f, f.gep(x, i, memory_type(self.x)), self.x, _STEP, f32)

        # As integers, magnitudes order like floats, with NaN on top.
        top = f.carry([f.const(0, wide)])
        for i in top.range(0, size, _STEP):
            top.values = [f.max(top.values[0], step(i).bits() & 0x7FFFFFFF)]
        maximum = f.reduce("max", top.values[0]).bits(f32)
        scale, inverse = scale_and_inverse(f, maximum, self.layout.limit)
        factor = f.splat(inverse, _STEP)
        meta = f.gep(to, self._code_bytes(f, size, width) * width)

        def put(i: Value) -> Value:
            codes = encode(f, step(i), factor, self.layout.offset)
            self._put(f, codes, codes_to, i, pitch, width > 1)
            return codes

        f.store(scale, meta)
        if self.layout.kind == "unsigned":
            for i in f.range(0, size, _STEP):
                put(i)
            return
        if self.layout.kind == "superblock":
            for quarter in f.range(0, 4):
                runs = [put(quarter * 64 + run * _STEP) for run in range(4)]
                self._store_run_sums(f, meta, width, quarter, runs)
            return
        if self.layout.kind == "shared":
            for i in f.range(0, size, RUN):
                total = f.reduce("add", put(i) + put(i + _STEP))
                f.store(biased_start(total), f.gep(meta, (i.udiv(RUN) + 1) * width, 4))
            return
        totals = f.carry([f.const(0, wide)])
        for i in totals.range(0, size, _STEP):
            totals.values = [totals.values[0] + put(i)]
        total = f.reduce("add", totals.values[0])
        f.store(-total, f.gep(meta, width, 4))
        f.store(scale * total.to(f32), f.gep(meta, width * 2, 4))

    def _put(
        self, f: Function, codes: Value, to: Value, i: Value, pitch: Value, several: Value
    ) -> None:
        """Store codes from i on, as a tile of several rows or a single row has them."""
        if not self.layout.wide:
            words = byte_words(codes)
            if self.layout.raised:
                raised = f.select(several, f.i32(RAISED), 0)
                words = words ^ f.splat(raised, words.type.lanes)
            self._put_words(f, words, f.gep(to, i * pitch), pitch)
            return
        for is_tile in f.either(several):
            if is_tile:
                self._put_words(f, wide_words(f, codes), f.gep(to, i * 2 * pitch), pitch)
            else:
                self._put_words(f, byte_words(codes), f.gep(to, i), pitch)

    def _put_words(self, f: Function, words: Value, to: Value, pitch: Value) -> None:
        """Store words, or pairs of them, `pitch` apart."""
        stride, align = pitch * 4, 0
        if self.layout.paired:
            words, align = words.bits(vec(words.type.lanes // 2, i64)), 4
            stride = pitch * 8
        for j in range(words.type.lanes):
            f.store(f.extract(words, j), f.gep(to, stride * j), align=align)

    def _store_run_sums(
        self, f: Function, meta: Value, width: Value, quarter: Value, runs: list[Value]
    ) -> None:
        """Store the sums of four runs of 16 as pairs, and those of both runs of 32."""
        pairs = [self._packed_sums(f, runs[i], runs[i + 2]) for i in range(2)]
        for i, pair in enumerate(pairs):
            f.store(pair, f.gep(meta, (quarter * 2 + i + 1) * width, 4))
        for i, shift in enumerate((0, 16)):
            both = (pairs[0] >> shift) + (pairs[1] >> shift)
            word = (quarter >> 1) * 2 + i + 9
            f.store(both.to(i16), f.gep(f.gep(meta, word * width, 4), quarter & 1, 2))

    def _packed_sums(self, f: Function, low: Value, high: Value) -> Value:
        """The sums of two runs in the halves of a word, in one reduction."""
        total = f.reduce("add", low + (high << 16))
        return total + ((total & 0x8000) << 1)  # a negative low half has borrowed from the high


def tile_of(
    f: Function, layout: RowLayout, row: Value, rows: Value, row_bytes: Value
) -> tuple[Value, Value]:
    """(byte where the tile of a row begins, rows of that tile)."""
    first = row & -layout.tile
    return first * row_bytes, tile_width(f, layout, rows - first)


def tile_width(f: Function, layout: RowLayout, left: Value) -> Value:
    """Rows of the tile that holds `left` rows."""
    width = f.i64(layout.tile)
    for size in reversed(layout.widths[:-1]):
        width = f.select(left <= size, f.i64(size), width)
    return width
