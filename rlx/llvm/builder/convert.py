"""Conversions between number types, with no call into a runtime library on any target."""

from __future__ import annotations

from rlx.llvm.builder.core import Value, unsuited
from rlx.llvm.builder.memory import MemoryOps
from rlx.llvm.builder.types import Type, bf16, f16, f32, f64, i1, i16, i32, i64


class ConvertOps(MemoryOps):
    """Conversion methods of a function."""

    def convert(self, value: Value, type_: Type, signed: bool = True) -> Value:
        """Convert to `type_` (a scalar type keeps the lanes).

        Integers are sign-extended and read as signed by default. Floats round to nearest even, NaN
        stays NaN; to integers they are truncated, out of range undefined. To i1: whether not zero.
        """
        source = value.type
        target = type_ if type_.lanes > 1 else type_.with_lanes(source.lanes)
        if source is target:
            return value
        if target.lanes != source.lanes or source.is_ptr or target.is_ptr:
            unsuited(f"convert to {type_.name}", source)
        if target.scalar is i1:
            return value.ne(0)
        if source.is_int:
            return self._from_int(value, target, signed)
        return self._from_float(value, target, signed)

    def _cast(self, op: str, value: Value, target: Type) -> Value:
        return self.instr(f"{op} {value.type.name} {value.name} to {target.name}", target)

    def _from_int(self, value: Value, target: Type, signed: bool) -> Value:
        source = value.type
        signed = signed and source.scalar is not i1
        if target.is_int:
            if value.const is not None and (signed or value.const >= 0):
                return self.const(value.const & (1 << target.bits) - 1, target)
            op = "trunc" if target.bits < source.bits else "sext" if signed else "zext"
            return self._cast(op, value, target)
        if target.bits == 16:
            middle = target.with_scalar(f32 if source.bits <= 16 else f64)
            return self.convert(self._from_int(value, middle, signed), target)
        return self._cast("sitofp" if signed else "uitofp", value, target)

    def _from_float(self, value: Value, target: Type, signed: bool) -> Value:
        source = value.type
        if source.bits == 16 and target.scalar is not f32:
            return self.convert(self.widen_half(value), target, signed)
        if target.is_int:
            # Through i32, as hardware does, so that narrow types wrap instead of being poison.
            wide = target.with_scalar(i64 if target.bits == 64 else i32)
            if not signed and target.bits == 32:
                wide = target.with_scalar(i64)
            op = "fptosi" if signed or target.bits < 64 else "fptoui"
            return self.convert(self._cast(op, value, wide), target)
        if source.bits == 16:
            return self.widen_half(value)
        if target.bits == 16:
            narrow = value if source.scalar is f32 else self._to_f32_odd(value)
            return self.narrow_half(narrow, target.scalar)
        return self._cast("fpext" if target.bits > source.bits else "fptrunc", value, target)

    def convert_saturating(self, value: Value, type_: Type, signed: bool = True) -> Value:
        """A float truncated to an integer type; saturating, NaN becomes 0."""
        target = type_ if type_.lanes > 1 else type_.with_lanes(value.type.lanes)
        if value.type.is_float and value.type.bits == 16:
            value = self.widen_half(value)
        if not value.type.is_float or not target.is_int or target.lanes != value.type.lanes:
            unsuited(f"convert_saturating to {type_.name}", value.type)
        name = f"llvm.fpto{'s' if signed else 'u'}i.sat.{target.suffix}.{value.type.suffix}"
        return self.intrinsic(name, target, value)

    def widen_half(self, value: Value) -> Value:
        """f16 or bf16 to f32, exactly."""
        target = value.type.with_scalar(f32)
        if value.type.scalar is bf16:
            bits = self.convert(value.bits(), i32, signed=False)
            return (bits << 16).bits(target)
        if self.module.target.f16c:
            return self._cast("fpext", value, target)
        return self.decode_float(value.bits(), exponent=5, mantissa=10)

    def narrow_half(self, value: Value, scalar: Type) -> Value:
        """f32 to f16 or bf16, to nearest even."""
        if scalar is f16 and self.module.target.f16c:
            return self._cast("fptrunc", value, value.type.with_scalar(f16))
        if scalar is f16:
            bits = self.encode_float(value, exponent=5, mantissa=10)
            return self.convert(bits, i16).bits(value.type.with_scalar(f16))
        # The instructions of AVX512-BF16 flush denormals, so the rounding is done in integers.
        bits = value.bits()
        rounded = bits + ((bits >> 16 & 1) + 0x7FFF) >> 16
        quiet = bits >> 16 | 0x40
        kept = self.select(value.is_nan(), quiet, rounded)
        return self.convert(kept, i16).bits(value.type.with_scalar(bf16))

    def _to_f32_odd(self, value: Value) -> Value:
        """f64 to f32 rounded to odd, so that a second rounding to 16 bits is the right one."""
        near = self._cast("fptrunc", value, value.type.with_scalar(f32))
        back = self._cast("fpext", near, value.type)
        bits = near.bits()
        away = self.compare("gt", self.abs(back), self.abs(value))
        inexact = self.compare("one", back, value)
        odd = (bits - away.to(i32)) | inexact.to(i32)
        return odd.bits(near.type)

    def encode_float(
        self, value: Value, exponent: int, mantissa: int, finite: bool = False
    ) -> Value:
        """f32 as the code of a small float (in i32), to nearest even.

        Too large becomes infinity, or NaN in a `finite` format, which has no infinity and whose
        only NaN is the code of all ones.
        """
        bias, shift = (1 << exponent - 1) - 1, 23 - mantissa
        bits = value.bits()
        size = bits & 0x7FFFFFFF
        normal = (size + ((size >> shift & 1) + ((1 << shift - 1) - 1)) >> shift) - (
            127 - bias << mantissa
        )
        # Adding 2^23 units of the smallest denormal leaves the rounded count in the low bits.
        magic = self.const(2.0 ** (23 + 1 - bias - mantissa), value.type)
        tiny = self.binary("add", size.bits(value.type), magic).bits() - magic.bits()
        code = self.select(size < (128 - bias << 23), tiny, normal)
        ones = (1 << exponent + mantissa) - 1
        if finite:
            code = self.select(code > ones - 1, ones, code)
            code = self.select(size > 0x7F800000, ones, code)
        else:
            infinity = (1 << exponent) - 1 << mantissa
            code = self.min(code, infinity)
            code = self.select(size > 0x7F800000, infinity | 1 << mantissa - 1, code)
        return code | (bits >> 31) << exponent + mantissa

    def decode_float(self, code: Value, exponent: int, mantissa: int) -> Value:
        """The f32 of a small float's code (an integer type) that has infinities; exact."""
        bias, shift = (1 << exponent - 1) - 1, 23 - mantissa
        bits = self.convert(code, i32, signed=False)
        size = (bits & (1 << exponent + mantissa) - 1) << shift
        target = size.type.with_scalar(f32)
        scaled = (size.bits(target) * 2.0 ** (127 - bias)).bits()
        top = (1 << exponent) - 1 << 23
        scaled = self.select(size < top, scaled, scaled | 0x7F800000)
        return (scaled | (bits >> exponent + mantissa & 1) << 31).bits(target)
