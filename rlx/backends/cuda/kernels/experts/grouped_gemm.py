"""Products of many rows with weights of their experts, by tensor cores: a tile has one expert.

Rows are in the order of their experts (`sort_rows`); results go back to where their rows were.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import BlockFunction, KernelModule
from rlx.backends.cuda.kernels.experts.sort_rows import ENTRY
from rlx.backends.cuda.kernels.gemm.gemm import Gemm, GemmEmitter
from rlx.llvm.builder import Value, f32, i32, i64
from rlx.support.records import dataclass


@dataclass(frozen=True)
class GroupedGemm(Gemm):
    """args: those of a product in one part, M being rows of all tiles there may be; then the tiles,
    the numbers (i32) of the rows, what columns [experts, n] are multiplied with (else 0), the first
    expert of those whose weights these are, and how many there are

    Weights are [experts, n, k].
    """

    column_scaled: bool = False

    @property
    def label(self) -> str:
        return f"expert gemm({self.tile.m}x{self.tile.n}x{self.k})"

    def emit(self, m: KernelModule) -> None:
        blocks = 2 if self.threads == 128 and self.shared <= 110 << 10 else 1
        _Emitter(m.begin_block(self.threads, self.shared, blocks), self).emit()


class _Emitter(GemmEmitter):
    kernel: GroupedGemm

    def __init__(self, f: BlockFunction, kernel: GroupedGemm) -> None:
        super().__init__(f, kernel)
        args = f["args"]
        tiles, self.order, self.column_scales = (f.arg(args, i) for i in (10, 11, 12))
        self.entry = f.gep(tiles, self.row0.udiv(self.tile.m).to(i64), ENTRY)

    def emit(self) -> None:
        f, kernel = self.f, self.kernel
        f.let_next_start()
        f.wait_for_previous()
        first, count = (f.arg(f["args"], i, i32) for i in (13, 14))
        found = f.load(self.entry, i32)
        self.expert = found - first

        def emit_tile() -> None:
            self.row0, self.m = (f.load(self.entry, i32, at) for at in (4, 8))
            start = self.expert.to(i64) * (kernel.n * kernel.k)
            self.weights = [f.gep(w, start, 2) for w in self.weights]
            self._emit_tile()

        ours = (found >= first) & (self.expert < count)
        f.if_(ours & (self.column0 < kernel.n), emit_tile)

    def _store(
        self, row: Value, column: Value, totals: list[Value], others: list[Value] | None
    ) -> None:
        f, kernel = self.f, self.kernel
        if kernel.scaled:
            scale = f.load(f.gep(self.scales, row.to(i64), 4), f32)
            totals = [v * scale for v in totals]

        def write() -> None:
            found = totals
            if kernel.column_scaled:
                at = self.expert.to(i64) * kernel.n + column.to(i64)
                scales = (f.load(f.gep(self.column_scales, at, 4), f32, 4 * i) for i in (0, 1))
                found = [v * s for v, s in zip(totals, scales, strict=True)]
            to = f.load(f.gep(self.order, row.to(i64), 4), i32).to(i64)
            first, second = found
            self.out.store_pair(first, second, to * kernel.n + column.to(i64))

        f.if_(column < kernel.n, write)
