"""Packing of GEMM's operands, of any strides, as `[kc][width]` for the micro-kernel.

"Rows" are rows of x or columns of w, the axis that is not k: element k of row i goes to element
k * width + i.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.loops.transpose_tiles import transposed
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Type, Value, i32, i64, ptr, vec
from rlx.llvm.storage import LINE, memory_type, widen

_UNROLL = 4  # k of two rows that are interleaved at once


def emit_pack(
    m: Module, name: str, dtype: DType, compute: Type | None, unit: str, routed: bool = False,
    panel: int = 0,
) -> Function:  # fmt: skip
    """void pack(ptr src, i64 stride_mn, i64 stride_k, i64 rows, i64 kc, ptr dst, i64 width,
    ptr route)

    Strides are bytes; `unit` is the axis with unit stride ("k", "m", "n" or "none"). Elements are
    converted to `compute`, or kept when that is None. When `routed`, rows are gathered in the order
    of `route`, i32 row numbers. `panel`: how many columns a whole panel of w has.
    """
    params = [("src", ptr), ("stride_mn", i64), ("stride_k", i64), ("rows", i64), ("kc", i64)]
    params += [("dst", ptr), ("width", i64), ("route", ptr)]
    f = m.function(name, params, internal=True)
    pack = _Pack(f, dtype, compute, routed)
    if unit == "k":
        for is_row in f.either(f["width"].eq(1)):
            if is_row:
                pack.copy_row()
            else:
                pack.interleave()
    elif unit in ("m", "n") and panel:
        for is_whole in f.either(f["rows"].eq(panel)):
            if is_whole:
                pack.copy_panel(panel)
            else:
                pack.copy_columns()
    elif unit in ("m", "n"):
        pack.copy_columns()
    else:
        pack.copy_strided()
    return f


class _Pack:
    def __init__(self, f: Function, dtype: DType, compute: Type | None, routed: bool) -> None:
        self.f, self.dtype, self.compute, self.routed = f, dtype, compute, routed
        self.raw = memory_type(dtype)
        self.type = compute or self.raw

    def read(self, address: Value, lanes: int) -> Value:
        value = self.f.load(address, vec(lanes, self.raw))
        return value if self.compute is None else widen(self.f, value, self.dtype, self.compute)

    def row(self, i: Value) -> Value:
        """Where row i begins."""
        f = self.f
        if self.routed:
            i = f.load(f.gep(f["route"], i, i32), i32).to(i64)
        return f.gep(f["src"], i * f["stride_mn"])

    def to(self, index: Value) -> Value:
        return self.f.gep(self.f["dst"], index, self.type)

    def copy_row(self) -> None:
        """One row: a contiguous copy."""
        f, kc = self.f, self.f["kc"]
        lanes = f.target.lanes(32)
        row, whole = self.row(f.i64(0)), kc - kc.urem(lanes)
        for step, lo, hi in ((lanes, f.i64(0), whole), (1, whole, kc)):
            for k in f.range(lo, hi, step):
                f.store(self.read(f.gep(row, k, self.raw), step), self.to(k))

    def interleave(self) -> None:
        """Squares of rows and k are transposed in registers, and what rows are left over two at a
        time: vectors along k are interleaved into pairs."""
        f = self.f
        squares = f.i64(0) if self.routed else self._transpose_squares()
        last = f["rows"] - 1
        whole = f["kc"] - (f["kc"] & (_UNROLL - 1))
        for i in f.range(squares, f["rows"], 2):
            first, second = self.row(i), self.row(f.min(i + 1, last))
            for k in f.range(0, whole, _UNROLL):
                self._pairs(i, k, f.gep(first, k, self.raw), f.gep(second, k, self.raw))
            for k in f.range(whole, f["kc"]):
                to = self.to(k * f["width"] + i)
                f.store(self.read(f.gep(first, k, self.raw), 1), to)
                f.store(self.read(f.gep(second, k, self.raw), 1), to, self.type.bytes)

    def _transpose_squares(self) -> Value:
        """Returns how many rows are done: as many as fill vectors."""
        f, target = self.f, self.f.target
        n = min(target.vector_bits // self.type.bits, target.num_vector_registers // 2)
        done = f["rows"] - (f["rows"] & (n - 1))
        whole = f["kc"] - (f["kc"] & (n - 1))
        for i in f.range(0, done, n):
            rows = [self.row(i + j) for j in range(n)]
            for k in f.range(0, whole, n):
                along = [self.read(f.gep(row, k, self.raw), n) for row in rows]
                for j, across in enumerate(transposed(f, along)):
                    f.store(across, self.to((k + j) * f["width"] + i))
            for k in f.range(whole, f["kc"]):
                for j, row in enumerate(rows):
                    value = self.read(f.gep(row, k, self.raw), 1)
                    f.store(value, self.to(k * f["width"] + i + j))
        return done

    def _pairs(self, i: Value, k: Value, first: Value, second: Value) -> None:
        f = self.f
        both = f.interleave(self.read(first, _UNROLL), self.read(second, _UNROLL))
        to = self.to(k * f["width"] + i)
        for u in range(_UNROLL):
            f.store(f.slice(both, 2 * u, 2), to)
            to = f.gep(to, f["width"], self.type)

    def copy_columns(self) -> None:
        """Rows are contiguous at each k: whole vectors, then the remainder."""
        f = self.f
        lanes = f.target.vector_bits // self.type.bits
        whole = f["rows"] - f["rows"].urem(lanes)
        for k in f.range(0, f["kc"]):
            row = f.gep(f["src"], k * f["stride_k"])
            start = k * f["width"]
            for step, lo, hi in ((lanes, f.i64(0), whole), (1, whole, f["rows"])):
                for i in f.range(lo, hi, step):
                    f.store(self.read(f.gep(row, i, self.raw), step), self.to(start + i))

    def copy_panel(self, columns: int) -> None:
        """A whole panel. Rows of a matrix often begin in pages of their own, which the hardware
        does not prefetch: each is asked for the panel that comes next."""
        f = self.f
        lanes = f.target.vector_bits // self.type.bits
        size = columns * self.raw.bytes
        for k in f.range(0, f["kc"]):
            row, to = f.gep(f["src"], k * f["stride_k"]), self.to(k * f["width"])
            for line in range(0, size, LINE):
                f.prefetch(row, size + line, locality=2)
            for i in range(0, columns, lanes):
                f.store(self.read(f.gep(row, i, self.raw), lanes), f.gep(to, i, self.type))

    def copy_strided(self) -> None:
        f = self.f
        for i in f.range(0, f["rows"]):
            row = self.row(i)
            for k in f.range(0, f["kc"]):
                value = self.read(f.gep(row, k * f["stride_k"]), 1)
                f.store(value, self.to(k * f["width"] + i))
