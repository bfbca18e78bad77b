"""Products of many rows on Hopper: the copy engine fills a ring of tiles, groups of warps multiply.

A block has two groups of four warps that multiply, and one thread of a third that begins copies:
it waits until a stage of the ring is free, they until it is filled. Blocks stay for several tiles,
so that the copies of a tile run while the one before is stored. Neighbouring tiles, which read the
same rows, are computed at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlx.backends.cuda.builder import BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue, EpilogueArgs
from rlx.backends.cuda.tensor_map import TILE_COLUMNS as STEP
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i32, i64, vec
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

GROUP = 128  # threads that multiply together
_MULTIPLIERS = 2 * GROUP
_FIRST = 1024  # where the stages begin in shared memory: an atom of the permuted form
_ROOM = 226 << 10
_MOST_STAGES = 8
_FULL, _EMPTY = 16, 16 + 8 * _MOST_STAGES  # where mbarriers are
_RASTER = 16  # tiles below each other before the next column begins
_TOGETHER = 8  # pairs of the result whose operands are loaded before the first is stored
_FEW_SUMS = 64  # of a thread, which leave registers for that
MANY_REGISTERS, FEW_REGISTERS = 232, 40  # registers of those that multiply, and of those that copy


@dataclass(frozen=True)
class GroupTile:
    """Rows and columns of products that a block computes: of 128 rows a group has 64, of 64 rows
    each group has half of the columns."""

    m: int
    n: int

    @property
    def across(self) -> int:
        """Groups beside each other."""
        return 2 if self.m == 64 else 1

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.m * self.n // _MULTIPLIERS


@dataclass(frozen=True)
class GroupGemm(BlockKernel):
    """args: tensor map of x, rows between its planes, scales of rows (else 0), tensor map of the
    weight, of a second (else 0), scales of columns (else 0), partial results, counters, M, blocks
    of the launch, if `batched` the number of products, or for `pictures` the places of one, then
    those of the epilogue

    The weight is [n, k] row by row. Matrices of a batch, and scales, lie behind each other.
    """

    tile: GroupTile
    element: DType
    planes: int
    k: int
    n: int
    scaled: bool
    columns_scaled: bool
    splits: int
    epilogue: Epilogue
    early: bool = False  # no kernel writes the weights: they are copied while the one in front ends
    batched: bool = False
    pictures: bool = False  # rows are places of pictures: the result is [pictures, n, places]
    folded: bool = (
        False  # x is (high, low), the weight too: (high, high, low) times (high, low, high)
    )
    parts: int = 1  # of the columns of x, each summed up by itself, then added in order

    @property
    def label(self) -> str:
        return f"gemm({self.tile.m}x{self.tile.n}x{self.k})"

    @property
    def threads(self) -> int:
        return _MULTIPLIERS + GROUP

    @property
    def columns(self) -> int:
        """Columns of the result that a block gives: half of its products are those of a gate."""
        return self.tile.n // 2 if self.epilogue.pair else self.tile.n

    @property
    def pieces(self) -> int:
        """Tiles of weights of a stage: those of a group lie together."""
        return self.tile.across * (2 if self.epilogue.pair else 1)

    @property
    def box(self) -> int:
        """Rows of a tile of a weight."""
        return self.tile.n // self.pieces

    @property
    def plane_bytes(self) -> int:
        return 2 * STEP * self.tile.m

    @property
    def stage_bytes(self) -> int:
        return self.planes * self.plane_bytes + 2 * STEP * self.tile.n

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, (_ROOM - _FIRST) // self.stage_bytes)

    @property
    def shared(self) -> int:
        return _FIRST + self.stages * self.stage_bytes

    @property
    def steps(self) -> int:
        return -(-self.k // STEP)

    def emit(self, m: KernelModule) -> None:
        Emitter(m.begin_block(self.threads, self.shared), self).emit()


class Emitter:
    def __init__(self, f: BlockFunction, kernel: GroupGemm) -> None:
        self.f, self.kernel, self.tile = f, kernel, kernel.tile
        self.type = memory_type(kernel.element)
        args = f["args"]
        self.x, self.apart, self.scales = f.arg(args, 0), f.arg(args, 1, i32), f.arg(args, 2)
        self.weights = [f.arg(args, 3 + i) for i in range(2 if kernel.epilogue.pair else 1)]
        self.column_scales = f.arg(args, 5)
        self.partial, self.counters = f.arg(args, 6), f.arg(args, 7)
        self.m, self.blocks = f.arg(args, 8, i32), f.arg(args, 9, i32)
        self.out = EpilogueArgs(f, kernel.epilogue, 10 + (kernel.batched or kernel.pictures))
        self.down = f.ceil_div(self.m, self.tile.m)
        self.across = -(-kernel.n // kernel.columns)
        self.items = self.down * (self.across * kernel.splits)
        if kernel.batched:
            self.items = self.items * f.arg(args, 10, i32)
        if kernel.pictures:
            self.places = f.arg(args, 10, i32)
        self.group = f.uniform(f.thread() >> 7)
        thread = f.thread() & GROUP - 1
        self.is_first = thread.eq(0)  # of its group
        self.row = (thread >> 5) * 16 + ((thread & 31) >> 2)  # in the tile
        self.column = (thread & 3) * 2
        if self.tile.across == 1:
            self.row = self.row + self.group * 64
        else:
            self.column = self.column + self.group * (kernel.columns // 2)

    def emit(self) -> None:
        f = self.f
        f.let_next_start()

        def begin() -> None:
            for i in range(self.kernel.stages):
                f.init_mbarrier(f.i32(_FULL + 8 * i), 1)
                f.init_mbarrier(f.i32(_EMPTY + 8 * i), 2)
            f.fence_mbarriers()
            for tensor_map in (self.x, *self.weights):
                f.acquire_map(tensor_map)

            if self.kernel.early:
                self._copy_early()

        f.if_(f.thread().eq(_MULTIPLIERS), begin)
        f.barrier()
        f.wait_for_previous()
        self.begin_tiles()
        f.if_(self.group.eq(2), self._emit_copies, self._emit_products)

    # -- which tiles there are, and where: other kernels have them elsewhere -----------------------

    def begin_tiles(self) -> None:
        """What the kernel in front has written of the tiles can be read from now on."""

    def corner(self, row: Value, column: Value, product: Value) -> tuple[Value, Value]:
        """Where a tile begins in x and in the weights."""
        if not self.kernel.batched:
            return row, column
        return row + product * self.m, column + product * self.kernel.n

    def first_row(self, product: Value) -> Value | None:
        """The rows of scales and results before those of a product."""
        return (product * self.m).to(i64) if self.kernel.batched else None

    def first_scale(self, product: Value) -> Value:
        """The columns whose scales are before those of a product."""
        return product * self.kernel.n if self.kernel.batched else self.f.i32(0)

    def target(self, row: Value) -> Value:
        """The row of the result that a row (i64) becomes."""
        return row

    def place(self, item: Value) -> tuple[Value, Value, Value, Value, Value]:
        """Number, split, first row, first column and product of a tile."""
        f, kernel = self.f, self.kernel
        per = self.across * _RASTER
        number = item.udiv(kernel.splits) if kernel.splits > 1 else item
        split = item - number * kernel.splits
        product, inside = f.i32(0), number
        if kernel.batched:
            each = self.down * self.across
            product = number.udiv(each)
            inside = number - product * each
        band = inside.udiv(per)
        left = inside - band * per
        height = f.min(self.down - band * _RASTER, _RASTER)
        right = left.udiv(height)
        row = (band * _RASTER + left - right * height) * self.tile.m
        return number, split, row, right * kernel.columns, product

    def _each_tile(self, body: Callable[..., list[Value]]) -> None:
        """Call `body` with each tile of this block, its place, and the stage and parity of its
        first step."""
        f = self.f

        def emit_item(item: Value, *ring: Value) -> list[Value]:
            return body(item, self.place(item), *ring)

        f.loop(f.block_number(), self.items, self.blocks, [f.i32(0), f.i32(0)], emit_item)

    def _steps(self, split: Value) -> tuple[Value, Value]:
        """The first step of a part of the columns of x, and the first behind it."""
        f, kernel = self.f, self.kernel
        if kernel.splits == 1:
            return f.i32(0), f.i32(kernel.steps)
        each = -(-kernel.steps // kernel.splits)
        return split * each, f.min(split * each + each, kernel.steps)

    def _next(self, stage: Value, parity: Value) -> list[Value]:
        f = self.f
        is_last = stage.eq(self.kernel.stages - 1)
        return [f.select(is_last, f.i32(0), stage + 1), parity ^ is_last.to(i32, signed=False)]

    # -- copies -----------------------------------------------------------------------------------

    def _emit_copies(self) -> None:
        f = self.f
        f.take_registers(FEW_REGISTERS, more=False)
        f.if_(self.is_first, lambda: self._each_tile(self._copy))

    def _copy(self, item: Value, place: tuple[Value, ...], *ring: Value) -> list[Value]:
        f, kernel = self.f, self.kernel
        _, split, row, column, product = place
        first, last = self._steps(split)
        row, column = self.corner(row, column, product)

        def emit_step(step: Value, stage: Value, parity: Value) -> list[Value]:
            full, at = stage * 8 + _FULL, stage * kernel.stage_bytes + _FIRST

            def begin() -> None:
                f.wait_phase(stage * 8 + _EMPTY, parity ^ 1)
                self._copy_weights(step, stage, column)

            if kernel.early:
                f.if_(item.ne(f.block_number()) | (step - first >= kernel.stages), begin)
            else:
                begin()
            for p in range(kernel.planes):
                there = row + self.apart * p if p else row
                f.copy_tile(at + p * kernel.plane_bytes, self.x, self._folded(step, 1), there, full)
            return self._next(stage, parity)

        return f.loop(first, last, 1, ring, emit_step)

    def _copy_weights(self, step: Value, stage: Value, column: Value) -> None:
        """Begin a stage with its weights."""
        f, kernel, count = self.f, self.kernel, len(self.weights)
        full = stage * 8 + _FULL
        at = stage * kernel.stage_bytes + (_FIRST + kernel.planes * kernel.plane_bytes)
        f.expect_bytes(full, kernel.stage_bytes)
        for i in range(kernel.pieces):
            there = column + i // count * kernel.box
            to = at + i * (2 * STEP * kernel.box)
            f.copy_tile(to, self.weights[i % count], self._folded(step, 2), there, full)

    def _folded(self, step: Value, parts: int) -> Value:
        """The column of a step: behind so many of three parts, folded ones begin again."""
        if not self.kernel.folded:
            return step * STEP
        each = self.kernel.steps // 3 * parts
        return self.f.select(step >= each, step - each, step) * STEP

    def _copy_early(self) -> None:
        """Begin all stages of the first tile with their weights."""
        f = self.f

        def begin() -> None:
            _, split, row, column, product = self.place(f.block_number())
            _, column = self.corner(row, column, product)
            first, last = self._steps(split)
            for i in range(self.kernel.stages):
                copy = partial(self._copy_weights, first + i, f.i32(i), column)
                f.if_(first + i < last, copy)

        f.if_(f.block_number() < self.items, begin)

    # -- products ---------------------------------------------------------------------------------

    def _emit_products(self) -> None:
        self.f.take_registers(MANY_REGISTERS, more=True)
        self._each_tile(self._multiply)

    def _multiply(self, item: Value, place: tuple[Value, ...], *ring: Value) -> list[Value]:
        number, split, row, column, product = place
        if self.kernel.parts > 1:
            stage, parity, *sums = self._sum_parts(*ring)
        else:
            stage, parity, *sums = self._sum(*self._steps(split), *ring)
        if self.kernel.splits == 1:
            self._store(row, column, product, sums)
        else:
            self._combine(number, split, (row, column, product), sums)
        return [stage, parity]

    def _sum_parts(self, *ring: Value) -> list[Value]:
        """The sums of all parts, as `_combine` adds them up: the same bits."""
        f, kernel = self.f, self.kernel
        each = -(-kernel.steps // kernel.parts)

        def emit_part(part: Value, stage: Value, parity: Value, *totals: Value) -> list[Value]:
            first = part * each
            last = f.min(first + each, kernel.steps)
            stage, parity, *sums = self._sum(first, last, stage, parity)
            return [stage, parity, *(a + b for a, b in zip(totals, sums, strict=True))]

        zeros = [f.const(0.0, f32)] * self.tile.sums
        return f.loop(f.i32(0), f.i32(kernel.parts), 1, [*ring, *zeros], emit_part)

    def _sum(self, first: Value, last: Value, *ring: Value) -> list[Value]:
        """Stage and parity behind some steps, and the sums of their products."""
        f = self.f

        def emit_step(
            step: Value, stage: Value, parity: Value, before: Value, *sums: Value
        ) -> list[Value]:
            f.wait_phase(stage * 8 + _FULL, parity)
            made = self._begin(stage, list(sums))
            f.wait_group(1)
            f.if_((step > first) & self.is_first, lambda: f.arrive(before * 8 + _EMPTY))
            return [*self._next(stage, parity), stage, *made]

        zeros = [f.const(0.0, f32)] * self.tile.sums
        stage, parity, before, *sums = f.loop(first, last, 1, [*ring, f.i32(0), *zeros], emit_step)
        sums = f.finish_group(sums)
        f.if_(self.is_first, lambda: f.arrive(before * 8 + _EMPTY))
        return [stage, parity, *sums]

    def _begin(self, stage: Value, sums: list[Value]) -> list[Value]:
        """Begin the products of a step."""
        f, kernel, tile = self.f, self.kernel, self.tile
        start = stage * kernel.stage_bytes + _FIRST
        rows, weights = start, start + kernel.planes * kernel.plane_bytes
        if tile.across == 1:
            rows = rows + self.group * (64 * 2 * STEP)
        else:
            weights = weights + self.group * (STEP * tile.n)
        f.begin_group()
        for p in range(kernel.planes):
            for k in range(STEP // 16):
                a, b = rows + (p * kernel.plane_bytes + 32 * k), weights + 32 * k
                sums = f.multiply_group(a, b, sums, tile.n // tile.across, self.type)
        f.commit_group()
        return sums

    def _combine(
        self, number: Value, split: Value, place: tuple[Value, Value, Value], sums: list[Value]
    ) -> None:
        """Keep the sums of this part; the last block of the tile adds up all parts."""
        f, kernel = self.f, self.kernel

        def place_of(part: Value) -> Value:
            whole = (number * kernel.splits + part).to(i64) * (self.tile.m * self.tile.n)
            return f.gep(self.partial, whole + (f.thread() * 4).to(i64), 4)

        to = place_of(split)
        for i in range(0, len(sums), 4):
            f.store(f.join(sums[i : i + 4]), to, 4 * _MULTIPLIERS * i, align=16)
        counter = f.gep(self.counters, number.to(i64), 8)
        last = f.is_last_block(counter, f.i32(kernel.splits), _MULTIPLIERS)

        def finish() -> None:
            def add(part: Value, *totals: Value) -> list[Value]:
                of, new = place_of(part), list[Value]()
                for i in range(0, len(sums), 4):
                    four = f.load(of, vec(4, f32), 4 * _MULTIPLIERS * i, align=16)
                    new += [totals[i + e] + f.extract(four, e) for e in range(4)]
                return new

            zeros = [f.const(0.0, f32)] * len(sums)
            self._store(*place, f.loop(f.i32(0), f.i32(kernel.splits), 1, zeros, add))

        f.if_(last, finish)

    # -- results ----------------------------------------------------------------------------------

    def _store(self, row0: Value, column0: Value, product: Value, sums: list[Value]) -> None:
        """Finish and store the sums: all threads compute, with rows and columns that are there."""
        f, kernel = self.f, self.kernel
        before, self.scaled_from = self.first_row(product), self.first_scale(product)
        shown = kernel.columns // self.tile.across // 8
        is_wide = kernel.epilogue.out.bytes == 2 and kernel.n % 8 == 0 and shown % 4 == 0
        is_wide = is_wide and not kernel.pictures
        step = 4 if is_wide else 1
        waits = kernel.epilogue.extras and self.tile.sums <= _FEW_SUMS
        together = max(step, _TOGETHER if waits else 1)
        for half in range(2):
            row = row0 + self.row + 8 * half
            there = f.min(row, self.m - 1).to(i64)
            if before is not None:
                there = there + before
            target = self.target(there)
            scale = f.load(f.gep(self.scales, there, 4), f32) if kernel.scaled else None
            for first in range(0, shown, together):
                made = [
                    self._finished(sums, j, half, there, column0, scale)
                    for j in range(first, min(first + together, shown))
                ]
                for i in range(0, len(made), step):
                    if is_wide:
                        self._store_wide(row, target, column0 + 8 * (first + i), made[i : i + 4])
                    else:
                        column = column0 + self.column + 8 * (first + i)
                        self._store_pair(row, target, column, made[i])

    def _finished(
        self, sums: list[Value], j: int, half: int, row: Value, column0: Value, scale: Value | None
    ) -> list[Value]:
        """Two neighbours of a row, in f32."""
        f, kernel = self.f, self.kernel
        at, others = 4 * j + 2 * half, None
        totals = sums[at : at + 2]
        if kernel.epilogue.pair:
            others = sums[at + len(sums) // 2 :][:2]
        column = f.min(column0 + self.column + 8 * j, kernel.n - 2).to(i64)
        if scale is not None:
            totals = [v * scale for v in totals]
            others = None if others is None else [v * scale for v in others]
        if kernel.columns_scaled:
            scales = f.gep(self.column_scales, column + self.scaled_from.to(i64), 4)
            both = f.load(scales, vec(2, f32), align=8)
            totals = [v * f.extract(both, i) for i, v in enumerate(totals)]
        return self.out.finish_pair(totals, others, column, row * kernel.n + column)

    def _store_pair(self, row: Value, target: Value, column: Value, made: list[Value]) -> None:
        f, n = self.f, self.kernel.n
        inside = (row < self.m) & (column < n)
        if self.kernel.pictures:
            f.if_(inside, partial(self._store_apart, row, column, made))
            return
        at = target * n + column.to(i64)
        f.if_(inside, partial(self.out.store_pair, made[0], made[1], at))

    def _store_apart(self, row: Value, column: Value, made: list[Value]) -> None:
        """Two numbers of a place: neighbouring rows, which other lanes have, lie side by side."""
        picture = row.udiv(self.places)
        place = row - picture * self.places
        first = (picture * self.kernel.n + column).to(i64) * self.places.to(i64) + place.to(i64)
        for i, value in enumerate(made):
            self.out.write(value, first + self.places.to(i64) * i)

    def _store_wide(
        self, row: Value, target: Value, column0: Value, made: list[list[Value]]
    ) -> None:
        """Four lanes have two numbers each of four times 8 columns; each stores 8 columns."""
        f, kernel = self.f, self.kernel
        element = memory_type(kernel.epilogue.out)
        words = transposed(f, [f.pack_halves(a, b, element) for a, b in made])
        first = (f.thread() & 3) * 8
        column = column0 + (first + self.column - (f.thread() & 3) * 2)
        to = f.gep(self.out.out, target * kernel.n + column.to(i64), 2)
        inside = (row < self.m) & (column < kernel.n)
        f.if_(inside, partial(f.store, f.join(words), to, align=16))


def transposed(f: BlockFunction, words: list[Value]) -> list[Value]:
    """Lane t of four has word t of four rows; afterwards all four words of row t."""
    words = list(words)
    for distance in (1, 2):
        is_upper = (f.thread() & distance).ne(0)
        for a in (i for i in range(4) if not i & distance):
            b = a | distance
            there = f.exchange(f.select(is_upper, words[a], words[b]), distance)
            words[a] = f.select(is_upper, there, words[a])
            words[b] = f.select(is_upper, words[b], there)
    return words
