"""What Python's operators, indexing and NumPy's methods build on values.

    x + 1    -x    x @ w    x ** 2    x > y    x == 0    x[1:, None]    x.reshape(2, -1)    x.T

All of them append ops to the value's graph; numbers and arrays on the other side become constants.
Comparison is elementwise, `==` and `!=` included. Two values are the same one when `a is b`; a
value is hashed by identity, so that it can be a key of a dict or a member of a set.

Why that is safe: dict and set compare keys by identity first, and by `==` only when the hashes are
equal. The hash is the address, so two live values never have equal hashes, and `==` is never
called. Everything else that needs the truth of `a == b` (`in` a list, `list.index`, `if`) calls
`__bool__`, which raises: a mistake is loud, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from rlx.errors import BoolConversionError, InputError, ShapeError
from rlx.ir.dim import Dim, Expr, as_dim, same
from rlx.ir.dtype import DType, DTypeLike
from rlx.ir.methods import ValueMethods
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.node import Value

if TYPE_CHECKING:
    from rlx.ir.dim import DimLike
    from rlx.ir.graph import Graph
    from rlx.ir.node import Operand, Value

    Index: TypeAlias = int | slice | EllipsisType | Operand | None

_TENSOR_LIKE = (int, float, np.ndarray, np.generic, list)


class Operators(ValueMethods):
    """The operators and methods of values that are more than an op's own method."""

    __slots__ = ()

    if TYPE_CHECKING:
        shape: Shape

        @property
        def graph(self) -> Graph: ...

    __hash__ = object.__hash__
    __array_ufunc__ = None  # a NumPy array on the left defers to these operators

    # -- arithmetic ---------------------------------------------------------------------------

    def __add__(self, other: Operand) -> Value:
        return self.graph.add(self, other)

    def __radd__(self, other: Operand) -> Value:
        return self.graph.add(other, self)

    def __sub__(self, other: Operand) -> Value:
        return self.graph.sub(self, other)

    def __rsub__(self, other: Operand) -> Value:
        return self.graph.sub(other, self)

    def __mul__(self, other: Operand) -> Value:
        return self.graph.mul(self, other)

    def __rmul__(self, other: Operand) -> Value:
        return self.graph.mul(other, self)

    def __truediv__(self, other: Operand) -> Value:
        return self.graph.div(self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return self.graph.div(other, self)

    def __floordiv__(self, other: Operand) -> Value:
        return self.graph.floor_div(self, other)

    def __rfloordiv__(self, other: Operand) -> Value:
        return self.graph.floor_div(other, self)

    def __mod__(self, other: Operand) -> Value:
        return self.graph.mod(self, other)

    def __rmod__(self, other: Operand) -> Value:
        return self.graph.mod(other, self)

    def __pow__(self, other: Operand) -> Value:
        return self.graph.pow(self, other)

    def __rpow__(self, other: Operand) -> Value:
        return self.graph.pow(other, self)

    def __matmul__(self, other: Operand) -> Value:
        return self.graph.matmul(self, other)

    def __rmatmul__(self, other: Operand) -> Value:
        return self.graph.matmul(other, self)

    def __neg__(self) -> Value:
        return self.graph.neg(self)

    def __pos__(self) -> Value:
        return self  # type: ignore[return-value]

    def __abs__(self) -> Value:
        return self.graph.abs(self)

    # -- bits and flags -----------------------------------------------------------------------

    def __invert__(self) -> Value:
        return self.graph.bitwise_not(self)

    def __and__(self, other: Operand) -> Value:
        return self.graph.bitwise_and(self, other)

    def __rand__(self, other: Operand) -> Value:
        return self.graph.bitwise_and(other, self)

    def __or__(self, other: Operand) -> Value:
        return self.graph.bitwise_or(self, other)

    def __ror__(self, other: Operand) -> Value:
        return self.graph.bitwise_or(other, self)

    def __xor__(self, other: Operand) -> Value:
        return self.graph.bitwise_xor(self, other)

    def __rxor__(self, other: Operand) -> Value:
        return self.graph.bitwise_xor(other, self)

    def __lshift__(self, other: Operand) -> Value:
        return self.graph.shift_left(self, other)

    def __rlshift__(self, other: Operand) -> Value:
        return self.graph.shift_left(other, self)

    def __rshift__(self, other: Operand) -> Value:
        return self.graph.shift_right(self, other)

    def __rrshift__(self, other: Operand) -> Value:
        return self.graph.shift_right(other, self)

    # -- comparison ---------------------------------------------------------------------------

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        """Elementwise; False for operands that are not tensors (None, a string)."""
        if isinstance(other, (Operators, *_TENSOR_LIKE)):
            return self.graph.eq(self, other)
        return NotImplemented

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        if isinstance(other, (Operators, *_TENSOR_LIKE)):
            return self.graph.ne(self, other)
        return NotImplemented

    def __lt__(self, other: Operand) -> Value:
        return self.graph.lt(self, other)

    def __le__(self, other: Operand) -> Value:
        return self.graph.le(self, other)

    def __gt__(self, other: Operand) -> Value:
        return self.graph.gt(self, other)

    def __ge__(self, other: Operand) -> Value:
        return self.graph.ge(self, other)

    # -- undefined while the graph is built -----------------------------------------------------

    def __bool__(self) -> NoReturn:
        raise BoolConversionError(
            "the elements of a value are not known while its graph is built", where="bool",
            got=repr(self), hint="choose with g.where(condition, a, b) or g.cond; "
            "whether two values are one and the same is `a is b`",
        )  # fmt: skip

    def __iter__(self) -> NoReturn:
        raise InputError(
            "a value is not a sequence", where="iter", got=repr(self),
            hint="take parts by index, x[0], or let g.scan go along an axis",
        )  # fmt: skip

    def __setitem__(self, index: object, value: object) -> NoReturn:
        raise InputError(
            "a value does not change", where="index", got=repr(self),
            hint="g.scatter and g.where give a new one, g.state_update writes into a state",
        )  # fmt: skip

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            "a value has no elements until its graph runs", where="numpy.asarray", got=repr(self),
            hint="build with the ops of the graph: x.exp(), g.concat([x, y])",
        )  # fmt: skip

    # -- shape and type, as in NumPy ------------------------------------------------------------

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Value:
        """Basic indexing as in NumPy, except that bounds outside the axis are an error.
        One array of ints gathers along its axis. See `index_value`."""
        return index_value(self, index)  # type: ignore[arg-type]

    def reshape(self, *shape: DimLike | tuple[DimLike, ...] | list[DimLike] | Shape) -> Value:
        """The elements in the same order under another shape: sizes, or one tuple of them."""
        return self.graph.reshape(self, _one_list(shape))

    def expand(self, *shape: DimLike | tuple[DimLike, ...] | list[DimLike] | Shape) -> Value:
        """Broadcast to a shape: sizes, or one tuple of them."""
        return self.graph.expand(self, _one_list(shape))

    def transpose(self, *axes: int | tuple[int, ...] | list[int]) -> Value:
        """The axes in another order; reversed when none are given."""
        order = _one_list(axes) if axes else tuple(range(self.shape.rank))[::-1]
        return self.graph.transpose(self, order)

    @property
    def T(self) -> Value:
        """The axes in reverse order."""
        return self.transpose()

    @property
    def mT(self) -> Value:
        """The last two axes swapped: the transposed matrices of a stack."""
        return self.swapaxes(-1, -2)

    def swapaxes(self, axis1: int, axis2: int) -> Value:
        """Two axes swapped."""
        axes = list(range(self.shape.rank))
        try:
            axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
        except IndexError:
            raise InputError(
                "no such axis", where="swapaxes", got=f"{axis1}, {axis2}", expected=self.shape
            ) from None
        return self.graph.transpose(self, tuple(axes))

    def astype(self, dtype: DTypeLike) -> Value:
        """In another element type; the value itself when it has that type."""
        if self.shape.dtype is DType.of(dtype):
            return self  # type: ignore[return-value]
        return self.graph.cast(self, dtype)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.shape.rank


