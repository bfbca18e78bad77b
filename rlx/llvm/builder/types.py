"""Types of the emitted code: scalars, pointers and vectors. Interned, so `is` compares them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from rlx.errors import CodegenError


class Type:
    """An LLVM first-class type. `name` is its LLVM spelling, `suffix` the one in intrinsics."""

    __slots__ = ("bits", "is_float", "is_int", "lanes", "name", "scalar", "suffix")

    name: str
    scalar: Type
    lanes: int
    bits: int
    is_float: bool
    is_int: bool
    suffix: str

    def __init__(self, name: str, suffix: str, bits: int, kind: str) -> None:
        self.name, self.suffix, self.bits = name, suffix, bits
        self.scalar, self.lanes = self, 1
        self.is_float, self.is_int = kind == "float", kind == "int"

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, ...]:
        return (_restore, (self.scalar.name, self.lanes))

    @property
    def is_ptr(self) -> bool:
        return self.scalar.name == "ptr"

    @property
    def bytes(self) -> int:
        """Bytes a value of this type takes in memory (masks of i1 are packed, and have none)."""
        return self.bits * self.lanes // 8

    def with_lanes(self, lanes: int) -> Type:
        """The same element with another number of lanes."""
        return vec(lanes, self.scalar)

    def with_scalar(self, scalar: Type) -> Type:
        """Another element with the same number of lanes."""
        return vec(self.lanes, scalar)

    @property
    def mask(self) -> Type:
        """The result type of a comparison: i1, or a vector of i1."""
        return vec(self.lanes, i1)

    @property
    def as_int(self) -> Type:
        """The integer type of the same bits."""
        return vec(self.lanes, _INTS[self.bits])


def _scalar(name: str, suffix: str, bits: int, kind: str) -> Type:
    return SCALARS.setdefault(name, Type(name, suffix, bits, kind))


SCALARS: Final[dict[str, Type]] = {}
void = Type("void", "", 0, "void")
i1 = _scalar("i1", "i1", 1, "int")
i8 = _scalar("i8", "i8", 8, "int")
i16 = _scalar("i16", "i16", 16, "int")
i32 = _scalar("i32", "i32", 32, "int")
i64 = _scalar("i64", "i64", 64, "int")
f16 = _scalar("half", "f16", 16, "float")
bf16 = _scalar("bfloat", "bf16", 16, "float")
f32 = _scalar("float", "f32", 32, "float")
f64 = _scalar("double", "f64", 64, "float")
ptr = _scalar("ptr", "p0", 64, "ptr")

_INTS = {1: i1, 8: i8, 16: i16, 32: i32, 64: i64}
_VECTORS: dict[tuple[int, str], Type] = {}


def vec(lanes: int, scalar: Type) -> Type:
    """A vector of `lanes` elements; one lane is the scalar itself."""
    if lanes == 1:
        return scalar
    found = _VECTORS.get((lanes, scalar.name))
    if found is not None:
        return found
    if lanes < 1 or scalar.lanes != 1 or scalar is void:
        raise CodegenError("no such vector", where="vec", got=f"{lanes} x {scalar.name}")
    made = Type(f"<{lanes} x {scalar.name}>", f"v{lanes}{scalar.suffix}", scalar.bits, "")
    made.scalar, made.lanes = scalar, lanes
    made.is_float, made.is_int = scalar.is_float, scalar.is_int
    return _VECTORS.setdefault((lanes, scalar.name), made)


def _restore(scalar: str, lanes: int) -> Type:
    return vec(lanes, SCALARS[scalar]) if scalar != "void" else void


Number = int | float


def literal(value: Number | Sequence[Number], type_: Type) -> str:
    """LLVM's spelling of a constant: one number for all lanes, or one per lane."""
    if isinstance(value, int | float):
        text = _scalar_literal(value, type_.scalar)
        if type_.lanes == 1:
            return text
        return "zeroinitializer" if text == "0" else f"splat ({type_.scalar.name} {text})"
    if len(value) != type_.lanes:
        raise CodegenError(
            "wrong number of lanes", where="const", got=len(value), expected=f"{type_.lanes}"
        )
    element = type_.scalar
    inner = ", ".join(f"{element.name} {_scalar_literal(v, element)}" for v in value)
    return f"<{inner}>" if type_.lanes > 1 else _scalar_literal(value[0], element)


def _scalar_literal(value: Number, type_: Type) -> str:
    if type_.is_int:
        low, high = -(1 << type_.bits - 1), (1 << type_.bits) - 1
        if not isinstance(value, int) or not low <= value <= high:
            raise CodegenError(
                "constant does not fit", where="const", got=repr(value), expected=type_.name
            )
        number = int(value) & 1 if type_.bits == 1 else int(value)
        return str(number if number <= 1 or number < -low else number + 2 * low)
    if type_ is ptr and value == 0:
        return "null"
    if not type_.is_float:
        raise CodegenError("no such constant", where="const", got=repr(value), expected=type_.name)
    return _float_literal(float(value), type_)


def _float_literal(value: float, type_: Type) -> str:
    if type_ is f16:
        return f"0xH{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
    if type_ is not f64:
        try:
            value = struct.unpack("<f", struct.pack("<f", value))[0]
        except OverflowError:
            raise CodegenError(
                "constant does not fit", where="const", got=repr(value), expected=type_.name
            ) from None
    if type_ is bf16:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        rounded = bits >> 16 | 0x40 if value != value else bits + 0x7FFF + (bits >> 16 & 1) >> 16
        return f"0xR{rounded:04X}"
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
