"""Rows in order: tiles are sorted by counting, then runs are merged two by two.

An element's key is greater the sooner it comes; of equal ones the first comes first.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import THREADS, BlockFunction, KernelFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel, GpuKernel
from rlx.backends.cuda.kernels.sorting.sort_keys import first_key
from rlx.ir.dtype import DType
from rlx.llvm.builder import Type, Value, i8, i16, i32, i64
from rlx.support.records import dataclass

TILE = 1024
_OWN = TILE // THREADS
_WHOLE: dict[int, Type] = {1: i8, 2: i16, 4: i32, 8: i64}


@dataclass(frozen=True)
class SortTiles(BlockKernel):
    """args: x, keys, places (i32), rows, elements of a row, their stride, tiles of a row

    Every element of a tile counts those that come before it.
    """

    dtype: DType
    largest: bool
    nan_first: bool

    @property
    def label(self) -> str:
        return "sort(tiles)"

    @property
    def shared(self) -> int:
        return 8 * TILE

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads, self.shared)
        f.let_next_start()
        f.wait_for_previous()
        args = f["args"]
        rows, tiles = f.arg(args, 3, i64), f.arg(args, 6, i64)
        block = f.block_number().to(i64)
        row = block.udiv(tiles)
        tile = block - row * tiles
        f.if_(row < rows, lambda: self._sort(f, row, tile * TILE))

    def _sort(self, f: BlockFunction, row: Value, start: Value) -> None:
        args = f["args"]
        x, keys, places = (f.arg(args, i) for i in range(3))
        size, stride = f.arg(args, 4, i64), f.arg(args, 5, i64)
        outer = row.udiv(stride)
        first = outer * size * stride + (row - outer * stride)
        count = f.max(f.min(size - start, TILE), 0).to(i32)
        for i in f.range(f.thread(), count, THREADS):
            at = f.gep(x, first + (start + i.to(i64)) * stride, self.dtype.bytes)
            f.store_shared(first_key(f, at, self.dtype, self.largest, self.nan_first), i * 8)
        f.barrier()
        own = [f.thread() + THREADS * i for i in range(_OWN)]
        mine = [f.load_shared(f.min(i, f.max(count - 1, 0)) * 8, i64) for i in own]

        def add(j: Value, *ranks: Value) -> list[Value]:
            other, found = f.load_shared(j * 8, i64), list[Value]()
            for i, key, rank in zip(own, mine, ranks, strict=True):
                ahead = (other > key) | (other.eq(key) & (j < i))
                found.append(rank + ahead.to(i32, signed=False))
            return found

        ranks = f.loop(f.i32(0), count, 1, [f.i32(0)] * _OWN, add)
        for i, key, rank in zip(own, mine, ranks, strict=True):
            to = row * size + start + rank.to(i64)

            def keep(i: Value = i, key: Value = key, to: Value = to) -> None:
                f.store(key, f.gep(keys, to, 8))
                f.store(start.to(i32) + i, f.gep(places, to, 4))

            f.if_(i < count, keep)


@dataclass(frozen=True)
class MergeRuns(GpuKernel):
    """args: keys and places, those merged, elements of all rows, elements of a row, of a run

    An element finds out how many of the run beside its own come before it.
    """

    steps: int  # of the search in a run

    @property
    def label(self) -> str:
        return "sort(merge)"

    def emit(self, m: KernelModule) -> None:
        f = m.begin_kernel()
        args = f["args"]
        keys, places, new_keys, new_places = (f.arg(args, i) for i in range(4))
        total, size, length = (f.arg(args, i, i64) for i in (4, 5, 6))
        for i in f.elements(total):
            row = i.udiv(size)
            at = i - row * size
            run = at.udiv(length)
            is_right = (run & 1).ne(0)
            other = (run ^ 1) * length
            key = f.load(f.gep(keys, i, 8), i64)
            low, high = f.min(other, size), f.min(other + length, size)
            there = f.gep(keys, row * size, 8)
            # on the right, equal ones of the left come before
            found = count_before(f, there, low, high, self.steps, key, is_right)
            to = row * size + f.min(run * length, other) + (at - run * length) + (found - low)
            f.store(key, f.gep(new_keys, to, 8))
            f.store(f.load(f.gep(places, i, 4), i32), f.gep(new_places, to, 4))


def count_before(
    f: KernelFunction, keys: Value, low: Value, high: Value, steps: int, key: Value, equal: Value
) -> Value:
    """The first of descending keys from `low` to `high` that does not come before `key`: the first
    that is less, with `equal`, else the first that is not greater."""

    def halve(_: Value, low: Value, high: Value) -> list[Value]:
        middle = (low + high) >> 1
        found = f.load(f.gep(keys, f.min(middle, f.max(high - 1, 0)), 8), i64)
        ahead = ((found > key) | (found.eq(key) & equal)) & (low < high)
        return [f.select(ahead, middle + 1, low), f.select(ahead, high, middle)]

    return f.loop(f.i64(0), f.i64(steps), 1, [low, high], halve)[0]


@dataclass(frozen=True)
class TakeSorted(GpuKernel):
    """args: x, places, values (else 0), indices (else 0), rows, elements of a row, their stride,
    how many of them"""

    bytes: int
    index: int  # bytes
    has_values: bool
    has_indices: bool

    @property
    def label(self) -> str:
        return "sort(take)"

    def emit(self, m: KernelModule) -> None:
        f = m.begin_kernel()
        args, whole = f["args"], _WHOLE[self.bytes]
        x, places, values, indices = (f.arg(args, i) for i in range(4))
        rows, size, stride, count = (f.arg(args, i, i64) for i in range(4, 8))
        for item in f.elements(rows * count):
            row = item.udiv(count)
            rank, outer = item - row * count, row.udiv(stride)
            inner = row - outer * stride
            place = f.load(f.gep(places, row * size + rank, 4), i32)
            to = (outer * count + rank) * stride + inner
            if self.has_values:
                of = (outer * size + place.to(i64)) * stride + inner
                f.store(f.load(f.gep(x, of, self.bytes), whole), f.gep(values, to, self.bytes))
            if self.has_indices:
                number = place if self.index == 4 else place.to(i64)
                f.store(number, f.gep(indices, to, self.index))