def _one_list(given: tuple[Any, ...]) -> Any:
    """`(2, 3)` as given one by one, or as one tuple, list or shape."""
    if len(given) == 1 and isinstance(given[0], (tuple, list, Shape)):
        return tuple(given[0])
    return given


def index_value(x: Value, index: object) -> Value:
    """The part of `x` that `index` names: narrow and slice for ranges, gather for arrays of ints,
    one reshape for the rest.

    As in NumPy, an int removes an axis, None adds one of size 1, `...` covers the axes not named,
    and negative positions count from the end, also of a symbolic axis. Two things differ. Bounds
    outside the axis are an error instead of being clipped, so that a symbolic size behaves like the
    number bound to it. And at most one index is an array of ints, next to slices only: NumPy's
    rules for several arrays, or for an array next to an int, surprise even experts.
    """
    items = _items(x, index if isinstance(index, tuple) else (index,))
    named = [i for i in items if i is not None]
    for axis, item in enumerate(named):
        x = _narrowed(x, axis, item)
    x = _strided(x, named)
    sizes = iter(x.shape.dims)
    dims: list[Dim] = []
    for item in items:
        size = 1 if item is None else next(sizes)
        if not _is_int(item):
            dims.append(size)
    if dims != list(x.shape.dims):
        x = x.graph.reshape(x, dims)
    for axis, item in enumerate(items):  # an array of ints, where there is one
        if item is not None and not isinstance(item, slice) and not _is_int(item):
            x = x.graph.gather(x, item, axis)
    return x


