"""A ring of slots in shared memory: one warp copies weights into them, the others read them."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.persistent.shape import (
    BARRIERS,
    PIECE,
    WARPS,
    DenseShape,
    Part,
)
from rlx.llvm.builder import Value, i32, i64

Place = tuple[Value, Value]  # a slot, and the parity of its phase


class Ring:
    def __init__(self, f: BlockFunction, shape: DenseShape, ahead: int) -> None:
        """At most `ahead` slots are being filled at a time: more copies than that fill the queues
        which the values that blocks hand over pass through."""
        self.f, self.shape, self.ahead = f, shape, min(ahead, shape.slots)
        self.slots, self.bytes = shape.slots, shape.slot_bytes
        self._full = shape.place(BARRIERS)
        self._empty = self._full + 8 * self.slots

    def init(self) -> None:
        """By one thread."""
        f = self.f
        for i in range(self.slots):
            f.init_mbarrier(f.i32(self._full + 8 * i), 1)
            f.init_mbarrier(f.i32(self._empty + 8 * i), WARPS)
        f.fence_mbarriers()

    def start(self) -> Place:
        return self.f.i32(0), self.f.i32(0)

    def next(self, place: Place) -> Place:
        f, (slot, parity) = self.f, place
        is_last = slot.eq(self.slots - 1)
        return f.select(is_last, f.i32(0), slot + 1), parity ^ is_last.to(i32, signed=False)

    # -- the warp that copies ---------------------------------------------------------------------

    def fill(self, place: Place, count: int, copy: Callable[[Value, Value], None]) -> Place:
        """Fill a slot with `count` bytes by `copy(start of the slot, mbarrier)`, for each lane."""
        f, (slot, parity) = self.f, place
        if self.ahead < self.slots:
            wraps = slot < self.ahead
            back = f.select(wraps, slot + (self.slots - self.ahead), slot - self.ahead)
            f.watch_phase(back * 8 + self._full, parity ^ wraps.to(i32, signed=False))
        f.wait_phase(slot * 8 + self._empty, parity ^ 1)
        full = slot * 8 + self._full
        for _ in f.when(f.lane32().eq(0)):
            f.expect_bytes(full, count)
        copy(slot * self.bytes, full)
        return self.next(place)

    def fill_part(
        self, part: Part, row: Callable[[Value], Value], place: Place, tiles: int | None = None
    ) -> Place:
        """Fill the slots of a part of a matrix; `row` gives the address of a row's first column."""
        f, lane = self.f, self.f.lane32()
        width = 2 * part.width

        def fill(i: Value, slot: Value, parity: Value) -> list[Value]:
            tile = i.udiv(part.slabs)
            slab = i - tile * part.slabs
            source = f.gep(row(tile * part.height + lane), (slab * width).to(i64))

            def copy(start: Value, full: Value) -> None:
                for _ in f.when(lane < part.height):
                    f.copy_bytes(start + lane * part.stride, source, width, full)

            return list(self.fill((slot, parity), part.height * width, copy))

        count = (part.tiles if tiles is None else tiles) * part.slabs
        slot, parity = f.loop(f.i32(0), f.i32(count), f.i32(1), list(place), fill)
        return slot, parity

    def fill_piece(self, keys: Value, values: Value, place: Place) -> Place:
        """Fill a slot with keys and values of some positions."""
        f, lane = self.f, self.f.lane32()
        count = 2 * PIECE * self.shape.head_dim

        def copy(start: Value, full: Value) -> None:
            for _ in f.when(lane < 2):
                source = f.select(lane.eq(0), keys, values)
                f.copy_bytes(start + lane * count, source, count, full)

        return self.fill(place, 2 * count, copy)

    # -- the warps that read ----------------------------------------------------------------------

    def wait(self, place: Place) -> Value:
        """Wait until a slot is full; where it begins."""
        self.f.wait_phase(place[0] * 8 + self._full, place[1])
        return place[0] * self.bytes

    def free(self, *places: Place) -> None:
        """This warp has read the slots."""
        f = self.f
        f.warp_barrier()
        for _ in f.when(f.lane32().eq(0)):
            for slot, _ in places:
                f.arrive(slot * 8 + self._empty)


