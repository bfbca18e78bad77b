"""Products of packed weights in the ring with a vector, as products of integers.

Quants are bytes that tensor cores multiply as they lie, of four bits after two instructions. So x
is made of bytes too: 32 numbers are multiples of a power of two, of 23 bits, whose three digits
stand in three of the eight columns. The sums of a block of weights are exact; its scale and that of
x are applied to them in f32. A warp has 32 of each 512 columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import WARP
from rlx.backends.cuda.kernels.persistent.product import Columns, Products, Tiles
from rlx.backends.cuda.kernels.persistent.shape import (
    COPY_UNIT,
    OUT_PLANES,
    PLANES,
    TILE,
    Part,
)
from rlx.llvm.builder import Value, f16, f32, i8, i16, i32, vec

_DIGITS = 3
_SCALE = 32 * _DIGITS  # where the scale of a record lies, and the sum of its numbers
_MAGIC, _MAGIC_BITS = float(3 << 22), 0x4B400000  # an f32 whose low bits are an integer
_BIAS = 0x808080  # makes digits of -128 to 127 such of 0 to 255
_LEAST_POWER = 32  # of two, as in an f32: smaller numbers are taken for 0


class PackedProducts(Products):
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

    def _operands(self, at: Value) -> list[Value]:
        """Two words of digits, the scale, and the sum of the numbers for the lanes that add it."""
        f = self.f
        words = [f.load_shared(at + self._read, i32, 16 * half) for half in range(2)]
        pair = f.load_shared(at, vec(2, f32), _SCALE, align=8)
        total = f.select(self._fourth.eq(0), f.extract(pair, 1), 0.0)
        return [*words, f.extract(pair, 0), total]

    def columns(self, rounds: int) -> Columns:
        return []  # they are read when they are multiplied

    # -- weights ----------------------------------------------------------------------------------
    # Of a tile and a round: the words of quants, those of higher bits, and what the lane's two rows
    # are scaled with: as they lie, then as f32.

    def _load(
        self, part: Part, starts: Sequence[Value], number: int, left: Value | int
    ) -> list[list[Value]]:
        start, box, slot = self._box(part, starts, number, left)
        at = start + box * part.box_bytes + self._first_tile(part) * (TILE * 128)
        if part.scheme == "Q8_0":
            at = at + self._in_tile
            quants = [self.f.load_matrices(at + i * (TILE * 128), 4) for i in range(part.tiles)]
        else:
            quants = self._load_nibbles(part, at)
        return [[*q, *self._beside(part, start, box, slot, i)] for i, q in enumerate(quants)]

    def _load_nibbles(self, part: Part, at: Value) -> list[list[Value]]:
        """A step is 16 bytes of a row: two tiles are read at a time."""
        f, found = self.f, list[list[Value]]()
        piece = (self._step(part) & 7) ^ (self.lane & 7)
        at = at + self._row_in_tile + piece * 16
        second = at + (self.lane >> 4) * (TILE * 128)
        for i in range(0, part.tiles, 2):
            if i + 1 < part.tiles:
                four = f.load_matrices(second + i * (TILE * 128), 4)
                found += [four[:2], four[2:]]
            else:
                found.append(f.load_matrices(at + i * (TILE * 128), 2))
        return found

    def _beside(
        self, part: Part, start: Value, box: Value, slot: Value | int, tile: int
    ) -> list[Value]:
        """Higher bits, then scales, then what these are multiples of; two numbers of 16 bits are
        one word."""
        found = list[Value]()
        for i, side in enumerate(part.weights.sides):
            words = self._side(part, i, start, box, slot, tile)
            if side.name == "high":
                found = [*words, *found]
            elif side.unit == 2:
                found.append(words[0] | words[1] << 16)
            else:
                found += words
        return found

    def _side(
        self, part: Part, i: int, start: Value, box: Value, slot: Value | int, tile: int
    ) -> list[Value]:
        """A word of each of the lane's rows, of what lies beside its step."""
        f, each, side = self.f, part.weights.per_box // part.weights.step, part.weights.sides[i]
        row, size = self._row + self._first_tile(part) * TILE, part.side_bytes(i)
        number = box if side.columns == 256 else box * each + (self._step(part) & each - 1)
        at = start + row * size + number * side.unit
        if side.unit == 8:
            at = at + (self._fourth & 1) * 4
        used = side.used(part.slot_columns)
        if used % COPY_UNIT:  # slots do not begin where copies do
            at = at + ((f.i32(0) + slot * used) & COPY_UNIT - 1)
        words, width = [], min(side.unit, 4)
        for half in range(2):
            offset = part.side_at(i) + (tile * TILE + 8 * half) * size
            word = f.load_shared(at, i16 if width == 2 else i32, offset, align=width)
            words.append(word.to(i32, signed=False) if width == 2 else word)
        return words

    def _decoded(self, part: Part, weights: list[Value]) -> list[Value]:
        f = self.f
        if part.scheme in ("Q8_0", "Q4_0"):
            scales = f.unpack_halves(weights[-1], f16)
            if part.scheme == "Q4_0":  # bytes are 16 times as large
                return [*weights[:2], *[s * 0.0625 for s in scales]]
            return [*weights[:4], *scales]
        if part.scheme == "Q4_K":
            return [*weights[:2], *self._pairs(weights[2:])]
        if part.scheme == "Q5_K":  # the bits that the lane needs, of both rows
            first, second = ((w >> self._fourth * 4) & 0x000F000F for w in weights[2:4])
            return [*weights[:2], first | second << 4, *weights[4:]]
        return weights  # scales are made when they are used: registers are few

    def _pairs(self, weights: Sequence[Value]) -> list[Value]:
        """Scales of both rows, and minima with their sign turned."""
        f, pair = self.f, weights[0]
        scales, minima = list[Value](), list[Value]()
        for half, word in enumerate(weights[1:3]):
            whole, least = f.unpack_halves(word, f16)
            small, smallest = (pair >> 16 * half + i & 63 for i in (0, 8))
            scales.append(whole * small.to(f32))
            minima.append(least * smallest.to(f32) * -1.0)
        return [*scales, *minima]

    def _bytes(self, part: Part, weights: Sequence[Value]) -> list[Value]:
        """The lane's quants as bytes with a sign."""
        first, second = weights[:2]
        if part.scheme == "Q8_0":
            return [*weights[:4]]
        if part.scheme == "Q4_0":  # 16 (q - 8)
            found = [first << 4, second << 4, first, second]
            return [(w & -0x0F0F0F10) ^ -0x7F7F7F80 for w in found]
        if part.scheme == "Q6_K":  # 4 (q - 32)
            high = [w >> (self._fourth & 2) for w in weights[2:4]]
            low = [w & 0x3C3C3C3C for w in (first << 2, second << 2, first >> 2, second >> 2)]
            more = [*[w << 6 for w in high], *[w << 2 for w in high]]
            return [a | ((b & -0x3F3F3F40) ^ -0x7F7F7F80) for a, b in zip(low, more, strict=True)]
        found = [w & 0x0F0F0F0F for w in (first, second, first >> 4, second >> 4)]
        if part.scheme == "Q5_K":
            fours = [weights[2] >> i & 15 for i in (0, 4, 16, 20)]
            found = [a | (b * 0x02040810 & 0x10101010) for a, b in zip(found, fours, strict=True)]
        return found

    def _add(
        self, part: Part, weights: Sequence[Value], operands: Sequence[Value], sums: list[Value]
    ) -> list[Value]:
        f = self.f
        *digits, scale, total = operands
        quants, nothing = self._bytes(part, weights), [f.i32(_MAGIC_BITS)] * 4
        if part.scheme == "Q6_K":  # each 16 numbers have a scale
            made = list(sums)
            wholes = f.unpack_halves(weights[5], f16)
            for i, digit in enumerate(digits):
                found = f.multiply_bytes(quants[2 * i : 2 * i + 2], [digit], nothing)
                small = [(weights[4] >> 8 * i + 16 * half).to(i8).to(f32) for half in range(2)]
                factors = [d * (scale * 0.25) * s for d, s in zip(wholes, small, strict=True)]
                made = self._scaled(found, factors, made)
            return made
        if part.scheme == "Q5_K":
            rest = self._pairs(weights[3:])
        else:
            at = 4 if part.scheme == "Q8_0" else 2
            rest = [w.bits(f32) for w in weights[at : at + (4 if part.scheme == "Q4_K" else 2)]]
        found = f.multiply_bytes(quants, digits, nothing)
        made = self._scaled(found, [s * scale for s in rest[:2]], sums)
        for half, minimum in enumerate(rest[2:]):
            made[2 * half] = f.fma(minimum, total, made[2 * half])
        return made

    def _scaled(
        self, found: Sequence[Value], factors: Sequence[Value], sums: Sequence[Value]
    ) -> list[Value]:
        """Sums of integers times the factors of both rows, plus what there is."""
        pairs = zip(found, sums, strict=True)
        return [
            self.f.fma(v.bits(f32) - _MAGIC, factors[i // 2], s) for i, (v, s) in enumerate(pairs)
        ]

    def _halves(self, sums: Sequence[Value]) -> list[Value]:
        """Lanes have the sums of the first and second digit, the third, and two of no digit."""
        f = self.f
        is_first = self._fourth.eq(0)
        low = f.select(is_first, 1.0, f.select(self._fourth.eq(1), 65536.0, f.const(0.0, f32)))
        high = f.select(is_first, 256.0, f.const(0.0, f32))
        return [f.fma(sums[i], low, sums[i + 1] * high) for i in (0, 2)]

    def _finish(self, part: Part, tiles: Tiles, columns: Columns, buffer: int) -> None:
        sums = [self.zeros() for _ in tiles]
        for i in range(part.rounds):
            operands = columns[i] if columns else self.operands(self.f.i32(i))
            sums = [self._add(part, t[i], operands, s) for t, s in zip(tiles, sums, strict=True)]
        for number, total in enumerate(sums):
            self._park(part, *divmod(number, part.tiles), total, buffer)
