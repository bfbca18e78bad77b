"""A packed weight as f16, for products of many rows: a warp decodes a row.

Rows are divided by a power of two, so that they fit the exponents of f16; the product multiplies
its columns with it again. A row that fits into registers is loaded while the kernel in front ends.
"""

from __future__ import annotations

from functools import partial

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.planes import power_of_two
from rlx.backends.cuda.kernels.gemm.weight_rows import Raw
from rlx.backends.cuda.kernels.qgemm.packed_rows import PackedRows
from rlx.llvm.builder import Value, f16, f32, i64
from rlx.support.records import dataclass

_WARPS = 4
_MOST_HELD = 8  # chunks that a lane has in registers


@dataclass(frozen=True)
class UnpackWeight(BlockKernel):
    """args: weight, result (f16), scales of its rows (f32), rows"""

    weight: PackedRows
    k: int

    @property
    def label(self) -> str:
        return f"unpack({self.weight.scheme})"

    @property
    def threads(self) -> int:
        return _WARPS * WARP

    @property
    def rows(self) -> int:
        """Of a block."""
        return _WARPS

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        args = f["args"]
        packed, out, scales = (f.arg(args, i) for i in range(3))
        count = f.arg(args, 3, i64)
        row = f.block_number().to(i64) * _WARPS + (f.thread() >> 5).to(i64)
        f.let_next_start()
        chunks = [f.lane() + WARP * i for i in range(-(-self.weight.chunks(self.k) // WARP))]
        held: list[Raw] | None = None
        if len(chunks) <= _MOST_HELD:
            there, last = f.min(row, count - 1), self.weight.chunks(self.k) - 1
            held = [self.weight.load(f, packed, there, f.min(c, last), self.k) for c in chunks]
        f.wait_for_previous()

        def emit_row() -> None:
            top = f.const(0.0, f32)
            if held is None:
                top = self._bound(f, packed, row)
            else:
                for raw in held:
                    top = self._wider(f, raw, top)
            power = power_of_two(f, f.warp_max(top))
            f.if_(f.lane32().eq(0), lambda: f.store(power.bits(f32), f.gep(scales, row, 4)))
            factor, to = (f.i32(254 << 23) - power).bits(f32), f.gep(out, row * self.k, 2)
            if held is None:
                for chunk in f.range(f.lane(), f.i64(self.weight.chunks(self.k)), WARP):
                    raw = self.weight.load(f, packed, row, chunk, self.k)
                    self._decode(f, raw, chunk, to, factor)
                return
            for chunk, raw in zip(chunks, held, strict=True):
                inside = chunk < self.weight.chunks(self.k)
                f.if_(inside, partial(self._decode, f, raw, chunk, to, factor))

        f.if_(row < count, emit_row)

    def _bound(self, f: BlockFunction, packed: Value, row: Value) -> Value:
        """No number of this lane's chunks is larger."""

        def widen(chunk: Value, top: Value) -> Value:
            return self._wider(f, self.weight.load(f, packed, row, chunk, self.k), top)

        chunks = f.i64(self.weight.chunks(self.k))
        return f.loop(f.lane(), chunks, WARP, [f.const(0.0, f32)], widen)[0]

    def _wider(self, f: BlockFunction, raw: Raw, top: Value) -> Value:
        most = float(self.weight.most)
        for _, scale, offset in self.weight.segments(f, raw):
            top = f.max_fast(f.abs(offset), f.max_fast(f.abs(f.fma(scale, most, offset)), top))
        return top

    def _decode(self, f: BlockFunction, raw: Raw, chunk: Value, to: Value, by: Value) -> None:
        numbers, made = iter(self.weight.decode(f, raw, chunk)), list[Value]()
        for size, scale, offset in self.weight.segments(f, raw):
            scale, offset = scale * by, offset * by
            made += [f.fma(next(numbers), scale, offset) for _ in range(size)]
        start = f.gep(to, chunk * self.weight.elements, 2)
        for i in range(0, len(made), 8):
            pairs = [f.pack_halves(made[j], made[j + 1], f16) for j in range(i, i + 8, 2)]
            f.store(f.join(pairs), start, 2 * i, align=16)
