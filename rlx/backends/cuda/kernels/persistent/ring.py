"""A ring of slots in shared memory: one warp copies weights into them, the others read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.persistent.shape import (
    BARRIERS,
    COPY_UNIT,
    WARPS,
    DenseShape,
    Part,
)
from rlx.backends.cuda.kernels.qgemm.row_planes import offsets
from rlx.llvm.builder import Value, i32

_BOX = 64  # 16-bit numbers of a row of a box
Slot = tuple[Value, Value]  # a slot, and the parity of its phase


class Ring:
    def __init__(self, f: BlockFunction, shape: DenseShape, ahead: int) -> None:
        """At most `ahead` slots are being filled at a time: more copies than that fill the queues
        which the values that blocks hand over pass through."""
        self.f, self.shape, self.ahead = f, shape, min(ahead, shape.slots)
        self.slots = shape.slots
        self._full = shape.place(BARRIERS)
        self._empty = self._full + 8 * self.slots

    def init(self) -> None:
        """By one thread."""
        f = self.f
        for i in range(self.slots):
            f.init_mbarrier(f.i32(self._full + 8 * i), 1)
            f.init_mbarrier(f.i32(self._empty + 8 * i), WARPS)
        f.fence_mbarriers()

    def start(self) -> Slot:
        return self.f.i32(0), self.f.i32(0)

    def next(self, place: Slot) -> Slot:
        f, (slot, parity) = self.f, place
        is_last = slot.eq(self.slots - 1)
        return f.select(is_last, f.i32(0), slot + 1), parity ^ is_last.to(i32, signed=False)

    # -- the thread that copies -------------------------------------------------------------------

    def fill(self, place: Slot, count: int, copy: Callable[[Value, Value], None]) -> Slot:
        """Fill a slot with `count` bytes by `copy(start of the slot, mbarrier)`."""
        f, (slot, parity) = self.f, place
        if self.ahead < self.slots:
            wraps = slot < self.ahead
            back = f.select(wraps, slot + (self.slots - self.ahead), slot - self.ahead)
            f.watch_phase(back * 8 + self._full, parity ^ wraps.to(i32, signed=False))
        f.wait_phase(slot * 8 + self._empty, parity ^ 1)
        full = slot * 8 + self._full
        f.expect_bytes(full, count)
        copy(slot * self.shape.slot_bytes, full)
        return self.next(place)

    def fill_part(
        self,
        part: Part,
        maps: Sequence[Sequence[Value]],
        row: Value,
        column: Value | int,
        place: Slot,
        rows: Value | None = None,
    ) -> Slot:
        """Fill the slots of a part of a matrix, or of two, that begins at this row and column; or
        of so many rows of it. `maps` are those of each: its quants, then what lies beside them."""
        f, weights = self.f, part.weights
        begins = offsets(part.scheme, part.whole)[0] if part.scheme else {}

        def fill(i: Value, slot: Value, parity: Value) -> list[Value]:
            above = i.udiv(part.across)
            first = (i - above * part.across) * part.slot_columns + column
            top = above * part.box_rows + row
            quants = first.udiv(weights.per_box // _BOX) if weights.per_box > _BOX else first

            def copy(start: Value, full: Value) -> None:
                for box in range(part.boxes):
                    for half, (source, *_) in enumerate(maps):
                        offset = box * part.box_bytes + half * (part.box_bytes // part.halves)
                        f.copy_tile(start + offset, source, quants + _BOX * box, top, full)
                for i, side in enumerate(weights.sides):
                    there = first.udiv(2 * side.columns // side.unit) & -COPY_UNIT // 2
                    there = there + begins[side.name] // 2
                    for half, (_, *sources) in enumerate(maps):
                        offset = part.side_at(i) + half * part.box_rows * part.side_bytes(i)
                        f.copy_tile(start + offset, sources[i], there, top, full)

            return list(self.fill((slot, parity), part.slot_bytes, copy))

        count = f.i32(part.slots) if rows is None else rows.udiv(part.height) * part.across
        slot, parity = f.loop(f.i32(0), count, f.i32(1), list(place), fill)
        return slot, parity

    @property
    def _piece_bytes(self) -> int:
        """Of keys, and as many of values."""
        return 2 * self.shape.piece * self.shape.head_dim

    def fill_piece(self, keys: Value, values: Value, place: Slot) -> Slot:
        """Fill one or two slots with keys and values of some positions."""
        f, count = self.f, self._piece_bytes

        def copy_keys(start: Value, full: Value) -> None:
            f.copy_bytes(start, keys, count, full)

        def copy_values(start: Value, full: Value) -> None:
            f.copy_bytes(start, values, count, full)

        def copy_both(start: Value, full: Value) -> None:
            copy_keys(start, full)
            copy_values(start + count, full)

        if 2 * count <= self.shape.slot_bytes:
            return self.fill(place, 2 * count, copy_both)
        return self.fill(self.fill(place, count, copy_keys), count, copy_values)

    def wait_piece(self, place: Slot) -> tuple[list[Value], list[Slot]]:
        """Where keys and values begin, and the slots that they are in."""
        start = self.wait(place)
        if 2 * self._piece_bytes <= self.shape.slot_bytes:
            return [start, start + self._piece_bytes], [place]
        behind = self.next(place)
        return [start, self.wait(behind)], [place, behind]

    # -- the warps that read ----------------------------------------------------------------------

    def wait(self, place: Slot) -> Value:
        """Wait until a slot is full; where it begins."""
        self.f.wait_phase(place[0] * 8 + self._full, place[1])
        return place[0] * self.shape.slot_bytes

    def free(self, *places: Slot) -> None:
        """This warp has read the slots."""
        f = self.f
        f.warp_barrier()
        for _ in f.when(f.lane32().eq(0)):
            for slot, _ in places:
                f.arrive(slot * 8 + self._empty)

    def wait_all(self, place: Slot, count: int) -> list[Value]:
        """Wait until so many slots are full, each of them by a lane; where they begin."""
        f = self.f
        slot, parity = self._of_lane(place)
        for _ in f.when(f.lane32() < count):
            f.wait_phase(slot * 8 + self._full, parity)
        f.warp_barrier()
        starts = [place[0]]
        for _ in range(count - 1):
            starts.append(self.next((starts[-1], place[1]))[0])
        return [s * self.shape.slot_bytes for s in starts]

    def free_all(self, place: Slot, count: int) -> Slot:
        """This warp has read so many slots; the place behind them."""
        f = self.f
        f.warp_barrier()
        slot, _ = self._of_lane(place)
        for _ in f.when(f.lane32() < count):
            f.arrive(slot * 8 + self._empty)
        return self._further(place, count)

    def _of_lane(self, place: Slot) -> Slot:
        return self._further(place, self.f.lane32())

    def _further(self, place: Slot, by: Value | int) -> Slot:
        f, (slot, parity) = self.f, place
        there = slot + by
        wraps = there >= self.slots
        return f.select(wraps, there - self.slots, there), parity ^ wraps.to(i32, signed=False)
