"""The two 8-bit floats, kept in i8: e4m3 (finite, largest 448, one NaN per sign) and e5m2."""

from __future__ import annotations

import math

from rlx.llvm.builder.core import Value, unsuited
from rlx.llvm.builder.types import f16, f32, i8, i16


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
