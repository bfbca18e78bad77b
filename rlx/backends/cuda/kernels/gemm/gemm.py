"""Products of many rows by tensor cores, tiles copied to shared memory some steps ahead.

x is one or more planes of 16-bit numbers whose sum it is. Where there are few tiles, blocks divide
the columns of x, and the last block of a tile adds up the parts in order. This is the form for all
GPUs, whose warps multiply what they have loaded; `group_gemm` has that of Hopper.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue, EpilogueArgs
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i32, i64, vec
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

STAGES = 4
_STEP = 32  # columns of x that are multiplied at a time
_PITCH = 80  # bytes of a row of a tile: an odd multiple of 16
_FIRST = 16  # where tiles begin in shared memory


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result that a block gives, and a warp of it."""

    m: int
    n: int
    warp_m: int
    warp_n: int

    @property
    def threads(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * WARP


LARGE, SMALL = Tile(128, 128, 64, 64), Tile(64, 64, 32, 32)


@dataclass(frozen=True)
class Gemm(BlockKernel):
    """args: x, rows of x apart, planes apart, scales of rows (else 0), weight, second weight (else
    0), partial results, counters, M, then those of the epilogue

    Strides are in elements. The weight is [n, k] row by row, or [k, n] if `by_rows`.
    """

    tile: Tile
    element: DType
    planes: int
    k: int
    n: int
    by_rows: bool
    scaled: bool
    splits: int
    epilogue: Epilogue

    @property
    def label(self) -> str:
        return f"gemm({self.tile.m}x{self.tile.n}x{self.k})"

    @property
    def threads(self) -> int:
        return self.tile.threads

    @property
    def columns(self) -> int:
        """Columns of the result that a block gives: half of its products are those of a gate."""
        return self.tile.n // 2 if self.epilogue.pair else self.tile.n

    @property
    def weight_pitch(self) -> int:
        return 2 * self.tile.n + 16 if self.by_rows else _PITCH

    @property
    def weight_bytes(self) -> int:
        return self.weight_pitch * (_STEP if self.by_rows else self.tile.n)

    @property
    def plane_bytes(self) -> int:
        return self.tile.m * _PITCH

    @property
    def stage_bytes(self) -> int:
        return self.planes * self.plane_bytes + self.weight_bytes

    @property
    def shared(self) -> int:
        return _FIRST + STAGES * self.stage_bytes

    def emit(self, m: KernelModule) -> None:
        blocks = 2 if self.threads == 128 and self.shared <= 110 << 10 else 1
        GemmEmitter(m.begin_block(self.threads, self.shared, blocks), self).emit()


class GemmEmitter:
    def __init__(self, f: BlockFunction, kernel: Gemm) -> None:
        self.f, self.kernel, self.tile = f, kernel, kernel.tile
        self.type = memory_type(kernel.element)
        args = f["args"]
        self.x = f.arg(args, 0)
        self.x_stride, self.plane_stride = f.arg(args, 1, i64), f.arg(args, 2, i64)
        self.scales = f.arg(args, 3)
        self.weights = [f.arg(args, 4 + i) for i in range(2 if kernel.epilogue.pair else 1)]
        self.partial, self.counters = f.arg(args, 6), f.arg(args, 7)
        self.m = f.arg(args, 8, i32)
        self.out = EpilogueArgs(f, kernel.epilogue, 9)
        number, tiles = f.block_number(), f.ceil_div(self.m, self.tile.m)
        self.split = f.i32(0)
        if kernel.splits > 1:
            whole = number.udiv(kernel.splits)
            number, self.split = whole, number - whole * kernel.splits
        self.number = number
        across = number.udiv(tiles)
        self.row0 = (number - across * tiles) * self.tile.m
        self.column0 = across * kernel.columns
        self.lane, warp = f.lane32(), f.thread() >> 5
        down = self.tile.m // self.tile.warp_m
        self.warp_n = warp.udiv(down)
        self.warp_m = warp - self.warp_n * down

    def emit(self) -> None:
        f = self.f
        f.let_next_start()
        f.wait_for_previous()
        f.if_(self.column0 < self.kernel.n, self._emit_tile)

    def _emit_tile(self) -> None:
        f, kernel = self.f, self.kernel
        steps = -(-kernel.k // _STEP)
        each = -(-steps // kernel.splits)
        first = self.split * each
        last = f.min(first + each, steps) if kernel.splits > 1 else f.i32(steps)
        count = self.tile.warp_m * self.tile.warp_n // WARP
        sums = self.products(first, last, [f.const(0.0, f32)] * count)
        if kernel.splits == 1:
            self._each(sums, self._store)
        else:
            self._combine(sums)

    def products(self, first: Value, last: Value, start: list[Value]) -> list[Value]:
        """The sums of the products of some steps; three are copied ahead."""
        f, kernel, ahead = self.f, self.kernel, STAGES - 1
        for i in range(ahead):
            self.copy_step(first + i, last, f.i32(i))
            f.commit_copies()

        def body(i: Value, *sums: Value) -> list[Value]:
            f.wait_copies(ahead - 1)
            f.barrier()
            self.copy_step(first + i + ahead, last, i + ahead & STAGES - 1)
            f.commit_copies()
            at = (i & STAGES - 1) * kernel.stage_bytes + _FIRST
            return self._multiply(at, list(sums))

        sums = f.loop(f.i32(0), last - first, 1, start, body)
        f.wait_copies(0)
        return sums

    # -- copies -----------------------------------------------------------------------------------

    def copy_step(self, step: Value, last: Value, stage: Value) -> None:
        """Begin to copy the tiles of a step; there is nothing from `last` on."""
        f, kernel = self.f, self.kernel
        start = stage * kernel.stage_bytes + _FIRST
        there = f.max(f.min(step, last - 1), 0) * _STEP
        size = f.select(step < last, f.i32(16), 0)
        for p in range(kernel.planes):
            base = f.gep(self.x, self.plane_stride * p, 2) if p else self.x
            at = start + p * kernel.plane_bytes
            self._rows(base, self.x_stride, self.row0, self.m, self.tile.m, (there, size, at))
        at = start + kernel.planes * kernel.plane_bytes
        part = self.tile.n // len(self.weights)
        for i, weight in enumerate(self.weights):
            if kernel.by_rows:
                self._columns(weight, part, (there, size, at + i * part * 2))
            else:
                here = at + i * part * _PITCH
                stride, n = f.i64(kernel.k), f.i32(kernel.n)
                self._rows(weight, stride, self.column0, n, part, (there, size, here))

    def _rows(
        self, base: Value, stride: Value, first: Value, limit: Value, count: int,
        place: tuple[Value, Value, Value],
    ) -> None:  # fmt: skip
        """Copy a tile of `count` rows of a step; those past the end are 0."""
        f, (column, size, at) = self.f, place
        pieces = _STEP // 8
        for i in range(0, count * pieces, self.kernel.threads):
            item = f.thread() + i
            row, piece = item.udiv(pieces), item & pieces - 1
            wanted, k = first + row, column + piece * 8
            inside = (wanted < limit) & (k < self.kernel.k)
            there = f.min(wanted, limit - 1).to(i64) * stride + f.min(k, self.kernel.k - 8).to(i64)
            valid = f.select(inside, size, 0)
            self._piece(
                count * pieces - i, at + self.place(row, piece), f.gep(base, there, 2), valid
            )

    def place(self, row: Value, piece: Value) -> Value:
        """Where 16 bytes of a row of a tile are."""
        return row * _PITCH + piece * 16

    def _columns(self, base: Value, count: int, place: tuple[Value, Value, Value]) -> None:
        """Copy a tile of a step's rows of `count` numbers, of a weight that lies so."""
        f, kernel, (row0, size, at) = self.f, self.kernel, place
        pieces = count // 8
        for i in range(0, _STEP * pieces, kernel.threads):
            item = f.thread() + i
            row, piece = item.udiv(pieces), item & pieces - 1
            k, n = row0 + row, self.column0 + piece * 8
            inside = (k < kernel.k) & (n < kernel.n)
            there = f.min(k, kernel.k - 1) * kernel.n + f.min(n, kernel.n - 8)
            valid = f.select(inside, size, 0)
            to = at + row * kernel.weight_pitch + piece * 16
            self._piece(_STEP * pieces - i, to, f.gep(base, there.to(i64), 2), valid)

    def _piece(self, left: int, to: Value, source: Value, valid: Value) -> None:
        f = self.f
        if left >= self.kernel.threads:
            f.copy_async(to, source, valid)
        else:
            f.if_(f.thread() < left, lambda: f.copy_async(to, source, valid))

    # -- products ---------------------------------------------------------------------------------

    def _multiply(self, start: Value, sums: list[Value]) -> list[Value]:
        """Add the products of a step: sums are [16 rows][8 columns][4] of this warp."""
        f, kernel, tile = self.f, self.kernel, self.tile
        down, across = tile.warp_m // 16, tile.warp_n // 8
        weights = start + kernel.planes * kernel.plane_bytes
        for k in range(_STEP // 16):
            columns = [v for j in range(0, across, 2) for v in self._weight(weights, k, j)]
            for p in range(kernel.planes):
                plane = start + p * kernel.plane_bytes
                for i in range(down):
                    rows = self._x(plane, k, i)
                    for j in range(across):
                        at = 4 * (i * across + j)
                        pair = columns[2 * j : 2 * j + 2]
                        sums[at : at + 4] = f.multiply(rows, pair, sums[at : at + 4], self.type)
        return sums

    def _x(self, start: Value, k: int, i: int) -> list[Value]:
        part, r = self.lane >> 3, self.lane & 7
        row = self.warp_m * self.tile.warp_m + (part & 1) * 8 + r + 16 * i
        return self.f.load_matrices(start + self.place(row, (part >> 1) + 2 * k), 4)

    def _weight(self, start: Value, k: int, j: int) -> list[Value]:
        """Two times 8 columns of the weight."""
        f, kernel = self.f, self.kernel
        part, r = self.lane >> 3, self.lane & 7
        column = self._column(j)
        if kernel.by_rows:
            row = (part & 1) * 8 + r + 16 * k
            at = start + row * kernel.weight_pitch + (column + (part >> 1) * 8) * 2
            return f.load_matrices(at, 4, transposed=True)
        row = column + (part >> 1) * 8 + r
        return f.load_matrices(start + self.place(row, (part & 1) + 2 * k), 4)

    def _column(self, j: int) -> Value:
        """Where 8 columns of this warp begin in the tile; of a pair, the gate's come first."""
        tile = self.tile
        if not self.kernel.epilogue.pair:
            return self.warp_n * tile.warp_n + 8 * j
        half = tile.warp_n // 16
        return self.warp_n * (tile.warp_n // 2) + (j // half * tile.n // 2 + j % half * 8)

    # -- results ----------------------------------------------------------------------------------

    def _each(self, sums: list[Value], use: object) -> None:
        """Call `use` with every pair of neighbours: row and column (i32) and the sums."""
        assert callable(use)
        tile, pair = self.tile, self.kernel.epilogue.pair
        across = tile.warp_n // 8
        shown = across // 2 if pair else across
        for i in range(tile.warp_m // 16):
            for half in range(2):
                row = self.row0 + self.warp_m * tile.warp_m + (self.lane >> 2) + (16 * i + 8 * half)

                def columns(i: int = i, half: int = half, row: Value = row) -> None:
                    for j in range(shown):
                        at = 4 * (i * across + j) + 2 * half
                        column = self.column0 + self._column(j) + ((self.lane & 3) << 1)
                        other = sums[at + 2 * across : at + 2 * across + 2] if pair else None
                        use(row, column, sums[at : at + 2], other)

                self.f.if_(row < self.m, columns)

    def _store(
        self, row: Value, column: Value, totals: list[Value], others: list[Value] | None
    ) -> None:
        f, kernel = self.f, self.kernel
        at = row.to(i64) * kernel.n + column.to(i64)
        if kernel.scaled:
            scale = f.load(f.gep(self.scales, row.to(i64), 4), f32)
            totals = [v * scale for v in totals]
            others = None if others is None else [v * scale for v in others]

        def finished(i: int) -> Value:
            other = None if others is None else others[i]
            return self.out.finish(totals[i], other, column.to(i64) + i, at + i)

        def write_both() -> None:
            self.out.store_pair(finished(0), finished(1), at)

        if kernel.n % 2 == 0:
            f.if_(column < kernel.n, write_both)
            return
        for i in range(2):
            f.if_(column + i < kernel.n, partial(self._write, finished, i, at))

    def _write(self, finished: Callable[[int], Value], i: int, at: Value) -> None:
        self.out.write(finished(i), at + i)

    def _combine(self, sums: list[Value]) -> None:
        """Keep the sums of this part; the last block of the tile adds up all parts."""
        f, kernel, tile = self.f, self.kernel, self.tile
        count = tile.threads * len(sums)

        def place(part: Value) -> Value:
            number = (self.number * kernel.splits + part).to(i64) * count
            return f.gep(self.partial, number + (f.thread() * 4).to(i64), 4)

        to = place(self.split)
        for i in range(0, len(sums), 4):
            four = f.join(sums[i : i + 4])
            f.store(four, to, 4 * tile.threads * i, align=16)
        counter = f.gep(self.counters, self.number.to(i64), 8)
        last = f.is_last_block(counter, f.i32(kernel.splits))

        def finish() -> None:
            def add(part: Value, *totals: Value) -> list[Value]:
                of, new = place(part), list[Value]()
                for i in range(0, len(sums), 4):
                    four = f.load(of, vec(4, f32), 4 * tile.threads * i, align=16)
                    new += [totals[i + e] + f.extract(four, e) for e in range(4)]
                return new

            zeros = [f.const(0.0, f32)] * len(sums)
            self._each(f.loop(f.i32(0), f.i32(kernel.splits), 1, zeros, add), self._store)

        f.if_(last, finish)
