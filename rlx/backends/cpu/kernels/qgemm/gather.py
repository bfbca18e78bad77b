"""Gather from quantised tables: embedding rows and the weights of chosen experts, as f32."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.kernels.qgemm.dequantize import emit_dequantize
from rlx.backends.cpu.kernels.qgemm.repack_weights import SIZES, word_places
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.layouts.quant_tiles import BLOCKS, LINE, TILE_COLUMNS, column_tile_layout
from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import QuantScheme
from rlx.llvm.builder import Function, Module, Value, f32, i32, i64
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass


class _Table:
    """A quantised table [V, ...] whose entries are `rows_per_entry` rows each. Words 0 to 2 are the
    rows, their scales and their zero points."""

    def __init__(self, f: Function, scheme: QuantScheme, rows_per_entry: Value, k: Value) -> None:
        self.f = f
        self.parts = [f.arg(f["args"], i) for i in range(3)]
        row = k.udiv(scheme.block_size) * scheme.bytes_per_block
        groups = k.udiv(scheme.block) if scheme.block else f.i64(1)
        side = groups if scheme.has_scale else f.i64(0)
        self.strides = [row, side * 4, side if scheme.has_zero_point else f.i64(0)]
        self.rows_per_entry = rows_per_entry

    def row(self, entry: Value, r: Value) -> list[Value]:
        """Where a row, its scales and its zero points begin."""
        index = entry * self.rows_per_entry + r
        pairs = zip(self.parts, self.strides, strict=True)
        return [self.f.gep(p, index * s) for p, s in pairs]


def checked_index(f: Function, ids: Value, dtype: DType, i: Value, limit: Value) -> Value:
    """ids[i]; an index out of range leaves `number` in `status` and becomes 0.

    `status` and `number` are args 3 and 4 of the kernel.
    """
    type_ = memory_type(dtype)
    index = f.load(f.gep(ids, i, type_), type_).to(i64, signed=dtype.kind == "int")
    exists = index.ult(limit)
    for _ in f.when(~exists):
        f.store(f.arg(f["args"], 4, i64), f.arg(f["args"], 3))
    return f.select(exists, index, 0)


@dataclass(frozen=True)
class DequantRows(KernelSpec):
    """args: table, scale, zp, status, number, ids, out, count, rows, k

    out[i] = the weights of row ids[i] of a table of `rows` rows.
    """

    scheme: QuantScheme
    index: DType

    @property
    def label(self) -> str:
        return f"dequant_rows {self.scheme}"

    def emit(self, m: Module) -> None:
        dequantize = emit_dequantize(m, self.scheme)
        f = m.kernel()
        ids, out = (f.arg(f["args"], i) for i in (5, 6))
        count, rows, k = (f.arg(f["args"], i, i64) for i in (7, 8, 9))
        table = _Table(f, self.scheme, f.i64(1), k)
        lo, hi = f.split(count)
        for i in f.range(lo, hi):
            entry = checked_index(f, ids, self.index, i, rows)
            place = f.gep(out, i * k, 4)
            f.call(dequantize, *table.row(entry, f.i64(0)), f.i64(0), k, place)


def has_tile_rows(scheme: QuantScheme) -> bool:
    """Whether rows can be read from column tiles: not where high bits were spread."""
    return scheme.name in BLOCKS and BLOCKS[scheme.name].top is None


@dataclass(frozen=True)
class DequantTileRows(KernelSpec):
    """args: packed, scratch, worker_bytes, status, number, ids, out, count, rows, k,
    column_tile_bytes

    `DequantRows` from column tiles: a row is reassembled in `scratch`, of which each worker has
    `worker_bytes` bytes, and dequantised from there.
    """

    scheme: QuantScheme
    index: DType

    @property
    def label(self) -> str:
        return f"dequant_tile_rows {self.scheme}"

    def emit(self, m: Module) -> None:
        dequantize = emit_dequantize(m, self.scheme)
        f = m.kernel()
        packed, scratch, ids, out = (f.arg(f["args"], i) for i in (0, 1, 5, 6))
        worker_bytes, count, rows, k, tile_bytes = (
            f.arg(f["args"], i, i64) for i in (2, 7, 8, 9, 10)
        )
        buffer = f.gep(scratch, f["tid"].to(i64) * worker_bytes)
        blocks = k.udiv(self.scheme.block_size)
        place = word_places(f, BLOCKS[self.scheme.name])
        lo, hi = f.split(count)
        for i in f.range(lo, hi):
            entry = checked_index(f, ids, self.index, i, rows)
            source = f.gep(packed, entry.udiv(TILE_COLUMNS) * tile_bytes)
            for b in f.range(0, blocks):
                to = f.gep(buffer, b, self.scheme.bytes_per_block)
                self._block(f, source, entry.urem(TILE_COLUMNS), b, to, place)
            f.call(dequantize, buffer, packed, packed, f.i64(0), k, f.gep(out, i * k, 4))

    def _block(
        self,
        f: Function,
        column_tile: Value,
        r: Value,
        b: Value,
        to: Value,
        place: Callable[[Value], Value],
    ) -> None:
        """Copy block b of row r of a column tile, in the format's own order."""
        block_map = BLOCKS[self.scheme.name]
        layout = column_tile_layout(self.scheme, self.scheme.block_size * 16)
        assert layout is not None
        inside = b & layout.group - 1
        group = f.gep(column_tile, b.udiv(layout.group), layout.group_bytes)
        for (at, size), offset in zip(block_map.fields, layout.field_offsets, strict=False):
            field = f.gep(f.gep(group, offset), inside * TILE_COLUMNS + r, size)
            f.store(f.load(field, SIZES[size]), f.gep(to, at), align=1)
        body = f.gep(f.gep(group, layout.field_offsets[-1]), inside * layout.words, LINE)
        words = f.gep(to, block_map.first)
        if block_map.grid is not None:
            column = f.gep(body, r, 4)
            given = [f.load(column, i32, LINE * i) for i in range(layout.words)]
            for i, moved in enumerate(block_map.grid.unpack(given)):
                f.store(moved, words, 4 * i, align=1)
            return
        for j in f.range(0, layout.words):
            word = f.load(f.gep(f.gep(body, place(j), LINE), r, 4), i32)
            f.store(word, f.gep(words, j, 4), align=1)


