"""Python's operators on arrays: `x + y` is `rlx.numpy.add(x, y)`.

An array is immutable, so `x += y` rebinds the name `x` to `x + y`. What is no operand of arrays
gets NotImplemented, so that Python asks the other side.
"""

# mypy: disable-error-code="no-any-return, override"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rlx.numpy.trace import Size

if TYPE_CHECKING:
    from rlx.numpy.array import Array
    from rlx.numpy.typing import Number

    Operand: TypeAlias = Array | np.ndarray[Any, Any] | np.generic | Number

functions: Any = None
"""The module `rlx.numpy`, which imports this one and sets it."""


class Operators:
    """The operators of `rlx.Array`."""

    __slots__ = ()
    __array_ufunc__ = None  # a NumPy array on the left defers to these operators
    __array_priority__ = 1000
    __hash__ = object.__hash__

    def __add__(self, other: Operand, /) -> Array:
        return functions.add(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __sub__(self, other: Operand, /) -> Array:
        return functions.subtract(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __mul__(self, other: Operand, /) -> Array:
        return functions.multiply(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __truediv__(self, other: Operand, /) -> Array:
        return functions.divide(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __floordiv__(self, other: Operand, /) -> Array:
        return (
            functions.floor_divide(self, other) if isinstance(other, _OPERANDS) else NotImplemented
        )

    def __mod__(self, other: Operand, /) -> Array:
        return functions.remainder(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __pow__(self, other: Operand, /) -> Array:
        return functions.pow(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __matmul__(self, other: Operand, /) -> Array:
        return functions.matmul(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __and__(self, other: Operand, /) -> Array:
        return (
            functions.bitwise_and(self, other) if isinstance(other, _OPERANDS) else NotImplemented
        )

    def __or__(self, other: Operand, /) -> Array:
        return functions.bitwise_or(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __xor__(self, other: Operand, /) -> Array:
        return (
            functions.bitwise_xor(self, other) if isinstance(other, _OPERANDS) else NotImplemented
        )

    def __lshift__(self, other: Operand, /) -> Array:
        return (
            functions.bitwise_left_shift(self, other)
            if isinstance(other, _OPERANDS)
            else NotImplemented
        )

    def __rshift__(self, other: Operand, /) -> Array:
        return (
            functions.bitwise_right_shift(self, other)
            if isinstance(other, _OPERANDS)
            else NotImplemented
        )

    def __radd__(self, other: Operand, /) -> Array:
        return functions.add(other, self) if isinstance(other, _OPERANDS) else NotImplemented

    def __rsub__(self, other: Operand, /) -> Array:
        return functions.subtract(other, self) if isinstance(other, _OPERANDS) else NotImplemented

    def __rmul__(self, other: Operand, /) -> Array:
        return functions.multiply(other, self) if isinstance(other, _OPERANDS) else NotImplemented

    def __rtruediv__(self, other: Operand, /) -> Array:
        return functions.divide(other, self) if isinstance(other, _OPERANDS) else NotImplemented

    def __rfloordiv__(self, other: Operand, /) -> Array:
        return (
            functions.floor_divide(other, self) if isinstance(other, _OPERANDS) else NotImplemented
        )

    def __rmod__(self, other: Operand, /) -> Array:
        return functions.remainder(other, self) if isinstance(other, _OPERANDS) else NotImplemented

    def __rpow__(self, other: Operand, /) -> Array:
        return functions.pow(other, self) if isinstance(other, _OPERANDS) else NotImplemented

    def __rmatmul__(self, other: Operand, /) -> Array:
        return functions.matmul(other, self) if isinstance(other, _OPERANDS) else NotImplemented

    def __rand__(self, other: Operand, /) -> Array:
        return (
            functions.bitwise_and(other, self) if isinstance(other, _OPERANDS) else NotImplemented
        )

    def __ror__(self, other: Operand, /) -> Array:
        return functions.bitwise_or(other, self) if isinstance(other, _OPERANDS) else NotImplemented

    def __rxor__(self, other: Operand, /) -> Array:
        return (
            functions.bitwise_xor(other, self) if isinstance(other, _OPERANDS) else NotImplemented
        )

    def __rlshift__(self, other: Operand, /) -> Array:
        return (
            functions.bitwise_left_shift(other, self)
            if isinstance(other, _OPERANDS)
            else NotImplemented
        )

    def __rrshift__(self, other: Operand, /) -> Array:
        return (
            functions.bitwise_right_shift(other, self)
            if isinstance(other, _OPERANDS)
            else NotImplemented
        )

    def __eq__(self, other: object, /) -> Array:
        return functions.equal(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __ne__(self, other: object, /) -> Array:
        return functions.not_equal(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __lt__(self, other: Operand, /) -> Array:
        return functions.less(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __le__(self, other: Operand, /) -> Array:
        return functions.less_equal(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __gt__(self, other: Operand, /) -> Array:
        return functions.greater(self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def __ge__(self, other: Operand, /) -> Array:
        return (
            functions.greater_equal(self, other) if isinstance(other, _OPERANDS) else NotImplemented
        )

    def __neg__(self) -> Array:
        return functions.negative(self)

    def __pos__(self) -> Array:
        return functions.positive(self)

    def __abs__(self) -> Array:
        return functions.abs(self)

    def __invert__(self) -> Array:
        return functions.bitwise_invert(self)

    # rebinding: Python assigns what these return
    __iadd__ = __add__
    __isub__ = __sub__
    __imul__ = __mul__
    __itruediv__ = __truediv__
    __ifloordiv__ = __floordiv__
    __imod__ = __mod__
    __ipow__ = __pow__
    __imatmul__ = __matmul__
    __iand__ = __and__
    __ior__ = __or__
    __ixor__ = __xor__
    __ilshift__ = __lshift__
    __irshift__ = __rshift__


_OPERANDS = (Operators, bool, int, float, complex, np.ndarray, np.generic, Size)
