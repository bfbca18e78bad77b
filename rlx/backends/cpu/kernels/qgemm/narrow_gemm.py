"""int8 GEMM with sums of 16 bits, for targets whose dot product is `pmaddubsw`.

Rows are codes of 7 bits with 64 added (layout "unsigned"), weights are signed bytes as they lie in
column tiles. A product of four words of k, 16 weights, is summed in 16 bits before `pmaddwd` widens
it: 1.25 multiplications for each line of weights in place of 2. Additions of 16 bits wrap, so that
only the sum must fit: it does where neither the positive nor the negative weights that share a lane
add up to more than LANE_LIMIT, which the quantiser sees to (`rlx.ir.quant.plain`) and which is
checked for every run of blocks. Others are widened word by word: the results are the same.

The 64 are corrected by the sums of the weights, where the sums of a block start.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.kernels.qgemm.block_formats import ColumnTile, Format, WeightBlock
from rlx.backends.cpu.kernels.qgemm.dot import Maddubs, MicroTile, dot_kind
from rlx.backends.cpu.kernels.qgemm.unpacked_gemm import clear_rows
from rlx.backends.cpu.layouts.quant_rows import OFFSET, RowLayout
from rlx.backends.cpu.layouts.quant_tiles import LINE, TILE_COLUMNS
from rlx.ir.quant.scheme import LANE_BLOCK, LANE_LIMIT, LANE_WORDS, QuantScheme
from rlx.llvm.builder import Function, Module, Value, f32, i32, i64, ptr, vec
from rlx.llvm.target import Target

ACC_ROWS = 256  # rows whose accumulators stay in memory while the blocks of a column tile pass by
_CACHE = 16 << 10  # bytes of a run of blocks: they and a tile's rows stay in the L1 cache
_PARAMS = [
    ("column_tile", ptr), ("starts", ptr), ("x", ptr), ("next", i64), ("first", i64),
    ("count", i64), ("out", ptr),
]  # fmt: skip


def suits_narrow(scheme: QuantScheme, target: Target) -> bool:
    """Whether weights of the scheme take rows of 7 bits on the target."""
    symmetric = scheme.packed_dtype == "i8" and scheme.has_scale and not scheme.has_zero_point
    blocks = scheme.block is not None and scheme.block % LANE_BLOCK == 0
    few_registers = dot_kind(target) is Maddubs and target.num_vector_registers <= 16
    return symmetric and blocks and few_registers


class _Lines:
    """Products of lines of weights with codes of rows."""

    def __init__(self, f: Function) -> None:
        self.f, self.dot = f, Maddubs(f, 1, f.target.lanes(32))
        self.sums, self.bytes, self.halves = self.dot.sums, self.dot.bytes, self.dot.halves
        self.ones = f.const(1, self.halves)

    def load(self, words: Value, index: Value | int, at: int = 0) -> Value:
        return self.f.load(self.f.gep(words, index, LINE), self.bytes, at)

    def row(self, at: Value, offset: int) -> Value:
        """A word of a row in every lane."""
        return self.f.broadcast_load(at, i32, self.dot.lanes, offset).bits(self.bytes)

    def multiply(self, unsigned: Value, signed: Value) -> Value:
        """Sums of two products, in 16 bits."""
        return self.dot.multiply_bytes(unsigned, signed)

    def widen(self, halves: Value) -> Value:
        """Sums of two 16-bit sums."""
        return self.dot.multiply_halves(halves, self.ones)


class NarrowFormat(Format):
    """The dot products of a single row, which is read at memory speed."""

    kind = "unsigned"

    def __init__(self, block: int) -> None:
        self.block = block

    def emit(self, t: MicroTile, column_tile: ColumnTile, out: Value, stride: int) -> None:
        f, lines = t.f, _Lines(t.f)
        offset = f.const(OFFSET, lines.bytes)
        sums = f.carry(t.float_zeros())
        for b in sums.range(0, column_tile.k.udiv(self.block)):
            w, x = column_tile.block(b), f.gep(column_tile.x, b, (self.block + 4) * t.rows)
            ints = f.carry(t.zeros())
            for g in ints.range(0, self.block // 4):
                codes, found = t.x(x, g, 0).bits(lines.bytes), []
                for v, total in enumerate(ints.values):
                    line = t.streamed(w.words, g, v)
                    # both fit 16 bits, and so does their difference
                    pairs = lines.multiply(codes, line) - lines.multiply(offset, line)
                    found.append(total + lines.widen(pairs))
                ints.values = found
            by = t.x_float(x, self.block // 4, 0)
            scales = [t.f32_field(w.fields[0], v) for v in t.columns]
            terms = zip(ints.values, scales, sums.values, strict=True)
            sums.values = [f.fma(i.to(f32), s * by, total) for i, s, total in terms]
        t.write(sums.values, out, stride)


class NarrowGemm:
    """The functions for more than one row, and the memory that they share."""

    packed_widths = (1,)

    def __init__(
        self, m: Module, scheme: QuantScheme, layout: RowLayout, tiles_per_panel: int
    ) -> None:
        self.scheme, self.layout = scheme, layout
        self.block, self.tile = layout.block, layout.tile
        self.stride = TILE_COLUMNS * tiles_per_panel
        self.sum = self._emit_sum(m)
        self.add_two = self._emit_add(m, "add_two", 2, LANE_WORDS)
        self.add_one = self._emit_add(m, "add_one", 1, LANE_WORDS)
        self.add_wide = self._emit_add(m, "add_wide", 1, 1)

    def _emit_sum(self, m: Module) -> Function:
        """i32 sum(ptr column_tile, i64 first, i64 count, ptr out)

        -64 times the sums of the columns of blocks; the result is the largest sum of weights of one
        sign in a lane.
        """
        params = [("column_tile", ptr), ("first", i64), ("count", i64), ("out", ptr)]
        f = m.function("sum", params, i32, internal=True)
        lines, lanes = _Lines(f), f.target.lanes(32)
        column_tile = self._column_tile(f)
        one, zero = f.const(1, lines.bytes), f.const(0, lines.bytes)
        worst = f.carry([f.const(0, lines.halves)])
        for b in worst.range(0, f["count"]):
            words = column_tile.block(f["first"] + b).words
            for shift in worst.range(0, TILE_COLUMNS, lanes):
                part = f.gep(words, shift, 4)
                total = f.carry([f.const(0, lines.sums), *worst.values])
                for g in total.range(0, self.block // 4, LANE_WORDS):
                    loaded = [lines.load(part, g, LINE * j) for j in range(LANE_WORDS)]
                    every = _added([lines.multiply(one, w) for w in loaded])
                    above = _added([lines.multiply(one, f.max(w, zero)) for w in loaded])
                    sums, most = total.values
                    most = f.max(most, f.max(above, above - every))
                    total.values = [sums + lines.widen(every), most]
                sums, most = total.values
                f.store(sums * -OFFSET, f.gep(f.gep(f["out"], b, LINE), shift, 4))
                worst.values = [most]
        f.ret(f.reduce("max", worst.values[0]).to(i32))
        return f

    def _column_tile(self, f: Function) -> ColumnTile:
        return ColumnTile(f, self.scheme, f["column_tile"], f.null(), f.i64(0))

    def _emit_add(self, m: Module, name: str, tiles: int, words: int) -> Function:
        """void add(ptr column_tile, ptr starts, ptr x, i64 next, i64 first, i64 count, ptr out)

        Accumulate `count` blocks from `first` on, for `tiles` tiles of rows, `next` bytes apart;
        `words` words are summed in 16 bits.
        """
        f = m.function(name, _PARAMS, internal=True)
        lanes, rows = f.target.lanes(32), self.tile * tiles
        column_tile, size = self._column_tile(f), (self.block + 4) * self.tile
        for shift in f.range(0, TILE_COLUMNS, lanes):
            out = f.gep(f["out"], shift, 4)
            for b in f.range(0, f["count"]):
                w, x = column_tile.block(f["first"] + b), f.gep(f["x"], b, size)
                w = WeightBlock(f.gep(w.words, shift, 4), [f.gep(w.fields[0], shift, 4)])
                starts = f.gep(f.gep(f["starts"], b, LINE), shift, 4)
                sums = f.carry([f.load(starts, vec(lanes, i32))] * rows)
                at = [f.gep(x, f["next"] * t) for t in range(tiles)]
                for g in sums.range(0, self.block // 4, words):
                    sums.values = self._words(f, w.words, at, g, words, sums.values)
                self._scale(f, w.fields[0], at, sums.values, out)
        return f

    def _words(
        self, f: Function, w: Value, x: Sequence[Value], g: Value, words: int, sums: Sequence[Value]
    ) -> list[Value]:
        """The sums plus the products of `words` words of all rows."""
        lines, out = _Lines(f), []
        loaded = [lines.load(w, g, LINE * j) for j in range(words)]
        for i, total in enumerate(sums):
            at = f.gep(x[i // self.tile], g, 4 * self.tile)
            places = [4 * (i % self.tile + self.tile * j) for j in range(words)]
            products = [
                lines.multiply(lines.row(at, place), line)
                for place, line in zip(places, loaded, strict=True)
            ]
            out.append(total + lines.widen(_added(products)))
        return out

    def _scale(
        self, f: Function, scales: Value, x: Sequence[Value], sums: Sequence[Value], out: Value
    ) -> None:
        """Add the scaled sums of a block to the accumulators."""
        floats = vec(f.target.lanes(32), f32)
        scale = f.load(scales, floats)
        for i, total in enumerate(sums):
            place = self.block * self.tile + 4 * (i % self.tile)
            by = f.broadcast_load(x[i // self.tile], f32, floats.lanes, place)
            to = f.gep(out, 4 * self.stride * i)
            f.store(f.fma(total.to(f32), scale * by, f.load(to, floats)), to)

    def reserve(self, f: Function) -> None:
        """Allocate sums of blocks, and accumulators of ACC_ROWS rows."""
        self.f = f
        self.most = max(1, _CACHE // (16 * self.block))
        self.starts = f.alloca(LINE * self.most)
        self.acc = f.alloca(4 * self.stride * ACC_ROWS)

    def accumulate(
        self, column_tile: Value, s: int, x: Value, rows: Value, row: Value, k: Value
    ) -> None:
        """Accumulate `rows` rows, in whole tiles, with column tile s of a panel."""
        f = self.f
        count, tiles = k.udiv(self.block), f.ceil_div(rows, self.tile)
        acc = f.gep(self.acc, 4 * TILE_COLUMNS * s)
        pairs = tiles - (tiles & 1)
        for b in f.range(0, count, self.most):
            some = f.min(count - b, self.most)
            worst = f.call(self.sum, column_tile, b, some, self.starts)

            def add(by: Function, i: Value) -> None:
                tile = i * self.tile
                first = f.gep(f.gep(x, tile * row), b, (self.block + 4) * self.tile)  # noqa: B023
                to = f.gep(acc, tile, 4 * self.stride)
                next_ = row * self.tile
                f.call(by, column_tile, self.starts, first, next_, b, some, to)  # noqa: B023

            for is_narrow in f.either(worst <= LANE_LIMIT):
                if is_narrow:
                    for i in f.range(0, pairs, 2):
                        add(self.add_two, i)
                    for i in f.range(pairs, tiles):
                        add(self.add_one, i)
                else:
                    for i in f.range(0, tiles):
                        add(self.add_wide, i)

    def clear(self, rows: Value) -> None:
        """Zero the accumulators of so many rows."""
        clear_rows(self.f, self.acc, rows, self.tile, self.stride)


def _added(values: Sequence[Value]) -> Value:
    """The sum, of neighbours first."""
    while len(values) > 1:
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
