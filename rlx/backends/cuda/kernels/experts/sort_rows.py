"""Rows in the order of their experts, and the tiles that they make: one block."""

from __future__ import annotations

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, i32, i64
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

_THREADS = 512
MOST_EXPERTS = 4096
ENTRY = (
    16  # bytes of a tile: its expert (-1: there is no such tile), first row, row behind the last
)


@dataclass(frozen=True)
class SortRows(BlockKernel):
    """args: experts of rows, rows, their order (i32), tiles, number of tiles at most, status, error
    number, the number of the first tile of each expert and one more (i32)

    Rows of one expert keep no order: results do not depend on it.
    """

    ids: DType
    experts: int
    tile: int  # rows

    @property
    def label(self) -> str:
        return f"sort_rows({self.experts})"

    @property
    def threads(self) -> int:
        return _THREADS

    @property
    def shared(self) -> int:
        """Of each expert the number of rows, then the first one; and the first tile."""
        return 8 * self.experts + 16

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads, self.shared)
        f.let_next_start()
        f.wait_for_previous()
        args, thread, experts = f["args"], f.thread(), f.i32(self.experts)
        rows, most = f.arg(args, 1, i32), f.arg(args, 4, i32)
        order, tiles = f.arg(args, 2), f.arg(args, 3)
        for e in f.range(thread, experts, _THREADS):
            f.store_shared(f.i32(0), e * 4)
        f.barrier()
        for i in f.range(thread, rows, _THREADS):
            f.add_shared(self._expert(f, i, tell=True) * 4, f.i32(1))
        f.barrier()
        f.if_(thread < WARP, lambda: self._begin(f, tiles))
        f.barrier()
        for i in f.range(thread, rows, _THREADS):
            place = f.add_shared(self._expert(f, i) * 4, f.i32(1))
            f.store(i, f.gep(order, place.to(i64), 4))
        used = f.load_shared(f.i32(8 * self.experts), i32)
        for i in f.range(used + thread, most, _THREADS):
            f.store(f.i32(-1), f.gep(tiles, i.to(i64), ENTRY))

    def _expert(self, f: BlockFunction, i: Value, tell: bool = False) -> Value:
        """The expert of a row; a wrong one is told, and the first taken instead."""
        args = f["args"]
        found = f.load(f.gep(f.arg(args, 0), i.to(i64), self.ids.bytes), memory_type(self.ids))
        wide = found.to(i64, signed=self.ids.kind == "int")
        known = wide.ult(self.experts)
        if tell:
            f.if_(~known, lambda: f.store(f.arg(args, 6, i64), f.arg(args, 5)))
        return f.select(known, wide, 0).to(i32)

    def _begin(self, f: BlockFunction, tiles: Value) -> None:
        """Where the rows and tiles of each expert begin. A lane has neighbouring experts."""
        lane, each = f.lane32(), -(-self.experts // WARP)
        first = lane * each
        last = f.min(first + each, f.i32(self.experts))

        def count(e: Value, rows: Value, used: Value) -> list[Value]:
            found = f.load_shared(e * 4, i32)
            return [rows + found, used + f.ceil_div(found, self.tile)]

        totals = f.loop(first, last, 1, [f.i32(0), f.i32(0)], count)
        before = [f.i32(0), f.i32(0)]  # of the lanes below
        distance = 1
        while distance < WARP:
            others = [f.exchange(t, distance) for t in totals]
            upper = (lane & distance).ne(0)
            before = [b + f.select(upper, o, 0) for b, o in zip(before, others, strict=True)]
            totals = [t + o for t, o in zip(totals, others, strict=True)]
            distance *= 2
        begins = f.arg(f["args"], 7)

        def tell() -> None:
            f.store_shared(totals[1], f.i32(8 * self.experts))
            f.store(totals[1], begins, 4 * self.experts)

        f.if_(lane.eq(0), tell)

        def place(e: Value, row: Value, tile: Value) -> list[Value]:
            found = f.load_shared(e * 4, i32)
            f.store_shared(row, e * 4)
            f.store(tile, f.gep(begins, e.to(i64), 4))
            count = f.ceil_div(found, self.tile)
            for i in f.range(f.i32(0), count):
                to = f.gep(tiles, (tile + i).to(i64), ENTRY)
                at = row + i * self.tile
                f.store(e, to)
                f.store(at, to, 4)
                f.store(f.min(at + self.tile, row + found), to, 8)
            return [row + found, tile + count]

        f.loop(first, last, 1, before, place)
