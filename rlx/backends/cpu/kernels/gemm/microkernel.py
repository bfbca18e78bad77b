"""The GEMM micro-kernel: an MR x NR tile of C in registers, updated by a rank-1 product per k.

B comes as a panel of `nr` columns, `[K][nr]`, so that one k is contiguous memory. A comes as its
rows lie in memory, or packed, `[K][mr]`, in the accumulator type. The tile, `[mr][nr]`, stays in
registers over the whole k block and is written to memory once per call. Where registers are few, a
tile of many rows is computed in passes, some columns at a time.

A result is the sum over k in order, one fma each, in every micro-kernel: its bits do not depend on
the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.kernels.spec import read_ahead
from rlx.ir.dtype import DType
from rlx.llvm.builder import Carry, Function, Module, Type, Value, i64, ptr, vec
from rlx.llvm.storage import LINE, load, memory_type
from rlx.llvm.target import Target
from rlx.support.records import dataclass

MR = 6  # rows of the full tile; remainder rows run in a smaller one
_PREFETCH_LINES = 2  # cache lines of the next panel that each k prefetches, during the first tiles


@dataclass(frozen=True)
class TileShape:
    """A tile: `mr` rows of `vectors` registers with `lanes` accumulators each. More than two rows
    take `vectors_at_once` of them at a time."""

    acc: Type  # accumulator type
    lanes: int
    vectors: int
    mr: int = MR
    vectors_at_once: int = 4

    @staticmethod
    def of(target: Target, acc: Type, weight: DType) -> TileShape:
        # 6 rows of 4 vectors (2 with 16 registers) leave registers for a row of the panel and a
        # broadcast, and are enough independent chains to hide the FMA latency; 4 vectors are nearly
        # enough for a single row. Wide tiles with few rows beat tall ones of the same size when
        # weights must be converted. With 16 registers a panel of weights that need not be is two
        # vectors wide: more would not stay in the L1 cache from one tile of rows to the next.
        at_once = 4 if target.num_vector_registers >= 32 else 2
        converts = memory_type(weight).bytes < acc.bytes
        vectors = 4 if converts else at_once
        return TileShape(acc, target.lanes(acc.bits), vectors, vectors_at_once=at_once)

    def for_columns(self, columns: int) -> TileShape:
        """The tile of a result with so few columns: no vectors without one, and rows enough to hide
        the FMA latency."""
        vectors = -(-columns // self.lanes)
        if vectors >= self.vectors:
            return self
        return TileShape(self.acc, self.lanes, vectors, 8 if vectors == 1 else MR, vectors)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of the full tile and of the remainder tiles."""
        return self.mr, 4, 2, 1

    @property
    def nr(self) -> int:
        return self.lanes * self.vectors

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a tile."""
        return self.nr * self.acc.bytes

    @property
    def tile_bytes(self) -> int:
        return self.mr * self.row_bytes

    def padded(self, f: Function, rows: Value) -> Value:
        """Rows of the smallest tile that holds `rows` rows."""
        return f.select(rows > 4, f.i64(self.mr), f.select(rows > 2, f.i64(4), rows))


_PARAMS = [
    ("count", i64), ("a", ptr), ("a_stride", i64), ("kc", i64), ("b", ptr), ("b_stride", i64),
    ("tile", ptr), ("k", i64), ("prefetch", ptr),
]  # fmt: skip


class MicroKernels:
    """The micro-kernels of one module, one per tile height.

    `packed`: A comes packed. `prefetches_next`: the next panel is prefetched while one is read.
    """

    def __init__(
        self,
        m: Module,
        shape: TileShape,
        weight: DType,
        sizes: tuple[int, ...],
        packed: bool = True,
        prefetches_next: bool = False,
    ) -> None:
        self.shape, self.packed = shape, packed
        self.b_stride = shape.nr * memory_type(weight).bytes
        self.prefetch_bytes = 0
        if prefetches_next:
            size = _PREFETCH_LINES * LINE
            self.prefetch_bytes = min(LINE if self.b_stride % size else size, self.b_stride)
        self.functions = {
            r: emit_microkernel(m, shape, weight, r, packed, 0 if r <= 2 else self.prefetch_bytes)
            for r in sizes
        }

    def prefetch(self, f: Function, tile: Value, panel: Value, kc: Value, next_: Value) -> Value:
        """What tile number `tile` prefetches: its part of the next panel; null: nothing."""
        if not self.prefetch_bytes:
            return f.null()
        parts = -(-self.b_stride // self.prefetch_bytes)
        part = f.gep(next_, tile * kc, self.prefetch_bytes)
        return f.select(tile < parts, part, f.null())

    def dispatcher(self, m: Module) -> Function:
        """One function that dispatches on the row count, for code with many calls."""
        f = m.function("microkernel", _PARAMS, internal=True)
        self.call(f, *(f[name] for name, _ in _PARAMS))
        return f

    def call(self, f: Function, rows: Value, *given: Value) -> None:
        """tile += a·b with `rows` rows; `given` are the other arguments of the micro-kernel."""
        for r in f.cases(self.shape.padded(f, rows), list(self.functions)):
            f.call(self.functions[r], rows, *given)


def emit_microkernel(
    m: Module, shape: TileShape, weight: DType, rows: int, packed: bool, prefetch_bytes: int
) -> Function:
    """void microkernel(i64 count, ptr a, i64 a_stride, i64 kc, ptr b, i64 b_stride, ptr tile,
    i64 k, ptr prefetch)

    `count` rows exist; unpacked rows are `a_stride` bytes apart. `b_stride` is the bytes from one k
    of b to the next. The tile starts from zeros where `k` is 0, else from memory. Each k prefetches
    `prefetch_bytes` bytes from `prefetch` on, unless that is null.
    """
    f = m.function(f"microkernel{rows}", _PARAMS, internal=True)
    at_once = shape.vectors if rows <= 2 else min(shape.vectors_at_once, shape.vectors)
    for first in range(0, shape.vectors, at_once):
        kernel = _MicroKernel(f, shape, weight, rows, packed, range(first, first + at_once))
        kernel.prefetch_bytes = 0 if first else prefetch_bytes
        kernel.run()
    return f


class _MicroKernel:
    """The sums of all rows and some of the panel's vectors."""

    prefetch_bytes = 0

    def __init__(
        self, f: Function, shape: TileShape, weight: DType, rows: int, packed: bool, vectors: range
    ) -> None:
        self.f, self.shape, self.weight, self.rows = f, shape, weight, rows
        self.packed, self.vectors = packed, vectors
        self.places = [
            (i * shape.nr + j * shape.lanes) * shape.acc.bytes for i in range(rows) for j in vectors
        ]
        if not packed:
            # Missing rows read the last one again; a smaller tile would hold fewer rows.
            sure = max((s + 1 for s in shape.sizes if s < rows), default=1)
            last = f["count"] - 1
            numbers = [f.i64(i) if i < sure else f.min(last, i) for i in range(rows)]
            self.a_rows = [f.gep(f["a"], f["a_stride"] * i) for i in numbers]

    def run(self) -> None:
        f, kc, start, acc = self.f, self.f["kc"], self.f.i64(0), self._start()
        if self.prefetch_bytes:
            # A loop of its own: the other one loses 5 % to prefetches of lines that are there.
            start = f.select(f["prefetch"].eq(f.null()), 0, kc)
            for k in acc.range(0, start):
                acc.values = self._prefetching_step(k, acc.values)
        unroll = 4 if self.rows != 2 else 2
        whole = kc - (kc & (unroll - 1))
        for k in acc.range(start, whole, unroll):
            acc.values = self._steps(k, unroll, acc.values)
        for k in acc.range(f.max(start, whole), kc):
            acc.values = self._rank_one(k, 0, f.gep(f["b"], k * f["b_stride"]), acc.values)
        for value, at in zip(acc.values, self.places, strict=True):
            f.store(value, f["tile"], at)

    def _start(self) -> Carry:
        """The accumulators: zeros, or the partial sums of earlier k blocks."""
        f, type_ = self.f, vec(self.shape.lanes, self.shape.acc)
        acc = f.carry()
        for is_first in f.either(f["k"].eq(0), acc):
            if is_first:
                acc.values = [f.const(0, type_)] * len(self.places)
            else:
                acc.values = [f.load(f["tile"], type_, at) for at in self.places]
        return acc

    def _prefetching_step(self, k: Value, acc: Sequence[Value]) -> list[Value]:
        f = self.f
        for at in range(0, self.prefetch_bytes, LINE):
            f.prefetch(f.gep(f["prefetch"], k, self.prefetch_bytes), at, locality=2)
        return self._rank_one(k, 0, f.gep(f["b"], k * f["b_stride"]), acc)

    def _steps(self, k: Value, count: int, acc: Sequence[Value]) -> list[Value]:
        """Several k. One or two rows read b for the first time, from memory."""
        f = self.f
        b, sums = f.gep(f["b"], k * f["b_stride"]), list(acc)
        ahead = read_ahead(f) if self.rows <= 2 else 0
        for u in range(count):
            if ahead:
                for line in range(0, self.shape.nr * memory_type(self.weight).bytes, LINE):
                    f.prefetch(b, ahead + line)
            sums = self._rank_one(k, u, b, sums)
            b = f.gep(b, f["b_stride"]) if u < count - 1 else b
        return sums

    def _rank_one(self, k: Value, ahead: int, b: Value, acc: Sequence[Value]) -> list[Value]:
        f, g = self.f, self.shape
        size = memory_type(self.weight).bytes
        columns = [
            load(f, b, self.weight, g.lanes, g.acc, j * g.lanes * size) for j in self.vectors
        ]
        out: list[Value] = []
        for i in range(self.rows):
            x = self._element(i, k, ahead)
            for column in columns:
                out.append(multiply_add(f, x, column, acc[len(out)]))
        return out

    def _element(self, row: int, k: Value, ahead: int) -> Value:
        """Element k + `ahead` of a row, in every lane."""
        f, g = self.f, self.shape
        size = g.acc.bytes
        if self.packed:
            base, at = f.gep(f["a"], k, self.rows * size), (ahead * self.rows + row) * size
        else:
            base, at = f.gep(self.a_rows[row], k, size), ahead * size
        return f.broadcast_load(base, g.acc, g.lanes, at)


def multiply_add(f: Function, a: Value, b: Value, c: Value) -> Value:
    """a * b + c; integers wrap."""
    return f.fma(a, b, c) if a.type.is_float else a * b + c
