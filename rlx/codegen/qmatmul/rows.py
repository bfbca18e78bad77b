"""Activations quantised to 8 bits, laid out as `rlx.ir.quant_rows` says."""

from __future__ import annotations

from rlx.codegen.emit import Function, Module, Value, f32, i8, i16, i32, i64, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.qmatmul.row_tiles import TileBlock, beginning, encode, has_tiles, scale_and_inverse
from rlx.codegen.storage import load, memory_type
from rlx.ir.dtype import DType
from rlx.ir.quant_rows import RUN, RowLayout
from rlx.support.records import dataclass

_STEP = 16  # codes at a time: a run of the smallest kind


@dataclass(frozen=True)
class QuantizeRows(KernelSpec):
    """args: x, out, rows, k

    x [rows, k] becomes quantised rows. The kernel works block by block, so that the blocks of one
    row are shared by all workers.
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
        if has_tiles(layout):
            done = rows & -layout.tile
            self._tiles(f, x, out, done.udiv(layout.tile), k)
        lo, hi = f.split((rows - done) * blocks)
        for unit in f.range(lo, hi):
            above = unit.udiv(blocks)
            row, b = done + above, unit - above * blocks
            place, width = tile_of(f, layout, row, rows, blocks * bytes_)
            base = f.gep(out, place)
            inside = row & layout.tile - 1
            to = f.gep(f.gep(base, b * bytes_ * width), inside, 4)
            source = f.gep(x, row * k + b * size, memory_type(self.x))
            self.block(f, source, to, width, size)

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
        """Codes of a block, blocks of a row, and bytes of a block of one row."""
        block = self.layout.block
        size = f.i64(block) if block else k
        return size, k.udiv(size) if block else f.i64(1), size + 4 * self.layout.meta

    def block(self, f: Function, x: Value, to: Value, width: Value, size: Value) -> None:
        """One block; its words go to every `width`-th word from `to` on."""
        wide = vec(_STEP, i32)

        def step(i: Value) -> Value:
            return load(f, f.gep(x, i, memory_type(self.x)), self.x, _STEP, f32)

        # As integers, magnitudes order like numbers, and NaN comes out on top.
        [peaks] = f.loop(
            0, size, _STEP, [f.const(0, wide)],
            lambda i, top: f.max(top, step(i).bits() & 0x7FFFFFFF),
        )  # fmt: skip
        peak = f.reduce("max", peaks).bits(f32)
        scale, inverse = scale_and_inverse(f, peak)
        factor = f.splat(inverse, _STEP)
        meta = f.gep(to, size.udiv(4) * width, 4)
        stride = width * 4

        def put(i: Value) -> Value:
            codes = encode(f, step(i), factor)
            words = codes.to(i8).bits(vec(_STEP // 4, i32))
            first = f.gep(to, i * width)
            for j in range(_STEP // 4):
                f.store(f.extract(words, j), f.gep(first, stride * j))
            return codes

        f.store(scale, meta)
        if self.layout.kind == "super":
            for quarter in f.range(0, 4):
                runs = [put(quarter * 64 + run * _STEP) for run in range(4)]
                self._put_sums(f, meta, width, quarter, runs)
            return
        if self.layout.kind == "runs":
            for i in f.range(0, size, RUN):
                total = f.reduce("add", put(i) + put(i + _STEP))
                f.store(beginning(total), f.gep(meta, (i.udiv(RUN) + 1) * width, 4))
            return
        [totals] = f.loop(0, size, _STEP, [f.const(0, wide)], lambda i, t: t + put(i))
        total = f.reduce("add", totals)
        f.store(-total, f.gep(meta, width, 4))
        f.store(scale * total.to(f32), f.gep(meta, width * 2, 4))

    def _put_sums(
        self, f: Function, meta: Value, width: Value, quarter: Value, runs: list[Value]
    ) -> None:
        """The sums of four runs of 16 at their places among the pairs, and those of both 32."""
        pairs = [self._pair(f, runs[i], runs[i + 2]) for i in range(2)]
        for i, pair in enumerate(pairs):
            f.store(pair, f.gep(meta, (quarter * 2 + i + 1) * width, 4))
        for i, shift in enumerate((0, 16)):
            both = (pairs[0] >> shift) + (pairs[1] >> shift)
            word = (quarter >> 1) * 2 + i + 9
            f.store(both.to(i16), f.gep(f.gep(meta, word * width, 4), quarter & 1, 2))

    def _pair(self, f: Function, low: Value, high: Value) -> Value:
        """The sums of two runs in the halves of a word, made in one go."""
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
