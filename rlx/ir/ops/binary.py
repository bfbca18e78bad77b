"""Elementwise ops of two tensors, with NumPy's broadcasting; and `where`.

Both operands are cast to the promoted dtype. Arithmetic is done in it, in f32 for narrower floats,
and rounded once. Integers wrap; integer division by zero gives 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.dtype import DType, bool_, f32, f64, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import ANY, NUMERIC, REAL, cast, compute, quiet, require_dtype, rounded
from rlx.ir.ops.complex_functions import power
from rlx.ir.shape import Shape, broadcast_dims

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value

Formula = Callable[["Graph", "Value", "Value"], Any]  # the function, built on graph values
Partial = Callable[["Graph", "Value", "Value", "Value", "Value"], Any]
"""t · ∂y/∂a at (a, b), where the result is y: f(g, t, a, b, y); None where it is zero."""


class Binary(Op):
    """Two tensors in, one of the broadcast dims and the promoted element type out."""

    is_elementwise = True
    takes: ClassVar[Sequence[str]] = REAL  # kinds of the promoted dtype
    weight: ClassVar[int] = 1  # operations per element, for the cost
    partials: ClassVar[tuple[Partial, Partial] | None] = None  # by a and by b, for differentiation

    def apply(self, a: Array, b: Array) -> Array:
        """The function itself, on arrays of one element type in compute precision."""
        raise NotImplementedError

    def formula(self, g: Graph, a: Value, b: Value) -> Any:
        """The function itself, built from other ops on values of one type in compute precision."""
        return None

    @classmethod
    def has_decomposition(cls) -> bool:
        return cls.formula is not Binary.formula

    def decompose(self, g: Graph, a: Value, b: Value) -> Any:
        common = self.common_type(a.shape.dtype, b.shape.dtype)
        wide = DType.of(_compute_type(common))
        y = self.formula(g, cast(g, a, wide), cast(g, b, wide))
        if y is None:
            return None
        dims = broadcast_dims(a.shape.dims, b.shape.dims)
        if not y.shape.same_dims(Shape(dims, y.shape.dtype)):
            raise ShapeError(
                "the formula is not elementwise", where=self.name, got=y.shape, expected=dims
            )
        return cast(g, y, self.result(common))

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
    formula: Formula | None = None,
    partials: tuple[Partial, Partial] | None = None,
    **traits: Any,
) -> None:
    """Register an elementwise op of two tensors; one without a formula is primitive. One without
    partial derivatives is differentiated through its formula."""
    space: dict[str, Any] = {
        "apply": lambda self, a, b: numpy(a, b),
        "__doc__": doc,
        "__module__": __name__,
    }
    space["partials"] = partials
    if formula is not None:
        space["formula"] = lambda self, g, a, b: formula(g, a, b)
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
    if a.dtype.kind == "c":
        return np.power(a.astype(np.clongdouble), b.astype(np.clongdouble))
    if a.dtype.kind == "f":
        return _wide(np.power)(a, b)
    whole = np.power(a, np.maximum(b, 0))
    # 1 / a^−b rounds towards 0: it is 0 but for bases 1 and −1
    odd = np.where(b % 2 == 0, 1, a)
    return np.where(b >= 0, whole, np.where(np.abs(a) == 1, odd, 0))


class _Power(_Numeric):
    weight = 16

    def decompose(self, g: Graph, a: Value, b: Value) -> Any:
        """Of complex numbers; of real ones it is primitive."""
        common = promote(a.shape.dtype, b.shape.dtype)
        if not common.is_complex:
            return None
        return power(g, cast(g, a, common), cast(g, b, common))


class _Function(FloatBinary):
    weight = 16


def _hypot_formula(g: Graph, a: Value, b: Value) -> Any:
    """The operands are scaled by a power of two where their squares leave the range."""
    a, b = g.abs(a), g.abs(b)
    element = a.shape.dtype
    # bounds of the greater operand, and what it is multiplied by beyond them
    low, up, high, down = (-300, 600, 500, -600) if element is f64 else (-40, 90, 60, -80)
    most = g.maximum(a, b)

    def choose(small: float, large: float) -> Value:
        one = g.constant(1.0, element)
        rest = g.where(g.gt(most, 2.0**high), g.constant(large, element), one)
        return g.where(g.lt(most, 2.0**low), g.constant(small, element), rest)

    scale, back = choose(2.0**up, 2.0**down), choose(2.0**-up, 2.0**-down)
    size = g.sqrt(g.square(a * scale) + g.square(b * scale)) * back
    infinite = g.logical_or(g.is_inf(a), g.is_inf(b))  # also where the other is NaN
    return g.where(infinite, g.constant(math.inf, element), size)


def _logaddexp_formula(g: Graph, a: Value, b: Value) -> Any:
    apart = g.where(g.eq(a, b), g.constant(0.0, a.shape.dtype), a - b)  # of equal infinities too
    return g.maximum(a, b) + g.log1p(g.exp(-g.abs(apart)))


def _copysign_formula(g: Graph, a: Value, b: Value) -> Any:
    size = g.abs(a)
    return g.where(g.signbit(b), -size, size)


def _same(g: Graph, t: Value, a: Value, b: Value, y: Value) -> Any:
    return t


def _none(g: Graph, t: Value, a: Value, b: Value, y: Value) -> Any:
    return None


def _chosen(g: Graph, t: Value, wins: Value, ties: Value) -> Any:
    """Equal operands share the derivative."""
    zero = g.constant(0.0, t.shape.dtype)
    return g.where(wins, t, g.where(ties, t * 0.5, zero))


def _pow_by_base(g: Graph, t: Value, a: Value, b: Value, y: Value) -> Any:
    zero = g.constant(0, t.shape.dtype)
    less = g.where(g.eq(b, zero), g.constant(1, b.shape.dtype), b - g.constant(1, b.shape.dtype))
    return g.where(g.eq(b, zero), zero, t * (b * g.pow(a, less)))


def _pow_by_exponent(g: Graph, t: Value, a: Value, b: Value, y: Value) -> Any:
    """0 at base 0, where a^b is 0 for all positive b."""
    zero, one = g.constant(0, a.shape.dtype), g.constant(1, a.shape.dtype)
    is_zero = g.eq(a, zero)
    if not b.shape.dtype.is_complex:
        is_zero = g.logical_and(is_zero, g.ge(b, zero))
    return g.where(is_zero, zero, t * (y * g.log(g.where(is_zero, one, a))))


def _share(of: int) -> Partial:
    """a / √(a² + b²), or b / …; 0 at the origin."""

    def part(g: Graph, t: Value, a: Value, b: Value, y: Value) -> Any:
        is_zero = g.eq(y, 0.0)
        return t * ((b if of else a) / g.where(is_zero, g.constant(1.0, y.shape.dtype), y))

    return part


def _turn(g: Graph, t: Value, a: Value, b: Value) -> Any:
    """t · a / (a² + b²), whose squares may leave the range; 0 at the origin."""
    size = g.hypot(a, b)
    size = g.where(g.eq(size, 0.0), g.constant(1.0, size.shape.dtype), size)
    return t * (a / size / size)


def _weight(g: Graph, a: Value, b: Value) -> Any:
    """e^a / (e^a + e^b); equal infinities share."""
    same = g.logical_and(g.is_inf(a), g.eq(a, b))
    return g.sigmoid(g.where(same, g.constant(0.0, a.shape.dtype), a - b))


_binary("add", np.add, "a + b", _Numeric, partials=(_same, _same), is_commutative=True)
_binary("sub", np.subtract, "a − b", _Numeric, partials=(_same, lambda g, t, a, b, y: -t))
_binary(
    "mul", np.multiply, "a · b", _Numeric, is_commutative=True,
    partials=(lambda g, t, a, b, y: t * b, lambda g, t, a, b, y: t * a),
)  # fmt: skip
_binary(
    "div", np.true_divide, "a / b; of integers an f32", _NumericFloat,
    partials=(lambda g, t, a, b, y: t / b, lambda g, t, a, b, y: -(t * y) / b),
)  # fmt: skip
_binary(
    "maximum", np.maximum, "the greater of a and b; NaN if either is", is_commutative=True,
    partials=(
        lambda g, t, a, b, y: _chosen(g, t, g.gt(a, b), g.eq(a, b)),
        lambda g, t, a, b, y: _chosen(g, t, g.gt(b, a), g.eq(a, b)),
    ),
)  # fmt: skip
_binary(
    "minimum", np.minimum, "the lesser of a and b; NaN if either is", is_commutative=True,
    partials=(
        lambda g, t, a, b, y: _chosen(g, t, g.lt(a, b), g.eq(a, b)),
        lambda g, t, a, b, y: _chosen(g, t, g.lt(b, a), g.eq(a, b)),
    ),
)  # fmt: skip
_binary(
    "mod", np.mod, "a − b · floor(a / b): the sign is b's; 0 where an integer b is 0",
    partials=(_same, lambda g, t, a, b, y: -(t * g.floor(a / b))),
)  # fmt: skip
_binary(
    "floor_div", np.floor_divide, "floor(a / b); 0 where an integer b is 0",
    has_zero_derivative=True,
)  # fmt: skip
_binary(
    "pow", _pow, "a^b; integers wrap, and towards 0 for a negative b", _Power,
    partials=(_pow_by_base, _pow_by_exponent),
)  # fmt: skip
_binary(
    "atan2", _wide(np.arctan2), "the angle of the point (b, a) from the x axis", _Function,
    partials=(lambda g, t, a, b, y: _turn(g, t, b, a), lambda g, t, a, b, y: -_turn(g, t, a, b)),
)  # fmt: skip
_binary(
    "hypot", _wide(np.hypot), "√(a² + b²), without overflow; inf if either is infinite",
    _Function, _hypot_formula, (_share(0), _share(1)), is_commutative=True,
)  # fmt: skip
_binary(
    "logaddexp", _wide(np.logaddexp), "ln(e^a + e^b), without overflow",
    _Function, _logaddexp_formula, is_commutative=True,
    partials=(
        lambda g, t, a, b, y: t * _weight(g, a, b), lambda g, t, a, b, y: t * _weight(g, b, a)
    ),
)  # fmt: skip
_binary(
    "copysign",
    np.copysign,
    "|a| with the sign of b, also of −0",
    FloatBinary,
    _copysign_formula,
    (lambda g, t, a, b, y: g.where(g.eq(g.signbit(a), g.signbit(b)), t, -t), _none),
)


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
