"""Elements as integers that have their order."""

from __future__ import annotations

from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Value, f32, f64, i64
from rlx.llvm.storage import load, memory_type

HIGHEST, LOWEST = (1 << 63) - 1, -(1 << 63)


def ascending_key(f: Function, at: Value, dtype: DType) -> Value:
    """An i64 that grows with the element at an address; NaN is the greatest, −0 equals 0."""
    if dtype.is_float:
        wide = f64 if dtype.bits == 64 else f32
        number = load(f, at, dtype, 1, wide) + 0.0  # -0 is 0
        bits = number.bits()
        ordered = f.select(bits < 0, bits ^ ((1 << wide.bits - 1) - 1), bits).to(i64)
        return f.select(number.is_nan(), f.i64(HIGHEST), ordered)
    found = f.load(at, memory_type(dtype)).to(i64, signed=dtype.kind == "int")
    return found ^ LOWEST if dtype.name == "u64" else found


def first_key(f: Function, at: Value, dtype: DType, largest: bool, nan_first: bool) -> Value:
    """An i64 that is greater the sooner an element comes: the largest or the least first."""
    key = ascending_key(f, at, dtype)
    if largest:
        return key
    key = key ^ -1
    if nan_first and dtype.is_float:
        key = f.select(key.eq(LOWEST), f.i64(HIGHEST), key)
    return key
