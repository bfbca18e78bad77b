"""Element types: conversion, promotion, limits; and what the namespace says of itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rlx.errors import ArrayTypeError, ArrayValueError, OptionError
from rlx.ir import dtype as dt
from rlx.ir.dtype import DType, promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array
from rlx.numpy.dispatch import apply, as_array, scalar_type
from rlx.numpy.typing import ArrayLike, DTypeLike

_KINDS = {  # those of the standard, and what `DType.kind` says of their members
    "bool": ("bool",),
    "signed integer": ("int",),
    "unsigned integer": ("uint",),
    "integral": ("int", "uint"),
    "real floating": ("float",),
    "complex floating": ("complex",),
    "numeric": ("int", "uint", "float", "complex"),
}
_ORDER = ("bool", "uint", "int", "float", "complex")
_NARROW = (dt.bf16, dt.f16, dt.f8e4m3, dt.f8e5m2)  # beyond the standard


def dtype_of(dtype: DTypeLike | None, default: DType = dt.f32) -> DType:
    """The element type meant by a DType, a NumPy dtype or a name of either."""
    if dtype is None:
        return default
    if isinstance(dtype, str) and dtype not in dt.BY_NAME:
        try:
            return DType.of(np.dtype(dtype))
        except TypeError:
            pass
    try:
        return DType.of(dtype)
    except OptionError as error:
        raise ArrayTypeError(
            "unknown element type", where="dtype", got=repr(dtype), expected=error.expected,
            hint=error.hint,
        ) from error  # fmt: skip


def _cast(g: Graph, x: Value, dtype: DType) -> Value:
    if x.shape.dtype.kind == "complex" and dtype is dt.bool_:
        return g.ne(x, g.constant(0, x.shape.dtype))
    return x.astype(dtype)


def astype(
    x: ArrayLike, dtype: DTypeLike, /, *, copy: bool = True, device: str | None = None
) -> Array:
    """The elements in another type."""
    require_host(device)
    array, element = as_array(x), dtype_of(dtype)
    if array.dtype is element:
        return array.alias() if copy else array
    if array.dtype.kind == "complex" and element.kind not in ("complex", "bool"):
        raise ArrayTypeError(
            "complex numbers in a real type", where="astype", got=f"{array.dtype} to {element}",
            hint="take rlx.numpy.real(x) or rlx.numpy.imag(x)",
        )  # fmt: skip
    return apply(_cast, [array], element, elementwise=True)


def require_host(device: str | None) -> None:
    if device not in (None, "cpu"):
        raise ArrayValueError(
            "no such device of arrays", where="device", got=repr(device), expected="'cpu'",
            hint="rlx.default_device chooses where kernels run",
        )  # fmt: skip


def result_type(*arrays_and_dtypes: ArrayLike | DTypeLike) -> DType:
    """The element type that arrays, types and Python numbers promote to together."""
    types, numbers = [], []
    for x in arrays_and_dtypes:
        if isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic):
            numbers.append(scalar_type(x))
        elif isinstance(x, (DType, str, np.dtype, type)):
            types.append(dtype_of(x))
        else:
            types.append(as_array(x).dtype)
    if not types and not numbers:
        raise ArrayValueError("no types", where="result_type", got="()", expected="one or more")
    if not types:
        return promote(*numbers)
    found = promote(*types)
    for own in numbers:
        if not _holds(found, own):
            found = promote(found, own)
    return found


def _holds(element: DType, number: DType) -> bool:
    """Whether a Python number of a kind takes on the element type."""
    kind = "uint" if number.kind == "int" else number.kind
    return _ORDER.index(element.kind) >= _ORDER.index(kind)


def can_cast(from_: DTypeLike | ArrayLike, to: DTypeLike, /) -> bool:
    """Whether promotion with `to` gives `to`."""
    element = result_type(from_)
    target = dtype_of(to)
    return dt.PROMOTION[element, target] is target


def isdtype(dtype: DTypeLike, kind: DTypeLike | tuple[DTypeLike, ...]) -> bool:
    """Whether an element type is of a kind ("integral", "real floating", …), a type, or one of
    several of them."""
    element = dtype_of(dtype)
    for one in kind if isinstance(kind, tuple) else (kind,):
        if isinstance(one, str) and one in _KINDS:
            if element.kind in _KINDS[one]:
                return True
        elif isinstance(one, str) and one not in dt.BY_NAME:
            raise ArrayValueError(
                "no such kind", where="isdtype", got=repr(one), expected=", ".join(_KINDS)
            )
        elif element is dtype_of(one):
            return True
    return False


class FloatInfo(NamedTuple):
    """Limits of a floating-point type, as Python numbers."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


class IntInfo(NamedTuple):
    """Limits of an integer type."""

    bits: int
    max: int
    min: int
    dtype: DType


def _named(given: DTypeLike | ArrayLike) -> DType:
    known = isinstance(given, (DType, str, np.dtype, type))
    return dtype_of(given) if known else as_array(given).dtype  # type: ignore[arg-type]


def finfo(type: DTypeLike | ArrayLike, /) -> FloatInfo:
    """Limits of a floating-point type; of a complex one, those of its parts."""
    element = _named(type)
    if element.kind not in ("float", "complex"):
        raise ArrayTypeError("not a floating-point type", where="finfo", got=element)
    part = np.empty(0, element.numpy).real.dtype if element.kind == "complex" else element.numpy
    info: Any = ml_dtypes.finfo(part)  # type: ignore[no-untyped-call]
    return FloatInfo(
        int(info.bits), float(info.eps), float(info.max), float(info.min),
        float(info.smallest_normal), DType.of(part),
    )  # fmt: skip


def iinfo(type: DTypeLike | ArrayLike, /) -> IntInfo:
    """Limits of an integer type."""
    element = _named(type)
    if not element.is_integer:
        raise ArrayTypeError("not an integer type", where="iinfo", got=element)
    info = np.iinfo(element.numpy)
    return IntInfo(int(info.bits), int(info.max), int(info.min), element)


class NamespaceInfo:
    """What `rlx.numpy` has, as the standard's inspection functions tell it."""

    def capabilities(self) -> dict[str, bool | int | None]:
        """Indexing by masks and results sized by data work outside `rlx.jit`."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        return "cpu"

    def devices(self) -> tuple[str, ...]:
        """Where elements can be: the host's memory."""
        return ("cpu",)

    def default_dtypes(self, *, device: str | None = None) -> dict[str, DType]:
        """The types of Python numbers, and of indices."""
        require_host(device)
        return {
            "real floating": dt.f32, "complex floating": dt.c64, "integral": dt.i64,
            "indexing": dt.i64,
        }  # fmt: skip

    def dtypes(
        self, *, device: str | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, DType]:
        """The types of the standard, of one kind or several, by name."""
        require_host(device)
        standard = {t.numpy.name: t for t in dt.ALL if t not in _NARROW}
        if kind is None:
            return standard
        return {name: t for name, t in standard.items() if isdtype(t, kind)}


def __array_namespace_info__() -> NamespaceInfo:
    return NamespaceInfo()
