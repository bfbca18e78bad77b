"""Rows of packed tables, decoded: embeddings, and the weights of chosen experts."""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.emit import Function, Module, Value, f32, i32, i64
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.qmatmul.decode import emit_decode
from rlx.codegen.qmatmul.repack import SIZES, word_places
from rlx.codegen.storage import memory_type
from rlx.ir.dtype import DType
from rlx.ir.quant import QuantScheme
from rlx.ir.quant_strips import BLOCKS, LINE, ROWS, strip_layout
from rlx.support.records import dataclass


class _Table:
    """A packed table [V, ...] whose entries are `lines` rows each: args 0 to 2 are the packed
    rows, their scales and their zero points."""

    def __init__(self, f: Function, scheme: QuantScheme, lines: Value, k: Value) -> None:
        self.f = f
        self.parts = [f.arg(f["args"], i) for i in range(3)]
        row = k.udiv(scheme.block_size) * scheme.bytes_per_block
        groups = k.udiv(scheme.block) if scheme.block else f.i64(1)
        side = groups if scheme.has_scale else f.i64(0)
        self.strides = [row, side * 4, side if scheme.has_zero_point else f.i64(0)]
        self.lines = lines

    def row(self, entry: Value, line: Value) -> list[Value]:
        """Where a row, its scales and its zero points begin."""
        index = entry * self.lines + line
        pairs = zip(self.parts, self.strides, strict=True)
        return [self.f.gep(p, index * s) for p, s in pairs]


def checked_index(f: Function, ids: Value, dtype: DType, i: Value, limit: Value) -> Value:
    """ids[i]; one that is not below `limit` leaves arg `number` in `status` and becomes 0.

    `status` and `number` are args 3 and 4 of the kernel.
    """
    type_ = memory_type(dtype)
    index = f.load(f.gep(ids, i, type_), type_).to(i64, signed=dtype.kind == "int")
    exists = index.ult(limit)
    f.if_(~exists, lambda: f.store(f.arg(f["args"], 4, i64), f.arg(f["args"], 3)))
    return f.select(exists, index, 0)


@dataclass(frozen=True)
class DecodeRows(KernelSpec):
    """args: table, scale, zp, status, number, ids, out, count, rows, k

    out[i] = the weights of row ids[i] of a table of `rows` rows.
    """

    scheme: QuantScheme
    index: DType

    @property
    def label(self) -> str:
        return f"decode_rows {self.scheme}"

    def emit(self, m: Module) -> None:
        decode = emit_decode(m, self.scheme)
        f = m.kernel()
        ids, out = (f.arg(f["args"], i) for i in (5, 6))
        count, rows, k = (f.arg(f["args"], i, i64) for i in (7, 8, 9))
        table = _Table(f, self.scheme, f.i64(1), k)
        lo, hi = f.split(count)
        for i in f.range(lo, hi):
            entry = checked_index(f, ids, self.index, i, rows)
            place = f.gep(out, i * k, 4)
            f.call(decode, *table.row(entry, f.i64(0)), f.i64(0), k, place)


def has_strip_rows(scheme: QuantScheme) -> bool:
    """Whether rows can be read out of strips: where top bits were spread, they cannot."""
    return scheme.name in BLOCKS and BLOCKS[scheme.name].top is None


@dataclass(frozen=True)
class DecodeStripRows(KernelSpec):
    """args: packed, scratch, step, status, number, ids, out, count, rows, k, strip

    The same from strips of `strip` bytes: a row is put together in `scratch`, of which each worker
    has `step` bytes, and decoded there.
    """

    scheme: QuantScheme
    index: DType

    @property
    def label(self) -> str:
        return f"decode_strip_rows {self.scheme}"

    def emit(self, m: Module) -> None:
        decode = emit_decode(m, self.scheme)
        f = m.kernel()
        packed, scratch, ids, out = (f.arg(f["args"], i) for i in (0, 1, 5, 6))
        step, count, rows, k, strip = (f.arg(f["args"], i, i64) for i in (2, 7, 8, 9, 10))
        buffer = f.gep(scratch, f["tid"].to(i64) * step)
        blocks = k.udiv(self.scheme.block_size)
        place = word_places(f, BLOCKS[self.scheme.name])
        lo, hi = f.split(count)
        for i in f.range(lo, hi):
            entry = checked_index(f, ids, self.index, i, rows)
            source = f.gep(packed, entry.udiv(ROWS) * strip)
            for b in f.range(0, blocks):
                to = f.gep(buffer, b, self.scheme.bytes_per_block)
                self._block(f, source, entry.urem(ROWS), b, to, place)
            f.call(decode, buffer, packed, packed, f.i64(0), k, f.gep(out, i * k, 4))

    def _block(
        self, f: Function, strip: Value, r: Value, b: Value, to: Value,
        place: Callable[[Value], Value],
    ) -> None:  # fmt: skip
        """Block b of row r of a strip as it was in its row."""
        found = BLOCKS[self.scheme.name]
        layout = strip_layout(self.scheme, self.scheme.block_size * 16)
        assert layout is not None
        inside = b & layout.group - 1
        group = f.gep(strip, b.udiv(layout.group), layout.group_bytes)
        for (at, size), offset in zip(found.fields, layout.field_offsets, strict=False):
            field = f.gep(f.gep(group, offset), inside * ROWS + r, size)
            f.store(f.load(field, SIZES[size]), f.gep(to, at), align=1)
        body = f.gep(f.gep(group, layout.field_offsets[-1]), inside * layout.words, LINE)
        words = f.gep(to, found.first)
        for j in f.range(0, layout.words):
            word = f.load(f.gep(f.gep(body, place(j), LINE), r, 4), i32)
            f.store(word, f.gep(words, j, 4), align=1)


LINES = 16  # rows of a weight that are decoded before they are turned


@dataclass(frozen=True)
class DecodeExperts(KernelSpec):
    """args: w, scale, zp, status, number, expert, out, count, experts, k, n, scratch, step

    out[i] = the weight of expert[i], turned to [K, N]; `scratch` holds `step` bytes per worker:
    `LINES` rows.
    """

    scheme: QuantScheme
    index: DType

    @property
    def label(self) -> str:
        return f"decode_experts {self.scheme}"

    def emit(self, m: Module) -> None:
        decode = emit_decode(m, self.scheme)
        f = m.kernel()
        expert, out = (f.arg(f["args"], i) for i in (5, 6))
        count, experts, k, n = (f.arg(f["args"], i, i64) for i in (7, 8, 9, 10))
        step = f.arg(f["args"], 12, i64)
        buffer = f.gep(f.arg(f["args"], 11), f["tid"].to(i64) * step)
        table = _Table(f, self.scheme, n, k)
        groups = f.ceil_div(n, LINES)
        lo, hi = f.split(count * groups)
        for unit in f.range(lo, hi):
            i = unit.udiv(groups)
            first = (unit - i * groups) * LINES
            lines = f.min(n - first, LINES)
            entry = checked_index(f, expert, self.index, i, experts)
            for r in f.range(0, lines):
                place = f.gep(buffer, r * k, 4)
                f.call(decode, *table.row(entry, first + r), f.i64(0), k, place)
            corner = f.gep(out, i * k * n + first, 4)
            for c in f.range(0, k):
                for r in f.range(0, lines):
                    f.store(f.load(f.gep(buffer, r * k + c, 4), f32), f.gep(corner, c * n + r, 4))
