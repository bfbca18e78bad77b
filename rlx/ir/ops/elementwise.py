"""Ops of one tensor, element by element; those of two are in binary.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from rlx.errors import AttributeValueError, DTypeError
from rlx.ir.dtype import DType, bool_, f32
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import ANY, NUMERIC, REAL, compute, quiet, require_kind, rounded
from rlx.ir.shape import Shape


class Unary(Op):
    """An op whose result element depends on one operand element; keeps the element type."""

    is_elementwise = True
    takes: ClassVar[Sequence[str]] = REAL
    weight: ClassVar[int] = 1  # operations per element, for the cost

    def apply(self, x: Array) -> Array:
        """The function itself, on an array in compute precision."""
        raise NotImplementedError

    def result(self, element: DType) -> DType:
        """The element type of the result."""
        return element

    def infer(self, x: Shape) -> Shape:
        require_kind(x, self.takes, "operand")
        return x.with_dtype(self.result(x.dtype))

    def reference(self, x: Array) -> Array:
        with quiet():
            return rounded(self.apply(compute(x)), self.result(DType.of(x.dtype)))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        plain = super().cost(inputs, outputs)
        return plain._replace(flops=plain.flops * self.weight)


class FloatUnary(Unary):
    """A function of real numbers: integers and bools become f32 first.

    The reference evaluates in f64 and rounds once, so that it is the nearest value of the type.
    """

    takes = (*REAL, "bool")
    weight = 8

    def result(self, element: DType) -> DType:
        return element if element.is_float else f32

    def reference(self, x: Array) -> Array:
        element = self.result(DType.of(x.dtype))
        with quiet():
            return rounded(self.apply(rounded(x, element).astype(np.float64)), element)


class Question(Unary):
    """A question about each element, answered with a bool."""

    def result(self, element: DType) -> DType:
        return bool_


def _define(base: type[Unary], name: str, function: Callable[[Any], Any], doc: str) -> None:
    space = {"apply": lambda self, x: function(x), "__doc__": doc}
    op(name)(type(name.title().replace("_", ""), (base,), space))


# -- functions of real numbers: name, NumPy function, what it is ------------------------------


def _each(function: Callable[[float], float]) -> Callable[[Any], Any]:
    """A function of `math` over an array: as exact as the C library, without SciPy."""

    def over(x: Any) -> Any:
        flat = x.ravel().tolist()
        return np.fromiter(map(function, flat), np.float64, len(flat)).reshape(x.shape)

    return over


_erf, _erfc = _each(math.erf), _each(math.erfc)


def _sigmoid(x: Any) -> Any:
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _gelu_tanh(x: Any) -> Any:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    # (1 + tanh z) / 2 is sigmoid(2z), which keeps its digits where tanh is near −1
    return x * _sigmoid(2 * inner)


def _softplus(x: Any) -> Any:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


_FLOAT: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("exp", np.exp, "e^x"),
    ("expm1", np.expm1, "e^x − 1, exact near 0"),
    ("log", np.log, "ln x; −inf at 0, NaN below"),
    ("log1p", np.log1p, "ln(1 + x), exact near 0"),
    ("sqrt", np.sqrt, "√x; NaN below 0"),
    ("rsqrt", lambda x: 1.0 / np.sqrt(x), "1 / √x; inf at 0, NaN below"),
    ("reciprocal", lambda x: 1.0 / x, "1 / x; ±inf at ±0"),
    ("sin", np.sin, "sin x, x in radians"),
    ("cos", np.cos, "cos x, x in radians"),
    ("tan", np.tan, "tan x, x in radians"),
    ("tanh", np.tanh, "tanh x"),
    ("erf", _erf, "the error function, 2/√π ∫₀ˣ e^(−t²) dt"),
    ("sigmoid", _sigmoid, "1 / (1 + e^−x)"),
    ("silu", lambda x: x * _sigmoid(x), "x · sigmoid(x)"),
    ("gelu", lambda x: 0.5 * x * _erfc(x * -math.sqrt(0.5)), "x · (1 + erf(x / √2)) / 2"),
    ("gelu_tanh", _gelu_tanh, "x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2"),
    ("gelu_quick", lambda x: x * _sigmoid(1.702 * x), "x · sigmoid(1.702 x)"),
    ("softplus", _softplus, "ln(1 + e^x)"),
)

for _name, _function, _doc in _FLOAT:
    _define(FloatUnary, _name, _function, _doc)


@op("leaky_relu")
class LeakyRelu(FloatUnary):
    """x where x ≥ 0, else alpha · x"""

    alpha: float = 0.01

    def apply(self, x: Array) -> Array:
        return np.where(x >= 0, x, self.alpha * x)


@op("elu")
class Elu(FloatUnary):
    """x where x ≥ 0, else alpha · (e^x − 1)"""

    alpha: float = 1.0

    def apply(self, x: Array) -> Array:
        return np.where(x >= 0, x, self.alpha * np.expm1(x))


# -- functions that keep the element type; integers wrap --------------------------------------


class _Numeric(Unary):
    takes = NUMERIC


class _Rounding(Unary):
    """Integers are whole already."""

    def reference(self, x: Array) -> Array:
        return super().reference(x) if DType.of(x.dtype).is_float else x


class _Bits(Unary):
    takes = ("int", "uint", "bool")


_define(_Numeric, "neg", np.negative, "−x")
_define(_Numeric, "square", lambda x: x * x, "x²")
_define(Unary, "sign", np.sign, "−1, 0 or 1; NaN of NaN")
_define(Unary, "relu", lambda x: np.maximum(x, 0), "max(x, 0); NaN of NaN")
_define(_Rounding, "floor", np.floor, "the next whole number towards −inf")
_define(_Rounding, "ceil", np.ceil, "the next whole number towards +inf")
_define(_Rounding, "round", np.rint, "the nearest whole number, halves to the even one")
_define(_Rounding, "trunc", np.trunc, "the next whole number towards 0")
_define(_Bits, "bitwise_not", np.invert, "every bit flipped; logical not of a bool")


@op("abs")
class Abs(_Numeric):
    """|x|; of a complex number its magnitude, an f32"""

    def apply(self, x: Array) -> Array:
        return np.abs(x)

    def result(self, element: DType) -> DType:
        return f32 if element.kind == "complex" else element


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

    def bounds(self, element: DType) -> tuple[float, float]:
        """The bounds as numbers of that type: for an integer type, ints inside its range."""
        if not element.is_integer:
            return self.low, self.high
        range_ = np.iinfo(element.numpy)
        least, most = int(range_.min), int(range_.max)

        def fit(bound: float) -> int:
            return least if bound <= least else most if bound >= most else int(bound)

        return fit(self.low), fit(self.high)


# -- questions --------------------------------------------------------------------------------


class _AnyQuestion(Question):
    takes = ANY


def _of_floats(test: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Integers are neither NaN nor infinite."""
    return lambda x: test(x) if x.dtype.kind == "f" else np.zeros(x.shape, np.bool_)


