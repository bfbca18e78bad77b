"""Dot products with columns that are contiguous along k, one lane for each column.

Square tiles of the columns are transposed in registers. A sum then takes k in order, one fma each,
and has the bits that the micro-kernel gives it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.kernels.gemm.microkernel import multiply_add
from rlx.backends.cpu.kernels.loops.transpose_tiles import transposed
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Type, Value, vec
from rlx.llvm.storage import load, memory_type

COLUMNS = 16  # at once: fewer would wait for their sums


class ColumnDots:
    """Rows of x and `COLUMNS` columns of w: sums are vectors `[group of lanes][row]`, flat."""

    def __init__(self, f: Function, x: DType, w: DType, acc: Type) -> None:
        self.f, self.x, self.w, self.acc = f, x, w, acc
        self.lanes = f.target.lanes(acc.bits)

    def zeros(self, rows: int) -> list[Value]:
        return [self.f.const(0, vec(self.lanes, self.acc))] * (COLUMNS // self.lanes * rows)

    def add(
        self, rows: Sequence[Value], columns: Sequence[Value], k: Value, sums: list[Value]
    ) -> list[Value]:
        """The sums plus k products, of rows and columns at these addresses."""
        f, lanes = self.f, self.lanes
        groups = [columns[i : i + lanes] for i in range(0, len(columns), lanes)]
        whole = k - k.urem(lanes)

        def tile(at: Value, *sums: Value) -> list[Value]:
            found: list[Value] = []
            for g, group in enumerate(groups):
                along = [self._read(c, self.w, at, lanes) for c in group]
                part: Sequence[Value] = sums[g * len(rows) : (g + 1) * len(rows)]
                for j, across in enumerate(transposed(f, along)):
                    part = self._step(rows, at + j, across, part)
                found += part
            return found

        def one(at: Value, *sums: Value) -> list[Value]:
            found: list[Value] = []
            for g, group in enumerate(groups):
                across = f.const(0, vec(lanes, self.acc))
                for j, c in enumerate(group):
                    across = f.insert(across, self._read(c, self.w, at, 1), j)
                found += self._step(rows, at, across, sums[g * len(rows) : (g + 1) * len(rows)])
            return found

        return f.loop(whole, k, 1, f.loop(0, whole, lanes, sums, tile), one)

    def _step(
        self, rows: Sequence[Value], at: Value, across: Value, sums: Sequence[Value]
    ) -> list[Value]:
        f = self.f
        x = [f.splat(self._read(row, self.x, at, 1), self.lanes) for row in rows]
        return [multiply_add(f, a, across, s) for a, s in zip(x, sums, strict=True)]

    def _read(self, base: Value, dtype: DType, at: Value, lanes: int) -> Value:
        return load(self.f, self.f.gep(base, at, memory_type(dtype)), dtype, lanes, self.acc)
