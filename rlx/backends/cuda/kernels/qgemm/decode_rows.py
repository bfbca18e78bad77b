"""Lookup of rows in a packed table: a warp decodes a row to f32."""

from __future__ import annotations

from rlx.backends.cuda.builder import WARP, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.weight_rows import WeightRows
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, i64
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

_WARPS = 4


@dataclass(frozen=True)
class DecodeRows(BlockKernel):
    """args: table, ids, result (f32), number of ids, rows of the table, status, error number"""

    weight: WeightRows
    ids: DType
    k: int

    @property
    def label(self) -> str:
        return "dequant_gather"

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
        table, ids, out = (f.arg(args, i) for i in range(3))
        count, limit = f.arg(args, 3, i64), f.arg(args, 4, i64)
        status, node = f.arg(args, 5), f.arg(args, 6, i64)
        item = f.block_number().to(i64) * _WARPS + (f.thread() >> 5).to(i64)
        f.let_next_start()
        f.wait_for_previous()

        def decode(row: Value) -> None:
            to = f.gep(out, item * self.k, 4)
            for chunk in f.range(f.lane(), f.i64(self.weight.chunks(self.k)), WARP):
                raw = self.weight.load(f, table, row, chunk, self.k)
                numbers = iter(self.weight.decode(f, raw, chunk))
                first = chunk * self.weight.elements
                at = 0
                for size, scale, offset in self.weight.segments(f, raw):
                    for i in range(size):
                        made = f.fma(next(numbers), scale, offset)
                        f.store(made, f.gep(to, first + (at + i), 4))
                    at += size

        def look_up() -> None:
            found = f.load(f.gep(ids, item, self.ids.bytes), memory_type(self.ids))
            row = found.to(i64, signed=self.ids.kind == "int")
            f.if_(row.ult(limit), lambda: decode(row), lambda: f.store(node, status))

        f.if_(item < count, look_up)
