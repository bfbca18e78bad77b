"""Elementwise ops of one tensor: a table with one row per op. Binary ops are in binary.py,
inverse trigonometric and hyperbolic functions in trigonometry.py, activation functions in
activation_functions.py.

    unary(
        "mish",
        lambda x: x * np.tanh(np.logaddexp(x, 0)),
        "x · tanh(softplus(x))",
        lambda g, x: x * g.tanh(g.softplus(x)),
    )

A row has the op's name, its NumPy function (the reference), its docstring, and its decomposition
into other elementwise ops. A primitive op has none and needs a kernel on every device. An op with
attributes is a class with the same parts, `apply` and `formula`. Fused ops take any of these as
their activation.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dtype import DType, bool_
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    ANY,
    NUMERIC,
    REAL,
    as_real,
    cast,
    compute,
    quiet,
    real_type,
    require_dtype,
    rounded,
    wide,
)
from rlx.ir.ops.complex_functions import COMPLEX, NUMPY, apply_formula
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value

NumpyFunction = Callable[[Any], Any]
Formula = Callable[["Graph", "Value"], Any]  # the same function, built on graph values
Derivative = Callable[["Graph", "Value", "Value"], Any]  # dy/dx on values, given x and y


class Unary(Op):
    """An op whose result element depends on one operand element; keeps the element type."""

    is_elementwise = True
    takes: ClassVar[Sequence[str]] = REAL
    weight: ClassVar[int] = 1  # operations per element, for the cost

    def apply(self, x: Array) -> Array:
        """The function itself, on an array in compute precision."""
        raise NotImplementedError

    def formula(self, g: Graph, x: Value) -> Any:
        """The function itself, built from other ops on a value in compute precision."""
        return None

    def derivative(self, g: Graph, x: Value, y: Value) -> Any:
        """dy / dx at x, where the result is y, on values in compute precision."""
        return None

    @classmethod
    def has_decomposition(cls) -> bool:
        return cls.formula is not Unary.formula

    def decompose(self, g: Graph, x: Value) -> Any:
        return self.elementwise(self.formula(g, x), x)

    def elementwise(self, y: Any, x: Value) -> Any:
        """What the formula gives, which must have the shape of its operand."""
        if y is not None and not y.shape.same_dims(x.shape):
            raise ShapeError(
                "the formula is not elementwise", where=self.name, got=y.shape, expected=x.shape
            )
        return y

    def result(self, element: DType) -> DType:
        """The element type of the result."""
        return element

    def infer(self, x: Shape) -> Shape:
        require_dtype(x, self.takes, "operand")
        return x.with_dtype(self.result(x.dtype))

    def reference(self, x: Array) -> Array:
        with quiet():
            return rounded(self.apply(compute(x)), self.result(DType.of(x.dtype)))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        plain = super().cost(inputs, outputs)
        return plain._replace(flops=plain.flops * self.weight)


class FloatUnary(Unary):
    """A function of real numbers: integers and bools become f32 first. One with a row in `COMPLEX`
    takes complex numbers too.

    The reference evaluates in f64 or c128 and rounds once, to the nearest value of the dtype.
    """

    takes: ClassVar[Sequence[str]] = (*REAL, "bool")
    weight = 8

    def infer(self, x: Shape) -> Shape:
        if x.dtype.is_complex and self.name in COMPLEX:
            return x
        return super().infer(x)

    def result(self, element: DType) -> DType:
        return real_type(element)

    def decompose(self, g: Graph, x: Value) -> Any:
        if x.shape.dtype.is_complex and self.name in COMPLEX:
            return apply_formula(g, COMPLEX[self.name], x)
        y = self.elementwise(self.formula(g, as_real(g, x)), x)
        return None if y is None else cast(g, y, self.result(x.shape.dtype))

    def reference(self, x: Array) -> Array:
        element = self.result(DType.of(x.dtype))
        with quiet():
            wide = np.complex128 if element.is_complex else np.float64
            return rounded(self.apply(rounded(x, element).astype(wide)), element)


class Predicate(Unary):
    """A test of each element; the result is bool."""

    def result(self, element: DType) -> DType:
        return bool_


def unary(
    name: str,
    numpy: NumpyFunction,
    doc: str,
    formula: Formula | None = None,
    *,
    base: type[Unary] = FloatUnary,
    derivative: Derivative | None = None,
    **traits: Any,
) -> type[Unary]:
    """Register an elementwise op of one tensor; returns its class.

    `numpy` and `formula` are the same function, on arrays and on graph values; an op without a
    formula is primitive. `derivative` is dy/dx, given x and y; an op without one is differentiated
    through its formula. `base` determines the dtypes of operand and result.
    """
    space: dict[str, Any] = {"apply": lambda self, x: numpy(x), "__doc__": doc}
    space["__module__"] = sys._getframe(1).f_globals["__name__"]
    if formula is not None:
        space["formula"] = lambda self, g, x: formula(g, x)
    if derivative is not None:
        space["derivative"] = lambda self, g, x, y: derivative(g, x, y)
    return op(name, **traits)(type(name.title().replace("_", ""), (base,), space))


class _NumericFloat(FloatUnary):
    """Of complex numbers by the same formula."""

    takes = (*NUMERIC, "bool")


# -- functions of real numbers ----------------------------------------------------------------


def each(function: Callable[[float], float]) -> NumpyFunction:
    """A function of `math` over an array: as exact as the C library, without SciPy."""

    def over(x: Any) -> Any:
        flat = x.ravel().tolist()
        return np.fromiter(map(function, flat), np.float64, len(flat)).reshape(x.shape)

    return over


_2_SQRT_PI, _LN_2 = 2 / math.sqrt(math.pi), math.log(2)
_LOG2_E, _LOG10_E = 1.4426950408889634, 0.4342944819032518

unary("exp", np.exp, "e^x", derivative=lambda g, x, y: y)
unary("expm1", NUMPY["expm1"], "e^x − 1, exact near 0", derivative=lambda g, x, y: y + 1.0)
unary("log", np.log, "ln x; −inf at 0, NaN below", derivative=lambda g, x, y: 1.0 / x)
unary(
    "log1p", NUMPY["log1p"], "ln(1 + x), exact near 0", derivative=lambda g, x, y: 1.0 / (x + 1.0)
)
unary("sqrt", np.sqrt, "√x; NaN below 0", derivative=lambda g, x, y: 0.5 / y)
unary("sin", np.sin, "sin x, x in radians", derivative=lambda g, x, y: g.cos(x))
unary("cos", np.cos, "cos x, x in radians", derivative=lambda g, x, y: -g.sin(x))
unary("tanh", NUMPY["tanh"], "tanh x", derivative=lambda g, x, y: 1.0 - y * y)
unary(
    "erf",
    each(math.erf),
    "the error function, 2/√π ∫₀ˣ e^(−t²) dt",
    derivative=lambda g, x, y: g.exp(-(x * x)) * _2_SQRT_PI,
)

unary(
    "rsqrt", lambda x: 1.0 / np.sqrt(x), "1 / √x; inf at 0, NaN below",
    lambda g, x: 1.0 / g.sqrt(x), derivative=lambda g, x, y: y / x * -0.5,
)  # fmt: skip
unary(
    "reciprocal", lambda x: 1.0 / x, "1 / x; ±inf at ±0",
    lambda g, x: 1.0 / x, base=_NumericFloat, derivative=lambda g, x, y: -(y * y),
)  # fmt: skip
unary(
    "exp2",
    np.exp2,
    "2^x",
    lambda g, x: g.pow(g.constant(2.0, x.shape.dtype), x),
    derivative=lambda g, x, y: y * _LN_2,
)
unary(
    "log2",
    np.log2,
    "log₂ x; −inf at 0, NaN below",
    lambda g, x: g.log(x) * _LOG2_E,
    derivative=lambda g, x, y: _LOG2_E / x,
)
unary(
    "log10",
    np.log10,
    "log₁₀ x; −inf at 0, NaN below",
    lambda g, x: g.log(x) * _LOG10_E,
    derivative=lambda g, x, y: _LOG10_E / x,
)
unary(
    "tan",
    np.tan,
    "tan x, x in radians",
    lambda g, x: g.sin(x) / g.cos(x),
    derivative=lambda g, x, y: y * y + 1.0,
)


# -- functions that keep the element type; integers wrap --------------------------------------


class _Numeric(Unary):
    takes = NUMERIC


class _Rounding(Unary):
    """Integers are whole already; complex numbers are rounded in both parts."""

    takes = NUMERIC

    def infer(self, x: Shape) -> Shape:
        if self.name != "round":
            require_dtype(x, REAL, "operand")
        return super().infer(x)

    def reference(self, x: Array) -> Array:
        return x if DType.of(x.dtype).is_integer else super().reference(x)


class _Sign(_Numeric):
    def decompose(self, g: Graph, x: Value) -> Any:
        if x.shape.dtype.is_complex:
            return apply_formula(g, COMPLEX["sign"], x)
        return super().decompose(g, x)


class _Bits(Unary):
    takes = ("int", "uint", "bool")


def _sign_formula(g: Graph, x: Value) -> Any:
    element = x.shape.dtype
    zero, one = g.constant(0, element), g.constant(1, element)
    if element.kind == "uint":
        return g.where(g.gt(x, zero), one, zero)
    rest = g.abs(x) if element.is_float else x  # 0, also of −0, or NaN
    below = g.where(g.lt(x, zero), g.constant(-1, element), rest)
    return g.where(g.gt(x, zero), one, below)


unary(
    "neg",
    np.negative,
    "−x",
    base=_Numeric,
    derivative=lambda g, x, y: g.constant(-1, x.shape.dtype),
)
unary(
    "square",
    lambda x: x * x,
    "x²",
    lambda g, x: x * x,
    base=_Numeric,
    derivative=lambda g, x, y: x + x,
)
unary("sign", np.sign, "−1, 0 or 1, of a complex x x / |x|; NaN of NaN", _sign_formula, base=_Sign)
unary(
    "relu", lambda x: np.maximum(x, 0), "max(x, 0); NaN of NaN",
    lambda g, x: g.maximum(x, g.constant(0, x.shape.dtype)), base=Unary,
    derivative=lambda g, x, y: g.cast(g.gt(x, g.constant(0, x.shape.dtype)), x.shape.dtype),
)  # fmt: skip
unary(
    "floor",
    np.floor,
    "the next whole number towards −inf",
    base=_Rounding,
    has_zero_derivative=True,
)
unary(
    "ceil", np.ceil, "the next whole number towards +inf", base=_Rounding, has_zero_derivative=True
)
unary(
    "round",
    np.rint,
    "the nearest whole number, halves to the even one",
    base=_Rounding,
    has_zero_derivative=True,
)
unary(
    "trunc", np.trunc, "the next whole number towards 0", base=_Rounding, has_zero_derivative=True
)
unary("bitwise_not", np.invert, "every bit flipped; logical not of a bool", base=_Bits)


@op("abs")
class Abs(_Numeric):
    """|x|; of a complex number its magnitude, a real number"""

    def apply(self, x: Array) -> Array:
        return np.abs(x)

    def result(self, element: DType) -> DType:
        return element.part


@op("clamp")
class Clamp(Unary):
    """x limited to low … high; NaN of NaN. Integers take whole bounds."""

    low: float = -math.inf
    high: float = math.inf

    def check(self) -> None:
        if not self.low <= self.high:  # also false when one of them is NaN
            raise AttributeValueError(
                "empty range", where=self.name, got=f"{self.low} … {self.high}",
                expected="low ≤ high",
            )  # fmt: skip

    def infer(self, x: Shape) -> Shape:
        bounds = [b for b in (self.low, self.high) if math.isfinite(b)]
        if x.dtype.is_integer and not all(b.is_integer() for b in bounds):
            raise AttributeValueError(
                "integers need whole bounds", got=f"{self.low} … {self.high} for {x}",
                hint="round the bounds, or cast x to a float type",
            )  # fmt: skip
        return super().infer(x)

    def apply(self, x: Array) -> Array:
        low, high = self.bounds(DType.of(x.dtype))
        return np.minimum(np.maximum(x, x.dtype.type(low)), x.dtype.type(high))

    def formula(self, g: Graph, x: Value) -> Any:
        low, high = (g.constant(b, x.shape.dtype) for b in self.bounds(x.shape.dtype))
        return g.minimum(g.maximum(x, low), high)

    def derivative(self, g: Graph, x: Value, y: Value) -> Any:
        """1 inside, and 0 at the bounds, as PyTorch's hardtanh and ReLU6 have it."""
        low, high = (g.constant(b, x.shape.dtype) for b in (self.low, self.high))
        return g.cast(g.logical_and(g.gt(x, low), g.lt(x, high)), x.shape.dtype)

    def bounds(self, element: DType) -> tuple[float, float]:
        """The bounds as numbers of that type: for an integer type, ints inside its range."""
        if not element.is_integer:
            return self.low, self.high
        range_ = np.iinfo(element.numpy)
        least, most = int(range_.min), int(range_.max)

        def fit(bound: float) -> int:
            return least if bound <= least else most if bound >= most else int(bound)

        return fit(self.low), fit(self.high)


