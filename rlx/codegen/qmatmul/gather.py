"""Rows of packed tables, decoded: embeddings, and the weights of chosen experts."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.codegen.emit import Function, Module, Value, f32, i64
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.qmatmul.decode import emit_decode
from rlx.codegen.storage import memory_type
from rlx.ir.dtype import DType
from rlx.ir.quant import QuantScheme


class _Table:
    """A packed table [V, ...] whose entries are `lines` rows each: words 0 to 2 are the packed
    rows, their scales and their zero points."""

    def __init__(self, f: Function, scheme: QuantScheme, lines: Value, k: Value) -> None:
        self.f = f
        self.parts = [f.word(f["words"], i) for i in range(3)]
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
    """ids[i]; one that is not below `limit` leaves word `number` in `status` and becomes 0.

    `status` and `number` are words 3 and 4 of the kernel.
    """
    type_ = memory_type(dtype)
    index = f.load(f.gep(ids, i, type_), type_).to(i64, signed=dtype.kind == "int")
    exists = index.ult(limit)
    f.if_(~exists, lambda: f.store(f.word(f["words"], 4, i64), f.word(f["words"], 3)))
    return f.select(exists, index, 0)


@dataclass(frozen=True)
class DecodeRows(KernelSpec):
    """words: table, scale, zp, status, number, ids, out, count, rows, k

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
        ids, out = (f.word(f["words"], i) for i in (5, 6))
        count, rows, k = (f.word(f["words"], i, i64) for i in (7, 8, 9))
        table = _Table(f, self.scheme, f.i64(1), k)
        lo, hi = f.split(count)
        for i in f.range(lo, hi):
            entry = checked_index(f, ids, self.index, i, rows)
            place = f.gep(out, i * k, 4)
            f.call(decode, *table.row(entry, f.i64(0)), f.i64(0), k, place)


LINES = 16  # rows of a weight that are decoded before they are turned


@dataclass(frozen=True)
class DecodeExperts(KernelSpec):
    """words: w, scale, zp, status, number, expert, out, count, experts, k, n, scratch, step

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
        expert, out = (f.word(f["words"], i) for i in (5, 6))
        count, experts, k, n = (f.word(f["words"], i, i64) for i in (7, 8, 9, 10))
        step = f.word(f["words"], 12, i64)
        buffer = f.gep(f.word(f["words"], 11), f["tid"].to(i64) * step)
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
