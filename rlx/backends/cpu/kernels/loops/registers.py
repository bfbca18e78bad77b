"""Elements in registers: what type they are computed in, and how they come from memory and go back.

Floats narrower than f32 are f32 in registers, bools are masks, integers keep their width, and a
complex number is a pair.

How wide the vectors of a nest are, and how the last, incomplete one is done.
"""

from __future__ import annotations

from typing import NamedTuple

from rlx.ir.dtype import DType, bool_, c64
from rlx.ir.dtype import f32 as f32_dtype
from rlx.llvm.builder import Function, Type, Value, f32, f64, i1, i16, vec
from rlx.llvm.storage import memory_type, narrow, widen
from rlx.llvm.target import Target
from rlx.loops.nest import ROW, Apply, Load, Nest, Walk


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
    """The values an element is made of."""
    return [x] if isinstance(x, Value) else [x.re, x.im]


def joined(values: list[Value]) -> Element:
    """The element made of `parts`."""
    return values[0] if len(values) == 1 else Complex(*values)


def spread(f: Function, x: Element, lanes: int) -> Element:
    """One element in every lane; a vector stays as it is."""
    if lanes_of(x) == lanes:
        return x
    return joined([f.splat(v, lanes) for v in parts(x)])


def from_memory(f: Function, raw: Value, dtype: DType) -> Value:
    """A real element as it lies in memory, in the type it is computed in."""
    if dtype is bool_:
        return raw.ne(0)
    if not dtype.is_float:
        return raw
    if dtype.bits == 16 and raw.type.is_int:
        raw = raw.bits(raw.type.with_scalar(memory_type(dtype)))
    return widen(f, raw, dtype, register_type(dtype))


def to_memory(f: Function, x: Value, dtype: DType) -> Value:
    """The way back; 16-bit floats come as integers, whose loads and stores every target has."""
    if dtype is bool_ or not dtype.is_float:
        return x.to(memory_type(dtype), signed=False)
    raw = narrow(f, x, dtype)
    return raw.bits(raw.type.with_scalar(i16)) if dtype.bits == 16 else raw


def raw_type(dtype: DType) -> Type:
    """The type of loads and stores of a real element."""
    return i16 if dtype.is_float and dtype.bits == 16 else memory_type(dtype)


def constant(f: Function, number: float | complex, dtype: DType) -> Element:
    """A number as an element."""
    if dtype is c64:
        whole = complex(number)
        return Complex(f.const(whole.real, f32), f.const(whole.imag, f32))
    assert not isinstance(number, complex)
    type_ = register_type(dtype)
    return f.const(float(number) if type_.is_float else int(number), type_)


def rounded(f: Function, x: Value, dtype: DType) -> Value:
    """A float rounded to what `dtype` holds, still in its register type."""
    if register_type(dtype).bits == dtype.bits:
        return x
    return from_memory(f, to_memory(f, x, dtype), dtype)


def convert(f: Function, x: Element, source: DType, target: DType) -> Element:
    """As the reference casts: floats to integers towards 0 and saturating (NaN is 0), integers to
    integers by their low bits, to bool whether not 0. A narrower float is not rounded yet."""
    if source is target:
        return x
    if isinstance(x, Complex):
        return x if target is c64 else x.re.ne(0.0) | x.im.ne(0.0)
    if target is c64:
        real = _convert_real(f, x, source, f32_dtype)
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
    result = x.type.with_scalar(memory_type(target))
    kind = "si" if target.kind == "int" else "ui"
    return f.intrinsic(f"llvm.fpto{kind}.sat.{result.suffix}.{x.type.suffix}", result, x)


def lanes_for(nest: Nest, target: Target, columns: bool) -> int:
    """Elements of the widest type that is computed with, in one register; fewer for short rows."""
    bits = [
        _bits(i.dtype)
        for i in nest.code
        if isinstance(i, (Load, Apply)) and (columns or i.level != ROW)
    ]
    bits += [_bits(s.walk.dtype) for s in nest.stores if columns or s.level != ROW]
    lanes = target.lanes(max(bits, default=32))
    sizes = [space[-1] for space in nest.spaces if space]
    longest = max((s if isinstance(s, int) else lanes for s in sizes), default=1)
    while not columns and lanes > max(longest, 1):
        lanes //= 2
    return lanes


def _bits(dtype: DType) -> int:
    return 32 if dtype is c64 else 8 if dtype is bool_ else register_type(dtype).bits


def masks_tail(nest: Nest, target: Target, columns: bool) -> bool:
    """Whether the last vector is masked; where masks are dear or tensors lie apart, what is left is
    done element by element instead."""
    for walk in nest.walks():
        step = walk.steps.between_lanes(columns)
        if walk.dtype is c64 or (step not in (0, 1)) or _data_per_lane(nest, walk, columns):
            return False
        if step == 1 and not _has_masks(target, raw_type(walk.dtype).bits):
            return False
    return True


def _data_per_lane(nest: Nest, walk: Walk, columns: bool) -> bool:
    """Whether an index that is data differs from lane to lane (taken to be so in columns)."""
    return any(columns or nest.code[number].level != ROW for number, _ in walk.terms)


def _has_masks(target: Target, bits: int) -> bool:
    return target.avx512 or (target.has("avx2") and bits >= 32)
