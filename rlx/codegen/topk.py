"""The k greatest or least elements of each row, in order, with their indices."""

from __future__ import annotations

from rlx.codegen.emit import Module, i32, i64
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.ranking import Heaps, Ranking
from rlx.codegen.region.registers import raw_type
from rlx.ir.dtype import DType
from rlx.support.records import dataclass


@dataclass(frozen=True)
class TopK(KernelSpec):
    """args: x, values, indices, rows, n, k, scratch, step

    Rows lie without gaps. Each worker has `step` bytes of scratch memory: k entries.
    """

    dtype: DType
    largest: bool

    def entry_bytes(self) -> int:
        return Ranking(self.dtype, self.largest).bytes

    def emit(self, m: Module) -> None:
        ranking = Ranking(self.dtype, self.largest)
        select = Heaps(m, ranking).emit_select()
        f = m.kernel()
        x, values, indices = (f.arg(f["args"], at) for at in range(3))
        rows, n, k = (f.arg(f["args"], at, i64) for at in (3, 4, 5))
        step = f.arg(f["args"], 7, i64)
        heap = f.gep(f.arg(f["args"], 6), f["tid"].to(i64) * step)
        lo, hi = f.split(rows)
        for row in f.range(lo, hi):
            source = f.gep(x, row * n, self.dtype.bytes)
            f.call(select, source, n, k, heap)
            for i in f.range(0, k):
                index = ranking.index(f, ranking.load(f, heap, i))
                element = f.load(f.gep(source, index, self.dtype.bytes), raw_type(self.dtype))
                to = row * k + i
                f.store(element, f.gep(values, to, self.dtype.bytes))
                f.store(index.to(i32), f.gep(indices, to, 4))
