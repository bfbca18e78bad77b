"""Register types of elements, their conversion from and to memory, vector width and tail masks.

Floats narrower than f32 are f32 in registers, bools are masks, integers keep their width, and a
complex number is a pair.

"""

from __future__ import annotations

from typing import NamedTuple

from rlx.ir.dtype import DType, bool_
from rlx.llvm.builder import Function, Type, Value, f32, f64, i1, i16, vec
from rlx.llvm.storage import memory_type, narrow, widen
from rlx.llvm.target import Target
from rlx.loops.nest import ROW, Access, Apply, Load, Nest


class Complex(NamedTuple):
    re: Value
    im: Value


Element = Value | Complex


def register_type(dtype: DType, lanes: int = 1) -> Type:
    """The type of a real element in a register."""
    if dtype.is_float:
        return vec(lanes, f64 if dtype.bits == 64 else f32)
    return vec(lanes, i1 if dtype is bool_ else memory_type(dtype))


def lanes_of(x: Element) -> int:
    return x.type.lanes if isinstance(x, Value) else x.re.type.lanes


def parts(x: Element) -> list[Value]:
    """The components of an element: two for a complex number."""
    return [x] if isinstance(x, Value) else [x.re, x.im]


def joined(values: list[Value]) -> Element:
    """The element with these components."""
    return values[0] if len(values) == 1 else Complex(*values)


def spread(f: Function, x: Element, lanes: int) -> Element:
    """A scalar broadcast to all lanes; a vector stays as it is."""
    if lanes_of(x) == lanes:
        return x
    return joined([f.splat(v, lanes) for v in parts(x)])


def from_memory(f: Function, raw: Value, dtype: DType) -> Value:
    """A real element as loaded, in its register type."""
    if dtype is bool_:
        return raw.ne(0)
    if not dtype.is_float:
        return raw
    if dtype.bits == 16 and raw.type.is_int:
        raw = raw.bits(raw.type.with_scalar(memory_type(dtype)))
    return widen(f, raw, dtype, register_type(dtype))


def to_memory(f: Function, x: Value, dtype: DType) -> Value:
    """A real element as stored; 16-bit floats as integers, which every target can store."""
    if dtype is bool_ or not dtype.is_float:
        return x.to(memory_type(dtype), signed=False)
    raw = narrow(f, x, dtype)
    return raw.bits(raw.type.with_scalar(i16)) if dtype.bits == 16 else raw


def raw_type(dtype: DType) -> Type:
    """The type of loads and stores of a real element."""
    return i16 if dtype.is_float and dtype.bits == 16 else memory_type(dtype)


def constant(f: Function, number: float | complex, dtype: DType) -> Element:
    """A constant element."""
    if dtype.is_complex:
        whole, part = complex(number), register_type(dtype.part)
        return Complex(f.const(whole.real, part), f.const(whole.imag, part))
    assert not isinstance(number, complex)
    type_ = register_type(dtype)
    return f.const(float(number) if type_.is_float else int(number), type_)


def rounded(f: Function, x: Value, dtype: DType) -> Value:
    """A float rounded to what `dtype` holds, still in its register type."""
    if register_type(dtype).bits == dtype.bits:
        return x
    return from_memory(f, to_memory(f, x, dtype), dtype)


def convert(f: Function, x: Element, source: DType, target: DType) -> Element:
    """Cast as the reference does: float to integer truncates and saturates (NaN becomes 0), integer
    to integer wraps, to bool tests for non-zero. A narrower float is rounded later."""
    if source is target:
        return x
    if isinstance(x, Complex):
        if target.is_complex:
            return Complex(*[_convert_real(f, v, source.part, target.part) for v in x])
        return x.re.ne(0.0) | x.im.ne(0.0)
    if target.is_complex:
        real = _convert_real(f, x, source, target.part)
        return Complex(real, f.const(0.0, real.type))
    return _convert_real(f, x, source, target)


def _convert_real(f: Function, x: Value, source: DType, target: DType) -> Value:
    if target is bool_:
        return x.ne(0)
    if source.is_float and target.is_integer:
        return _saturated(f, x, target)
    if x.type.scalar is f64 and target.is_float and target.bits == 16:
        return x.to(memory_type(target)).to(f32)  # one rounding, not two
    return x.to(register_type(target), signed=source.kind == "int")


def _saturated(f: Function, x: Value, target: DType) -> Value:
    return f.convert_saturating(x, memory_type(target), target.kind == "int")


def lanes_for(nest: Nest, target: Target, columns: bool) -> int:
    """Vector width: lanes of the widest type in one register; fewer for short rows."""
    bits = [
        _bits(i.dtype)
        for i in nest.code
        if isinstance(i, (Load, Apply)) and (columns or i.level != ROW)
    ]
    bits += [_bits(s.access.dtype) for s in nest.stores if columns or s.level != ROW]
    lanes = target.lanes(max(bits, default=32))
    sizes = [space[-1] for space in nest.spaces if space]
    longest = max((s if isinstance(s, int) else lanes for s in sizes), default=1)
    while not columns and lanes > max(longest, 1):
        lanes //= 2
    return lanes


def _bits(dtype: DType) -> int:
    return 8 if dtype is bool_ else register_type(dtype.part).bits


def masks_tail(nest: Nest, target: Target, columns: bool) -> bool:
    """Whether the tail is one masked vector; a scalar loop where masks are slow or accesses are
    not contiguous."""
    for access in nest.accesses():
        step = access.strides.lane_stride(columns)
        if access.dtype.is_complex or (step not in (0, 1)) or _data_per_lane(nest, access, columns):
            return False
        if step == 1 and not _has_masks(target, raw_type(access.dtype).bits):
            return False
    return True


def _data_per_lane(nest: Nest, access: Access, columns: bool) -> bool:
    """Whether a gathered index may differ between lanes."""
    return any(columns or nest.code[number].level != ROW for number, _ in access.gathered)


def _has_masks(target: Target, bits: int) -> bool:
    return target.avx512 or (target.has("avx2") and bits >= 32)
