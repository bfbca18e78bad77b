"""f32 matrices as f16, for products by tensor cores: each number is the sum of two, 22 bits.

Rows are divided by a power of two first, so that their largest is below 2; the product multiplies
with it again. One product of 16-bit numbers, three times as long, has all three that count: (high,
high, low) of x against (high, low, high) of the weight. A row is written as high and low, of which
the product reads one twice (`folded`), or where parts are not whole steps as all three.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.planes import power_of_two
from rlx.backends.cuda.kernels.gemm.weight_rows import load_run
from rlx.backends.cuda.tensor_map import TILE_COLUMNS as STEP
from rlx.ir.dtype import DType
from rlx.ir.dtype import f32 as F32
from rlx.llvm.builder import Value, f16, f32, i64
from rlx.llvm.storage import load
from rlx.support.records import dataclass

PARTS = 3  # that are multiplied
CHUNK = 8  # numbers that a lane takes together
_WARPS, _COLUMN_WARPS = 8, 16
_BESIDE = 8  # rows of a block that lie beside each other: 32 bytes


def is_folded(k: int) -> bool:
    """Whether parts of a row are whole steps of a product."""
    return padded(k) % STEP == 0


def row_numbers(k: int) -> int:
    """Those of a row with its parts."""
    return (2 if is_folded(k) else PARTS) * padded(k)


def padded(k: int) -> int:
    """Numbers of a part of a row: its end is filled with zeros."""
    return -(-k // CHUNK) * CHUNK


@dataclass(frozen=True)
class SplitRows(BlockKernel):
    """args: matrices, how far apart groups of them are, and those of a group, how many are in one,
    rows apart, columns apart, result, scales of rows, rows of a matrix, rows of all (strides in
    elements)

    If numbers of a row follow each other, some lanes of a warp share a row. Else a block has eight
    rows, which lie beside each other, and its threads divide their numbers.
    """

    k: int
    is_weight: bool
    by_columns: bool
    is_aligned: bool  # whether four numbers of a row can be loaded together
    x: DType = F32

    @property
    def folded(self) -> bool:
        return is_folded(self.k)

    @property
    def label(self) -> str:
        return f"split({self.k})"

    @property
    def threads(self) -> int:
        return WARP * (self.column_warps if self.by_columns else _WARPS)

    @property
    def column_warps(self) -> int:
        """So many that no thread is without a chunk, where there are few."""
        chunks = padded(self.k) // CHUNK
        return min(_COLUMN_WARPS, -(-chunks * _BESIDE // WARP))

    @property
    def shared(self) -> int:
        return 4 * _BESIDE * self.column_warps if self.by_columns else 0

    @property
    def lanes(self) -> int:
        """Of a warp that share a row: a power of two, about as many as there are chunks."""
        chunks = padded(self.k) // CHUNK
        return min(WARP, 1 << (chunks - 1).bit_length())

    def blocks(self, rows: int) -> int:
        """Of a launch with so many rows."""
        return -(-rows // (_BESIDE if self.by_columns else self.threads // self.lanes))

    def emit(self, m: KernelModule) -> None:
        SplitEmitter(m.begin_block(self.threads, self.shared), self).emit()


class SplitEmitter:
    def __init__(self, f: BlockFunction, kernel: SplitRows) -> None:
        self.f, self.kernel = f, kernel
        args = f["args"]
        self.source, self.out, self.scales = f.arg(args, 0), f.arg(args, 6), f.arg(args, 7)
        self.far, self.apart, self.few = (f.arg(args, i, i64) for i in (1, 2, 3))
        self.row_stride, self.stride = f.arg(args, 4, i64), f.arg(args, 5, i64)
        self.rows, self.count = f.arg(args, 8, i64), f.arg(args, 9, i64)

    def emit(self) -> None:
        f, kernel = self.f, self.kernel
        f.let_next_start()
        f.wait_for_previous()
        thread, number = f.thread().to(i64), f.block_number().to(i64)
        if kernel.by_columns:
            row = number * _BESIDE + (thread & _BESIDE - 1)
            self._emit_row(row, thread.udiv(_BESIDE), kernel.threads // _BESIDE)
            return
        lanes = kernel.lanes
        row = number * (kernel.threads // lanes) + thread.udiv(lanes)
        self._emit_row(row, thread & lanes - 1, lanes)

    def find_row(self, row: Value) -> Value:
        """Where a row begins."""
        matrix = row.udiv(self.rows)
        group, own = matrix.udiv(self.few), row - matrix * self.rows
        there = group * self.far + (matrix - group * self.few) * self.apart
        return self.f.gep(self.source, there + own * self.row_stride, self.kernel.x.bytes)

    def _emit_row(self, row: Value, first: Value, step: int) -> None:
        """Chunks from `first` on, in steps."""
        self.emit_numbers(row, self.find_row(self.f.min(row, self.count - 1)), first, step)

    def emit_numbers(self, row: Value, base: Value, first: Value, step: int) -> None:
        """The parts of a row that begins at `base`, and its scale."""
        f, kernel = self.f, self.kernel
        chunks = f.i64(padded(kernel.k) // CHUNK)

        def widen(chunk: Value, top: Value) -> Value:
            for v in self.load_chunk(base, chunk):
                top = f.max_fast(f.abs(v), top)
            return top

        [top] = f.loop(first, chunks, step, [f.const(0.0, f32)], widen)
        top = self._of_block(top) if kernel.by_columns else f.warp_max(top, kernel.lanes)
        power = power_of_two(f, top)
        factor = (f.i32(254 << 23) - power).bits(f32)

        def write() -> None:
            place = f.gep(self.scales, row, 4)
            f.if_(first.eq(0), lambda: f.store(power.bits(f32), place))
            to = f.gep(self.out, row * row_numbers(kernel.k), 2)
            for chunk in f.range(first, chunks, step):
                self._store([v * factor for v in self.load_chunk(base, chunk)], to, chunk)

        f.if_(row < self.count, write)

    def load_chunk(self, base: Value, chunk: Value) -> list[Value]:
        f, kernel, at = self.f, self.kernel, chunk * CHUNK
        if kernel.is_aligned and kernel.k % CHUNK == 0:
            return [v for i in (0, 4) for v in load_run(f, base, at + i, 4, kernel.x)]
        found = []
        for i in range(CHUNK):
            k = at + i
            there = f.min(k, kernel.k - 1)
            value = load(f, f.gep(base, there * self.stride, kernel.x.bytes), kernel.x, 1, f32)
            if kernel.k % CHUNK:
                value = f.select(k < kernel.k, value, f.const(0.0, f32))
            found.append(value)
        return found

    def _of_block(self, top: Value) -> Value:
        """The largest of what the threads of a row found."""
        f = self.f
        for distance in (_BESIDE, 2 * _BESIDE):
            top = f.max_fast(f.exchange(top, distance), top)
        place = (f.thread() >> 5) * _BESIDE + f.lane32()
        f.if_(f.lane32() < _BESIDE, lambda: f.store_shared(top, place * 4))
        f.barrier()
        own = (f.thread() & _BESIDE - 1) * 4
        for i in range(self.kernel.column_warps):
            top = f.max_fast(f.load_shared(own, f32, 4 * _BESIDE * i), top)
        return top

    def _store(self, numbers: list[Value], to: Value, chunk: Value) -> None:
        f, width = self.f, padded(self.kernel.k)
        high = [f.pack_halves(numbers[i], numbers[i + 1], f16) for i in range(0, CHUNK, 2)]
        known = [v for pair in high for v in f.unpack_halves(pair, f16)]
        rest = [a - b for a, b in zip(numbers, known, strict=True)]
        low = [f.pack_halves(rest[i], rest[i + 1], f16) for i in range(0, CHUNK, 2)]
        order = [high, low, high] if self.kernel.is_weight else [high, high, low]
        if self.kernel.folded:
            order = [high, low]
        for i, part in enumerate(order):
            f.store(f.join(part), f.gep(to, chunk * CHUNK + i * width, 2), align=16)
