"""Products of packed weights in the ring with a vector, as products of integers.

A warp has 32 of each 512 columns, a lane all of them of a row of 32, or half of them of a row of
16: tensor cores would multiply eight columns where x has one, and leave sums of two rows and three
digits in different lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import WARP
from rlx.backends.cuda.kernels.persistent.product import Columns, Products, Tiles
from rlx.backends.cuda.kernels.persistent.shape import (
    COPY_UNIT,
    OUT_PLANES,
    PLANES,
    SUM_STRIDE,
    Part,
)
from rlx.backends.cuda.kernels.qgemm.digits import (
    DIGITS,
    SCALE_AT,
    Scale,
    add_products,
    digits,
    factors,
    quant_bytes,
)
from rlx.backends.cuda.kernels.qgemm.packed_rows import shared_words
from rlx.llvm.builder import Value, f32, i8, i16, i32, vec


class PackedProducts(Products):
    per_tile = 1
    most_registers = 17  # digits need more

    def _column(self) -> Value:
        return self.warp * WARP + self.lane

    # -- the vector -------------------------------------------------------------------------------

    def put(self, values: Sequence[Value]) -> None:
        at = self.warp * self.shape.planes_bytes + self.shape.place(PLANES)
        for i, value in enumerate(values):
            self._put_digits(value, at + i * self.shape.record)
        self.f.warp_barrier()

    def put_out(self, value: Value, column: Value) -> None:
        self._put_digits(value, (column >> 5) * self.shape.record + self.shape.place(OUT_PLANES))

    def _put_digits(self, value: Value, at: Value) -> None:
        """Store the warp's 32 numbers as digits."""
        f = self.f
        found = Scale(f, f.largest_of_warp(value.bits(i32) & 0x7FFFFFFF))
        number, scale = found.number(value), found.value()
        whole = digits(number)
        for i in range(DIGITS):
            digit = whole >> 8 * i if i else whole
            f.store_shared(digit.to(i8), at + self.lane, 32 * i)
        total = f.sum_of_warp(number).to(f32) * scale
        for _ in f.when(self.lane.eq(0)):
            f.store_shared(f.join([scale, total]), at, SCALE_AT, align=8)

    def _operands(self, part: Part, at: Value) -> list[Value]:
        """The words of each digit, the scale, and the sum of the numbers for the lane that adds
        it."""
        f, words, own = self.f, list[Value](), self._half(part)
        for first in range(0, SCALE_AT, 32):
            if part.lanes == 1:
                words += self._words(at, first, 4) + self._words(at, first + 16, 4)
            elif part.scheme == "Q8_0":
                words += self._words(at + own * 16, first, 4)
            else:
                there = at + own * 8
                words += self._words(there, first, 2) + self._words(there, first + 16, 2)
        pair = f.load_shared(at, vec(2, f32), SCALE_AT, align=8)
        total = f.extract(pair, 1)
        if part.lanes > 1:
            total = f.select(own.eq(0), total, 0.0)
        return [*words, f.extract(pair, 0), total]

    def _words(self, at: Value, offset: int, count: int) -> list[Value]:
        return shared_words(self.f, at, offset, count)

    def columns(self, part: Part) -> Columns:
        return []  # they are read when they are multiplied

    # -- weights ----------------------------------------------------------------------------------
    # A lane has a row of a tile, or half of the step of one. Of a tile and a round it has the words
    # of quants, those of higher bits, and what the row is scaled with, as they lie.

    def _half(self, part: Part) -> Value:
        """Which half of a step is the lane's."""
        return self.lane & part.lanes - 1

    def _row_of(self, part: Part) -> Value:
        """The lane's row of the first of its tiles."""
        return self.lane.udiv(part.lanes) + self._first_tile(part) * part.tile

    def _load(
        self, part: Part, starts: Sequence[Value], number: int, left: Value | int
    ) -> list[list[Value]]:
        start, box, slot = self._box(part, starts, number, left)
        row = self._row_of(part)
        at, each = start + box * part.box_bytes + row * 128, part.weights.per_box // 32
        step = self._step(part) & each - 1
        if part.scheme == "Q8_0":  # two pieces of 16 bytes
            ours = range(2) if part.lanes == 1 else [self._half(part)]
            pieces = [at + ((step * 2 + i) ^ (row & 7)) * 16 for i in ours]
            width = 4
        else:
            pieces = [at + (step ^ (row & 7)) * 16 + self._half(part) * 8]
            width = 4 // part.lanes
        found = []
        for tile in range(part.tiles):
            offset = tile * part.tile * 128
            quants = [w for piece in pieces for w in self._words(piece, offset, width)]
            found.append(quants + self._beside(part, start, box, slot, tile))
        return found

    def _beside(
        self, part: Part, start: Value, box: Value, slot: Value | int, tile: int
    ) -> list[Value]:
        """Higher bits, then scales, then what these are multiples of."""
        found = list[Value]()
        for i, side in enumerate(part.weights.sides):
            words = self._side(part, i, start, box, slot, tile)
            found = [*words, *found] if side.name == "high" else [*found, *words]
        return found

    def _side(
        self, part: Part, i: int, start: Value, box: Value, slot: Value | int, tile: int
    ) -> list[Value]:
        """What lies beside the step of the lane's row."""
        f, each, side = self.f, part.weights.per_box // part.weights.step, part.weights.sides[i]
        size = part.side_bytes(i)
        number = box if side.columns == 256 else box * each + (self._step(part) & each - 1)
        at = start + self._row_of(part) * size + number * side.unit
        used = side.used(part.slot_columns)
        if used % COPY_UNIT:  # slots do not begin where copies do
            at = at + ((f.i32(0) + slot * used) & COPY_UNIT - 1)
        offset = part.side_at(i) + tile * part.tile * size
        if side.unit == 2:
            return [f.load_shared(at, i16, offset, align=2).to(i32, signed=False)]
        return self._words(at, offset, side.unit // 4)

    def _add(
        self, part: Part, weights: Sequence[Value], operands: Sequence[Value], sums: list[Value]
    ) -> list[Value]:
        f, scheme, ends = self.f, part.scheme, part.tile_registers
        pairs = 1 if scheme in ("Q8_0", "Q4_0") else 2
        count = (8 if scheme == "Q8_0" else 4) // part.lanes
        own = None if part.lanes == 1 else self._half(part)
        quants = quant_bytes(f, scheme, weights[:count], weights[count : ends - pairs], own)
        pair, supers = weights[ends - pairs], weights[ends - 1]
        scales = factors(f, scheme, pair, supers)
        return [add_products(f, scheme, quants, scales, operands, sums[0])]

    def _park(
        self, part: Part, above: int | Value, tile: int, sums: Sequence[Value], buffer: int
    ) -> None:
        f, [total] = self.f, sums
        at = self._sums_of(part, above, tile, buffer)
        if part.lanes == 1:
            f.store_shared(total, at + self.lane * SUM_STRIDE)
            return
        whole = total + f.exchange(total, 1)
        for _ in f.when(self._half(part).eq(0)):
            f.store_shared(whole, at + (self.lane >> 1) * SUM_STRIDE)

    def _finish(self, part: Part, tiles: Tiles, columns: Columns, buffer: int) -> None:
        sums = [self.zeros() for _ in tiles]
        for i in range(part.rounds):
            operands = columns[i] if columns else self.operands(part, self.f.i32(i))
            sums = [self._add(part, t[i], operands, s) for t, s in zip(tiles, sums, strict=True)]
        for number, total in enumerate(sums):
            self._park(part, *divmod(number, part.tiles), total, buffer)
