"""Activations quantised to 8 bits, laid out as `rlx.ir.quant_rows` says."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.codegen.emit import Function, Module, Value, f32, i8, i16, i32, i64, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.storage import load, memory_type
from rlx.ir.dtype import DType
from rlx.ir.quant_rows import TINY, RowLayout

_STEP = 16  # codes at a time: a run of the smallest kind


@dataclass(frozen=True)
class QuantizeRows(KernelSpec):
    """words: x, out, rows, k

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
        x, out = f.word(f["words"], 0), f.word(f["words"], 1)
        rows, k = (f.word(f["words"], i, i64) for i in (2, 3))
        layout = self.layout
        size, blocks, bytes_ = self.sizes(f, k)
        lo, hi = f.split(rows * blocks)
        for unit in f.range(lo, hi):
            row = unit.udiv(blocks)
            b = unit - row * blocks
            place, width = tile_of(f, layout, row, rows, blocks * bytes_)
            base = f.gep(out, place)
            inside = row & layout.tile - 1
            to = f.gep(f.gep(base, b * bytes_ * width), inside, 4)
            source = f.gep(x, row * k + b * size, memory_type(self.x))
            self.block(f, source, to, width, size)

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
        usable = ~(peak < TINY)
        inverse = f.select(usable, f.const(127.0, f32) / peak, 0.0)
        scale = f.select(usable, peak * (1 / 127), 0.0)
        factor = f.splat(inverse, _STEP)
        meta = f.gep(to, size.udiv(4) * width, 4)
        # Adding 1.5 * 2^23 rounds to nearest even and leaves the code in the low bits.
        magic = f.const(12582912.0, vec(_STEP, f32))

        def encode(i: Value, *totals: Value) -> list[Value]:
            with f.exact():
                codes = (step(i) * factor + magic).bits() - 0x4B400000
            words = codes.to(i8).bits(vec(_STEP // 4, i32))
            for j in range(_STEP // 4):
                f.store(f.extract(words, j), f.gep(to, (i.udiv(4) + j) * width, 4))
            if not totals:
                self._put_run(f, meta, width, i.udiv(_STEP), f.reduce("add", codes))
            return [total + codes for total in totals]

        f.store(scale, meta)
        if self.layout.kind == "super":
            f.loop(0, size, _STEP, [], encode)
            self._put_pairs(f, meta, width)
            return
        total = f.reduce("add", f.loop(0, size, _STEP, [f.const(0, wide)], encode)[0])
        f.store(-total, f.gep(meta, width, 4))
        f.store(scale * total.to(f32), f.gep(meta, width * 2, 4))

    def _put_run(self, f: Function, meta: Value, width: Value, run: Value, total: Value) -> None:
        """The sum of a run of 16 at its place among the pairs: (0, 2), (1, 3), (4, 6), ..."""
        word = (run >> 2) * 2 + (run & 1) + 1
        half = run >> 1 & 1
        f.store(total.to(i16), f.gep(f.gep(meta, word * width, 4), half, 2))

    def _put_pairs(self, f: Function, meta: Value, width: Value) -> None:
        """Sums of runs of 32 from those of 16, in the same order."""

        def sixteen(run: Value) -> Value:
            word = (run >> 2) * 2 + (run & 1) + 1
            at = f.gep(f.gep(meta, word * width, 4), run >> 1 & 1, 2)
            return f.load(at, i16)

        for run in f.range(0, 8):
            both = sixteen(run * 2) + sixteen(run * 2 + 1)
            word = (run >> 2) * 2 + (run & 1) + 9
            f.store(both, f.gep(f.gep(meta, word * width, 4), run >> 1 & 1, 2))


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
