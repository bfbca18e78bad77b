"""A packed weight as f16, for products of many rows: a warp decodes a row.

Rows are divided by a power of two, so that they fit the exponents of f16; the product multiplies
its columns with it again.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.planes import power_of_two
from rlx.backends.cuda.kernels.qgemm.packed_rows import PackedRows
from rlx.llvm.builder import Value, f16, f32, i64
from rlx.support.records import dataclass

_WARPS = 4


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
        f.wait_for_previous()

        def emit_row() -> None:
            power = power_of_two(f, f.warp_max(self._bound(f, packed, row)))
            f.if_(f.lane32().eq(0), lambda: f.store(power.bits(f32), f.gep(scales, row, 4)))
            factor = (f.i32(254 << 23) - power).bits(f32)
            self._decode(f, packed, row, f.gep(out, row * self.k, 2), factor)

        f.if_(row < count, emit_row)

    def _bound(self, f: BlockFunction, packed: Value, row: Value) -> Value:
        """No number of this lane's chunks is larger."""
        most = float(self.weight.most)

        def widen(chunk: Value, top: Value) -> Value:
            raw = self.weight.load(f, packed, row, chunk, self.k)
            for _, scale, offset in self.weight.segments(f, raw):
                top = f.max_fast(f.abs(offset), f.max_fast(f.abs(f.fma(scale, most, offset)), top))
            return top

        chunks = f.i64(self.weight.chunks(self.k))
        return f.loop(f.lane(), chunks, WARP, [f.const(0.0, f32)], widen)[0]

    def _decode(self, f: BlockFunction, packed: Value, row: Value, to: Value, by: Value) -> None:
        for chunk in f.range(f.lane(), f.i64(self.weight.chunks(self.k)), WARP):
            raw = self.weight.load(f, packed, row, chunk, self.k)
            numbers, made = iter(self.weight.decode(f, raw, chunk)), list[Value]()
            for size, scale, offset in self.weight.segments(f, raw):
                scale, offset = scale * by, offset * by
                made += [f.fma(next(numbers), scale, offset) for _ in range(size)]
            start = f.gep(to, chunk * self.weight.elements, 2)
            for i in range(0, len(made), 8):
                pairs = [f.pack_halves(made[j], made[j + 1], f16) for j in range(i, i + 8, 2)]
                f.store(f.join(pairs), start, 2 * i, align=16)
