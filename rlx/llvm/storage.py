"""Element types in memory and the types they are computed in; alignment, streaming stores.

The two 8-bit floats are kept in i8: e4m3 (finite, largest 448, one NaN per sign) and e5m2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.errors import CodegenError
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Type, Value, bf16, f16, f32, f64, i8, i16, i32, i64, vec
from rlx.llvm.builder.core import unsuited

_MEMORY: dict[str, Type] = {
    "f64": f64,
    "f32": f32,
    "f16": f16,
    "bf16": bf16,
    "f8e4m3": i8,
    "f8e5m2": i8,
    "i64": i64,
    "u64": i64,
    "i32": i32,
    "u32": i32,
    "i16": i16,
    "u16": i16,
    "i8": i8,
    "u8": i8,
    "bool": i8,
}


def memory_type(dtype: DType) -> Type:
    """The LLVM type of one element in memory."""
    found = _MEMORY.get(dtype.name)
    if found is None:
        raise CodegenError("no scalar type in memory", where="storage", got=dtype.name)
    return found


def compute_type(dtype: DType) -> Type:
    """The accumulator type of dot products; integers wrap, so 32 bits suffice."""
    if dtype.is_float:
        return f64 if dtype.bits == 64 else f32
    return i64 if dtype.bits == 64 else i32


def load(
    f: Function, base: Value, dtype: DType, lanes: int, compute: Type, offset: Value | int = 0
) -> Value:
    """`lanes` elements at base + offset bytes, converted to `compute`."""
    raw = f.load(base, vec(lanes, memory_type(dtype)), offset)
    return widen(f, raw, dtype, compute)


def widen(f: Function, raw: Value, dtype: DType, compute: Type) -> Value:
    """Loaded elements, converted to `compute`."""
    decode = _DECODE.get(dtype.name)
    if decode is not None:
        return decode(raw).to(compute)
    return raw.to(compute, signed=dtype.kind == "int")


def narrow(f: Function, value: Value, dtype: DType) -> Value:
    """Values converted to the memory type of `dtype`, rounded once."""
    encode = _ENCODE.get(dtype.name)
    return encode(value) if encode is not None else value.to(memory_type(dtype))


def from_e4m3(code: Value) -> Value:
    """i8 codes to f32, exactly."""
    f = code.fn
    _check(code, "from_e4m3")
    wide = f.convert(code, i16, signed=False)
    # The same fields as an f16, whose exponent bias is 8 larger.
    half = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).bits(wide.type.with_scalar(f16))
    value = f.convert(half, f32) * 256.0
    return f.select((wide & 0x7F).eq(0x7F), math.nan, value)


def from_e5m2(code: Value) -> Value:
    """i8 codes to f32, exactly: they are the upper bytes of f16."""
    f = code.fn
    _check(code, "from_e5m2")
    wide = f.convert(code, i16, signed=False) << 8
    return f.convert(wide.bits(wide.type.with_scalar(f16)), f32)


def to_e4m3(value: Value) -> Value:
    """f32 to i8 codes, to nearest even; overflow becomes NaN."""
    return value.fn.convert(value.fn.encode_float(value, 4, 3, finite=True), i8)


def to_e5m2(value: Value) -> Value:
    """f32 to i8 codes, to nearest even; overflow becomes infinity."""
    return value.fn.convert(value.fn.encode_float(value, 5, 2), i8)


def _check(code: Value, op: str) -> None:
    if code.type.scalar is not i8:
        unsuited(op, code.type)


_DECODE = {"f8e4m3": from_e4m3, "f8e5m2": from_e5m2}
_ENCODE = {"f8e4m3": to_e4m3, "f8e5m2": to_e5m2}


def store(
    f: Function,
    value: Value,
    base: Value,
    dtype: DType,
    offset: Value | int = 0,
    streams: bool = False,
) -> None:
    """Write numbers as elements of `dtype` at base + offset bytes."""
    raw = narrow(f, value, dtype)
    if streams:
        stream(f, raw, f.gep(base, offset))
    else:
        f.store(raw, base, offset)


LINE = 64  # bytes of a cache line: no vector is wider


def is_aligned(f: Function, addresses: Sequence[Value]) -> Value:
    """Whether all addresses and strides (as numbers) are multiples of a cache line."""
    bits = f.i64(0)
    for a in addresses:
        bits = bits | (f.bitcast(a, i64) if a.type.is_ptr else a)
    return (bits & LINE - 1).eq(0)


def stream(f: Function, raw: Value, at: Value) -> None:
    """Streaming (non-temporal) store of an aligned vector: its cache line is not read before. A
    fence must follow the last one. Scalars are stored normally."""
    whole = raw.type.lanes > 1
    f.store(raw, at, align=raw.type.bytes if whole else 0, nontemporal=whole)
