"""Integer dot products of AArch64: sdot, plain NEON, and matrix products (i8mm)."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.kernels.qgemm.dot import UNROLL_ROWS, DotLoop, FourWay, IntDot
from rlx.llvm.builder import Function, Type, Value, i16, i32, vec
from rlx.llvm.target import Target

_HALVES = vec(8, i16)


class Dotprod(FourWay):
    """sdot: signed bytes."""

    instruction = "sdot"
    signed_bytes = True

    def tile_row(self, first: Value, i: int, type_: Type = i32) -> Value:
        """A lane of four rows: instructions take it from there, so that nothing is broadcast."""
        if self.rows % 4:
            return super().tile_row(first, i, type_)
        four = self.f.load(first, vec(4, type_), 16 * (i // 4))
        return self.f.shuffle(four, None, [i % 4] * self.lanes)

    def step(self, total: Value, codes: Value, x: Value) -> Value:
        name = f"llvm.aarch64.neon.sdot.{self.sums.suffix}.{self.bytes.suffix}"
        return self._call(name, self.sums, total, codes, x.bits(self.bytes))

    def pairs(self, total: Value, a: Value, b: Value) -> Value:
        return total + self.sum_of_pairs([a], [b])

    def sum_of_pairs(self, a: Sequence[Value], b: Sequence[Value]) -> Value:
        """Products of the lower two and of the upper two lanes, whose neighbours are added last."""
        f = self.f
        low = high = f.const(0, self.sums)
        for both in zip(a, b, strict=True):
            x, y = (v.bits(vec(8, i16)) for v in both)
            low = low + f.slice(x, 0, 4).to(i32) * f.slice(y, 0, 4).to(i32)
            high = high + f.slice(x, 4, 4).to(i32) * f.slice(y, 4, 4).to(i32)
        return f.shuffle(low, high, range(0, 8, 2)) + f.shuffle(low, high, range(1, 8, 2))

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        values = self.f.const(list(table), self.bytes)
        return self._call(
            f"llvm.aarch64.neon.tbl1.{self.bytes.suffix}", self.bytes, values, indices
        )


class Neon(Dotprod):
    """smull, addp, sadalp: CPUs without sdot. Two products of bytes fit 16 bits: 2 · 128 · 127."""

    instruction = "smull"

    def step(self, total: Value, codes: Value, x: Value) -> Value:
        f, x = self.f, x.bits(self.bytes)
        products = [
            self._call(
                "llvm.aarch64.neon.smull.v8i16", _HALVES, f.slice(codes, at, 8), f.slice(x, at, 8)
            )
            for at in (0, 8)
        ]
        pairs = self._call("llvm.aarch64.neon.addp.v8i16", _HALVES, *products)
        return total + self._call("llvm.aarch64.neon.saddlp.v4i32.v8i16", self.sums, pairs)


class Matrix(Dotprod):
    """smmla: two rows times two columns, eight products for each of their four sums.

    Two steps of codes, interleaved, are eight codes of a column; so are words of rows, unless they
    lie in pairs already. Sum i of a vector of columns holds rows 2p and 2p + 1 of its columns 2h
    and 2h + 1, where i = 2p + h. They are the same integers as those of `Dotprod`, which takes
    single rows.
    """

    instruction = "smmla"
    takes_pairs = True

    def __init__(self, f: Function, rows: int, lanes: int) -> None:
        super().__init__(f, rows, lanes)
        self.has_tiles = rows % 4 == 0

    def tile_row(self, first: Value, i: int, type_: Type = i32) -> Value:
        if not self.has_tiles:
            return super().tile_row(first, i, type_)
        four, row = self.f.load(first, vec(4, type_), 16 * (i // 4)), i % 4 // 2 * 2
        return self.f.shuffle(four, None, [row, row, row + 1, row + 1])

    def tile_column(self, value: Value, i: int) -> Value:
        if not self.has_tiles:
            return value
        column = i % 2 * 2
        return self.f.shuffle(value, None, [column, column + 1] * 2)

    def rows_of(self, sums: Sequence[Value]) -> list[Value]:
        if not self.has_tiles:
            return list(sums)
        pairs = zip(sums[::2], sums[1::2], strict=True)
        order = [0, 1, 4, 5], [2, 3, 6, 7]
        return [self.f.shuffle(left, right, lanes) for left, right in pairs for lanes in order]

    def accumulate(self, loop: DotLoop, sums: Sequence[Value]) -> list[Value]:
        if not self.has_tiles:
            return super().accumulate(loop, sums)
        if loop.scales is None:
            return self._tiles(loop, sums)
        zeros = [self.f.const(0, self.sums)] * (len(loop.sets) * self.rows)
        totals, out = self._tiles(loop, zeros), list(sums)
        for s, (column, scale) in enumerate(loop.sets):
            assert scale is not None
            for i in range(self.rows):
                at = column * self.rows + i
                out[at] = out[at] + totals[s * self.rows + i] * self.tile_column(scale, i)
        return out

    def _tiles(self, loop: DotLoop, start: Sequence[Value]) -> list[Value]:
        """All steps of the loop, an even number where it is not known; unrolled where it is and
        nothing is scaled."""
        if isinstance(loop.groups, int) and loop.scales is None and self.rows >= UNROLL_ROWS:
            tiles = list(start)
            for g in range(0, loop.groups - 1, 2):
                tiles = self._two_steps(loop, self.f.i64(g), tiles)
            return self._last_step(loop, tiles)
        known = isinstance(loop.groups, int)
        even = loop.groups - loop.groups % 2 if isinstance(loop.groups, int) else loop.groups
        carried = self.f.carry(start)
        for step in carried.range(0, even, 2):
            carried.values = self._two_steps(loop, step, carried.values)
        return self._last_step(loop, carried.values) if known else carried.values

    def _last_step(self, loop: DotLoop, given: Sequence[Value]) -> list[Value]:
        """The last of an odd number of steps: its codes and zeros."""
        tiles, groups = list(given), loop.groups
        if not isinstance(groups, int) or groups % 2 == 0:
            return tiles
        g, zeros = self.f.i64(groups - 1), self.f.const(0, self.sums)
        for s, codes in enumerate(loop.codes(g)):
            columns = self._zipped(codes.bits(self.sums), zeros)
            place = loop.x(g, s)
            fours = [self.f.load(place, self.sums, at) for at in range(0, 4 * self.rows, 16)]
            rows = [x for four in fours for x in self._zipped(four, zeros)]
            tiles = self._multiplied(loop, s, tiles, rows, columns)
        return tiles

    def _two_steps(self, loop: DotLoop, g: Value, given: Sequence[Value]) -> list[Value]:
        tiles = list(given)
        for s, both in enumerate(zip(loop.codes(g), loop.codes(g + 1), strict=True)):
            columns = self._zipped(*(codes.bits(self.sums) for codes in both))
            tiles = self._multiplied(loop, s, tiles, self._pairs_of_rows(loop, g, s), columns)
        return tiles

    def _multiplied(
        self,
        loop: DotLoop,
        s: int,
        given: Sequence[Value],
        rows: Sequence[Value],
        columns: Sequence[Value],
    ) -> list[Value]:
        """The tiles plus the products of stream s."""
        tiles = list(given)
        for pair, x in enumerate(rows):
            for half, codes in enumerate(columns):
                at = loop.set_of[s] * self.rows + pair * 2 + half
                name = "llvm.aarch64.neon.smmla.v4i32.v16i8"
                tiles[at] = self._call(name, self.sums, tiles[at], x, codes)
        return tiles

    def _pairs_of_rows(self, loop: DotLoop, g: Value, s: int) -> list[Value]:
        """Eight codes of two rows each, of step g and the next."""
        f = self.f
        if self.paired:
            at = loop.x(g, s)
            return [f.load(at, self.bytes, 16 * p) for p in range(self.rows // 2)]
        places = loop.x(g, s), loop.x(g + 1, s)
        fours = range(0, 4 * self.rows, 16)
        return [
            x for at in fours for x in self._zipped(*(f.load(p, self.sums, at) for p in places))
        ]

    def _zipped(self, a: Value, b: Value) -> list[Value]:
        """Lanes of a and b in turn: the words of the first two, of the last two."""
        order = [0, 4, 1, 5], [2, 6, 3, 7]
        return [self.f.shuffle(a, b, lanes).bits(self.bytes) for lanes in order]


def arm_dot(target: Target) -> type[IntDot]:
    """The integer dot product of an AArch64 target."""
    if target.dotprod:
        return Matrix if target.i8mm else Dotprod
    return Neon
