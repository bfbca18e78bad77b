"""Quantised grouped GEMM for mixture of experts: routed rows times their expert's column tiles.

A chunk of the routing (see `kernels.gemm.grouped_gemm`) is rows of one expert. Its rows, quantised
in the order of the routing, are tiles of their own. Since the last tile of a chunk may be padded, a
chunk begins as many rows further on as the padding of the chunks before it can take.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.gemm.gemm import MC
from rlx.backends.cpu.kernels.gemm.grouped_gemm import Chunk, each_chunk
from rlx.backends.cpu.kernels.qgemm.qgemm import QuantGemm, QuantGemmEmitter
from rlx.backends.cpu.kernels.qgemm.quantize_rows import QuantizeRows, tile_of
from rlx.llvm.builder import Function, Module, Value, i32, i64, ptr
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass


def routed_rows(rows: int, experts: int, tile: int) -> int:
    """Rows of the buffer that holds any routing."""
    chunks = min(rows, experts + rows // MC)
    return rows + chunks * (tile - 1)


def _first_row(chunk: Chunk, tile: int) -> Value:
    """The first quantised row of a chunk."""
    return chunk.start + chunk.number * (tile - 1)


@dataclass(frozen=True)
class QuantizeRoutedRows(QuantizeRows):
    """args: x, out, rows, k, table"""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        x, out, table = (f.arg(f["args"], i) for i in (0, 1, 4))
        rows, k = (f.arg(f["args"], i, i64) for i in (2, 3))
        size, blocks, bytes_ = self.sizes(f, k)
        # A unit is a block of a row: the blocks of every chunk are divided among the workers.
        for chunk in each_chunk(f, table, rows, blocks):
            base = f.gep(out, _first_row(chunk, self.layout.tile) * blocks * bytes_)
            for i in f.range(0, chunk.size):
                row = f.load(f.gep(chunk.route, i, 4), i32).to(i64)
                start, width = tile_of(f, self.layout, i, chunk.size, blocks * bytes_)
                inside = i & self.layout.tile - 1
                to = f.gep(f.gep(base, start), inside, 4)
                for b in f.range(chunk.first, chunk.last):
                    source = f.gep(x, row * k + b * size, memory_type(self.x))
                    self.block(f, source, f.gep(to, b * bytes_ * width), width, size)


@dataclass(frozen=True)
class QuantGroupedGemm(QuantGemm):
    """args: those of `QuantGemm`, then table and the bytes of an expert's weight"""

    @property
    def args(self) -> list[str]:
        return [*super().args, "table", "w_expert"]

    def emit(self, m: Module) -> None:
        _GroupedEmitter(self, m).emit()


class _GroupedEmitter(QuantGemmEmitter):
    routed = True

    def arg(self, f: Function, name: str) -> Value:
        if name == "table":
            return f.arg(f["args"], self.spec.args.index(name), ptr)
        return super().arg(f, name)

    def emit(self) -> None:
        f = self.f
        self.acc = self.reserve_accumulators()
        panels = f.ceil_div(self["n"], self.columns)
        for chunk in each_chunk(f, self["table"], self["m"], panels):
            x = f.gep(self["x"], _first_row(chunk, self.layout.tile) * self["row"])
            w = f.gep(self["w"], chunk.expert * self["w_expert"])
            for p in f.range(chunk.first, chunk.last):
                self.panel(w, p, x, f.i64(0), chunk.size, chunk.route)
