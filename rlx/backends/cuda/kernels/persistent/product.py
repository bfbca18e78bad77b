"""Products of weights in the ring with a vector, by tensor cores.

A warp has 16 of each 256 columns. Its numbers are split into three 16-bit ones, whose sum they
are; these stand in three of the eight columns that are multiplied at a time. So the product is that
of f32 numbers. The warps' sums are added up through shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.persistent.ring import Ring, Slot
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
from rlx.support.records import dataclass

_PLANES = 3
_PLANE = 32  # bytes of 16 numbers

Columns = list[list[Value]]  # of each round, the operands of a product
Tiles = list[list[list[Value]]]  # of each tile and round, its other operands


@dataclass(frozen=True)
class Rows:
    """A block's rows of a matrix, where they may be of another type: `count` are not. These are in
    front; either all rows are of one type, or both types are copied 16 rows at a time."""

    part: Part
    other: Part | None = None
    count: Value | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.part,) if self.other is None else (self.part, self.other)


class Products:
    """Those of weights in bf16."""

    per_tile = 4  # sums of a lane
    most_registers = 48  # in which weights are held while values are awaited

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
        # Where the lane's row of four 8 × 8 matrices is in a tile of 16 rows: in the two pieces of
        # 16 bytes that the warp has of a row of a box.
        eighth = self.lane & 7
        piece = ((self.warp & 3) * 2 + (self.lane >> 4)) ^ eighth
        self._row_in_tile = (eighth + ((self.lane >> 3) & 1) * 8) * 128
        self._in_tile = self._row_in_tile + piece * 16
        self.column = self._column()

    def _column(self) -> Value:
        """The thread's first column."""
        return (self.lane >> 4) * 256 + self.warp * 16 + (self.lane & 15)

    # -- the vector -------------------------------------------------------------------------------

    def put(self, values: Sequence[Value]) -> None:
        """Split the thread's numbers, those of columns `column` + 512 i, for its own warp."""
        f = self.f
        at = self.warp * self.shape.planes_bytes + self.shape.place(PLANES)
        at = at + (self.lane >> 4) * self.shape.record + (self.lane & 15) * 2
        self._split(values, at)
        f.warp_barrier()

    def lay_aside(self, values: Sequence[Value]) -> None:
        """Keep the thread's numbers where its warp's columns were, which all have read."""
        for i, value in enumerate(values):
            self.f.store_shared(value, self._aside, 128 * i)

    def take_back(self, count: int) -> list[Value]:
        found = [self.f.load_shared(self._aside, f32, 128 * i) for i in range(count)]
        self.f.warp_barrier()  # columns are put there again
        return found

    @property
    def _aside(self) -> Value:
        return self.warp * self.shape.planes_bytes + self.shape.place(PLANES) + self.lane * 4

    def put_out(self, value: Value, column: Value) -> None:
        """Split one number of the result of attention, for all warps."""
        at = (column >> 4) * self.shape.record + self.shape.place(OUT_PLANES) + (column & 15) * 2
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
                    offset = 2 * self.shape.record * (first + i) + plane * _PLANE
                    f.store_shared(half, at, offset)

    def columns(self, part: Part) -> Columns:
        """The warp's columns as operands."""
        return [self.operands(part, self.f.i32(i)) for i in range(part.rounds)]

    def operands(self, part: Part, number: Value) -> list[Value]:
        """Those of one round."""
        at = self.warp * self.shape.planes_bytes + self.shape.place(PLANES)
        return self._operands(part, at + number * self.shape.record)

    def out_columns(self, part: Part) -> Columns:
        """The same of the result of attention."""
        record = self.shape.record
        at = self._step(part) * record + self.shape.place(OUT_PLANES)
        return [self._operands(part, at + i * (WARPS * record)) for i in range(part.rounds)]

    def _operands(self, part: Part, at: Value) -> list[Value]:
        f = self.f
        words = [f.load_shared(at + self._read, i32, 16 * half) for half in range(2)]
        return [f.select(self._has_plane, w, f.i32(0)) for w in words]

    # -- weights ----------------------------------------------------------------------------------

    def fetch(self, rows: Rows, place: Slot, share: Value | int) -> tuple[Tiles, Slot]:
        """All of the warp's weights of some rows, into registers. The block has the `share`-th
        piece of each row of the matrix."""
        if rows.other is None or rows.count is None:
            return self._fetch(rows.part, place, share)
        most = max(part.tile_registers for part in rows.parts)
        zero = self.f.i32(0)

        def flat(part: Part) -> list[Value]:
            tiles, (slot, parity) = self._fetch(part, place, share)
            words = [[w.bits(i32) for w in words] for tile in tiles for words in tile]
            return [slot, parity, *(w for four in words for w in [*four, *[zero] * most][:most])]

        slot, parity, *words = self.f.if_(
            rows.count.ne(0), lambda: flat(rows.part), lambda: flat(rows.parts[1])
        )
        each = most * rows.part.rounds
        return [
            [words[i + j : i + j + most] for j in range(0, each, most)]
            for i in range(0, len(words), each)
        ], (slot, parity)

    def _fetch(self, part: Part, place: Slot, share: Value | int) -> tuple[Tiles, Slot]:
        starts, left = self.ring.wait_all(place, part.slots), part.left(share)
        found: Tiles = []
        for above in range(part.down):
            mine = starts[above * part.across : (above + 1) * part.across]
            rounds = [self._load(part, mine, i, left) for i in range(part.rounds)]
            found += [[r[tile] for r in rounds] for tile in range(part.tiles)]
        return found, self.ring.free_all(place, part.slots)

    def _step(self, part: Part) -> Value:
        """Which step of a round is the warp's."""
        return self.warp & WARPS // part.teams - 1

    def _first_tile(self, part: Part) -> Value | int:
        """Of a slot: teams of warps have different ones."""
        return self.warp.udiv(WARPS // part.teams) * part.tiles if part.teams > 1 else 0

    def _box(
        self, part: Part, starts: Sequence[Value], number: int, left: Value | int
    ) -> tuple[Value, Value, Value | int]:
        """Where the slot begins that has the warp's step of a round, its box there, and how many
        slots are left of it; `starts` are the slots of these rows."""
        f, each, step = self.f, part.weights.per_box // part.weights.step, self._step(part)
        if part.boxes < part.round_boxes:  # half a round
            first, second = starts[2 * number : 2 * number + 2]
            is_first = step < WARPS // part.teams // 2
            slot = f.select(is_first, f.i32(0), f.i32(1)) + 2 * number + left
            return f.select(is_first, first, second), step.udiv(each) & part.boxes - 1, slot
        per = part.boxes // part.round_boxes  # rounds of a slot
        box = step.udiv(each) + number % per * part.round_boxes
        return starts[number // per], box, left + number // per

    def _load(
        self, part: Part, starts: Sequence[Value], number: int, left: Value | int
    ) -> list[list[Value]]:
        """The weights of a round, of each tile."""
        start, box, _ = self._box(part, starts, number, left)
        at = start + box * part.box_bytes + self._in_tile
        if part.teams > 1:
            at = at + self._first_tile(part) * (TILE * 128)
        return [self.f.load_matrices(at + i * (TILE * 128), 4) for i in range(part.tiles)]

    def _add(
        self, part: Part, weights: Sequence[Value], operands: Sequence[Value], sums: list[Value]
    ) -> list[Value]:
        """Add the products of a tile and a round."""
        return self.f.multiply(weights, operands, sums, bf16)

    def zeros(self) -> list[Value]:
        return [self.f.const(0.0, f32)] * self.per_tile

    # -- sums -------------------------------------------------------------------------------------

    def _park(
        self, part: Part, above: int | Value, tile: int, sums: Sequence[Value], buffer: int
    ) -> None:
        """Store the warp's sums of the rows of a tile of the `above`-th slot of a column."""
        f = self.f
        at = self._row * SUM_STRIDE + self._sums_of(part, above, tile, buffer)
        halves = [sums[0] + sums[1], sums[2] + sums[3]]
        totals = [v + f.exchange(v, 1) for v in halves]
        for _ in f.when(self._fourth.eq(0)):
            f.store_shared(totals[0], at)
            f.store_shared(totals[1], at, 8 * SUM_STRIDE)

    def _park_all(self, part: Part, above: int | Value, sums: Sequence[Value], buffer: int) -> None:
        each = self.per_tile
        for tile in range(part.tiles):
            self._park(part, above, tile, sums[each * tile : each * (tile + 1)], buffer)

    def _sums_of(self, part: Part, above: int | Value, tile: int, buffer: int) -> Value:
        """Where the warp's sums of a tile are."""
        tiles = self._first_tile(part) + tile + above * (part.tiles * part.teams)
        at = self._step(part) * 4 + self._sums_at(buffer)
        return at + tiles * (part.tile * SUM_STRIDE)

    def _sums_at(self, buffer: int) -> int:
        return self.shape.place(SUMS) + buffer * self.shape.sums_bytes

    def total(self, part: Part, row: Value, buffer: int) -> Value:
        """The sum of all warps of a row."""
        return self.add_up(row * SUM_STRIDE + self._sums_at(buffer), WARPS // part.teams)

    def add_up(self, at: Value, count: int = WARPS) -> Value:
        """The sum of a number of each of some warps, in shared memory."""
        f = self.f
        fours = [f.load_shared(at, vec(4, f32), 16 * i, align=16) for i in range(count // 4)]
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
        whole = self.add_up(f.i32(self.shape.place(SQUARES) + 4 * WARPS * buffer))
        return f.rsqrt_fast(f.fma(whole, 1.0 / self.shape.hidden, self.shape.eps))

    # -- whole products ---------------------------------------------------------------------------

    def finish(self, rows: Rows, tiles: Tiles, columns: Columns, buffer: int) -> None:
        """Multiply what was fetched, and store the sums."""
        if rows.other is None or rows.count is None:
            self._finish(rows.part, tiles, columns, buffer)
        else:
            first, second = (partial(self._finish, p, tiles, columns, buffer) for p in rows.parts)
            self.f.if_(rows.count.ne(0), first, second)

    def _finish(self, part: Part, tiles: Tiles, columns: Columns, buffer: int) -> None:
        for number, rounds in enumerate(tiles):
            chains = []
            for first in range(0, len(rounds), 2):  # short ones, beside each other
                sums = self.zeros()
                for weights, operands in zip(
                    rounds[first : first + 2], columns[first : first + 2], strict=True
                ):
                    sums = self._add(part, weights, operands, sums)
                chains.append(sums)
            total = chains[0]
            for chain in chains[1:]:
                total = [a + b for a, b in zip(total, chain, strict=True)]
            self._park(part, *divmod(number, part.tiles), total, buffer)

    def stream(
        self, rows: Rows, place: Slot, buffer: int, columns: Columns, share: Value | int
    ) -> Slot:
        """Multiply slot by slot as they come; `columns` are the operands if registers hold them."""
        f = self.f
        for part in rows.parts:

            def row(above: Value, slot: Value, parity: Value, part: Part = part) -> list[Value]:
                sums, place = self._stream_row(part, (slot, parity), columns, part.left(share))
                self._park_all(part, above, sums, buffer)
                return list(place)

            first, last = f.i32(0), f.i32(part.down)
            if rows.count is not None:
                ends = rows.count.udiv(part.height)
                first, last = (first, ends) if part is rows.part else (ends, last)
            slot, parity = f.loop(first, last, f.i32(1), list(place), row)
            place = slot, parity
        return place

    def stream_rows(self, part: Part, place: Slot, number: Value, columns: Columns) -> Slot:
        """The same of one row of slots, the `number`-th of the buffers of sums."""
        sums, place = self._stream_row(part, place, columns, 0)
        self._park_all(part, number, sums, 0)
        return place

    def _stream_row(
        self, part: Part, place: Slot, columns: Columns, left: Value | int
    ) -> tuple[list[Value], Slot]:
        f = self.f
        # rounds of a slot, or slots of a round
        per, slots = (max(1, n) for n in _ratios(part.boxes, part.round_boxes))
        each = self.per_tile

        def some(number: Value | int, slot: Value, parity: Value, *sums: Value) -> list[Value]:
            places = [(slot, parity)]
            for _ in range(slots):
                places.append(self.ring.next(places[-1]))
            starts = [self.ring.wait(p) for p in places[:-1]]
            before = number * slots + left
            loaded = [self._load(part, starts, i, before) for i in range(per)]
            self.ring.free(*places[:-1])
            made = list(sums)
            for i, tiles in enumerate(loaded):
                at = number * per + i
                operands = columns[at] if isinstance(at, int) else self.operands(part, at)
                for tile, weights in enumerate(tiles):
                    own = slice(each * tile, each * (tile + 1))
                    made[own] = self._add(part, weights, operands, made[own])
            return [*places[-1], *made]

        state = [*place, *self.zeros() * part.tiles]
        count = part.rounds // per
        if columns:
            for i in range(count):
                state = some(i, *state)
        else:
            state = f.loop(f.i32(0), f.i32(count), f.i32(1), state, some)
        return state[2:], (state[0], state[1])


def _ratios(a: int, b: int) -> tuple[int, int]:
    return a // b, b // a
