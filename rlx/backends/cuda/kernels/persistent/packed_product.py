"""Products of packed weights in the ring with a vector, as products of integers.

Quants are bytes, of four bits after two instructions for eight of them. So x is made of bytes too:
32 numbers are multiples of a power of two, of 23 bits, that have three digits. Four products and
their sum are one instruction. The sums of a block of weights are exact; its scale and that of x are
applied to them in f32. A warp has 32 of each 512 columns, a lane all of them of a row of 32, or half
of them of a row of 16: tensor cores would multiply eight columns where x has one, and leave sums of
two rows and three digits in different lanes.
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
from rlx.backends.cuda.kernels.qgemm.packed_rows import half
from rlx.llvm.builder import Value, f16, f32, i8, i16, i32, vec

_DIGITS = 3
_SCALE = 32 * _DIGITS  # where the scale of a record lies, and the sum of its numbers
_MAGIC, _MAGIC_BITS = float(3 << 22), 0x4B400000  # an f32 whose low bits are an integer
_BIAS = 0x808080  # makes digits of -128 to 127 such of 0 to 255
_LEAST_POWER = 32  # of two, as in an f32: smaller numbers are taken for 0
_LARGEST = {"Q4_K": 15, "Q5_K": 31}  # of the bytes that quants are made


class PackedProducts(Products):
    per_tile = 1

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
        largest = f.largest_of_warp(value.bits(i32) & 0x7FFFFFFF)
        power = f.max(largest >> 23, _LEAST_POWER)  # the numbers are below 2^(power - 126)
        factor = ((f.i32(275) - power) << 23).bits(f32)
        number = f.fma(value, factor, _MAGIC).bits(i32) - _MAGIC_BITS  # of at most 2^22
        digits = (number + _BIAS) ^ _BIAS
        for i in range(_DIGITS):
            digit = digits >> 8 * i if i else digits
            f.store_shared(digit.to(i8), at + self.lane, 32 * i)
        scale = f.select(power.eq(255), float("nan"), ((power - 21) << 23).bits(f32))
        total = f.sum_of_warp(number).to(f32) * scale
        for _ in f.when(self.lane.eq(0)):
            f.store_shared(f.join([scale, total]), at, _SCALE, align=8)

    def _operands(self, part: Part, at: Value) -> list[Value]:
        """The words of each digit, the scale, and the sum of the numbers for the lane that adds
        it."""
        f, words, own = self.f, list[Value](), self._half(part)
        for first in range(0, _SCALE, 32):
            if part.lanes == 1:
                words += self._words(at, first, 4) + self._words(at, first + 16, 4)
            elif part.scheme == "Q8_0":
                words += self._words(at + own * 16, first, 4)
            else:
                there = at + own * 8
                words += self._words(there, first, 2) + self._words(there, first + 16, 2)
        pair = f.load_shared(at, vec(2, f32), _SCALE, align=8)
        total = f.extract(pair, 1)
        if part.lanes > 1:
            total = f.select(own.eq(0), total, 0.0)
        return [*words, f.extract(pair, 0), total]

    def _words(self, at: Value, offset: int, count: int) -> list[Value]:
        found = self.f.load_shared(at, vec(count, i32), offset, align=4 * count)
        return [self.f.extract(found, i) for i in range(count)]

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

    def _bytes(self, part: Part, weights: Sequence[Value]) -> list[Value]:
        """The lane's quants as bytes with a sign: of its low nibbles, then of its high ones."""
        if part.scheme == "Q8_0":
            return list(weights[: 8 // part.lanes])
        count = 4 // part.lanes
        quants, more = weights[:count], weights[count:]
        if part.scheme == "Q4_0":  # 16 (q - 8)
            found = [*[w << 4 for w in quants], *quants]
            return [(w & -0x0F0F0F10) ^ -0x7F7F7F80 for w in found]
        if part.scheme == "Q6_K":
            return self._six_bits(part, quants, more[:2])
        found = [w & 0x0F0F0F0F for w in (*quants, *[w >> 4 for w in quants])]
        if part.scheme == "Q5_K":
            word = more[0] if part.lanes == 1 else more[0] >> self._half(part) * 8
            fours = [word >> (4 * i + 16 * high) & 15 for high in range(2) for i in range(count)]
            found = [a | (b * 0x02040810 & 0x10101010) for a, b in zip(found, fours, strict=True)]
        return found

    def _six_bits(
        self, part: Part, quants: Sequence[Value], high: Sequence[Value]
    ) -> list[Value]:
        """4 (q - 32)"""
        low = [w & 0x3C3C3C3C for w in (*[w << 2 for w in quants], *[w >> 2 for w in quants])]
        more = list[Value]()
        for nibble in range(2):  # of the low and the high nibbles of each word, its two bits
            for i in range(len(quants)):
                word, shift = high[i % 2], 6 - 4 * nibble - 2 * (i // 2)
                if part.lanes > 1:
                    word = word >> self._half(part) * 2
                more.append(word << shift if shift >= 0 else word >> -shift)
        return [a | ((b & -0x3F3F3F40) ^ -0x7F7F7F80) for a, b in zip(low, more, strict=True)]

    def _scales(self, part: Part, weights: Sequence[Value]) -> list[Value]:
        """What the sums of the lane's groups are multiplied with, and the minimum with its sign
        turned if there is one."""
        f = self.f
        if part.scheme in ("Q8_0", "Q4_0"):
            scale = half(f, weights[part.tile_registers - 1])
            return [scale * 0.0625 if part.scheme == "Q4_0" else scale]  # bytes are 16 times that
        pair, supers = weights[part.tile_registers - 2 : part.tile_registers]
        if part.scheme == "Q6_K":
            whole = half(f, supers) * 0.25
            return [whole * (pair >> shift).to(i8).to(f32) for shift in (0, 8)]
        whole, least = f.unpack_halves(supers, f16)
        small, smallest = (pair >> shift & 63 for shift in (0, 8))
        return [whole * small.to(f32), least * smallest.to(f32) * -1.0]

    def _add(
        self, part: Part, weights: Sequence[Value], operands: Sequence[Value], sums: list[Value]
    ) -> list[Value]:
        f, [made] = self.f, sums
        *digits, scale, total = operands
        quants, factors = self._bytes(part, weights), self._scales(part, weights)
        count = len(quants)
        planes = [digits[i : i + count] for i in range(0, len(digits), count)]
        groups = 2 if part.scheme == "Q6_K" else 1
        for i in range(groups):
            own = slice(count // groups * i, count // groups * (i + 1))
            found = self._sum(part, quants[own], [plane[own] for plane in planes])
            made = f.fma(found, factors[i] * scale, made)
        return [f.fma(minimum, total, made) for minimum in factors[groups:]] or [made]

    def _sum(
        self, part: Part, quants: Sequence[Value], planes: Sequence[Sequence[Value]]
    ) -> Value:
        """The products of the quants and the numbers of 23 bits, added up."""
        f, sums = self.f, list[Value]()
        for plane in planes:
            made = f.i32(0)
            for a, b in zip(quants, plane, strict=True):
                made = f.dot_bytes(a, b, made)
            sums.append(made)
        low = sums[0] + (sums[1] << 8)
        if 4 * len(quants) * _LARGEST.get(part.scheme, 128) < 1 << 9:
            return (low + (sums[2] << 16)).to(f32)
        return f.fma(sums[2].to(f32), 65536.0, low.to(f32))

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
