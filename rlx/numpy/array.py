"""`rlx.Array`: an immutable array, concrete or traced.

A concrete array holds a NumPy array. Inside `rlx.jit` an array is a `Tracer`: a value of the graph
being recorded. Both have the same operators and methods; the functions behind them are those of
`rlx.numpy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rlx.errors import (
    ArrayTypeError,
    ArrayValueError,
    BoolConversionError,
)
from rlx.ir.dtype import DType
from rlx.ir.node import Value
from rlx.numpy import dlpack, operators
from rlx.numpy.trace import Trace, make_size

if TYPE_CHECKING:
    from rlx.numpy.indexing import Index
    from rlx.numpy.typing import ArrayLike, Axis, DTypeLike
    from rlx.numpy.updates import Updates

Scalar = bool | int | float | complex
_assignment: ContextVar[bool] = ContextVar("item_assignment", default=False)


@contextmanager
def item_assignment() -> Iterator[None]:
    """In this context `x[index] = value` is allowed: for code that was written for arrays that
    change, such as scikit-learn's.

    The array `x` takes `x.at[index].set(value)` in place of its elements. Arrays that shared memory
    with it, such as views, keep theirs; so do jitted functions that captured it.
    """
    token = _assignment.set(True)
    try:
        yield
    finally:
        _assignment.reset(token)


_VERSIONS = ("2022.12", "2023.12", "2024.12", "2025.12")


class Array(operators.Operators):
    """An immutable n-dimensional array. Make one with `rlx.numpy.asarray`; the operators and
    functions of `rlx.numpy` return new ones."""

    __slots__ = ("__weakref__", "_dtype", "data")
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
    def nbytes(self) -> int:
        return self.size * self.dtype.bytes

    @property
    def device(self) -> str:
        """Where the elements are: in the host's memory, whichever device computed them."""
        return "cpu"

    def to_device(self, device: str, /, *, stream: object = None) -> Array:
        if device != "cpu" or stream is not None:
            raise ArrayValueError(
                "no such device of arrays", where="to_device", got=repr(device),
                expected="'cpu', without a stream",
            )  # fmt: skip
        return self

    @property
    def T(self) -> Array:
        """The transposed matrix."""
        if self.ndim != 2:
            raise ArrayValueError("T is of matrices", got=f"{self.ndim} axes", hint="use mT")
        return self.mT

    @property
    def mT(self) -> Array:
        """The last two axes swapped."""
        return _call("matrix_transpose", self)

    # -- conversion ---------------------------------------------------------------------------

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """A read-only view; a copy of its own where `copy` or another type asks for one."""
        if dtype is not None and np.dtype(dtype) != self.data.dtype:
            if copy is False:
                raise ArrayValueError(
                    "a copy is needed for another element type", where="numpy.asarray", got=dtype,
                    expected=self.data.dtype,
                )  # fmt: skip
            return self.data.astype(dtype)
        if copy:
            return self.data.copy()
        view = self.data.view()
        view.flags.writeable = False
        return view

    def __dlpack__(
        self, *, stream: object = None, max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None, copy: bool | None = None,
    ) -> object:  # fmt: skip
        return dlpack.export(self.data, stream, max_version, dl_device, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        if api_version not in (None, *_VERSIONS):
            raise ArrayValueError(
                "no such version of the array API", where="__array_namespace__",
                got=repr(api_version), expected=", ".join(_VERSIONS),
            )  # fmt: skip
        return operators.functions  # type: ignore[no-any-return]

    def _scalar(self, kind: str) -> Scalar:
        if self.ndim:
            raise ArrayTypeError(
                "not an array without axes", where=kind, got=f"shape {self.shape}", expected="()"
            )
        found: Scalar = self.data.item()
        if isinstance(found, complex) and kind in ("int", "float"):
            raise ArrayTypeError("a complex number", where=kind, got=found, expected="a real one")
        return found

    def __bool__(self) -> bool:
        return bool(self._scalar("bool"))

    def __int__(self) -> int:
        return int(self._scalar("int"))  # type: ignore[arg-type]

    def __float__(self) -> float:
        return float(self._scalar("float"))  # type: ignore[arg-type]

    def __complex__(self) -> complex:
        return complex(self._scalar("complex"))

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise ArrayTypeError("an index is an integer", where="index", got=self.dtype)
        return int(self._scalar("index"))  # type: ignore[arg-type]

    def item(self) -> Scalar:
        """The only element as a Python number."""
        if self.data.size != 1:
            raise ArrayValueError("not one element", where="item", got=f"shape {self.shape}")
        found: Scalar = self.data.item()
        return found

    def tolist(self) -> Scalar | list[Any]:
        """The elements as nested lists of Python numbers."""
        found: Scalar | list[Any] = self.data.tolist()
        return found

    def astype(self, dtype: DTypeLike, *, copy: bool = True) -> Array:
        return _call("astype", self, dtype, copy=copy)

    # -- shape and reductions, as in NumPy ------------------------------------------------------

    def reshape(self, *shape: int | tuple[int, ...] | list[int]) -> Array:
        """Under another shape: sizes, or one tuple of them."""
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return _call("reshape", self, given)

    def transpose(self, *axes: int | tuple[int, ...] | list[int]) -> Array:
        """The axes in another order; reversed when none are given."""
        given = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        return _call("permute_dims", self, given or tuple(range(self.ndim))[::-1])

    def flatten(self) -> Array:
        """The elements in one axis."""
        return _call("reshape", self, (-1,))

    ravel = flatten

    def squeeze(self, axis: Axis = None) -> Array:
        """Without axes of size 1: those named, or all."""
        given = tuple([i for i, n in enumerate(self.shape) if n == 1]) if axis is None else axis
        return _call("squeeze", self, given)

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Array:
        return _call("sum", self, axis=axis, keepdims=keepdims)

    def prod(self, axis: Axis = None, keepdims: bool = False) -> Array:
        return _call("prod", self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Array:
        return _call("mean", self, axis=axis, keepdims=keepdims)

    def max(self, axis: Axis = None, keepdims: bool = False) -> Array:
        return _call("max", self, axis=axis, keepdims=keepdims)

    def min(self, axis: Axis = None, keepdims: bool = False) -> Array:
        return _call("min", self, axis=axis, keepdims=keepdims)

    def all(self, axis: Axis = None, keepdims: bool = False) -> Array:
        return _call("all", self, axis=axis, keepdims=keepdims)

    def any(self, axis: Axis = None, keepdims: bool = False) -> Array:
        return _call("any", self, axis=axis, keepdims=keepdims)

    # -- indexing -----------------------------------------------------------------------------

    def __getitem__(self, key: Index, /) -> Array:
        return _indexing().get_item(self, key)  # type: ignore[no-any-return]

    def __setitem__(self, key: Index, value: ArrayLike, /) -> None:
        if not _assignment.get():
            raise ArrayTypeError(
                "an array does not change", where="index", got=f"x[{key!r:.60}] = …",
                hint="x = x.at[index].set(value) gives a new one; for code written for arrays that "
                "change, there is `with rlx.numpy.item_assignment():`",
            )  # fmt: skip
        self._become(self.at[key].set(value))

    def _become(self, other: Array) -> None:
        self.data = other.data

    def alias(self) -> Array:
        """The same elements as an array of its own."""
        return Array(self.data)

    @property
    def at(self) -> Updates:
        """`x.at[i].set(v)`, `x.at[i].add(v)`: new arrays with some elements changed."""
        from rlx.numpy.updates import Updates  # late: it imports this file

        return Updates(self)

    def __len__(self) -> int:
        if not self.ndim:
            raise ArrayTypeError("an array without axes has no length", where="len", got=repr(self))
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Array]:
        if not self.ndim:
            raise ArrayTypeError("an array without axes", where="iter", got=repr(self))
        return (self[i] for i in range(len(self)))

    def __contains__(self, value: ArrayLike) -> bool:
        return bool(_call("any", _call("equal", self, value)))

    # -- copies and text ----------------------------------------------------------------------

    def __copy__(self) -> Array:
        return self.alias()

    def __deepcopy__(self, memo: object) -> Array:
        return self.alias()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Array, (np.ascontiguousarray(self.data).reshape(self.data.shape),))

    def __format__(self, spec: str) -> str:
        if not spec:
            return str(self)
        if self.ndim:
            raise ArrayTypeError(
                "a format is of one number", where="format", got=f"{spec!r} for shape {self.shape}"
            )
        return format(self._scalar("format"), spec)

    def __repr__(self) -> str:
        text = np.array2string(self.data, separator=", ", prefix="Array(")
        shape = f", shape={self.shape}" if not self.data.size and self.shape != (0,) else ""
        return f"Array({text}{shape}, dtype={self.data.dtype.name})"

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

    def _become(self, other: Array) -> None:
        assert isinstance(other, Tracer)
        self.home, self.own = other.home, other.own

    def alias(self) -> Array:
        return Tracer(self.home, self.own)

    def _scalar(self, kind: str) -> NoReturn:
        raise BoolConversionError(
            "the elements of a traced array are not known", where=kind, got=repr(self),
            hint="choose with rlx.numpy.where(condition, a, b), or make the argument static",
        )  # fmt: skip

    def __index__(self) -> NoReturn:
        self._scalar("index")

    def item(self) -> NoReturn:
        self._scalar("item")

    def tolist(self) -> NoReturn:
        self._scalar("tolist")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        self._scalar("numpy.asarray")

    def __dlpack__(self, **options: Any) -> NoReturn:
        self._scalar("__dlpack__")

    def __reduce__(self) -> NoReturn:
        self._scalar("pickle")

    def __format__(self, spec: str) -> str:
        return self._scalar("format") if spec else repr(self)

    def __repr__(self) -> str:
        return f"Tracer({self.own.shape})"

    __str__ = __repr__


def _indexing() -> Any:
    from rlx.numpy import indexing

    return indexing


def _call(name: str, *args: Any, **options: Any) -> Array:
    """A function of `rlx.numpy`, which imports this module."""
    found: Array = getattr(operators.functions, name)(*args, **options)
    return found
