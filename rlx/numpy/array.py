"""`rlx.Array`: an immutable array, concrete or traced.

A concrete array holds a NumPy array. Inside `rlx.jit` an array is a `Tracer`: a value of the graph
being recorded. Both have the same operators and methods; the functions behind them are those of
`rlx.numpy`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from rlx.errors import BoolConversionError, InputError
from rlx.ir.dtype import DType
from rlx.ir.node import Value
from rlx.numpy.trace import Trace, make_size


class Array:
    """An immutable n-dimensional array. Make one with `rlx.numpy.asarray`; the operators and
    functions of `rlx.numpy` return new ones."""

    __slots__ = ("__weakref__", "_dtype", "data")
    __array_ufunc__ = None  # a NumPy array on the left defers to these operators
    data: np.ndarray[Any, Any]

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data
        self._dtype: DType | None = None

    # -- facts --------------------------------------------------------------------------------

    @property
    def dtype(self) -> DType:
        found = self._dtype
        if found is None:
            found = self._dtype = DType.of(self.data.dtype)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes; inside `rlx.jit` they may be symbolic."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        total = 1
        for n in self.shape:
            total = total * n
        return total

    @property
    def device(self) -> str:
        return "cpu"

    def to_device(self, device: str, /, *, stream: object = None) -> Array:
        if device != "cpu":
            raise InputError("no such device of arrays", got=repr(device), expected="'cpu'")
        return self

    @property
    def T(self) -> Array:
        """The transposed matrix."""
        if self.ndim != 2:
            raise InputError("T is of matrices", got=f"{self.ndim} axes", hint="use mT")
        return self.mT

    @property
    def mT(self) -> Array:
        """The last two axes swapped."""
        return _call("matrix_transpose", self)

    # -- conversion ---------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False and dtype is not None and np.dtype(dtype) != self.data.dtype:
            raise ValueError("a copy is needed for another element type")
        return np.array(self.data, dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.data.__dlpack_device__()
        return int(kind), int(number)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        if api_version not in (None, *_VERSIONS):
            raise ValueError(f"array API version {api_version!r} is not one of {_VERSIONS}")
        return _functions()

    def _scalar(self, kind: str) -> Any:
        if self.ndim:
            raise TypeError(f"{kind}() takes an array without axes; got shape {self.shape}")
        return self.data[()]

    def __bool__(self) -> bool:
        return bool(self._scalar("bool"))

    def __int__(self) -> int:
        return int(self._scalar("int"))

    def __float__(self) -> float:
        return float(self._scalar("float"))

    def __complex__(self) -> complex:
        return complex(self._scalar("complex"))

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise TypeError(f"an index is an integer; got an array of {self.dtype}")
        return int(self._scalar("index"))

    def item(self) -> Any:
        """The only element as a Python number."""
        return self.data.item()

    def tolist(self) -> Any:
        return self.data.tolist()

    def astype(self, dtype: Any, *, copy: bool = True) -> Array:
        return _call("astype", self, dtype, copy=copy)

    def reshape(self, *shape: Any) -> Array:
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return _call("reshape", self, given)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Array:
        return _call("sum", self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Array:
        return _call("mean", self, axis=axis, keepdims=keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Array:
        return _call("max", self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Array:
        return _call("min", self, axis=axis, keepdims=keepdims)

    # -- indexing -----------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Array:
        found: Array = _indexing().get_item(self, index)
        return found

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise InputError(
            "an array does not change", where="index", got=repr(index),
            hint="x = x.at[index].set(value) gives a new one",
        )  # fmt: skip

    @property
    def at(self) -> Updates:
        """`x.at[i].set(v)`, `x.at[i].add(v)`: new arrays with some elements changed."""
        return Updates(self)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("an array without axes has no length")
        return int(self.shape[0])

    def __iter__(self) -> Any:
        if not self.ndim:
            raise TypeError("an array without axes cannot be iterated")
        return (self[i] for i in range(len(self)))

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        text = np.array2string(self.data, separator=", ", prefix="Array(")
        return f"Array({text}, dtype={self.dtype})"

    def __str__(self) -> str:
        return str(self.data)


class Tracer(Array):
    """An array inside a jitted function while it is traced: it has a shape but no elements.

    `own` is its value in the trace that made it, `home`; `trace` and `value` are those of the body
    of a loop or branch that is traced now, where there is one.
    """

    __slots__ = ("home", "own")

    def __init__(self, trace: Trace, value: Value) -> None:
        self.home, self.own = trace, value
        self._dtype = value.shape.dtype

    @property
    def trace(self) -> Trace:
        return self.home.innermost()

    @property
    def value(self) -> Value:
        return self.home.innermost().enter(self.own, self.home)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([make_size(self.home, d) for d in self.own.shape.dims])

    @property
    def ndim(self) -> int:
        return self.own.shape.rank

    def _scalar(self, kind: str) -> NoReturn:
        raise BoolConversionError(
            "the elements of a traced array are not known", where=kind, got=repr(self),
            hint="choose with rlx.numpy.where(condition, a, b), or make the argument static",
        )  # fmt: skip

    def item(self) -> NoReturn:
        self._scalar("item")

    def tolist(self) -> NoReturn:
        self._scalar("tolist")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        self._scalar("numpy.asarray")

    def __dlpack__(self, **options: Any) -> NoReturn:
        self._scalar("__dlpack__")

    def __repr__(self) -> str:
        return f"Tracer({self.own.shape})"

    __str__ = __repr__


class Updates:
    """`x.at`, and with an index `x.at[i]`."""

    __slots__ = ("array", "index")

    def __init__(self, array: Array, index: Any = None) -> None:
        self.array, self.index = array, index

    def __getitem__(self, index: Any) -> Updates:
        return Updates(self.array, (index,))

    def set(self, value: Any) -> Array:
        """The array with the elements at the index replaced."""
        made: Array = _indexing().updated(self.array, self._chosen(), value, "set")
        return made

    def add(self, value: Any) -> Array:
        """The array with `value` added at the index; equal indices add up."""
        made: Array = _indexing().updated(self.array, self._chosen(), value, "add")
        return made

    def _chosen(self) -> Any:
        if self.index is None:
            raise InputError("no index", where="at", expected="x.at[index].set(value)")
        return self.index[0]


_VERSIONS = ("2022.12", "2023.12", "2024.12", "2025.12")


def _functions() -> Any:
    import rlx.numpy

    return rlx.numpy


def _indexing() -> Any:
    from rlx.numpy import manipulation

    return manipulation


def _call(name: str, *args: Any, **options: Any) -> Array:
    """A function of `rlx.numpy`, which imports this module."""
    found: Array = getattr(_functions(), name)(*args, **options)
    return found


_BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide",
    "floordiv": "floor_divide", "mod": "remainder", "pow": "pow", "matmul": "matmul",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
_COMPARISONS = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal",
}  # fmt: skip
_UNARY = {"neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert"}
OPERANDS = (Array, bool, int, float, complex, np.ndarray, np.generic)


def _install() -> None:
    """Operators: `x + y` is `rlx.numpy.add(x, y)`. In-place ones rebind, as for numbers."""

    def binary(name: str, swapped: bool) -> Any:
        def operator(self: Array, other: Any) -> Any:
            if not isinstance(other, OPERANDS):
                return NotImplemented
            function = getattr(_functions(), name)
            return function(other, self) if swapped else function(self, other)

        return operator

    for short, name in (_BINARY | _COMPARISONS).items():
        setattr(Array, f"__{short}__", binary(name, False))
        if short in _BINARY:
            setattr(Array, f"__r{short}__", binary(name, True))
    for short, name in _UNARY.items():
        setattr(Array, f"__{short}__", lambda self, name=name: getattr(_functions(), name)(self))


_install()
