"""Products of many rows with packed weights on Hopper: warps decode what they multiply.

Rows of the weight are the left side of products by groups of four warps: a lane decodes the numbers
that it has of them to f16, in registers, while tensor cores multiply those before. x is the right
side: the copy engine brings tiles of it to shared memory. Its columns are ordered so that what a
lane needs of a row of the weight lies together (`Planes` writes them so).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.builder import BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue, EpilogueArgs
from rlx.backends.cuda.kernels.gemm.group_gemm import (
    FEW_REGISTERS,
    GROUP,
    MANY_REGISTERS,
    GroupTile,
)
from rlx.backends.cuda.kernels.gemm.plan import BLOCKS, estimated_cycles
from rlx.backends.cuda.kernels.qgemm.digits import takes_bytes
from rlx.backends.cuda.kernels.qgemm.few_packed_rows import FEW_ROWS
from rlx.backends.cuda.kernels.qgemm.fragments import Fragments, Raw
from rlx.backends.cuda.tensor_map import TILE_COLUMNS as STEP
from rlx.ir.lir import aligned
from rlx.ir.node import Node
from rlx.llvm.builder import Value, f16, f32, i32, i64, vec
from rlx.support.records import dataclass

_ROWS = 128  # of the weight, of a tile: each of two groups of warps has 64
_MULTIPLIERS = 256
_WIDTHS = (256, 192, 128, 64)  # rows of x of a tile
_FIRST = 1024  # where the stages begin in shared memory
_ROOM, _MOST_STAGES = 200 << 10, 8
_FULL, _EMPTY = 16, 16 + 8 * _MOST_STAGES  # where mbarriers are
_AHEAD = {256: 1, 192: 2, 128: 2, 64: 3}  # steps whose weights are loaded ahead, by the width


@dataclass(frozen=True)
class PackedPlan:
    """How a product is computed, and where its scratch memory lies: x, scales of its rows, parts of
    sums."""

    width: int
    tiles: int
    splits: int
    scales_at: int
    partial_at: int
    bytes: int


def plan_packed(m: int, k: int, n: int, pair: bool) -> PackedPlan:
    """The width and the number of parts of the least estimated time."""
    rows, steps = (2 * n if pair else n), k // STEP
    found = []
    for width in _WIDTHS:
        for splits in (1, 2, 3, 4, 6, 8):
            each = -(-steps // splits)
            if splits == 1 or (each >= 4 and (splits - 1) * each < steps):
                tile = GroupTile(_ROWS, width)
                cost = estimated_cycles(rows, m, steps, 1, tile, splits)
                found.append((cost, width, splits))
    _, width, splits = min(found)
    tiles = -(-rows // _ROWS) * -(-m // width)
    scales_at = aligned(2 * m * k)
    partial_at = scales_at + aligned(4 * m)
    part = 4 * tiles * splits * _ROWS * width if splits > 1 else 0
    return PackedPlan(width, tiles, splits, scales_at, partial_at, partial_at + part)


@dataclass(frozen=True)
class PackedGemm(BlockKernel):
    """args: tensor map of x, scales of its rows, weight, second weight of a pair (else 0), partial
    results, counters, M, blocks of the launch, then those of the epilogue"""

    scheme: str
    k: int
    n: int
    width: int
    splits: int
    epilogue: Epilogue

    @property
    def label(self) -> str:
        return f"gemm({_ROWS}x{self.width}x{self.k})"

    @property
    def threads(self) -> int:
        return _MULTIPLIERS + GROUP

    @property
    def columns(self) -> int:
        """Columns of the result that a block gives."""
        return _ROWS // 2 if self.epilogue.pair else _ROWS

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.width // 2

    @property
    def steps(self) -> int:
        return self.k // STEP

    @property
    def ahead(self) -> int:
        return _AHEAD[self.width]

    @property
    def stage_bytes(self) -> int:
        return 2 * STEP * self.width

    @property
    def stages(self) -> int:
        return min(_MOST_STAGES, (_ROOM - _FIRST) // self.stage_bytes)

    @property
    def shared(self) -> int:
        return _FIRST + self.stages * self.stage_bytes

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared), self).emit()


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: PackedGemm) -> None:
        self.f, self.kernel = f, kernel
        args = f["args"]
        self.x, self.scales = f.arg(args, 0), f.arg(args, 1)
        self.weights = [f.arg(args, 2 + i) for i in range(2 if kernel.epilogue.pair else 1)]
        self.partial, self.counters = f.arg(args, 4), f.arg(args, 5)
        self.m, self.blocks = f.arg(args, 6, i32), f.arg(args, 7, i32)
        self.zero = self.m >> 31
        self.out = EpilogueArgs(f, kernel.epilogue, 8)
        beside = f.ceil_div(self.m, kernel.width)  # tiles that have the same weights
        self.beside = f.max(beside, 1)
        self.items = beside * (-(-kernel.n // kernel.columns) * kernel.splits)
        self.warp = f.uniform(f.thread() >> 5)
        self.group, self.quad = f.lane32() >> 2, f.lane32() & 3
        self.fragments = Fragments(f, kernel.scheme, kernel.k)

    def emit(self) -> None:
        f = self.f
        f.let_next_start()

        def begin() -> None:
            for i in range(self.kernel.stages):
                f.init_mbarrier(f.i32(_FULL + 8 * i), 1)
                f.init_mbarrier(f.i32(_EMPTY + 8 * i), 8)
            f.fence_mbarriers()
            f.acquire_map(self.x)

        f.if_(f.thread().eq(_MULTIPLIERS), begin)
        f.barrier()
        f.if_((self.warp >> 2).eq(2), self._emit_copies, self._emit_products)

    def _place(self, item: Value) -> tuple[Value, Value, Value, Value]:
        """Number, split, first column of the result and first row of a tile."""
        kernel = self.kernel
        number = item.udiv(kernel.splits) if kernel.splits > 1 else item
        split = item - number * kernel.splits
        across = number.udiv(self.beside)
        return (
            number,
            split,
            across * kernel.columns,
            (number - across * self.beside) * kernel.width,
        )

    def _steps(self, split: Value) -> tuple[Value, Value]:
        """The first step of a part of the columns of x, and the first behind it."""
        f, kernel = self.f, self.kernel
        each = -(-kernel.steps // kernel.splits)
        return split * each, f.min(split * each + each, kernel.steps)

    def _next(self, stage: Value, parity: Value) -> list[Value]:
        f = self.f
        is_last = stage.eq(self.kernel.stages - 1)
        return [f.select(is_last, f.i32(0), stage + 1), parity ^ is_last.to(i32, signed=False)]

    # -- copies of x ------------------------------------------------------------------------------

    def _emit_copies(self) -> None:
        f = self.f
        f.take_registers(FEW_REGISTERS, more=False)
        f.wait_for_previous()

        def copy(item: Value, *ring: Value) -> list[Value]:
            _, split, _, row = self._place(item)

            def emit_step(step: Value, stage: Value, parity: Value) -> list[Value]:
                full = stage * 8 + _FULL
                f.wait_phase(stage * 8 + _EMPTY, parity ^ 1)
                f.expect_bytes(full, self.kernel.stage_bytes)
                to = stage * self.kernel.stage_bytes + _FIRST
                f.copy_tile(to, self.x, step * STEP, row, full)
                return self._next(stage, parity)

            first, last = self._steps(split)
            return f.loop(first, last, 1, ring, emit_step)

        def copy_all() -> None:
            f.loop(f.block_number(), self.items, self.blocks, [f.i32(0), f.i32(0)], copy)

        f.if_(f.thread().eq(_MULTIPLIERS), copy_all)

    # -- products ---------------------------------------------------------------------------------

    def _emit_products(self) -> None:
        f = self.f
        f.take_registers(MANY_REGISTERS, more=True)
        ahead = self._begin(f.block_number())
        f.wait_for_previous()

        def multiply(item: Value, stage: Value, parity: Value, *raw: Value) -> list[Value]:
            stage, parity = self._multiply(item, stage, parity, list(raw))
            return [stage, parity, *self._begin(item + self.blocks)]

        f.loop(f.block_number(), self.items, self.blocks, [f.i32(0), f.i32(0), *ahead], multiply)

    def _begin(self, item: Value) -> list[Value]:
        """The weights of the first steps of a tile."""
        f = self.f
        _, split, column, _ = self._place(f.max(f.min(item, self.items - 1), 0))
        rows, (first, last) = self._rows(column), self._steps(split)
        return [
            v
            for i in range(self.kernel.ahead + 1)
            for v in self._load(rows, f.min(first + i, last - 1))
        ]

    def _rows(self, column: Value) -> list[Value]:
        """Where this lane's two rows of the weight begin: neighbours but eight, or the gate of a
        column and what it gates."""
        f, kernel = self.f, self.kernel
        if kernel.epilogue.pair:
            row = f.min(column + self.warp * 8 + self.group, kernel.n - 1)
            return [self.fragments.row(w, row) for w in self.weights]
        first = column + self.warp * 16 + self.group
        return [
            self.fragments.row(self.weights[0], f.min(r, kernel.n - 1)) for r in (first, first + 8)
        ]

    def _load(self, rows: Sequence[Value], step: Value) -> Raw:
        return [v for row in rows for v in self.fragments.load(row, step)]

    def _multiply(
        self, item: Value, stage: Value, parity: Value, raw: list[Value]
    ) -> tuple[Value, Value]:
        f, kernel, size = self.f, self.kernel, self.fragments.size * 2
        number, split, column, row = self._place(item)
        rows, (first, last) = self._rows(column), self._steps(split)
        now = self.fragments.decode(raw[:size])
        held, waiting = len(now), raw[size:]

        def emit_step(step: Value, stage: Value, parity: Value, *carried: Value) -> list[Value]:
            a, later = list(carried[:held]), list(carried[held : held + len(waiting)])
            sums = list(carried[held + len(waiting) :])
            f.wait_phase(stage * 8 + _FULL, parity)
            at = stage * kernel.stage_bytes + _FIRST
            f.begin_group()
            for k in range(STEP // 16):
                sums = f.multiply_held(a[4 * k : 4 * k + 4], at + 32 * k, sums, kernel.width, f16)
            f.commit_group()
            more = self._load(rows, f.min(step + (1 + kernel.ahead), last - 1))
            following = self.fragments.decode(later[:size])
            sums = f.finish_group(sums, held=a)
            following = [f.move(v, self.zero) for v in following]
            f.if_(f.lane32().eq(0), lambda: f.arrive(stage * 8 + _EMPTY))
            return [*self._next(stage, parity), *following, *later[size:], *more, *sums]

        zeros = [f.const(0.0, f32)] * kernel.sums
        stage, parity, *carried = f.loop(
            first, last, 1, [stage, parity, *now, *waiting, *zeros], emit_step
        )
        sums = carried[held + len(waiting) :]
        if kernel.splits == 1:
            self._store(column, row, sums)
        else:
            self._combine(number, split, (column, row), sums)
        return stage, parity

    def _combine(
        self, number: Value, split: Value, place: tuple[Value, Value], sums: list[Value]
    ) -> None:
        """Keep the sums of this part; the last block of the tile adds up all parts."""
        f, kernel = self.f, self.kernel

        def place_of(part: Value) -> Value:
            whole = (number * kernel.splits + part).to(i64) * (_ROWS * kernel.width)
            return f.gep(self.partial, whole + (f.thread() * 4).to(i64), 4)

        to = place_of(split)
        for i in range(0, len(sums), 4):
            f.store(f.join(sums[i : i + 4]), to, 4 * _MULTIPLIERS * i, align=16)
        counter = f.gep(self.counters, number.to(i64), 8)
        last = f.is_last_block(counter, f.i32(kernel.splits), _MULTIPLIERS)

        def add(part: Value, *totals: Value) -> list[Value]:
            of, new = place_of(part), list[Value]()
            for i in range(0, len(sums), 4):
                four = f.load(of, vec(4, f32), 4 * _MULTIPLIERS * i, align=16)
                new += [totals[i + e] + f.extract(four, e) for e in range(4)]
            return new

        def finish() -> None:
            zeros = [f.const(0.0, f32)] * len(sums)
            self._store(*place, f.loop(f.i32(0), f.i32(kernel.splits), 1, zeros, add))

        f.if_(last, finish)

    # -- results ----------------------------------------------------------------------------------
    # A lane has two rows of the weight and, of each eight rows of x, two. Lanes that differ in one
    # bit of the first exchange what makes neighbours of a row of the result.

    def _store(self, column0: Value, row0: Value, sums: list[Value]) -> None:
        f, kernel = self.f, self.kernel
        odd = (self.group & 1).ne(0)
        for i in range(0, kernel.sums, 4):
            first = row0 + self.quad * 2 + 2 * i
            low, high = sums[i : i + 2], sums[i + 2 : i + 4]
            if kernel.epilogue.pair:
                row = first + (self.group & 1)
                column = column0 + self.warp * 8 + (self.group & 6)
                pairs = [self._neighbours(odd, v[0], v[1]) for v in (low, high)]
                self._store_pair(row, column, pairs[0], pairs[1])
                continue
            column = column0 + self.warp * 16 + (self.group & 6) + f.select(odd, f.i32(8), f.i32(0))
            for j in range(2):
                self._store_pair(first + j, column, self._neighbours(odd, low[j], high[j]), None)

    def _neighbours(self, odd: Value, a: Value, b: Value) -> list[Value]:
        """Of even lanes theirs and the next one's a, of odd ones the one before's b and theirs."""
        f = self.f
        there = f.exchange(f.select(odd, a, b), 4)
        return [f.select(odd, there, a), f.select(odd, b, there)]

    def _store_pair(
        self, row: Value, column: Value, totals: list[Value], others: list[Value] | None
    ) -> None:
        """Finish two neighbours of a row: all threads compute, with what is there."""
        f, n = self.f, self.kernel.n
        there = f.min(row, self.m - 1).to(i64)
        scale = f.load(f.gep(self.scales, there, 4), f32)
        totals = [v * scale for v in totals]
        others = None if others is None else [v * scale for v in others]
        known = f.min(column, n - 2).to(i64)
        at = there * n + known
        made = self.out.finish_pair(totals, others, known, at)
        inside = (row < self.m) & (column < n)
        f.if_(inside, partial(self.out.store_pair, made[0], made[1], at))


def blocks_of(plan: PackedPlan) -> int:
    return min(plan.tiles * plan.splits, BLOCKS)


def decodes(node: Node, m: int) -> bool:
    """Whether warps decode what they multiply, of a `packed_planes_matmul` of up to m rows."""
    n: Any = node.output.shape.dims[-1]
    return not is_asked() and m > FEW_ROWS and n % 2 == 0 and takes_bytes(node)
