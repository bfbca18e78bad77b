"""Rows routed to experts, quantised in the order of the routing, against experts' strips.

A chunk of the routing (see `rlx.codegen.grouped_matmul`) is rows of one expert. Its quantised rows
are tiles of their own; since the last of them may be filled up, a chunk's rows begin as many rows
further on as the chunks before it can have filled up.
"""

from __future__ import annotations

from rlx.codegen.emit import Function, Module, Value, i32, i64, ptr
from rlx.codegen.grouped_matmul import Chunk, each_chunk
from rlx.codegen.matmul import CHUNK
from rlx.codegen.qmatmul.product import Product, QuantMatmul
from rlx.codegen.qmatmul.rows import QuantizeRows, tile_of
from rlx.codegen.storage import memory_type
from rlx.support.records import dataclass


def routed_rows(rows: int, experts: int, tile: int) -> int:
    """Room, in rows, for any routing."""
    chunks = min(rows, experts + rows // CHUNK)
    return rows + chunks * (tile - 1)


def _place(chunk: Chunk, tile: int) -> Value:
    """The row with which a chunk begins among the quantised ones."""
    return chunk.start + chunk.number * (tile - 1)


@dataclass(frozen=True)
class RoutedRows(QuantizeRows):
    """args: x, out, rows, k, table"""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        x, out, table = (f.arg(f["args"], i) for i in (0, 1, 4))
        rows, k = (f.arg(f["args"], i, i64) for i in (2, 3))
        size, blocks, bytes_ = self.sizes(f, k)
        # A unit is a block of a row; every chunk shares its blocks among the workers.
        for chunk in each_chunk(f, table, rows, blocks):
            base = f.gep(out, _place(chunk, self.layout.tile) * blocks * bytes_)
            for i in f.range(0, chunk.size):
                row = f.load(f.gep(chunk.route, i, 4), i32).to(i64)
                start, width = tile_of(f, self.layout, i, chunk.size, blocks * bytes_)
                inside = i & self.layout.tile - 1
                to = f.gep(f.gep(base, start), inside, 4)
                for b in f.range(chunk.first, chunk.last):
                    source = f.gep(x, row * k + b * size, memory_type(self.x))
                    self.block(f, source, f.gep(to, b * bytes_ * width), width, size)


@dataclass(frozen=True)
class QuantGrouped(QuantMatmul):
    """args: those of `QuantMatmul`, then table and the bytes of an expert's weight"""

    @property
    def args(self) -> list[str]:
        return [*super().args, "table", "w_expert"]

    def emit(self, m: Module) -> None:
        _Grouped(self, m).emit()


class _Grouped(Product):
    routed = True

    def arg(self, f: Function, name: str) -> Value:
        if name == "table":
            return f.arg(f["args"], self.spec.args.index(name), ptr)
        return super().arg(f, name)

    def emit(self) -> None:
        f = self.f
        self.buffer = self.make_buffer()
        panels = f.ceil_div(self["n"], self.columns)
        for chunk in each_chunk(f, self["table"], self["m"], panels):
            x = f.gep(self["x"], _place(chunk, self.layout.tile) * self["row"])
            w = f.gep(self["w"], chunk.expert * self["w_expert"])
            for p in f.range(chunk.first, chunk.last):
                self.panel(w, p, x, f.i64(0), chunk.size, chunk.route)
