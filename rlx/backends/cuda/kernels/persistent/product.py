"""Products of weights in the ring with a vector, by tensor cores.

A warp has 32 columns of each slot. Its numbers are split into three 16-bit ones, whose sum they
are; these stand in three of the eight columns that are multiplied at a time. So the product is that
of f32 numbers. The warps' sums are added up through shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.persistent.ring import Place, Ring
from rlx.backends.cuda.kernels.persistent.shape import (
    OUT_PLANES,
    PLANES,
    SQUARES,
    SUM_STRIDE,
    SUMS,
    TILE,
    WARPS,
    DenseShape,
    Part,
)
from rlx.llvm.builder import Value, bf16, f32, i32, vec

_PLANES = 3
_PLANE = 64  # bytes of 32 numbers
_SLAB = _PLANES * _PLANE
_STEPS = 2  # products of 16 columns in 32
AT_ONCE = 6  # slots that are held in registers while values are awaited

Columns = list[list[list[Value]]]  # of each slab and step, two operands of a product
Tiles = list[list[list[Value]]]  # of each slot and step, four operands of a product


class Products:
    def __init__(self, f: BlockFunction, shape: DenseShape, ring: Ring) -> None:
        self.f, self.shape, self.ring = f, shape, ring
        self.thread = f.thread()
        self.warp = f.uniform(self.thread >> 5)
        self.lane = f.lane32()
        row, self._fourth = self.lane >> 2, self.lane & 3
        self._has_plane = row < _PLANES
        plane = f.min(row, _PLANES - 1)
        self._read = plane * _PLANE + self._fourth * 4
        self._row = row
        self._tile_row = (self.lane & 7) + ((self.lane >> 3) & 1) * 8
        self._tile_column = (self.lane >> 4) * 16

    # -- the vector -------------------------------------------------------------------------------

    def put(self, values: Sequence[Value]) -> None:
        """Split the thread's numbers, one of each slab, for its own warp."""
        f = self.f
        at = self.warp * self.shape.planes_bytes + self.shape.place(PLANES) + self.lane * 2
        self._split(values, at)
        f.warp_barrier()

    def put_out(self, value: Value, column: Value) -> None:
        """Split one number of the result of attention, for all warps."""
        at = (column >> 5) * _SLAB + self.shape.place(OUT_PLANES) + (column & 31) * 2
        self._split([value], at)

    def _split(self, values: Sequence[Value], at: Value) -> None:
        f = self.f
        zero = f.const(0.0, f32)
        for first in range(0, len(values), 2):
            pair = [*values[first : first + 2], zero][:2]
            for plane in range(_PLANES):
                packed = f.pack_halves(pair[0], pair[1], bf16)
                rounded = f.unpack_halves(packed, bf16)
                pair = [a - b for a, b in zip(pair, rounded, strict=True)]
                for i in range(min(2, len(values) - first)):
                    half = (packed >> 16 * i if i else packed).to(bf16.as_int)
                    f.store_shared(half, at, (first + i) * _SLAB + plane * _PLANE)

    def columns(self, slabs: int) -> Columns:
        """The warp's columns as operands."""
        at = self.warp * self.shape.planes_bytes + self.shape.place(PLANES)
        return [self._operands(at, i * _SLAB) for i in range(slabs)]

    def column(self, slab: Value) -> list[list[Value]]:
        at = self.warp * self.shape.planes_bytes + self.shape.place(PLANES)
        return self._operands(at + slab * _SLAB, 0)

    def out_columns(self, part: Part) -> Columns:
        """The same of the result of attention; teams of warps have the same columns."""
        warps = WARPS // part.teams
        at = (self.warp & warps - 1) * _SLAB + self.shape.place(OUT_PLANES)
        return [self._operands(at, i * warps * _SLAB) for i in range(part.slabs)]

    def _operands(self, at: Value, offset: int) -> list[list[Value]]:
        f = self.f
        return [
            [
                f.select(
                    self._has_plane,
                    f.load_shared(at + self._read, i32, offset + 32 * step + 16 * half),
                    f.i32(0),
                )
                for half in range(2)
            ]
            for step in range(_STEPS)
        ]

    # -- weights ----------------------------------------------------------------------------------

    def fetch(self, part: Part, place: Place, count: int) -> tuple[Tiles, Place]:
        """The warp's weights of the next slots, into registers."""
        places = [place]
        for _ in range(count):
            places.append(self.ring.next(places[-1]))
        tiles = [self._load(part, self.ring.wait(p)) for p in places[:-1]]
        self.ring.free(*places[:-1])
        return tiles, places[-1]

    def _load(self, part: Part, start: Value) -> list[list[Value]]:
        f = self.f
        warps = WARPS // part.teams
        team = self.warp.udiv(warps)
        row = team * TILE + self._tile_row if part.teams > 1 else self._tile_row
        column = (self.warp & warps - 1) * 64 + self._tile_column
        at = start + row * part.stride + column
        return [f.load_matrices(at + 32 * step, 4) for step in range(_STEPS)]

    def multiply(
        self, tile: list[list[Value]], columns: list[list[Value]], sums: Sequence[Value]
    ) -> list[Value]:
        found = list(sums)
        for weights, operands in zip(tile, columns, strict=True):
            found = self.f.multiply(weights, operands, found, bf16)
        return found

    def zeros(self) -> list[Value]:
        return [self.f.const(0.0, f32)] * 4

    # -- sums -------------------------------------------------------------------------------------

    def tile_of_head(self, place: Place, number: Value, columns: Columns) -> Place:
        """Multiply a tile of the head, whose sums are the `number`-th of the buffers."""
        part = self.shape.head
        sums = self.zeros()
        for slab in range(part.slabs):
            tile = self._load(part, self.ring.wait(place))
            self.ring.free(place)
            place = self.ring.next(place)
            sums = self.multiply(tile, columns[slab], sums)
        self.park(part, number, sums, 0)
        return place

    def park(self, part: Part, tile: int | Value, sums: Sequence[Value], buffer: int) -> None:
        """Store the warp's sums of 16 rows of the `tile`-th slot from above."""
        f = self.f
        at = self._sums_at(buffer) + self._row * SUM_STRIDE
        warps = WARPS // part.teams
        if part.teams > 1:
            at = at + self.warp.udiv(warps) * (TILE * SUM_STRIDE)
        at = at + (self.warp & warps - 1) * 4
        offset = 0
        if isinstance(tile, int):
            offset = tile * part.height * SUM_STRIDE
        else:
            at = at + tile * (part.height * SUM_STRIDE)
        halves = [sums[0] + sums[1], sums[2] + sums[3]]
        totals = [v + f.exchange(v, 1) for v in halves]
        for _ in f.when(self._fourth.eq(0)):
            f.store_shared(totals[0], at, offset)
            f.store_shared(totals[1], at, offset + 8 * SUM_STRIDE)

    def _sums_at(self, buffer: int) -> int:
        return self.shape.place(SUMS) + buffer * self.shape.sums_bytes

    def total(self, row: Value, buffer: int, warps: int = WARPS) -> Value:
        """The sum of all warps of a row."""
        at = row * SUM_STRIDE + self._sums_at(buffer)
        return self._add_up(at, warps)

    def _add_up(self, at: Value, warps: int) -> Value:
        f = self.f
        fours = [f.load_shared(at, vec(4, f32), 16 * i, align=16) for i in range(warps // 4)]
        pairs = [
            (f.extract(v, 0) + f.extract(v, 1)) + (f.extract(v, 2) + f.extract(v, 3)) for v in fours
        ]
        while len(pairs) > 1:
            pairs = [a + b for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        return pairs[0]

    def put_squares(self, values: Sequence[Value], buffer: int) -> None:
        """Store the warp's sum of squares."""
        f = self.f
        square = values[0] * values[0]
        for value in values[1:]:
            square = f.fma(value, value, square)
        whole = f.warp_sum(square)
        at = self.warp * 4 + (self.shape.place(SQUARES) + 4 * WARPS * buffer)
        for _ in f.when(self.lane.eq(0)):
            f.store_shared(whole, at)

    def norm(self, buffer: int) -> Value:
        """1 / √(mean of squares + eps)"""
        f = self.f
        whole = self._add_up(f.i32(self.shape.place(SQUARES) + 4 * WARPS * buffer), WARPS)
        return f.rsqrt_fast(f.fma(whole, 1.0 / self.shape.hidden, self.shape.eps))

    # -- whole products ---------------------------------------------------------------------------

    def finish(self, part: Part, tiles: Tiles, columns: Columns, buffer: int) -> None:
        """Multiply what was fetched, and store the sums."""
        for row in range(part.tiles):
            mine = tiles[row * part.slabs : (row + 1) * part.slabs]
            made = [
                self.multiply(t, c, self.zeros()) for t, c in zip(mine, columns, strict=True)
            ]
            while len(made) > 1:
                rest = made[2 * (len(made) // 2) :]
                made = [
                    [x + y for x, y in zip(a, b, strict=True)]
                    for a, b in zip(made[::2], made[1::2], strict=False)
                ] + rest
            self.park(part, row, made[0], buffer)

    def stream(
        self, part: Part, place: Place, buffer: int, columns: Columns | None = None
    ) -> Place:
        """Multiply slot by slot as they come."""
        f = self.f

        def slab(i: Value, slot: Value, parity: Value, *sums: Value) -> list[Value]:
            tile = self._load(part, self.ring.wait((slot, parity)))
            self.ring.free((slot, parity))
            return [*self.ring.next((slot, parity)), *self.multiply(tile, self.column(i), sums)]

        def row(tile: Value, slot: Value, parity: Value) -> list[Value]:
            sums = self.zeros()
            if columns is None:
                slot, parity, *sums = f.loop(
                    f.i32(0), f.i32(part.slabs), f.i32(1), [slot, parity, *sums], slab
                )
            else:
                for known in columns:
                    found = self._load(part, self.ring.wait((slot, parity)))
                    self.ring.free((slot, parity))
                    slot, parity = self.ring.next((slot, parity))
                    sums = self.multiply(found, known, sums)
            self.park(part, tile, sums, buffer)
            return [slot, parity]

        slot, parity = f.loop(f.i32(0), f.i32(part.tiles), f.i32(1), list(place), row)
        return slot, parity


