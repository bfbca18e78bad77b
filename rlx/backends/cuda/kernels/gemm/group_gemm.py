"""Products of many rows on Hopper: four warps multiply tiles that lie in shared memory.

`wgmma` runs beside the code: while it multiplies one step, the next are copied. Rows of a tile are
128 bytes, their 16-byte pieces permuted as the instruction expects it.
"""

from __future__ import annotations

from typing import ClassVar

from rlx.backends.cuda.builder import KernelModule
from rlx.backends.cuda.kernels.gemm.gemm import STAGES, Gemm, GemmEmitter, Tile
from rlx.llvm.builder import Value
from rlx.support.records import dataclass

WIDE, SQUARE, FLAT = Tile(128, 256, 16, 256), Tile(128, 128, 16, 128), Tile(64, 128, 16, 128)


@dataclass(frozen=True)
class GroupGemm(Gemm):
    """args: those of `Gemm`"""

    step: ClassVar[int] = 64
    pitch: ClassVar[int] = 128
    first: ClassVar[int] = 1024

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared), self).emit()


class _Emitter(GemmEmitter):
    def place(self, row: Value, piece: Value) -> Value:
        return row * 128 + (piece ^ (row & 7)) * 16

    def products(self, first: Value, last: Value, start: list[Value]) -> list[Value]:
        """Two steps are copied ahead, one is multiplied, and the one before it may not be done."""
        f, kernel, ahead = self.f, self.kernel, STAGES - 2
        for i in range(ahead):
            self.copy_step(first + i, last, f.i32(i))
            f.commit_copies()

        def body(i: Value, *sums: Value) -> list[Value]:
            f.wait_copies(ahead - 1)
            f.fence_shared()
            f.barrier()
            at = (i & STAGES - 1) * kernel.stage_bytes + kernel.first
            made = self._begin(at, list(sums))
            self.copy_step(first + i + ahead, last, i + ahead & STAGES - 1)
            f.commit_copies()
            f.wait_group(1)
            return made

        sums = f.loop(f.i32(0), last - first, 1, start, body)
        f.wait_copies(0)
        return f.finish_group(sums)

    def _begin(self, start: Value, sums: list[Value]) -> list[Value]:
        """Begin the products of a step."""
        f, kernel, tile = self.f, self.kernel, self.tile
        group = f.thread() >> 7  # of four warps, 64 rows each
        weights = start + kernel.planes * kernel.plane_bytes
        f.begin_group()
        for p in range(kernel.planes):
            rows = start + group * (64 * kernel.pitch) + p * kernel.plane_bytes
            for k in range(kernel.step // 16):
                sums = f.multiply_group(rows + 32 * k, weights + 32 * k, sums, tile.n, self.type)
        f.commit_group()
        return sums