# -- predicates -------------------------------------------------------------------------------


class _AnyPredicate(Predicate):
    takes = ANY


class _FloatPredicate(Predicate):
    """A test of floats, or of complex numbers in either part."""

    takes = NUMERIC


def _of_floats(test: NumpyFunction) -> NumpyFunction:
    """Integers are neither NaN nor infinite."""
    return lambda x: test(x) if x.dtype.kind in "fc" else np.zeros(x.shape, np.bool_)


def _is_inf_formula(g: Graph, x: Value) -> Any:
    if x.shape.dtype.is_complex:
        return g.logical_or(g.is_inf(g.real(x)), g.is_inf(g.imag(x)))
    return g.eq(g.abs(wide(g, x)), math.inf) if x.shape.dtype.is_float else g.ne(x, x)


def _is_finite_formula(g: Graph, x: Value) -> Any:
    if x.shape.dtype.is_complex:
        return g.logical_and(g.is_finite(g.real(x)), g.is_finite(g.imag(x)))
    return g.lt(g.abs(wide(g, x)), math.inf) if x.shape.dtype.is_float else g.eq(x, x)


def _signbit_formula(g: Graph, x: Value) -> Any:
    """The sign of a NaN is not seen."""
    if not x.shape.dtype.is_float:
        return g.lt(x, g.constant(0, x.shape.dtype))
    x = wide(g, x)
    return g.logical_or(g.lt(x, 0.0), g.eq(1.0 / x, -math.inf))  # 1 / −0


unary(
    "is_nan",
    _of_floats(np.isnan),
    "whether x is NaN",
    lambda g, x: g.ne(x, x),
    base=_FloatPredicate,
)
unary(
    "is_inf",
    _of_floats(np.isinf),
    "whether x is +inf or −inf",
    _is_inf_formula,
    base=_FloatPredicate,
)
unary(
    "is_finite", np.isfinite, "whether x is neither infinite nor NaN",
    _is_finite_formula, base=_FloatPredicate,
)  # fmt: skip
unary("signbit", np.signbit, "whether x is negative, or −0", _signbit_formula, base=Predicate)
unary(
    "logical_not", lambda x: x == 0, "whether x is zero (NaN is not)",
    lambda g, x: g.eq(x, g.constant(0, x.shape.dtype)), base=_AnyPredicate,
)  # fmt: skip
