"""The micro-tile of quantised GEMM: a few rows of activations against the 16 columns of a column
tile.

Activations lie as `layouts.quant_rows` describes; each word is broadcast to all lanes. The tile's
f32 sums lie in memory, `[row][columns]`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlx.backends.cpu.kernels.qgemm.dot import Index, IntDot, make_dot
from rlx.backends.cpu.layouts.quant_tiles import LINE
from rlx.llvm.builder import Function, Value, f16, f32, i8, i16, i32, vec


class MicroTile:
    """`vectors` vectors of columns for `rows` rows: what format emitters build on.

    Addresses of a column tile are those of its first column: `shift` is the first column of this
    pass, and everything with one entry per column is offset by it.
    """

    def __init__(self, f: Function, rows: int, vectors: int, shift: Value) -> None:
        self.f, self.rows, self.vectors = f, rows, vectors
        self.dot: IntDot = make_dot(f, rows)
        self.lanes = self.dot.lanes
        self.floating = vec(self.lanes, f32)
        self.shift = shift
        self.columns = range(vectors)
        self.ahead = f.target.read_ahead if rows == 1 else 0

    def group_streams(self, streams: list[int]) -> list[list[int]]:
        """Streams of codes that share lines, in groups that leave registers for their sums."""
        room = 16 if self.f.target.num_vector_registers >= 32 else 4
        size = max(1, min(len(streams), room // (self.rows * self.vectors)))
        return [streams[i : i + size] for i in range(0, len(streams), size)]

    # -- weights ----------------------------------------------------------------------------

    def line(self, base: Value, index: Index, v: int) -> Value:
        """Four codes of each column of vector v, in word `index` of a block."""
        at = self.f.gep(base, index, LINE)
        return self.f.load(self.f.gep(at, self.shift, 4), self.dot.bytes, 4 * self.lanes * v)

    def word(self, base: Value, index: Index, v: int) -> Value:
        return self.line(base, index, v).bits(self.dot.sums)

    def streamed(self, base: Value, index: Index, v: int) -> Value:
        """A line of codes; with one row a later line is prefetched."""
        if self.ahead and v == 0:
            self.f.prefetch(self.f.gep(base, index, LINE), self.ahead)
        return self.line(base, index, v)

    def nibbles(self, raw: Value) -> list[Value]:
        """The low and the high halves of bytes."""
        return [raw & 15, (raw.bits(self.dot.sums) >> 4).bits(raw.type) & 15]

    def shifted(self, word: Value, count: Value) -> Value:
        """Lanes shifted right by one number of bits."""
        return word >> self.f.splat(count.to(i32), self.lanes)

    def f16_field(self, base: Value, v: int) -> Value:
        """The f16 of every column, as f32."""
        at = self.f.gep(base, self.shift, 2)
        return self.f.load(at, vec(self.lanes, f16), 2 * self.lanes * v).to(f32)

    def f32_field(self, base: Value, v: int) -> Value:
        at = self.f.gep(base, self.shift, 4)
        return self.f.load(at, vec(self.lanes, f32), 4 * self.lanes * v)

    def byte_field(self, base: Value, v: int, signed: bool) -> Value:
        """The byte of every column, as i32."""
        at = self.f.gep(base, self.shift)
        return self.f.load(at, vec(self.lanes, i8), self.lanes * v).to(i32, signed=signed)

    def low_f16(self, word: Value) -> Value:
        """The f16 in the low half of every lane."""
        return word.to(i16).bits(vec(self.lanes, f16)).to(f32)

    # -- activations ------------------------------------------------------------------------

    def rows_at(self, base: Value, index: Index) -> Value:
        """Address of word `index` of all rows."""
        return self.f.gep(base, index, 4 * self.rows)

    def x(self, base: Value, index: Index, row: int) -> Value:
        """Word `index` of a row of the tile, in every lane."""
        return self.dot.row(self.rows_at(base, index), row)

    def x_float(self, base: Value, index: Index, row: int) -> Value:
        at = self.rows_at(base, index)
        return self.f.broadcast_load(at, f32, self.lanes, 4 * row)

    # -- sums -------------------------------------------------------------------------------

    def zeros(self) -> list[Value]:
        return [self.f.const(0, self.dot.sums)] * (self.vectors * self.rows)

    def float_zeros(self) -> list[Value]:
        return [self.f.const(0.0, vec(self.lanes, f32))] * (self.vectors * self.rows)

    def place(self, out: Value, stride: int, v: int, row: int) -> Value:
        """Address of the sums of vector v and a row, `stride` columns to a row."""
        at = self.f.gep(out, self.shift, 4)
        return self.f.gep(at, 4 * (row * stride + v * self.lanes))

    def places(self, out: Value, stride: int) -> Iterator[Value]:
        """Addresses of all sums, in order."""
        for v in self.columns:
            for i in range(self.rows):
                yield self.place(out, stride, v, i)

    def write(self, sums: list[Value], out: Value, stride: int) -> None:
        for value, place in zip(sums, self.places(out, stride), strict=True):
            self.f.store(value, place)