TRANSPOSED_ROWS = 16  # rows of a weight that are dequantised, then transposed


@dataclass(frozen=True)
class DequantExperts(KernelSpec):
    """args: w, scale, zp, status, number, expert, out, count, experts, k, n, scratch, worker_bytes

    out[i] = the weight of expert[i], transposed to [K, N]; `scratch` holds `worker_bytes` bytes
    (`TRANSPOSED_ROWS` rows) per worker.
    """

    scheme: QuantScheme
    index: DType

    @property
    def label(self) -> str:
        return f"dequant_experts {self.scheme}"

    def emit(self, m: Module) -> None:
        dequantize = emit_dequantize(m, self.scheme)
        f = m.kernel()
        expert, out = (f.arg(f["args"], i) for i in (5, 6))
        count, experts, k, n = (f.arg(f["args"], i, i64) for i in (7, 8, 9, 10))
        worker_bytes = f.arg(f["args"], 12, i64)
        buffer = f.gep(f.arg(f["args"], 11), f["tid"].to(i64) * worker_bytes)
        table = _Table(f, self.scheme, n, k)
        groups = f.ceil_div(n, TRANSPOSED_ROWS)
        lo, hi = f.split(count * groups)
        for unit in f.range(lo, hi):
            i = unit.udiv(groups)
            first = (unit - i * groups) * TRANSPOSED_ROWS
            rows = f.min(n - first, TRANSPOSED_ROWS)
            entry = checked_index(f, expert, self.index, i, experts)
            for r in f.range(0, rows):
                place = f.gep(buffer, r * k, 4)
                f.call(dequantize, *table.row(entry, first + r), f.i64(0), k, place)
            corner = f.gep(out, i * k * n + first, 4)
            for c in f.range(0, k):
                for r in f.range(0, rows):
                    f.store(f.load(f.gep(buffer, r * k + c, 4), f32), f.gep(corner, c * n + r, 4))
