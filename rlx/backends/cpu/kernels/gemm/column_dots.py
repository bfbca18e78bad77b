"""Dot products of one row with columns that are contiguous along k, one lane for each column.

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
    """A row of elements `x` times `COLUMNS` columns of elements `w`, in vectors of `acc`."""

    def __init__(self, f: Function, x: DType, w: DType, acc: Type) -> None:
        self.f, self.x, self.w, self.acc = f, x, w, acc
        self.lanes = f.target.lanes(acc.bits)

    def dots(self, row: Value, columns: Sequence[Value], k: Value) -> list[Value]:
        """The dot products over k of the row and the columns at these addresses."""
        f, lanes = self.f, self.lanes
        groups = [columns[i : i + lanes] for i in range(0, COLUMNS, lanes)]
        whole = k - k.urem(lanes)

        def tile(at: Value, *sums: Value) -> list[Value]:
            found = list(sums)
            for g, group in enumerate(groups):
                along = [self._read(c, self.w, at, lanes) for c in group]
                for j, across in enumerate(transposed(f, along)):
                    found[g] = self._step(row, at + j, across, found[g])
            return found

        def single(at: Value, *sums: Value) -> list[Value]:
            found = list(sums)
            for g, group in enumerate(groups):
                across = f.const(0, vec(lanes, self.acc))
                for j, c in enumerate(group):
                    across = f.insert(across, self._read(c, self.w, at, 1), j)
                found[g] = self._step(row, at, across, found[g])
            return found

        zeros = [f.const(0, vec(lanes, self.acc))] * len(groups)
        return f.loop(whole, k, 1, f.loop(0, whole, lanes, zeros, tile), single)

    def _step(self, row: Value, at: Value, across: Value, total: Value) -> Value:
        x = self.f.splat(self._read(row, self.x, at, 1), self.lanes)
        return multiply_add(self.f, x, across, total)

    def _read(self, base: Value, dtype: DType, at: Value, lanes: int) -> Value:
        return load(self.f, self.f.gep(base, at, memory_type(dtype)), dtype, lanes, self.acc)