_define(Question, "is_nan", _of_floats(np.isnan), "whether x is NaN")
_define(Question, "is_inf", _of_floats(np.isinf), "whether x is +inf or −inf")
_define(_AnyQuestion, "logical_not", lambda x: x == 0, "whether x is zero (NaN is not)")


# -- cast -------------------------------------------------------------------------------------


@op("cast")
class Cast(Unary):
    """x in another element type.

    To a float type: the nearest value. From float to integer: towards 0, what does not fit becomes
    the nearest bound and NaN becomes 0. Between integers: the low bits. To bool: whether not 0.
    """

    takes = ANY
    dtype: DType

    def result(self, element: DType) -> DType:
        return self.dtype

    def infer(self, x: Shape) -> Shape:
        if x.dtype.kind == "complex" and self.dtype.kind != "complex":
            raise DTypeError(
                "a complex number has no real value", got=f"{x} to {self.dtype}",
                hint="take real, imag or abs of it",
            )  # fmt: skip
        return super().infer(x)

    def reference(self, x: Array) -> Array:
        if self.dtype.is_integer and DType.of(x.dtype).is_float:
            return _saturated(x, self.dtype)
        if self.dtype is bool_:
            return rounded(compute(x) != 0, bool_)
        return rounded(x, self.dtype)


def _saturated(x: Array, dtype: DType) -> Array:
    limits: Any = np.iinfo(dtype.numpy)
    # as floats the bounds of 64-bit types are one past the end, hence ≥ and the strict <
    low, high = float(limits.min), float(limits.max)
    wide = np.asarray(x, np.float64)
    inside = (wide > low) & (wide < high)  # false for NaN
    result = np.where(inside, wide, 0.0).astype(dtype.numpy)
    result[wide >= high] = limits.max
    result[wide <= low] = limits.min
    return result
