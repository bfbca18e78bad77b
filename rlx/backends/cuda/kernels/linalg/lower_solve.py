"""Linear equations: a block eliminates a matrix with its right sides, in f64, rows pivoted.

A number is one f64, or two where it is complex.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from rlx.backends.cuda.builder import THREADS, WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.lowering import Context, KernelArg, KernelLaunch, lowers
from rlx.backends.kernel_args import Pointer, Scratch
from rlx.ir.dim import Dim, same, upper_bound
from rlx.ir.dtype import DType
from rlx.ir.dtype import f32 as f32_type
from rlx.ir.dtype import f64 as f64_type
from rlx.ir.node import Node
from rlx.ir.shape import Shape
from rlx.llvm.builder import Value, f64, i32, i64
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass

Number = Sequence[Value]
_MOST = 1024  # rows that one block eliminates


def _part(dtype: DType) -> DType:
    """What a number consists of."""
    if not dtype.is_complex:
        return dtype
    return f32_type if dtype.bits == 64 else f64_type


@dataclass(frozen=True)
class SolveMatrices(BlockKernel):
    """args: a, b, result, work (f64 [matrices, n, n + m]), matrices, n, m, whether there is one a
    for all, and one b"""

    a: DType
    b: DType
    out: DType

    @property
    def label(self) -> str:
        return "solve"

    @property
    def parts(self) -> int:
        return 2 if self.out.is_complex else 1

    @property
    def shared(self) -> int:
        """The best pivot of each warp."""
        return 16 * THREADS // WARP

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads, self.shared)
        f.let_next_start()
        f.wait_for_previous()
        _Emitter(f, self).emit()


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: SolveMatrices) -> None:
        self.f, self.kernel, args = f, kernel, f["args"]
        self.n, self.m = f.arg(args, 5, i64), f.arg(args, 6, i64)
        self.width = self.n + self.m
        self.number = f.block_number().to(i64)
        size = self.n * self.width * (8 * kernel.parts)
        self.work = f.gep(f.arg(args, 3), self.number * size)
        self.thread = f.thread().to(i64)

    def emit(self) -> None:
        f = self.f
        f.if_(self.number < f.arg(f["args"], 4, i64), self._solve)

    def _solve(self) -> None:
        f = self.f
        self._copy()
        f.barrier()

        def eliminate(k: Value, singular: Value) -> list[Value]:
            pivot = self._pivot(k)
            f.if_(pivot.ne(k), lambda: self._swap(k, pivot))
            f.barrier()
            of = self._load(k, k)
            is_zero = of[0].eq(0.0)
            for part in of[1:]:
                is_zero = is_zero & part.eq(0.0)
            self._subtract(k, of)
            f.barrier()
            return [singular | is_zero.to(i32, signed=False)]

        [singular] = f.loop(f.i64(0), self.n, 1, [f.i32(0)], eliminate)
        for i in f.range(f.i64(0), self.n):
            self._substitute(self.n - 1 - i)
        for item in self._items(self.n * self.m):
            row = item.udiv(self.m)
            self._write(item, self._load(row, self.n + item - row * self.m), singular.ne(0))

    def _items(self, count: Value) -> Iterator[Value]:
        return self.f.range(self.thread, count, THREADS)

    # -- the steps --------------------------------------------------------------------------------

    def _copy(self) -> None:
        """a and b side by side."""
        f, kernel, args = self.f, self.kernel, self.f["args"]
        for i, dtype, columns, start in (
            (0, kernel.a, self.n, f.i64(0)), (1, kernel.b, self.m, self.n),
        ):  # fmt: skip
            alone = f.arg(args, 7 + i, i64).ne(0)
            first = f.select(alone, 0, self.number * self.n * columns)
            for item in self._items(self.n * columns):
                row = item.udiv(columns)
                found = self._given(f.arg(args, i), first + item, dtype)
                self._store(found, row, start + item - row * columns)

    def _given(self, base: Value, at: Value, dtype: DType) -> Number:
        f, part = self.f, _part(dtype)
        count = 2 if dtype.is_complex else 1
        found = [
            load(f, f.gep(base, at * count + i, memory_type(part)), part, 1, f64)
            for i in range(count)
        ]
        return [*found, *[f.const(0.0, f64)] * (self.kernel.parts - count)]

    def _pivot(self, k: Value) -> Value:
        """The row from k on whose number in column k is largest."""
        f = self.f

        def take(row: Value, best: Value, place: Value) -> list[Value]:
            size = f.abs(self._load(row, k)[0])
            for part in self._load(row, k)[1:]:
                size = size + f.abs(part)
            bits = size.bits(i64)
            wins = bits > best
            return [f.select(wins, bits, best), f.select(wins, row, place)]

        found = f.loop(k + self.thread, self.n, THREADS, [f.i64(-1), k], take)
        distance = WARP // 2
        while distance:
            found = self._better(found, [f.exchange(v, distance) for v in found])
            distance //= 2
        own = (f.thread() >> 5) * 16
        for i, value in enumerate(found):
            f.store_shared(value, own, 8 * i)
        f.barrier()
        best = [f.load_shared(f.i32(0), i64, 8 * i) for i in range(2)]
        for warp in range(1, THREADS // WARP):
            there = f.i32(16 * warp)
            best = self._better(best, [f.load_shared(there, i64, 8 * i) for i in range(2)])
        f.barrier()
        return best[1]

    def _better(self, a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
        f = self.f
        wins = (b[0] > a[0]) | (b[0].eq(a[0]) & (b[1] < a[1]))
        return [f.select(wins, y, x) for x, y in zip(a, b, strict=True)]

    def _swap(self, k: Value, pivot: Value) -> None:
        for column in self.f.range(k + self.thread, self.width, THREADS):
            upper, lower = self._load(k, column), self._load(pivot, column)
            self._store(lower, k, column)
            self._store(upper, pivot, column)

    def _subtract(self, k: Value, pivot: Number) -> None:
        """Subtract multiples of row k from those behind it; column k stays as it is."""
        columns = self.width - k - 1
        for item in self._items((self.n - k - 1) * columns):
            down = item.udiv(columns)
            row, column = k + 1 + down, k + 1 + item - down * columns
            factor = self._divided(self._load(row, k), pivot)
            product = self._times(factor, self._load(k, column))
            old = self._load(row, column)
            self._store([a - b for a, b in zip(old, product, strict=True)], row, column)

    def _substitute(self, k: Value) -> None:
        f = self.f
        for column in self._items(self.m):
            at = self.n + column
            self._store(self._divided(self._load(k, at), self._load(k, k)), k, at)
        f.barrier()
        for item in self._items(k * self.m):
            row = item.udiv(self.m)
            at = self.n + item - row * self.m
            product = self._times(self._load(row, k), self._load(k, at))
            old = self._load(row, at)
            self._store([a - b for a, b in zip(old, product, strict=True)], row, at)
        f.barrier()

    # -- numbers ----------------------------------------------------------------------------------

    def _times(self, a: Number, b: Number) -> Number:
        if len(a) == 1:
            return [a[0] * b[0]]
        return [a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]]

    def _divided(self, a: Number, b: Number) -> Number:
        if len(a) == 1:
            return [a[0] / b[0]]
        size = b[0] * b[0] + b[1] * b[1]
        product = self._times(a, [b[0], -b[1]])
        return [v / size for v in product]

    def _at(self, row: Value, column: Value) -> Value:
        return self.f.gep(self.work, row * self.width + column, 8 * self.kernel.parts)

    def _load(self, row: Value, column: Value) -> Number:
        at = self._at(row, column)
        return [self.f.load(at, f64, 8 * i) for i in range(self.kernel.parts)]

    def _store(self, number: Number, row: Value, column: Value) -> None:
        at = self._at(row, column)
        for i, part in enumerate(number):
            self.f.store(part, at, 8 * i)

    def _write(self, item: Value, number: Number, singular: Value) -> None:
        f, part = self.f, _part(self.kernel.out)
        at = self.number * self.n * self.m + item
        for i, value in enumerate(number):
            made = f.select(singular, float("nan"), value)
            to = f.gep(f.arg(f["args"], 2), at * self.kernel.parts + i, memory_type(part))
            store(f, made, to, part)


def _batch(shape: Shape) -> tuple[Dim, ...]:
    return shape.dims[:-2]


def _is_one(shape: Shape) -> bool:
    return prod(_batch(shape), start=1) == 1


def _suits(node: Node) -> bool:
    """Small matrices, and batches that are alike, or of one matrix."""
    a, b = (v.shape for v in node.inputs)
    n, batch = a.dims[-1], _batch(node.output.shape)
    if not isinstance(n, int) or n > _MOST or any(v.dtype.bits == 8 for v in node.inputs):
        return False
    return all(
        _is_one(s) or (len(_batch(s)) == len(batch) and all(map(same, _batch(s), batch)))
        for s in (a, b)
    )


def _scratch(node: Node) -> int:
    live, out = node.graph.live, node.output.shape
    n, m = node.inputs[0].shape.dims[-1], out.dims[-1]
    size = prod(_batch(out), start=1) * n * (n + m)
    return upper_bound(size, live) * (16 if out.dtype.is_complex else 8)


@lowers("solve", when=_suits, scratch=_scratch, strided=False)
def lower_solve(node: Node, ctx: Context) -> list[KernelLaunch]:
    a, b = node.inputs
    out = node.output.shape
    count, (n, m) = prod(_batch(out), start=1), out.dims[-2:]
    if not ctx.upper(count * n * m):
        return []
    kernel = SolveMatrices(a.dtype, b.dtype, out.dtype)
    args: list[KernelArg] = [Pointer(a), Pointer(b), Pointer(node.output), Scratch(node)]
    args += [count, n, m, int(_is_one(a.shape)), int(_is_one(b.shape))]
    return [KernelLaunch(kernel, args, blocks=ctx.upper(count))]
