"""What a name in an ONNX graph stands for.

While a segment is traced, a value is one of: an `Array` (traced, or a concrete one), a `Known` (a
constant, or a small tensor computed from sizes, whose elements may be symbolic), a list (a
sequence), or None (an optional without a value, an operand that is absent).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rlx.errors import OptionError, UnsupportedError
from rlx.formats.onnx import Initializer
from rlx.ir.dim import Dim, evaluate
from rlx.ir.dtype import DType
from rlx.numpy.array import Array, Tracer
from rlx.numpy.manipulation import reshape, stack
from rlx.numpy.trace import Size

Data: TypeAlias = "np.ndarray[Any, Any]"
Value: TypeAlias = "Array | Known | list[Any] | None"


_names: dict[int, tuple[weakref.ref[Array], str]] = {}  # of arrays that are constants


def _remember(array: Array, name: str) -> None:
    key = id(array)
    _names[key] = weakref.ref(array, lambda _: _names.pop(key, None)), name


def constant_name(array: Array) -> str:
    """What the file calls a constant, or nothing."""
    found = _names.get(id(array))
    return found[1] if found is not None and found[0]() is array else ""


class Known:
    """A tensor whose elements are known while a graph is traced: `data` has the elements, of type
    object where some of them are symbolic sizes or strings. `dtype` is the elements' type."""

    __slots__ = ("_array", "data", "dtype", "is_constant", "name")

    def __init__(
        self, data: Data, dtype: np.dtype[Any] | None = None, is_constant: bool = False,
        name: str = "",
    ) -> None:  # fmt: skip
        if not isinstance(data, np.ndarray):  # NumPy gives an element of objects as it is
            data = _scalar(data)
        self.data, self.is_constant, self.name = data, is_constant, name  # a constant of the file
        self.dtype = data.dtype if dtype is None else dtype
        self._array: Array | None = None

    @property
    def is_text(self) -> bool:
        return self.dtype == object

    @property
    def is_symbolic(self) -> bool:
        return self.data.dtype == object and self.dtype != object

    def array(self) -> Array:
        """As an array for computing: always the same one, so that it is captured once."""
        if self.is_symbolic:
            return self._stacked()
        if self._array is None:
            require_numbers(self.dtype)
            self._array = Array(np.ascontiguousarray(self.data).reshape(self.data.shape))
            if self.name:
                _remember(self._array, self.name)
        return self._array

    def _stacked(self) -> Array:
        element = DType.of(self.dtype)
        parts = [
            x.as_array(element) if isinstance(x, Size) else Array(np.asarray(x, self.dtype))
            for x in self.data.reshape(-1)
        ]
        return reshape(stack(parts), self.data.shape) if self.data.ndim else parts[0]

    def __repr__(self) -> str:
        return f"Known({self.data!r})"


class Host:
    """A value that no graph takes, such as a tensor of strings: its users run between segments."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


def _scalar(value: Any) -> Data:
    made: Data = np.empty((), object)
    made[()] = value
    return made


def is_number_type(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this type can be computed with on devices."""
    try:
        DType.of(dtype)
    except OptionError:
        return False
    return True


def require_numbers(dtype: np.dtype[Any]) -> None:
    if not is_number_type(dtype):
        raise UnsupportedError(
            "an op that does not take this element type",
            got="string" if dtype.kind == "O" else dtype,
        )


def shrunk(data: Any, dtype: np.dtype[Any]) -> Known:
    """A Known of an array of objects: of numbers where no element is symbolic."""
    array = np.asarray(data)
    if array.dtype == object and dtype.kind != "O":
        if not any(isinstance(x, Size) for x in array.reshape(-1)):
            return Known(array.astype(dtype), dtype)
        return Known(array, dtype)
    return Known(array.astype(dtype, copy=False), dtype)


def known_sizes(sizes: Sequence[Any]) -> Known:
    """Sizes as a tensor of int64."""
    data = np.empty(len(sizes), object)
    data[:] = list(sizes)
    return shrunk(data, np.dtype(np.int64))


def evaluated_sizes(
    dims: Sequence[Dim], shape: tuple[int, ...], dtype: np.dtype[Any], sizes: Mapping[str, int]
) -> Known:
    """A tensor of sizes, once they are numbers."""
    return Known(np.array([evaluate(d, sizes) for d in dims], dtype).reshape(shape))


def shape_of(value: Any) -> tuple[Any, ...]:
    """The sizes of a tensor; symbolic ones are `Size`s."""
    return tuple(value.data.shape) if isinstance(value, Known) else tuple(value.shape)


def type_of(value: Any) -> np.dtype[Any]:
    """The NumPy type of a tensor's elements; object for strings."""
    return value.dtype if isinstance(value, Known) else value.dtype.numpy


class NeedsValueError(Exception):
    """Raised while a segment is traced by an op that must see elements. `on_host`: the op itself
    runs between segments; else it can go into the next segment with the elements as constants."""

    def __init__(self, value: Any = None, on_host: bool = False) -> None:
        super().__init__("the elements of a traced array are needed")
        self.value, self.on_host = value, on_host


def elements_of(value: Any) -> Data:
    """The elements of a tensor, which may be symbolic."""
    if isinstance(value, Known):
        return value.data
    if isinstance(value, Tracer):
        raise NeedsValueError(value)
    if isinstance(value, Array):
        return value.data
    return np.asarray(value)


def constant_of(made: Initializer) -> Known:
    """A constant of the file, always the same one."""
    if made.reading is None:
        made.reading = Known(made.array(), made.dtype, is_constant=True, name=made.name)
    found: Known = made.reading
    return found
