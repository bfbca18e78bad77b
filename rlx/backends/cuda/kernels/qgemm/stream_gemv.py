"""Products of one row with large packed weights: rows stream through shared memory (Hopper).

One block stays on each multiprocessor, and leaves room for one of the kernel behind unless the
weight is so large that a longer ring gains more. Its warps are teams, which go over the rows
together; the warps of a team divide the columns. A lane keeps its columns of x as digits in
registers and takes them times all rows of the team. One thread of a team copies the rows, which
follow each other in memory, to a ring of slots: what is under way does not take registers, and the
first slots of the kernel behind are filled while this one ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue, EpilogueArgs
from rlx.backends.cuda.kernels.gemm.gemv import Norm, scatter_sums
from rlx.backends.cuda.kernels.gemm.plan import BLOCKS
from rlx.backends.cuda.kernels.gemm.weight_rows import Raw, load_run
from rlx.backends.cuda.kernels.qgemm.digits import (
    RECORD,
    SCALE_AT,
    add_products,
    factors,
    quant_bytes,
)
from rlx.backends.cuda.kernels.qgemm.packed_rows import shared_words
from rlx.backends.cuda.kernels.qgemm.row_planes import offsets
from rlx.backends.cuda.kernels.qgemm.split_digits import PASS, split_by_eight
from rlx.ir.dtype import f32 as _F32
from rlx.llvm.builder import Value, f32, i16, i32, i64, vec
from rlx.support.records import dataclass

_CHUNK = 32  # columns that a lane has
_MOST_RECORDS = 16 << 10  # bytes
_MOST_WARPS = 16
_ROOM, _WHOLE = 112 << 10, 226 << 10  # bytes of shared memory: half of a multiprocessor, and all
_LARGE = 1 << 25  # numbers of weights from which on a block that has all of it is faster
_MOST_SLOTS = 16
_MOST_OWN = 2  # chunks of a lane, whose digits lie in registers


@dataclass(frozen=True)
class StreamGemv(BlockKernel):
    """args: those of `Gemv` for one row

    `split` warps have `own` chunks of 32 columns in each lane; there are `teams` of them. A slot
    has `rows` rows of the weight, of both halves of a pair.
    """

    scheme: str
    k: int
    n: int
    epilogue: Epilogue
    norm: Norm | None
    teams: int
    split: int
    own: int
    rows: int
    slots: int
    blocks: int

    @property
    def label(self) -> str:
        return f"gemv(1x{self.k})"

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def warps(self) -> int:
        return self.teams * self.split

    @property
    def halves(self) -> int:
        return 2 if self.epilogue.pair else 1

    @property
    def row_bytes(self) -> int:
        return offsets(self.scheme, self.k)[1]

    @property
    def slot_bytes(self) -> int:
        return self.halves * self.rows * self.row_bytes

    @property
    def items(self) -> int:
        """Slots that all rows fill."""
        return -(-self.n // self.rows)

    @property
    def all_teams(self) -> int:
        return self.blocks * self.teams

    @property
    def team_items(self) -> int:
        """Of a team, at most."""
        return -(-self.items // self.all_teams)

    # -- shared memory: mbarriers, sums of squares, sums of rows, x, slots ------------------------

    @property
    def squares_at(self) -> int:
        return 16 * self.teams * self.slots

    @property
    def sums_at(self) -> int:
        return self.squares_at + 4 * self.warps

    @property
    def records_at(self) -> int:
        sums = 4 * self.teams * self.team_items * self.halves * self.rows * self.split
        return -(-(self.sums_at + sums) // 128) * 128

    @property
    def shares(self) -> bool:
        """Whether the digits of all of x lie in shared memory for a while."""
        return self.k // 32 * RECORD <= _MOST_RECORDS

    @property
    def slots_at(self) -> int:
        count = self.k // 32 if self.shares else self.warps * (PASS // 32)
        return -(-(self.records_at + RECORD * count) // 128) * 128

    @property
    def shared(self) -> int:
        return self.slots_at + self.teams * self.slots * self.slot_bytes

    def emit(self, m: KernelModule) -> None:
        blocks = 2 if self.own == 1 else 1
        _Emitter(m.begin_block(self.threads, self.shared, blocks), self).emit()


def stream_gemv_for(
    scheme: str, k: int, n: int, epilogue: Epilogue, norm: Norm | None = None,
    warps: int = 0, rows: int = 0, room: int = 0,
) -> StreamGemv | None:  # fmt: skip
    """The kernel for these sizes, or None where rows are too long; `warps` (at most), `rows` and
    the `room` in shared memory are chosen if they are 0."""
    units = -(-k // (_CHUNK * WARP))  # warps that a row could use
    own = -(-units // _MOST_WARPS)
    if own > _MOST_OWN:
        return None
    divide = -(-units // own)
    teams = max(1, (warps or _MOST_WARPS) // divide)
    numbers = n * k * (2 if epilogue.pair else 1)
    room = room or (_WHOLE if numbers >= _LARGE else _ROOM)
    for count in (rows,) if rows else (8, 4, 2, 1):
        if count > n:
            continue
        sizes = teams, divide, own, count, 1, BLOCKS
        made = StreamGemv(scheme, k, n, epilogue, norm, *sizes)
        left = room - made.slots_at - 16 * teams * _MOST_SLOTS
        slots = min(_MOST_SLOTS, left // (teams * made.slot_bytes))
        if slots >= 4 or (slots >= 2 and count in (1, rows)):
            return replace(made, slots=slots)
    return None


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: StreamGemv) -> None:
        self.f, self.kernel = f, kernel
        args = f["args"]
        self.x = f.arg(args, 0)
        self.weights = [f.arg(args, 2 + i) for i in range(kernel.halves)]
        self.out = EpilogueArgs(f, kernel.epilogue, 6)
        first = 7 + kernel.epilogue.extras
        count = 0 if kernel.norm is None else 3 if kernel.norm.adds else 1
        self.norm_args = [f.arg(args, first + i) for i in range(count)]
        self.lane = f.lane32()
        self.warp = f.uniform(f.thread() >> 5)
        self.team = self.warp.udiv(kernel.split)
        self.part = self.warp - self.team * kernel.split  # of the columns
        self.is_leader = self.part.eq(0) & self.lane.eq(0)
        self.full = self.team * (16 * kernel.slots)
        self.empty = self.full + 8 * kernel.slots
        self.ring = self.team * (kernel.slots * kernel.slot_bytes) + kernel.slots_at
        self.first, self.count = self._items(self.team)
        last = kernel.k // _CHUNK - 1
        there = [(self.part + kernel.split * j) * WARP + self.lane for j in range(kernel.own)]
        self.inside = [c <= last for c in there]
        self.chunks = [f.min(c, last) for c in there]

    def _items(self, team: Value) -> tuple[Value, Value]:
        """The first item of a team of this block, and how many it has."""
        f, kernel = self.f, self.kernel
        number = f.block_number() * kernel.teams + team
        left = f.max(kernel.items - 1 - number, -1)
        return number, (left + kernel.all_teams).udiv(kernel.all_teams)

    def emit(self) -> None:
        f, kernel = self.f, self.kernel
        f.if_(self.is_leader, self._begin)
        f.barrier()
        f.wait_for_previous()
        operands = self._split_x()

        def body(item: Value, slot: Value, parity: Value) -> list[Value]:
            if kernel.split > 1:  # the slot of the item before is free by now, or soon
                self._refill(item - 1, *self._before(slot, parity), item > 0)
            f.wait_phase(self.full + slot * 8, parity)
            sums = self._multiply(self.ring + slot * kernel.slot_bytes, operands)
            f.warp_barrier()
            if kernel.split > 1:
                f.if_(self.lane.eq(0), lambda: f.arrive(self.empty + slot * 8))
            else:
                self._refill(item, slot, parity, None)
            self._keep(item, sums)
            is_last = slot.eq(kernel.slots - 1)
            return [f.select(is_last, f.i32(0), slot + 1), parity ^ is_last.to(i32, signed=False)]

        f.loop(f.i32(0), self.count, f.i32(1), [f.i32(0), f.i32(0)], body)
        f.barrier()
        self._finish()

    # -- copies, by one thread of a team -----------------------------------------------------------

    def _begin(self) -> None:
        f, kernel = self.f, self.kernel
        for i in range(kernel.slots):
            f.init_mbarrier(self.full + 8 * i, 1)
            f.init_mbarrier(self.empty + 8 * i, kernel.split)
        f.fence_mbarriers()
        for slot in f.range(f.i32(0), f.i32(kernel.slots), f.i32(1)):
            f.if_(slot < self.count, partial(self._copy, slot, slot))
        f.if_(self.count <= kernel.slots, f.let_next_start)

    def _copy(self, item: Value, slot: Value) -> None:
        """Fill a slot with the rows of an item of this team."""
        f, kernel = self.f, self.kernel
        size, full = kernel.rows * kernel.row_bytes, self.full + slot * 8
        f.expect_bytes(full, kernel.slot_bytes)
        to = self.ring + slot * kernel.slot_bytes
        for half, weight in enumerate(self.weights):
            source = f.gep(weight, self._row(self.first, item).to(i64) * kernel.row_bytes)
            f.copy_bytes(to + half * size, source, size, full)

    def _row(self, first: Value, item: Value) -> Value:
        """The first row of an item of a team: the last of all shares rows with that before."""
        kernel = self.kernel
        number = first + item * kernel.all_teams
        return self.f.min(number * kernel.rows, kernel.n - kernel.rows)

    def _place(self, team: Value, item: Value) -> Value:
        """The place of an item of a team among those of the block."""
        kernel = self.kernel
        return item * kernel.teams + team

    def _refill(self, item: Value, slot: Value, parity: Value, also: Value | None) -> None:
        """Copy what comes into the slot of an item after it. With the last copy of all, the kernel
        behind may start: its own copies follow."""
        f, kernel = self.f, self.kernel
        behind = item + kernel.slots

        def copy() -> None:
            if kernel.split > 1:
                f.wait_phase(self.empty + slot * 8, parity)
            self._copy(behind, slot)
            f.if_((behind + 1).eq(self.count), f.let_next_start)

        wanted = self.is_leader & (behind < self.count)
        f.if_(wanted if also is None else wanted & also, copy)

    def _before(self, slot: Value, parity: Value) -> tuple[Value, Value]:
        """The slot before one, and its parity."""
        f = self.f
        is_first = slot.eq(0)
        back = f.select(is_first, f.i32(self.kernel.slots - 1), slot - 1)
        return back, parity ^ is_first.to(i32, signed=False)

    # -- x ----------------------------------------------------------------------------------------
    # A warp splits 128 columns at a time, eight lanes each 32 of them, and leaves records in shared
    # memory, of which each lane takes its own. Where all records have room the block shares the
    # work; else each warp splits what its lanes need.

    @property
    def _swap(self) -> Value:
        """Which of the two pieces of 16 bytes of Q8_0 a lane loads first: neighbouring lanes would
        wait for each other."""
        return (self.lane >> 2) & 1

    def _split_x(self) -> list[list[Value]]:
        """Of each chunk of a lane: words of digits, their scale and their sum."""
        f, kernel = self.f, self.kernel
        total = f.const(0.0, f32)
        if kernel.shares:
            step = f.i32(kernel.warps * PASS)

            def split_part(column: Value, total: Value) -> Value:
                at = (column >> 5) * RECORD + kernel.records_at
                return self._split_pass(column, at, total, f.block_number().eq(0))

            last = f.i32(kernel.k)
            [total] = f.loop(self.warp * PASS, last, step, [total], split_part)
            self._keep_square(total)
            f.barrier()
            at = [c * RECORD + kernel.records_at for c in self.chunks]
            return [self._own(self._record(a), j) for j, a in enumerate(at)]
        found, first_team = [], f.block_number().eq(0) & self.team.eq(0)
        for j in range(kernel.own):
            place = self.warp * (RECORD * PASS // 32) + kernel.records_at
            first = (self.part + kernel.split * j) * (_CHUNK * WARP)
            mine = place + (self.lane & 3) * RECORD

            def split_own(
                i: Value, total: Value, *record: Value, first: Value = first,
                place: Value = place, mine: Value = mine,
            ) -> list[Value]:  # fmt: skip
                column = first + i * PASS
                there = column < kernel.k
                column = f.min(column, kernel.k - PASS)
                more = self._split_pass(column, place, f.const(0.0, f32), first_team & there)
                f.warp_barrier()
                kept = list(record)
                own = f.if_((self.lane >> 2).eq(i), lambda: self._record(mine), lambda: kept)
                f.warp_barrier()
                return [total + f.select(there, more, 0.0), *own]

            empty = [f.i32(0)] * (SCALE_AT // 4) + [f.const(0.0, f32)] * 2
            passes = f.i32(_CHUNK * WARP // PASS)
            total, *record = f.loop(f.i32(0), passes, f.i32(1), [total, *empty], split_own)
            found.append(self._own(record, j))
        self._keep_square(total)
        return found

    def _split_pass(self, first: Value, at: Value, total: Value, keeps: Value) -> Value:
        """Split 128 columns from `first` on into records at an address of shared memory; the sum of
        the lane's squares, added to `total`."""
        f, kernel = self.f, self.kernel
        column = (first + self.lane * 4).to(i64)
        values = load_run(f, self.x, column, 4, _F32)
        if kernel.norm is not None:
            gamma, *residual = self.norm_args
            if residual:
                more = load_run(f, residual[0], column, 4, _F32)
                values = [a + b for a, b in zip(values, more, strict=True)]
                to, row = f.gep(self.norm_args[2], column, 4), f.join(values)
                f.if_(keeps, lambda: f.store(row, to, align=16))
            for v in values:
                total = f.fma(v, v, total)
            factors = load_run(f, gamma, column, 4, _F32)
            values = [a * b for a, b in zip(values, factors, strict=True)]
        words, scale, whole = split_by_eight(f, values)
        record, number = at + (self.lane >> 3) * RECORD, self.lane & 7
        for i, word in enumerate(words):
            f.store_shared(word, record + number * 4, 32 * i)
        pair = f.join([scale, whole])
        f.if_(number.eq(0), lambda: f.store_shared(pair, record, SCALE_AT, align=8))
        return total

    def _record(self, at: Value) -> list[Value]:
        """The words, the scale and the sum of a record, as lanes have quants."""
        f, found = self.f, list[Value]()
        swap = self._swap * 16 if self.kernel.scheme == "Q8_0" else f.i32(0)
        for i in range(0, SCALE_AT, 32):
            found += shared_words(f, at + swap, i, 4) + shared_words(f, at + (swap ^ 16), i, 4)
        pair = f.load_shared(at, vec(2, f32), SCALE_AT, align=8)
        return [*found, f.extract(pair, 0), f.extract(pair, 1)]

    def _own(self, record: list[Value], j: int) -> list[Value]:
        """Lanes behind the last column count nothing."""
        scale, total = (self.f.select(self.inside[j], v, 0.0) for v in record[-2:])
        return [*record[:-2], scale, total]

    def _keep_square(self, total: Value) -> None:
        f, kernel = self.f, self.kernel
        if kernel.norm is None:
            return
        whole = f.warp_sum(total)
        place = self.warp * 4 + kernel.squares_at
        f.if_(self.lane.eq(0), lambda: f.store_shared(whole, place))

    # -- products ---------------------------------------------------------------------------------

    def _multiply(self, at: Value, operands: Sequence[Sequence[Value]]) -> list[Value]:
        """A lane's parts of the sums of all rows in a slot."""
        f, kernel = self.f, self.kernel
        places = [self._places(at, chunk) for chunk in self.chunks]
        sums = []
        for row in range(kernel.halves * kernel.rows):
            total = f.const(0.0, f32)
            for own, numbers in zip(places, operands, strict=True):
                raw = self._load(own, row * kernel.row_bytes)
                total = self._add(raw, numbers, total)
            sums.append(total)
        return sums

    def _places(self, at: Value, chunk: Value) -> dict[str, Value]:
        """Where the parts of a chunk of the first row are."""
        scheme, found = self.kernel.scheme, dict[str, Value]()
        begins = offsets(scheme, self.kernel.k)[0]
        if scheme == "Q8_0":
            found["quants"] = at + chunk * 32 + self._swap * 16
            found["others"] = at + chunk * 32 + (self._swap ^ 1) * 16
        else:
            found["quants"] = at + chunk * 16
        found["scales"] = at + chunk * 2 + begins["scales"]
        if "supers" in begins:
            size = 2 if scheme == "Q6_K" else 4
            found["supers"] = at + (chunk >> 3) * size + begins["supers"]
        if "high" in begins:
            found["high"] = at + chunk * (8 if scheme == "Q6_K" else 4) + begins["high"]
        return found

    def _load(self, places: dict[str, Value], offset: int) -> tuple[Raw, Raw, Value, Value]:
        """Words of quants, those of higher bits, the pair of scales, and their super scale."""
        f, scheme = self.f, self.kernel.scheme
        quants = shared_words(f, places["quants"], offset, 4)
        if scheme == "Q8_0":
            quants += shared_words(f, places["others"], offset, 4)
        high = list[Value]()
        if "high" in places:
            high = shared_words(f, places["high"], offset, 2 if scheme == "Q6_K" else 1)
        pair = self._short(places["scales"], offset)
        supers = pair
        if scheme == "Q6_K":
            supers = self._short(places["supers"], offset)
        elif "supers" in places:
            [supers] = shared_words(f, places["supers"], offset, 1)
        return quants, high, pair, supers

    def _short(self, at: Value, offset: int) -> Value:
        return self.f.load_shared(at, i16, offset, align=2).to(i32, signed=False)

    def _add(
        self, raw: tuple[Raw, Raw, Value, Value], operands: Sequence[Value], total: Value
    ) -> Value:
        f, scheme = self.f, self.kernel.scheme
        quants, high, pair, supers = raw
        found = quant_bytes(f, scheme, quants, high)
        return add_products(f, scheme, found, factors(f, scheme, pair, supers), operands, total)

    # -- sums -------------------------------------------------------------------------------------

    def _keep(self, item: Value, sums: list[Value]) -> None:
        """Keep the sums of an item over the lanes of this warp."""
        f, kernel = self.f, self.kernel
        value, spread = scatter_sums(f, sums, self.lane)
        number = self.lane.udiv(spread)
        own = self._place(self.team, item) * len(sums) + number
        place = (own * kernel.split + self.part) * 4 + kernel.sums_at
        keeps = (self.lane & spread - 1).eq(0) & (number < len(sums))
        f.if_(keeps, lambda: f.store_shared(value, place))

    def _finish(self) -> None:
        """Add up the warps of the teams, and store: a thread has a row."""
        f, kernel = self.f, self.kernel
        factor = self._factor()
        count = f.i32(kernel.teams * kernel.team_items * kernel.rows)
        for number in f.range(f.thread(), count, f.i32(kernel.threads)):
            place = number.udiv(kernel.rows)
            row = number - place * kernel.rows
            item = place.udiv(kernel.teams)
            team = place - item * kernel.teams
            first, items = self._items(team)
            column = self._row(first, item) + row
            f.if_(item < items, partial(self._finish_row, place, row, column, factor))

    def _finish_row(self, place: Value, row: Value, column: Value, factor: Value | None) -> None:
        kernel = self.kernel
        totals = [
            self._total((place * kernel.halves + half) * kernel.rows + row)
            for half in range(kernel.halves)
        ]
        if factor is not None:
            totals = [v * factor for v in totals]
        at = column.to(i64)
        self.out.store(totals[0], totals[1] if kernel.epilogue.pair else None, at, at)

    def _total(self, number: Value) -> Value:
        f, kernel = self.f, self.kernel
        place = number * (4 * kernel.split) + kernel.sums_at
        total = f.load_shared(place, f32)
        for part in range(1, kernel.split):
            total = total + f.load_shared(place, f32, 4 * part)
        return total

    def _factor(self) -> Value | None:
        """What makes a product of x and gamma one of the norm."""
        f, kernel = self.f, self.kernel
        if kernel.norm is None:
            return None
        whole = f.load_shared(f.i32(kernel.squares_at), f32)
        parts = kernel.warps if kernel.shares else kernel.split  # those of the first team
        for part in range(1, parts):
            whole = whole + f.load_shared(f.i32(kernel.squares_at), f32, 4 * part)
        return 1.0 / f.sqrt(whole * (1.0 / kernel.k) + kernel.norm.eps)
