"""Scatter: slices stored or added at gathered indices.

Workers divide the elements of a slice, not the slices: each visits all indices in order, so that
the last of equal indices wins and the order of sums is deterministic.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.loops.registers import from_memory, raw_type, register_type, to_memory
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Value, i64, vec
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

TILE = 256  # elements of a slice per work item


@dataclass(frozen=True)
class Scatter(KernelSpec):
    """args: result, indices, updates, outer, size, inner, count, status, node

    The result is [outer, size, inner] and updates are [outer, count, inner], both contiguous.
    """

    result: DType
    updates: DType
    indices: DType
    add: bool

    @property
    def label(self) -> str:
        return "scatter_add" if self.add else "scatter"

    def emit(self, m: Module) -> None:
        f = m.kernel()
        outer, size, inner = (f.arg(f["args"], at, i64) for at in (3, 4, 5))
        tiles = f.ceil_div(inner, TILE)
        lo, hi = f.split(outer * tiles)
        for item in f.range(lo, hi):
            block = item.udiv(tiles)
            start = (item - block * tiles) * TILE
            width = f.min(inner - start, TILE)
            self._emit_tile(f, block, size, inner, start, width)

    def _emit_tile(
        self, f: Function, block: Value, size: Value, inner: Value, start: Value, width: Value
    ) -> None:
        """All updates of one tile of elements."""
        result, indices, updates = (f.arg(f["args"], at) for at in range(3))
        count = f.arg(f["args"], 6, i64)
        status, node = f.arg(f["args"], 7), f.arg(f["args"], 8, i64)
        to = f.gep(result, block * size * inner + start, self.result.bytes)
        source = f.gep(updates, block * count * inner + start, self.updates.bytes)
        lanes = f.target.lanes(max(register_type(d).bits for d in (self.result, self.updates)))
        for i in f.range(0, count):
            raw = f.load(f.gep(indices, i, self.indices.bytes), memory_type(self.indices))
            index = raw.to(i64, signed=self.indices.kind == "int")
            if self.indices.kind == "int":
                index = f.select(index < 0, index + size, index)
            good = index.ult(size)
            row = f.gep(to, index * inner, self.result.bytes)
            new = f.gep(source, i * inner, self.updates.bytes)

            def write(row: Value = row, new: Value = new) -> None:
                whole = width & -lanes
                for k in f.range(0, whole, lanes):
                    self._elements(f, row, new, k, lanes)
                for k in f.range(whole, width):
                    self._elements(f, row, new, k, 1)

            f.if_(good, write, lambda: f.store(node, status))

    def _elements(self, f: Function, row: Value, new: Value, at: Value, lanes: int) -> None:
        to = f.gep(row, at, self.result.bytes)
        raw = f.load(f.gep(new, at, self.updates.bytes), vec(lanes, raw_type(self.updates)))
        value = from_memory(f, raw, self.updates)
        if self.add:
            old = from_memory(f, f.load(to, vec(lanes, raw_type(self.result))), self.result)
            value = old + value.to(old.type)
        f.store(to_memory(f, value, self.result), to)
