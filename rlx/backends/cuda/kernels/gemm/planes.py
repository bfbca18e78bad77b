"""x in f32 as planes of 16-bit numbers whose sum it is, for products by tensor cores.

Three planes of bf16 hold all 24 bits of an f32, two hold 16. The exponents of f16 reach less far:
its rows are divided by a power of two, which the product is multiplied with again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.weight_rows import load_run
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i32, i64
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

_PIECE = 512  # numbers of a row
_EXPONENT = 0x7F800000


@dataclass(frozen=True)
class Planes(BlockKernel):
    """args: x, rows of x apart, planes, planes apart, scales, M (strides in elements)

    A warp has a row of `k` numbers if it is scaled, else a piece of one. With `chosen`, then the
    numbers (i32) of the rows of x, in the order in which they are wanted.
    """

    x: DType
    element: DType
    planes: int
    k: int
    scaled: bool
    unit: int = 0  # columns are ordered in units of so many, as packed weights want them
    chosen: bool = False

    @property
    def label(self) -> str:
        return f"planes({self.planes})"

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def warps(self) -> int:
        """Of a block: long rows are divided among more blocks."""
        return 4 if self.scaled else 8

    @property
    def pieces(self) -> int:
        """Of a row."""
        return 1 if self.scaled else -(-self.k // _PIECE)

    def blocks(self, m: int) -> int:
        """Of a launch with m rows."""
        return -(-m * self.pieces // self.warps)

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        args = f["args"]
        x, stride = f.arg(args, 0), f.arg(args, 1, i64)
        out, apart = f.arg(args, 2), f.arg(args, 3, i64)
        scales, count = f.arg(args, 4), f.arg(args, 5, i64)
        item = f.block_number() * self.warps + (f.thread() >> 5)
        row32 = item.udiv(self.pieces) if self.pieces > 1 else item
        first, row = ((item - row32 * self.pieces) * _PIECE).to(i64), row32.to(i64)
        f.let_next_start()
        f.wait_for_previous()

        def emit_row() -> None:
            source = row
            if self.chosen:
                source = f.load(f.gep(f.arg(args, 6), row, 4), i32).to(i64)
            base, lane = f.gep(x, source * stride, self.x.bytes), (f.lane32() * 4).to(i64)
            factor = self._scale(f, base, row, scales) if self.scaled else None

            def emit_at(at: Value) -> None:
                numbers = load_run(f, base, at, 4, self.x)
                if factor is not None:
                    numbers = [v * factor for v in numbers]
                if self.unit:
                    self._store_ordered(f, numbers, f.gep(out, row * self.k, 2), at)
                    return
                self._store(f, numbers, f.gep(out, row * self.k + at, 2), apart)

            if self.scaled:
                for at in f.range(lane, f.i64(self.k), WARP * 4):
                    emit_at(at)
            else:
                self._emit_piece(f, first + lane, emit_at)

        f.if_(row < count, emit_row)

    def _emit_piece(self, f: BlockFunction, first: Value, emit_at: Callable[[Value], None]) -> None:
        """A piece whole, its loads together, unless the row ends in it."""
        steps = [WARP * 4 * i for i in range(_PIECE // (WARP * 4))]
        for step in steps:
            f.if_(first + step < self.k, partial(emit_at, first + step))

    def _scale(self, f: BlockFunction, base: Value, row: Value, scales: Value) -> Value:
        """The power of two that the row is multiplied with: its largest is below 2 then."""

        def most(at: Value, top: Value) -> Value:
            for v in load_run(f, base, at, 4, self.x):
                top = f.max_fast(f.abs(v), top)
            return top

        first = (f.lane32() * 4).to(i64)
        [top] = f.loop(first, f.i64(self.k), WARP * 4, [f.const(0.0, f32)], most)
        power = power_of_two(f, f.warp_max(top))

        def keep() -> None:
            f.store(power.bits(f32), f.gep(scales, row, 4))

        f.if_(f.lane32().eq(0), keep)
        return (f.i32(254 << 23) - power).bits(f32)

    def _store(self, f: BlockFunction, numbers: list[Value], to: Value, apart: Value) -> None:
        element = memory_type(self.element)
        for p in range(self.planes):
            pairs = [f.pack_halves(numbers[i], numbers[i + 1], element) for i in (0, 2)]
            whole = f.join(pairs)
            f.store(whole, f.gep(to, apart * p, 2), align=8)
            known = [v for pair in pairs for v in f.unpack_halves(pair, element)]
            numbers = [a - b for a, b in zip(numbers, known, strict=True)]

    def _store_ordered(self, f: BlockFunction, numbers: list[Value], to: Value, at: Value) -> None:
        """Store four neighbours of the only plane."""
        place = f.gep(to, ordered(at, self.unit), 2)
        for i in (0, 2):
            pair = f.pack_halves(numbers[i], numbers[i + 1], memory_type(self.element))
            f.store(pair, place, 8 * i, align=4)


def ordered(column: Value, unit: int) -> Value:
    """Where the first two of four columns go, of which the first is a multiple of 4; the others go
    8 further. Lane q of a row of packed weights has neighbours of each unit of so many columns, and
    tensor cores take them at 2 q and 2 q + 8 of each 16."""
    inside = column & unit - 1
    lane, step = inside.udiv(unit // 4), inside.udiv(4) & unit // 16 - 1
    return column - inside + step * 16 + lane * 2


def power_of_two(f: BlockFunction, top: Value) -> Value:
    """The bits of the largest power of two that is at most `top`; it has a reciprocal."""
    return f.min(f.max(top.bits() & _EXPONENT, 1 << 23), 253 << 23)
