"""Rearranging operands for the micro-kernel: `[terms][width]`, whatever way they lie in memory.

Each function copies `lines` lines of `terms` elements so that element k of line i comes to
dst + (k * width + i) elements. What lies beyond the last line is not written; results of such lines
are dropped. Only of an odd number of lines the last one is written twice.
"""

from __future__ import annotations

from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Type, Value, i32, i64, ptr, vec
from rlx.llvm.storage import memory_type, widen

_GROUP = 4  # terms of two lines that are interleaved at once


def emit_pack(
    m: Module, name: str, dtype: DType, compute: Type | None, unit: str, routed: bool = False
) -> Function:
    """void pack(ptr src, i64 line, i64 term, i64 lines, i64 terms, ptr dst, i64 width, ptr route)

    `line` and `term` are the bytes from one line, or term, to the next; `unit` says which of them
    is one element ("line", "term" or "none"). Elements become `compute` numbers, or stay as they
    are when that is None. When `routed`, lines are taken in the order of `route`, i32 numbers.
    """
    params = [("src", ptr), ("line", i64), ("term", i64), ("lines", i64), ("terms", i64)]
    params += [("dst", ptr), ("width", i64), ("route", ptr)]
    f = m.function(name, params, internal=True)
    pack = _Pack(f, dtype, compute, routed)
    if unit == "term":
        f.if_(f["width"].eq(1), pack.copy_line, pack.interleave)
    elif unit == "line":
        pack.copy_terms()
    else:
        pack.any_way()
    return f


class _Pack:
    def __init__(self, f: Function, dtype: DType, compute: Type | None, routed: bool) -> None:
        self.f, self.dtype, self.compute, self.routed = f, dtype, compute, routed
        self.raw = memory_type(dtype)
        self.type = compute or self.raw

    def read(self, address: Value, lanes: int) -> Value:
        value = self.f.load(address, vec(lanes, self.raw))
        return value if self.compute is None else widen(self.f, value, self.dtype, self.compute)

    def line(self, i: Value) -> Value:
        """Where line i begins."""
        f = self.f
        if self.routed:
            i = f.load(f.gep(f["route"], i, i32), i32).to(i64)
        return f.gep(f["src"], i * f["line"])

    def to(self, index: Value) -> Value:
        return self.f.gep(self.f["dst"], index, self.type)

    def copy_line(self) -> None:
        """One line: a plain copy."""
        f, terms = self.f, self.f["terms"]
        lanes = f.target.lanes(32)
        line, whole = self.line(f.i64(0)), terms - terms.urem(lanes)
        for step, lo, hi in ((lanes, f.i64(0), whole), (1, whole, terms)):
            for k in f.range(lo, hi, step):
                f.store(self.read(f.gep(line, k, self.raw), step), self.to(k))

    def interleave(self) -> None:
        """Two lines at a time, from vectors along k to pairs across them."""
        f = self.f
        last = f["lines"] - 1
        whole = f["terms"] - (f["terms"] & (_GROUP - 1))
        for i in f.range(0, f["lines"], 2):
            first, second = self.line(i), self.line(f.min(i + 1, last))
            for k in f.range(0, whole, _GROUP):
                self._pairs(i, k, f.gep(first, k, self.raw), f.gep(second, k, self.raw))
            for k in f.range(whole, f["terms"]):
                to = self.to(k * f["width"] + i)
                f.store(self.read(f.gep(first, k, self.raw), 1), to)
                f.store(self.read(f.gep(second, k, self.raw), 1), to, self.type.bytes)

    def _pairs(self, i: Value, k: Value, first: Value, second: Value) -> None:
        f = self.f
        both = f.interleave(self.read(first, _GROUP), self.read(second, _GROUP))
        to = self.to(k * f["width"] + i)
        for u in range(_GROUP):
            f.store(f.slice(both, 2 * u, 2), to)
            to = f.gep(to, f["width"], self.type)

    def copy_terms(self) -> None:
        """Every term is a run of lines: whole vectors of it, then what is left."""
        f = self.f
        lanes = f.target.vector_bits // self.type.bits
        whole = f["lines"] - f["lines"].urem(lanes)
        for k in f.range(0, f["terms"]):
            row = f.gep(f["src"], k * f["term"])
            start = k * f["width"]
            for step, lo, hi in ((lanes, f.i64(0), whole), (1, whole, f["lines"])):
                for i in f.range(lo, hi, step):
                    f.store(self.read(f.gep(row, i, self.raw), step), self.to(start + i))

    def any_way(self) -> None:
        f = self.f
        for i in f.range(0, f["lines"]):
            line = self.line(i)
            for k in f.range(0, f["terms"]):
                value = self.read(f.gep(line, k * f["term"]), 1)
                f.store(value, self.to(k * f["width"] + i))
