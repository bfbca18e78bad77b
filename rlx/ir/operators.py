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

from types import EllipsisType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from rlx.errors import BoolConversionError, InputError
from rlx.ir.dtype import DType, DTypeLike
from rlx.ir.methods import ValueMethods
from rlx.ir.shape import Shape

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
        One array of ints gathers along its axis. See indexing.py."""
        from rlx.ir.indexing import index_value

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
