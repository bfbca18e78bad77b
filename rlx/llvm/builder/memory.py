"""Memory: addresses, loads and stores (plain, masked, gathered), atomics, the stack.

Conversions between number types, with no call into a runtime library on any target.
"""

from __future__ import annotations

from rlx.errors import CodegenError
from rlx.llvm.builder.core import Value, mismatch, unsuited
from rlx.llvm.builder.types import (
    Number,
    Type,
    bf16,
    f16,
    f32,
    f64,
    i1,
    i8,
    i16,
    i32,
    i64,
    ptr,
    vec,
    void,
)
from rlx.llvm.builder.vector import VectorOps

_POWERS = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}


class MemoryOps(VectorOps):
    """Memory methods of a function. Offsets are in bytes unless a scale says otherwise."""

    def gep(self, base: Value, index: Value | int, scale: int | Type = 1) -> Value:
        """base + index * scale; a Type as scale means its size."""
        if not base.type.is_ptr:
            unsuited("gep", base.type)
        size = scale if isinstance(scale, int) else scale.bytes
        if isinstance(index, int) or index.const is not None:
            offset = size * (index if isinstance(index, int) else index.const or 0)
            if offset == 0:
                return base
            return self.instr(f"getelementptr i8, ptr {base.name}, i64 {offset}", ptr)
        if not index.type.is_int:
            mismatch("gep", index.type, i64)
        element = _POWERS.get(size) or f"[{size} x i8]"
        text = f"getelementptr {element}, ptr {base.name}, {index.type.name} {index.name}"
        return self.instr(text, vec(index.type.lanes, ptr))

    def load(
        self,
        base: Value,
        type_: Type,
        offset: Value | int = 0,
        align: int = 0,
        nontemporal: bool = False,
    ) -> Value:
        """The value at base + offset bytes; aligned to its element by default."""
        address = self.gep(base, offset)
        tail = f", align {align or self._align(type_)}{self._hint(nontemporal)}"
        return self.instr(f"load {type_.name}, ptr {address.name}{tail}", type_)

    def store(
        self,
        value: Value,
        base: Value,
        offset: Value | int = 0,
        align: int = 0,
        nontemporal: bool = False,
    ) -> None:
        address = self.gep(base, offset)
        tail = f", align {align or self._align(value.type)}{self._hint(nontemporal)}"
        self.effect(f"store {value.type.name} {value.name}, ptr {address.name}{tail}")

    def _align(self, type_: Type) -> int:
        if type_ is void or (type_.scalar is i1 and type_.lanes > 1):
            raise CodegenError("masks have no place in memory", where="load/store", got=type_.name)
        return max(type_.scalar.bits // 8, 1)

    def _hint(self, nontemporal: bool) -> str:
        if not nontemporal:
            return ""
        self.module.metadata["!0"] = "!0 = !{i32 1}"
        return ", !nontemporal !0"

    def broadcast_load(
        self, base: Value, type_: Type, lanes: int, offset: Value | int = 0
    ) -> Value:
        """Load one element and broadcast it to all lanes."""
        return self.splat(self.load(base, type_, offset), lanes)

    def masked_load(
        self,
        base: Value,
        type_: Type,
        mask: Value,
        other: Value | Number = 0,
        offset: Value | int = 0,
        align: int = 0,
    ) -> Value:
        """A masked load, `other` in the masked-off lanes; their memory is not accessed."""
        rest = self.const(other, type_)
        if mask.type is not type_.mask:
            mismatch("masked_load", mask.type, type_.mask)
        return self.intrinsic(
            f"llvm.masked.load.{type_.suffix}.p0",
            type_,
            self.gep(base, offset),
            self.i32(align or self._align(type_)),
            mask,
            rest,
        )

    def masked_store(
        self,
        value: Value,
        base: Value,
        mask: Value,
        offset: Value | int = 0,
        align: int = 0,
    ) -> None:
        if mask.type is not value.type.mask:
            mismatch("masked_store", mask.type, value.type.mask)
        self.intrinsic(
            f"llvm.masked.store.{value.type.suffix}.p0",
            void,
            value,
            self.gep(base, offset),
            self.i32(align or self._align(value.type)),
            mask,
        )

    def gather(self, base: Value, index: Value, type_: Type, mask: Value | None = None) -> Value:
        """type_'s elements at base + index * element size, for each lane of the mask."""
        where = self._addresses("gather", base, index, type_, mask)
        keep = self.const(1, type_.mask) if mask is None else mask
        return self.intrinsic(
            f"llvm.masked.gather.{type_.suffix}.{where.type.suffix}",
            type_,
            where,
            self.i32(self._align(type_)),
            keep,
            self.const(0, type_),
        )

    def scatter(self, value: Value, base: Value, index: Value, mask: Value | None = None) -> None:
        """Lanes stored at base + index * element size; of equal indices the last lane wins."""
        type_ = value.type
        where = self._addresses("scatter", base, index, type_, mask)
        self.intrinsic(
            f"llvm.masked.scatter.{type_.suffix}.{where.type.suffix}",
            void,
            value,
            where,
            self.i32(self._align(type_)),
            self.const(1, type_.mask) if mask is None else mask,
        )

    def _addresses(
        self, op: str, base: Value, index: Value, type_: Type, mask: Value | None
    ) -> Value:
        if index.type.lanes != type_.lanes:
            mismatch(op, index.type, type_)
        if mask is not None and mask.type is not type_.mask:
            mismatch(op, mask.type, type_.mask)
        return self.gep(base, index, type_.scalar)

    def alloca(self, size: int, align: int = 64) -> Value:
        """Stack memory for the whole call, allocated in the entry block."""
        self._count += 1
        name = f"%v{self._count}"
        self.allocas.append(f"  {name} = alloca [{size} x i8], align {align}")
        return Value(name, ptr, self)  # type: ignore[arg-type]

    def prefetch(
        self, base: Value, offset: Value | int = 0, locality: int = 3, writes: bool = False
    ) -> None:
        """Ask for a cache line, to be read or written; locality 3 keeps it in every cache, 0 in
        none."""
        address = self.gep(base, offset)
        one, near = self.i32(1), self.i32(locality)
        self.intrinsic("llvm.prefetch.p0", void, address, self.i32(int(writes)), near, one)

    def copy(self, dst: Value, src: Value, size: int) -> None:
        """A copy of constant `size`, unrolled: no call of memcpy."""
        done, width = 0, self.module.target.vector_bits // 8
        while done < size:
            while width > size - done:
                width //= 2
            piece = self.load(src, vec(width, i8), done)
            self.store(piece, dst, done)
            done += width

    def atomic_load(
        self, base: Value, type_: Type, offset: int = 0, order: str = "acquire"
    ) -> Value:
        address = self.gep(base, offset)
        return self.instr(
            f"load atomic {type_.name}, ptr {address.name} {order}, align {type_.bytes}", type_
        )

    def atomic_store(
        self, value: Value, base: Value, offset: int = 0, order: str = "release"
    ) -> None:
        address, type_ = self.gep(base, offset), value.type
        self.effect(
            f"store atomic {type_.name} {value.name}, ptr {address.name} {order}, "
            f"align {type_.bytes}"
        )

    def atomic_rmw(
        self, op: str, base: Value, value: Value, offset: int = 0, order: str = "acq_rel"
    ) -> Value:
        """Atomic read-modify-write (add, sub, and, or, xchg, max, …); returns the old value."""
        address, type_ = self.gep(base, offset), value.type
        return self.instr(
            f"atomicrmw {op} ptr {address.name}, {type_.name} {value.name} {order}", type_
        )

    def compare_exchange(
        self, base: Value, expected: Value, desired: Value, offset: int = 0
    ) -> tuple[Value, Value]:
        """(old value, i1: was it replaced)."""
        if expected.type is not desired.type:
            mismatch("compare_exchange", expected.type, desired.type)
        address, type_ = self.gep(base, offset), expected.type
        pair = Type(f"{{ {type_.name}, i1 }}", "", 0, "")
        result = self.instr(
            f"cmpxchg ptr {address.name}, {type_.name} {expected.name}, "
            f"{type_.name} {desired.name} seq_cst seq_cst",
            pair,
        )
        old = self.instr(f"extractvalue {pair.name} {result.name}, 0", type_)
        return old, self.instr(f"extractvalue {pair.name} {result.name}, 1", i1)

    def fence(self, order: str = "seq_cst") -> None:
        self.effect(f"fence {order}")

    def arg(self, args: Value, index: int, type_: Type = ptr) -> Value:
        """Operand `index` of a kernel: a pointer, or an i64 (any other type is read from it)."""
        if type_ is ptr or type_ is i64 or type_.bits == 64:
            return self.load(args, type_, 8 * index)
        raw = self.load(args, i64, 8 * index)
        narrow = self.instr(f"trunc i64 {raw.name} to i32", i32)
        if type_ is i32:
            return narrow
        if type_ is f32:
            return self.bitcast(narrow, f32)
        raise CodegenError("an arg holds 64-bit values, i32 or f32", where="arg", got=type_.name)

    def bitcast(self, value: Value, type_: Type) -> Value:
        """The same bits as another type of the same size."""
        if value.type is type_:
            return value
        if value.type.bits * value.type.lanes != type_.bits * type_.lanes:
            mismatch("bitcast", value.type, type_)
        op = "bitcast"
        if value.type.is_ptr != type_.is_ptr:
            op = "ptrtoint" if value.type.is_ptr else "inttoptr"
        return self.instr(f"{op} {value.type.name} {value.name} to {type_.name}", type_)


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
        if target.lanes > 1 and self.module.target.is_x86:
            return self._clamped(value, target, signed)
        name = f"llvm.fpto{'s' if signed else 'u'}i.sat.{target.suffix}.{value.type.suffix}"
        return self.intrinsic(name, target, value)

    def _clamped(self, value: Value, target: Type, signed: bool) -> Value:
        """The same of vectors on x86, where LLVM takes them apart into scalars."""
        bits, mantissa = target.bits, 24 if value.type.scalar is f32 else 53
        low = -(1 << bits - 1) if signed else 0
        high = (1 << bits - signed) - 1
        excess = max(high.bit_length() - mantissa, 0)
        top = high >> excess << excess  # the largest float that is not above `high`
        # of two numbers that are not ordered, the second: a NaN becomes `low`
        inside = self.select(value > float(low), value, float(low))
        inside = self.select(inside < float(top), inside, float(top))
        wide = target if bits >= 32 else target.with_scalar(i32)
        number = self._cast("fptoui" if not signed and bits >= 32 else "fptosi", inside, wide)
        if excess:
            number = self.select(value > float(top), high, number)
        if low:
            number = self.select(value.is_nan(), 0, number)
        return number if wide is target else self.convert(number, target)

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