def _items(x: Value, given: Sequence[object]) -> list[Any]:
    """One item per axis of `x`, and a None for each new axis; the ellipsis expanded."""
    named = [i for i in given if i is not None and i is not Ellipsis]
    dots = [at for at, item in enumerate(given) if item is Ellipsis]
    for item in named:
        if not (isinstance(item, slice) or _is_int(item) or _is_array(item)):
            raise _wrong(x, "not an index", item)
    arrays = [i for i in named if not isinstance(i, slice) and not _is_int(i)]
    if len(arrays) > 1 or (arrays and any(map(_is_int, named))):
        raise _wrong(x, "an array of ints goes with slices only", given)
    if len(dots) > 1 or len(named) > x.shape.rank:
        raise _wrong(x, "too many indices" if len(dots) < 2 else "more than one ellipsis", given)
    at = dots[0] if dots else len(given)
    rest = [slice(None)] * (x.shape.rank - len(named))
    return [*given[:at], *rest, *given[at + 1 :]]


def _is_int(item: object) -> bool:
    return isinstance(item, (int, np.integer, Expr)) and not isinstance(item, bool)


def _is_array(item: object) -> bool:
    """Whether `item` is a tensor of ints."""
    from rlx.ir.node import Value

    if isinstance(item, Value):
        return bool(item.shape.dtype.is_integer)
    return isinstance(item, (np.ndarray, list)) and np.asarray(item).dtype.kind in "iu"


def _wrong(x: Value, what: str, got: object) -> InputError:
    return InputError(
        what, where="index", got=f"{got!r} for {x!r}",
        expected="ints, slices, None, ... and at most one array of ints",
        hint="g.gather and g.take_along index by data, g.where chooses by flags",
    )  # fmt: skip


def _position(at: Dim, size: Dim) -> Dim:
    return at + size if isinstance(at, int) and at < 0 else at


def _narrowed(x: Value, axis: int, item: Any) -> Value:
    """An int or a contiguous range of one axis; the full range is a no-op."""
    size = x.shape.dims[axis]
    if _is_int(item):
        at = _position(as_dim(item), size)
        if isinstance(at, int) and isinstance(size, int) and not 0 <= at < size:
            raise ShapeError(
                "index past the end of its axis", where="index",
                got=f"{item} for axis {axis} of {x!r}", expected=f"{-size} … {size - 1}",
            )  # fmt: skip
        return x.graph.narrow(x, axis, at, 1)
    if not isinstance(item, slice) or item.step not in (None, 1):
        return x
    start = 0 if item.start is None else _position(as_dim(item.start), size)
    stop = size if item.stop is None else _position(as_dim(item.stop), size)
    if start == 0 and same(stop, size):
        return x
    return x.graph.narrow(x, axis, start, stop - start)


def _strided(x: Value, items: Sequence[Any]) -> Value:
    """All strided ranges, as one slice op."""
    wide = [isinstance(i, slice) and i.step not in (None, 1) for i in items]
    if not any(wide):
        return x
    starts = [i.start if w else None for i, w in zip(items, wide, strict=True)]
    stops = [i.stop if w else None for i, w in zip(items, wide, strict=True)]
    steps = [i.step if w else 1 for i, w in zip(items, wide, strict=True)]
    return x.graph.slice(x, starts, stops, steps)
