"""Dequantisation to f32 in native code, bit for bit as `quant.scheme.decode` does it.

One emitter per block type writes the code for one block; `emit_dequantize` makes a function of it
that dequantises any range of a row.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.errors import CodegenError
from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import QuantScheme
from rlx.llvm.builder import Function, Module, Value, f32, i8, i64, ptr, vec
from rlx.llvm.dequant_formats import DEQUANTIZERS, Block
from rlx.llvm.storage import memory_type, widen


def emit_dequantize(m: Module, scheme: QuantScheme, name: str = "dequantize") -> Function:
    """void dequantize(ptr row, ptr scale, ptr zp, i64 first, i64 count, ptr out)

    Weights first .. first + count of a row, both multiples of the block; `scale` and `zp` are the
    row's, read where the scheme has them.
    """
    params = [("row", ptr), ("scale", ptr), ("zp", ptr), ("first", i64), ("count", i64)]
    f = m.function(name, [*params, ("out", ptr)], internal=True)
    if scheme.ggml_type is None or scheme.block_size == 1:
        _Elementwise(f, scheme).emit()
        return f
    emitter = DEQUANTIZERS.get(scheme.name)
    if emitter is None:
        raise CodegenError("no native dequantizer", where="dequantize", got=scheme.name)
    start = f.gep(f["row"], f["first"].udiv(scheme.block_size), scheme.bytes_per_block)
    for b in f.range(0, f["count"].udiv(scheme.block_size)):
        out = f.gep(f["out"], b, 4 * scheme.block_size)
        emitter(Block(f, f.gep(start, b, scheme.bytes_per_block), out))
    return f


def vector_loop(
    f: Function, lo: Value, hi: Value, lanes: int, body: Callable[[Value, int], None]
) -> None:
    """body(index, width) over lo .. hi in whole vectors, then one by one."""
    whole = lo + (hi - lo).udiv(lanes) * lanes
    for width, start, stop in ((lanes, lo, whole), (1, whole, hi)):
        for i in f.range(start, stop, width):
            body(i, width)


_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class _Elementwise:
    """Elements stored one by one, with a scale per row or per block in another tensor."""

    def __init__(self, f: Function, scheme: QuantScheme) -> None:
        self.f, self.scheme = f, scheme
        self.dtype = DType.of(_FLOATS.get(scheme.name, scheme.packed_dtype))
        self.per_byte = 2 if self.dtype.name == "u8" else 1

    def emit(self) -> None:
        f, block = self.f, self.scheme.block
        first, end = f["first"], f["first"] + f["count"]
        if block is None:
            self._block(first, end, f.i64(0))
            return
        group = first.udiv(block)
        for g in f.range(group, end.udiv(block)):
            self._block(g * block, (g + 1) * block, g)

    def _block(self, lo: Value, hi: Value, group: Value) -> None:
        """Weights lo .. hi, which share a scale."""
        f, scheme = self.f, self.scheme
        scale = f.load(f.gep(f["scale"], group, 4), f32) if scheme.has_scale else None
        zero: Value | None = None
        if scheme.has_zero_point:
            raw = f.load(f.gep(f["zp"], group), i8)
            zero = raw.to(f32, signed=scheme.packed_dtype == "i8")
        elif self.per_byte == 2:
            zero = f.const(8.0, f32)
        per = self.per_byte

        def vector(i: Value, width: int) -> None:
            raw = self._read(i, width)
            for value in [raw] if per == 1 else self._nibbles(raw):
                self._store(value, zero, scale, i, width)

        lanes = f.target.lanes(32)
        vector_loop(f, lo.udiv(per), hi.udiv(per), lanes, vector)

    def _read(self, i: Value, width: int) -> Value:
        type_ = memory_type(self.dtype)
        return self.f.load(self.f.gep(self.f["row"], i, type_), vec(width, type_), align=1)

    def _nibbles(self, raw: Value) -> list[Value]:
        """Bytes as pairs of nibbles, the low one first."""
        low, high = raw & 15, raw >> 4
        if raw.type.lanes == 1:
            return [self.f.concat(low, high)]
        return [self.f.interleave(low, high)]

    def _store(
        self, raw: Value, zero: Value | None, scale: Value | None, i: Value, width: int
    ) -> None:
        f, lanes = self.f, width * self.per_byte
        value = widen(f, raw, self.dtype, f32)
        if zero is not None:
            value = value - f.splat(zero, lanes)
        if scale is not None:
            value = value * f.splat(scale, lanes)
        f.store(value, f.gep(f["out"], i * self.per_byte - f["first"], 4))
