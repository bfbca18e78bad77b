"""The k greatest or least elements of rows.

A block has a row. In short rows every element counts those that come before it; in long ones the
best of what is left is found k times, or all are sorted where k is large.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cuda.builder import THREADS, WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.sorting.lower_sort import sorted_rows, sorted_scratch
from rlx.backends.cuda.kernels.sorting.sort_keys import HIGHEST, LOWEST, first_key
from rlx.backends.cuda.lowering import Context, KernelLaunch, lowers
from rlx.backends.kernel_args import Pointer
from rlx.ir.dim import upper_bound
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.ir.shape import normalize_axis
from rlx.llvm.builder import Type, Value, i8, i16, i32, i64
from rlx.support.records import dataclass

_SHORT = 1024  # elements of a row that all are compared with each other
_MOST = 16  # that are found one after the other; each costs a pass over the row
_WHOLE: dict[int, Type] = {1: i8, 2: i16, 4: i32, 8: i64}


@dataclass(frozen=True)
class TopK(BlockKernel):
    """args: x, values, indices, rows, elements of a row, their stride, k"""

    dtype: DType
    largest: bool
    short: bool

    @property
    def label(self) -> str:
        return "top_k"

    @property
    def shared(self) -> int:
        return 8 * _SHORT if self.short else 16 * THREADS // WARP

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads, self.shared)
        f.let_next_start()
        f.wait_for_previous()
        _Emitter(f, self).emit()


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: TopK) -> None:
        self.f, self.kernel = f, kernel
        args = f["args"]
        self.x, self.values, self.indices = (f.arg(args, i) for i in range(3))
        self.rows, self.stride = f.arg(args, 3, i64), f.arg(args, 5, i64)
        self.size, self.k = f.arg(args, 4, i32), f.arg(args, 6, i32)
        row = f.block_number().to(i64)
        outer = row.udiv(self.stride)
        self.first = (outer * self.size.to(i64)) * self.stride + (row - outer * self.stride)
        self.target = (outer * self.k.to(i64)) * self.stride + (row - outer * self.stride)
        self.row = row

    def emit(self) -> None:
        body = self._short if self.kernel.short else self._long
        self.f.if_(self.row < self.rows, body)

    def _place(self, i: Value) -> Value:
        return self.first + i.to(i64) * self.stride

    def _key(self, i: Value) -> Value:
        """An i64 that is greater the sooner an element comes; NaNs come first."""
        f, dtype = self.f, self.kernel.dtype
        at = f.gep(self.x, self._place(i), dtype.bytes)
        return first_key(f, at, dtype, self.kernel.largest, nan_first=True)

    def _store(self, i: Value, rank: Value) -> None:
        f, size = self.f, self.kernel.dtype.bytes
        to = self.target + rank.to(i64) * self.stride
        element = f.load(f.gep(self.x, self._place(i), size), _WHOLE[size])
        f.store(element, f.gep(self.values, to, size))
        f.store(i, f.gep(self.indices, to, 4))

    def _short(self) -> None:
        f = self.f
        for i in f.range(f.thread(), self.size, THREADS):
            f.store_shared(self._key(i), i * 8)
        f.barrier()
        for i in f.range(f.thread(), self.size, THREADS):
            mine = f.load_shared(i * 8, i64)

            def count(j: Value, rank: Value, i: Value = i, mine: Value = mine) -> list[Value]:
                other = f.load_shared(j * 8, i64)
                ahead = (other > mine) | (other.eq(mine) & (j < i))
                return [rank + ahead.to(i32, signed=False)]

            [rank] = f.loop(f.i32(0), self.size, 1, [f.i32(0)], count)

            def store(i: Value = i, rank: Value = rank) -> None:
                self._store(i, rank)

            f.if_(rank < self.k, store)

    def _long(self) -> None:
        f = self.f

        def find(rank: Value, key: Value, at: Value) -> list[Value]:
            """The best element behind the last one."""

            def take(i: Value, best: Value, place: Value) -> list[Value]:
                mine = self._key(i)
                left = (mine < key) | (mine.eq(key) & (i > at))
                wins = left & ((mine > best) | place.eq(-1))
                return [f.select(wins, mine, best), f.select(wins, i, place)]

            none = [f.i64(LOWEST), f.i32(-1)]
            best, place = self._best(*f.loop(f.thread(), self.size, THREADS, none, take))
            f.if_(f.thread().eq(0), lambda: self._store(place, rank))
            return [best, place]

        f.loop(f.i32(0), self.k, 1, [f.i64(HIGHEST), f.i32(-1)], find)

    def _best(self, key: Value, at: Value) -> tuple[Value, Value]:
        """The best of all threads of the block."""
        f = self.f
        distance = WARP // 2
        while distance:
            key, at = self._better((key, at), (f.exchange(key, distance), f.exchange(at, distance)))
            distance //= 2
        own = (f.thread() >> 5) * 16
        f.barrier()

        def keep() -> None:
            f.store_shared(key, own)
            f.store_shared(at, own, 8)

        f.if_((f.thread() & WARP - 1).eq(0), keep)
        f.barrier()
        whole = (f.load_shared(f.i32(0), i64), f.load_shared(f.i32(0), i32, 8))
        for warp in range(1, THREADS // WARP):
            there = f.i32(16 * warp)
            whole = self._better(whole, (f.load_shared(there, i64), f.load_shared(there, i32, 8)))
        return whole

    def _better(self, a: tuple[Value, Value], b: tuple[Value, Value]) -> tuple[Value, Value]:
        f = self.f
        sooner = (b[0] > a[0]) | (b[0].eq(a[0]) & (b[1] < a[1]))
        wins = b[1].ne(-1) & (sooner | a[1].eq(-1))
        return f.select(wins, b[0], a[0]), f.select(wins, b[1], a[1])


def _size(node: Node) -> int:
    """The most elements of a row."""
    op: Any = node.op
    x = node.inputs[0].shape
    return upper_bound(x.dims[normalize_axis(op.axis, x.rank)], node.graph.live)


def _is_sorted(node: Node) -> bool:
    """Whether all elements are put in order: many of long rows are wanted."""
    op: Any = node.op
    return op.k > _MOST and _size(node) > _SHORT


def _scratch(node: Node) -> int:
    return sorted_scratch(node) if _is_sorted(node) else 0


@lowers("top_k", scratch=_scratch, strided=False)
def lower_top_k(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x = node.inputs[0].shape
    if 0 in x.dims:
        return []
    if _is_sorted(node):
        values, indices = node.outputs
        return sorted_rows(node, ctx, values, indices, op.k, op.largest, nan_first=True)
    axis = normalize_axis(op.axis, x.rank)
    inner = prod(x.dims[axis + 1 :], start=1)
    rows = prod(x.dims[:axis], start=1) * inner
    kernel = TopK(x.dtype, op.largest, _size(node) <= _SHORT)
    args = [*map(Pointer, (*node.inputs, *node.outputs)), rows, x.dims[axis], inner, op.k]
    return [KernelLaunch(kernel, args, blocks=ctx.upper(rows))]
