"""Products of many rows with unpacked weights: some blocks of a strip, then all tiles of rows.

The sums of the tiles wait in memory for the next blocks.
"""

from __future__ import annotations

from rlx.codegen.emit import Function, Module, Value, f32, i64, ptr, vec
from rlx.codegen.qmatmul.dot import Maddubs, Widened, dot_kind
from rlx.codegen.qmatmul.formats import Format, Runs, Strip
from rlx.codegen.qmatmul.tile import Tile
from rlx.codegen.qmatmul.unpacked import (
    Piece,
    UnpackedRow,
    Unpacking,
    blocks_at_once,
    unpacked_format,
)
from rlx.ir.quant import QuantScheme
from rlx.ir.quant_strips import LINE, ROWS

PART = 256  # rows whose sums wait
_VECTORS = 2  # of columns that a tile has: as many sums as leave registers for codes


class ManyRows:
    """The functions of one kernel for more than one row, and the memory that they share."""

    def __init__(
        self, m: Module, scheme: QuantScheme, form: Format, tile: int, strips: int
    ) -> None:
        self.form, self.scheme = unpacked_format(form), scheme
        self.tile, self.strips, self.stride = tile, strips, ROWS * strips
        self.unpack, self.add = self._emit_unpack(m), self._emit_add(m)
        self.scale = self._emit_scale(m) if isinstance(self.form, UnpackedRow) else None

    @staticmethod
    def of(m: Module, scheme: QuantScheme, form: Format, tile: int, strips: int) -> ManyRows | None:
        """None where tiles had better read strips as they are."""
        if dot_kind(m.target) is not Maddubs or m.target.num_vector_registers > 16:
            return None
        if isinstance(form, Runs):  # rows meant for another target
            return None
        return ManyRows(m, scheme, form, tile, strips)

    def _emit_unpack(self, m: Module) -> Function:
        """void unpack(ptr strip, i64 first, i64 count, ptr out): some blocks of a strip."""
        params = [("strip", ptr), ("first", i64), ("count", i64), ("out", ptr)]
        f = m.function("unpack", params, internal=True)
        form, t = self.form, Unpacking(f, self.form.unpacked)
        strip = Strip(f, self.scheme, f["strip"], f["out"], f["count"])
        for b in f.range(0, f["count"]):
            form.write(t, strip, f["first"] + b, f.gep(f["out"], b, LINE * form.lines))
        return f

    def _emit_add(self, m: Module) -> Function:
        """void add(ptr blocks, ptr x, i64 count, ptr out): the products of unpacked blocks with a
        tile of rows, added to its sums."""
        params = [("blocks", ptr), ("x", ptr), ("count", i64), ("out", ptr)]
        f = m.function("add", params, internal=True)
        piece = Piece(f["blocks"], f["x"], f["count"])
        for shift in f.range(0, ROWS, f.target.lanes(32) * _VECTORS):
            self.form.add(self._tile(f, shift), piece, f["out"], self.stride)
        return f

    def _emit_scale(self, m: Module) -> Function:
        """void scale(ptr strip, ptr x, i64 k, ptr out): a tile's integers into numbers."""
        params = [("strip", ptr), ("x", ptr), ("k", i64), ("out", ptr)]
        f = m.function("scale", params, internal=True)
        assert isinstance(self.form, UnpackedRow)
        strip = Strip(f, self.scheme, f["strip"], f["x"], f["k"])
        for shift in f.range(0, ROWS, f.target.lanes(32) * _VECTORS):
            self.form.scale(self._tile(f, shift), strip, f["out"], self.stride)
        return f

    def _tile(self, f: Function, shift: Value) -> Tile:
        t = Tile(f, self.tile, _VECTORS, shift)
        if self.form.unpacked.bits == 8:
            t.dot = Widened(f, t.rows, t.lanes)
        return t

    def reserve(self, f: Function) -> None:
        """Memory in the kernel: unpacked blocks, and sums of a part of the rows."""
        self.f = f
        self.blocks = f.alloca(LINE * self.form.lines * blocks_at_once(self.form))
        self.sums = f.alloca(4 * self.stride * PART)

    def run(self, strip: Value, s: int, x: Value, rows: Value, row: Value, k: Value) -> None:
        """The sums of whole tiles of `rows` rows with strip s of a panel."""
        f, form = self.f, self.form
        count, most = k.udiv(form.block), blocks_at_once(form)
        sums = f.gep(self.sums, 4 * ROWS * s)
        tiles = f.ceil_div(rows, self.tile)

        def places(i: Value) -> tuple[Value, Value]:
            tile = i * self.tile
            return f.gep(x, tile * row), f.gep(sums, tile, 4 * self.stride)

        for b in f.range(0, count, most):
            some = f.min(count - b, most)
            f.call(self.unpack, strip, b, some, self.blocks)
            for i in f.range(0, tiles):
                at, out = places(i)
                first = f.gep(at, b, form.row_bytes * self.tile)
                f.call(self.add, self.blocks, first, some, out)
        if self.scale is not None:
            for i in f.range(0, tiles):
                at, out = places(i)
                f.call(self.scale, strip, at, k, out)

    def clear(self, rows: Value) -> None:
        """Sums of so many rows begin with zeros."""
        f, wide = self.f, vec(self.f.target.lanes(32), f32)
        size = f.ceil_div(rows, self.tile) * (4 * self.stride * self.tile)
        for at in f.range(0, size, wide.bytes):
            f.store(f.const(0.0, wide), f.gep(self.sums, at))
