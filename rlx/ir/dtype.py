"""Element types (dtypes) and their promotion table."""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from rlx.errors import DTypeError, OptionError


class DType:
    """One element type. Instances are unique: compare with `is` or `==`."""

    __slots__ = ("bits", "bytes", "kind", "name", "numpy", "rank")

    def __init__(self, name: str, numpy: Any, kind: str, rank: int) -> None:
        self.name = name
        self.numpy: np.dtype[Any] = np.dtype(numpy)
        self.kind = kind  # "float", "int", "uint", "bool", "complex"
        self.rank = rank  # order among dtypes of its kind, for promotion
        self.bytes: int = self.numpy.itemsize
        self.bits: int = self.bytes * 8

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_complex(self) -> bool:
        return self.kind == "complex"

    @property
    def part(self) -> DType:
        """The type of the real and imaginary parts of a complex type; of others, the type."""
        return self if self.kind != "complex" else f32 if self is c64 else f64

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (DType.of, (self.name,))

    @staticmethod
    def of(value: object) -> DType:
        """The element type named by a string, a NumPy dtype, or a DType itself."""
        if isinstance(value, DType):
            return value
        if isinstance(value, str) and value in BY_NAME:
            return BY_NAME[value]
        if not isinstance(value, str):
            found = _from_numpy(value)
            if found is not None:
                return found
        known = {str(dtype.numpy): name for name, dtype in BY_NAME.items()}  # as NumPy calls them
        raise OptionError(
            "unknown element type", got=repr(value), expected=", ".join(BY_NAME),
            hint=f"did you mean {known[value]}?" if value in known else "",
        )  # fmt: skip


DTypeLike: TypeAlias = DType | str | np.dtype[Any] | type


def _from_numpy(value: object) -> DType | None:
    try:
        return _BY_NUMPY.get(np.dtype(value))  # type: ignore[call-overload]
    except TypeError:
        return None


bool_ = DType("bool", np.bool_, "bool", 0)
u8 = DType("u8", np.uint8, "uint", 0)
u16 = DType("u16", np.uint16, "uint", 1)
u32 = DType("u32", np.uint32, "uint", 2)
u64 = DType("u64", np.uint64, "uint", 3)
i8 = DType("i8", np.int8, "int", 0)
i16 = DType("i16", np.int16, "int", 1)
i32 = DType("i32", np.int32, "int", 2)
i64 = DType("i64", np.int64, "int", 3)
f8e4m3 = DType("f8e4m3", ml_dtypes.float8_e4m3fn, "float", 0)
f8e5m2 = DType("f8e5m2", ml_dtypes.float8_e5m2, "float", 0)
f16 = DType("f16", np.float16, "float", 1)
bf16 = DType("bf16", ml_dtypes.bfloat16, "float", 1)
f32 = DType("f32", np.float32, "float", 2)
f64 = DType("f64", np.float64, "float", 3)
c64 = DType("c64", np.complex64, "complex", 0)
c128 = DType("c128", np.complex128, "complex", 1)

ALL = (
    f32, f16, bf16, f64, i8, i16, i32, i64, u8, u16, u32, u64, bool_, f8e4m3, f8e5m2, c64, c128,
)  # fmt: skip
BY_NAME = {t.name: t for t in ALL}
_BY_NUMPY = {t.numpy: t for t in ALL}
FLOATS = tuple(t for t in ALL if t.is_float)
INTEGERS = tuple(t for t in ALL if t.is_integer)

_SIGNED = (i8, i16, i32, i64)


def _promote(a: DType, b: DType) -> DType:
    """bool < uint < int < float < complex; within a kind the wider one; ties promote to f32.

    An integer never widens a float (i64 with f16 is f16): indices do not change the precision of a
    model, and f64 with c64 is c128. u64 with a signed type is an error: no integer type represents
    both.
    """
    if a is b:
        return a
    order = ("bool", "uint", "int", "float", "complex")
    low, high = sorted((a, b), key=lambda t: (order.index(t.kind), t.rank))
    if high.kind == "complex":
        return c128 if low is f64 else high
    if low.kind == high.kind:
        return f32 if low.rank == high.rank else high
    if (low.kind, high.kind) == ("uint", "int"):
        if low is u64:
            raise DTypeError("no integer type represents both", got=f"{a} and {b}")
        return _SIGNED[max(low.rank + 1, high.rank)]
    return high


def _table() -> dict[tuple[DType, DType], DType | None]:
    table: dict[tuple[DType, DType], DType | None] = {}
    for a in ALL:
        for b in ALL:
            try:
                table[a, b] = _promote(a, b)
            except DTypeError:
                table[a, b] = None
    return table


PROMOTION = _table()


def complex_of(part: DType) -> DType:
    """The complex type for results of a function of that type: c128 for f64, else c64."""
    return c128 if part in (f64, c128) else c64


def promote(*types: DType) -> DType:
    """The common dtype of all `types`."""
    result = types[0]
    for t in types[1:]:
        if t is not result:
            met = PROMOTION[result, t]
            if met is None:
                raise DTypeError(
                    "element types do not promote to a common one",
                    got=f"{result} and {t}",
                    hint="cast one of them first",
                )
            result = met
    return result
