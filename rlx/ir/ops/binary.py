"""Elementwise ops of two tensors, with NumPy's broadcasting; and `where`.

Both operands are cast to the promoted dtype. Arithmetic is done in it, in f32 for narrower floats,
and rounded once. Integers wrap; integer division by zero gives 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from rlx.errors import DTypeError
from rlx.ir.dtype import DType, bool_, f32, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import ANY, NUMERIC, REAL, compute, quiet, require_dtype, rounded
from rlx.ir.shape import Shape, broadcast_dims


class Binary(Op):
    """Two tensors in, one of the broadcast dims and the promoted element type out."""

    is_elementwise = True
    takes: ClassVar[Sequence[str]] = REAL  # kinds of the promoted dtype
    weight: ClassVar[int] = 1  # operations per element, for the cost

    def apply(self, a: Array, b: Array) -> Array:
        """The function itself, on arrays of one element type in compute precision."""
        raise NotImplementedError

    def common_type(self, a: DType, b: DType) -> DType:
        """The dtype that both operands are cast to."""
        return promote(a, b)

    def result(self, common: DType) -> DType:
        return common

    def infer(self, a: Shape, b: Shape) -> Shape:
        common = self.common_type(a.dtype, b.dtype)
        for operand in (a, b):
            if operand.dtype.kind == common.kind:  # the operand that determined it
                require_dtype(operand, self.takes, "operand")
        return Shape(broadcast_dims(a.dims, b.dims), self.result(common))

    def reference(self, a: Array, b: Array) -> Array:
        common = self.common_type(DType.of(a.dtype), DType.of(b.dtype))
        wide = _compute_type(common)
        with quiet():
            return rounded(self.apply(a.astype(wide), b.astype(wide)), self.result(common))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        plain = super().cost(inputs, outputs)
        return plain._replace(flops=plain.flops * self.weight)


def _compute_type(element: DType) -> Any:
    return f32.numpy if element.is_float and element.bytes < 4 else element.numpy


class FloatBinary(Binary):
    """Integers and bools become f32 first."""

    def common_type(self, a: DType, b: DType) -> DType:
        common = promote(a, b)
        return f32 if common.kind in ("int", "uint", "bool") else common


def _binary(
    name: str,
    numpy: Callable[[Any, Any], Any],
    doc: str,
    base: type[Binary] = Binary,
    **traits: Any,
) -> None:
    """Register an elementwise op of two tensors: all of them are primitive."""
    space = {"apply": lambda self, a, b: numpy(a, b), "__doc__": doc, "__module__": __name__}
    made = type(name.title().replace("_", ""), (base,), space)
    op(name, group="elementwise", **traits)(made)


# -- arithmetic -------------------------------------------------------------------------------


class _Numeric(Binary):
    takes = NUMERIC


class _NumericFloat(FloatBinary):
    takes = NUMERIC


def _wide(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Evaluated in f64, so that the rounded result is the nearest one."""
    return lambda a, b: function(a.astype(np.float64), b.astype(np.float64))


def _pow(a: Any, b: Any) -> Any:
    if a.dtype.kind == "f":
        return _wide(np.power)(a, b)
    whole = np.power(a, np.maximum(b, 0))
    # 1 / a^−b rounds towards 0: it is 0 but for bases 1 and −1
    odd = np.where(b % 2 == 0, 1, a)
    return np.where(b >= 0, whole, np.where(np.abs(a) == 1, odd, 0))


class _Power(Binary):
    weight = 16


class _Angle(FloatBinary):
    weight = 16


_binary("add", np.add, "a + b", _Numeric, is_commutative=True)
_binary("sub", np.subtract, "a − b", _Numeric)
_binary("mul", np.multiply, "a · b", _Numeric, is_commutative=True)
_binary("div", np.true_divide, "a / b; of integers an f32", _NumericFloat)
_binary("maximum", np.maximum, "the greater of a and b; NaN if either is", is_commutative=True)
_binary("minimum", np.minimum, "the lesser of a and b; NaN if either is", is_commutative=True)
_binary("mod", np.mod, "a − b · floor(a / b): the sign is b's; 0 where an integer b is 0")
_binary("floor_div", np.floor_divide, "floor(a / b); 0 where an integer b is 0")
_binary("pow", _pow, "a^b; integers wrap, and towards 0 for a negative b", _Power)
_binary("atan2", _wide(np.arctan2), "the angle of the point (b, a) from the x axis", _Angle)


# -- bits -------------------------------------------------------------------------------------


class _Bits(Binary):
    takes = ("int", "uint", "bool")


class _Shift(Binary):
    takes = ("int", "uint")


_binary("bitwise_and", np.bitwise_and, "a & b", _Bits, is_commutative=True)
_binary("bitwise_or", np.bitwise_or, "a | b", _Bits, is_commutative=True)
_binary("bitwise_xor", np.bitwise_xor, "a ^ b", _Bits, is_commutative=True)
_binary("shift_left", np.left_shift, "a << b; 0 where b is not in 0 … bits − 1", _Shift)
_binary("shift_right", np.right_shift, "a >> b, arithmetic; all sign where b is too far", _Shift)


# -- comparisons and logic -------------------------------------------------------------------


class Compare(Binary):
    """A bool per element; the operands are promoted first."""

    takes: ClassVar[Sequence[str]] = (*REAL, "bool")

    def result(self, common: DType) -> DType:
        return bool_


class _Equality(Compare):
    takes = ANY


class Logical(Binary):
    """Each operand is true where it is not zero (NaN is not zero)."""

    def common_type(self, a: DType, b: DType) -> DType:
        return bool_

    def infer(self, a: Shape, b: Shape) -> Shape:
        return Shape(broadcast_dims(a.dims, b.dims), bool_)

    def reference(self, a: Array, b: Array) -> Array:
        return rounded(self.apply(compute(a) != 0, compute(b) != 0), bool_)


_binary("eq", np.equal, "a = b; false where either is NaN", _Equality, is_commutative=True)
_binary("ne", np.not_equal, "a ≠ b; true where either is NaN", _Equality, is_commutative=True)
_binary("lt", np.less, "a < b", Compare)
_binary("le", np.less_equal, "a ≤ b", Compare)
_binary("gt", np.greater, "a > b", Compare)
_binary("ge", np.greater_equal, "a ≥ b", Compare)
_binary("logical_and", np.logical_and, "a and b", Logical, is_commutative=True)
_binary("logical_or", np.logical_or, "a or b", Logical, is_commutative=True)
_binary("logical_xor", np.logical_xor, "a or b, not both", Logical, is_commutative=True)


@op("where", group="elementwise")
class Where(Op):
    """a where the bool `condition` is true, else b; all three broadcast."""

    is_elementwise = True

    def infer(self, condition: Shape, a: Shape, b: Shape) -> Shape:
        if condition.dtype is not bool_:
            raise DTypeError(
                "the condition must be bool", got=condition, expected="bool",
                hint="compare with 0: ne(condition, 0)",
            )  # fmt: skip
        return Shape(broadcast_dims(condition.dims, a.dims, b.dims), promote(a.dtype, b.dtype))

    def reference(self, condition: Array, a: Array, b: Array) -> Array:
        common = promote(DType.of(a.dtype), DType.of(b.dtype))
        return np.where(condition, rounded(a, common), rounded(b, common))
