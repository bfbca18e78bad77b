"""Elementwise functions of the array API standard, each one op of the graph."""

from __future__ import annotations

import builtins
from typing import Any, Protocol

from rlx.errors import ArrayTypeError
from rlx.ir.dtype import DType, bf16, f16, f32, f64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array
from rlx.numpy.dispatch import apply, as_array, with_scalars
from rlx.numpy.typing import ArrayLike


class Unary(Protocol):
    """A function of one array."""

    def __call__(self, x: ArrayLike, /) -> Array: ...


class Binary(Protocol):
    """A function of two arrays that broadcast."""

    def __call__(self, x1: ArrayLike, x2: ArrayLike, /) -> Array: ...


def _named(function: Any, name: str, doc: str) -> Any:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _unary(name: str, op: str, doc: str) -> Unary:
    def build(g: Graph, x: Value) -> Any:
        return getattr(g, op)(x)

    def function(x: ArrayLike, /) -> Array:
        return apply(build, [as_array(x)], elementwise=True)

    build.__name__ = name
    return _named(function, name, doc)  # type: ignore[no-any-return]


def _binary(name: str, op: str, doc: str) -> Binary:
    def build(g: Graph, a: Value, b: Value) -> Any:
        return getattr(g, op)(a, b)

    def function(x1: ArrayLike, x2: ArrayLike, /) -> Array:
        return apply(build, with_scalars(x1, x2), elementwise=True)

    build.__name__ = name
    return _named(function, name, doc)  # type: ignore[no-any-return]


exp = _unary("exp", "exp", "e to the power of each element.")
expm1 = _unary("expm1", "expm1", "e^x − 1, exact near 0.")
log = _unary("log", "log", "The natural logarithm.")
log1p = _unary("log1p", "log1p", "ln(1 + x), exact near 0.")
sqrt = _unary("sqrt", "sqrt", "The square root.")
sin = _unary("sin", "sin", "The sine, of radians.")
cos = _unary("cos", "cos", "The cosine, of radians.")
tan = _unary("tan", "tan", "The tangent, of radians.")
tanh = _unary("tanh", "tanh", "The hyperbolic tangent.")
asin = _unary("asin", "asin", "The inverse sine.")
acos = _unary("acos", "acos", "The inverse cosine.")
atan = _unary("atan", "atan", "The inverse tangent.")
sinh = _unary("sinh", "sinh", "The hyperbolic sine.")
cosh = _unary("cosh", "cosh", "The hyperbolic cosine.")
asinh = _unary("asinh", "asinh", "The inverse hyperbolic sine.")
acosh = _unary("acosh", "acosh", "The inverse hyperbolic cosine.")
atanh = _unary("atanh", "atanh", "The inverse hyperbolic tangent.")
exp2 = _unary("exp2", "exp2", "2 to the power of each element.")
log2 = _unary("log2", "log2", "The logarithm to base 2.")
log10 = _unary("log10", "log10", "The logarithm to base 10.")
signbit = _unary("signbit", "signbit", "Whether the sign bit is set.")
_isfinite = _unary("isfinite", "is_finite", "Whether each element is neither NaN nor infinite.")
negative = _unary("negative", "neg", "−x.")
square = _unary("square", "square", "x².")
reciprocal = _unary("reciprocal", "reciprocal", "1 / x.")
logical_not = _unary("logical_not", "logical_not", "Whether each element is false.")
_isnan = _unary("isnan", "is_nan", "Whether each element is NaN.")
_isinf = _unary("isinf", "is_inf", "Whether each element is infinite.")
_abs = _unary("abs", "abs", "The magnitude.")
sign = _unary("sign", "sign", "−1, 0 or 1.")

add = _binary("add", "add", "x1 + x2.")
subtract = _binary("subtract", "sub", "x1 − x2.")
multiply = _binary("multiply", "mul", "x1 · x2.")
divide = _binary("divide", "div", "x1 / x2; integers become f32.")
floor_divide = _binary("floor_divide", "floor_div", "floor(x1 / x2).")
remainder = _binary("remainder", "mod", "The remainder of x1 / x2, with the sign of x2.")
pow = _binary("pow", "pow", "x1 to the power of x2.")
maximum = _binary("maximum", "maximum", "The greater of two elements.")
minimum = _binary("minimum", "minimum", "The lesser of two elements.")
atan2 = _binary("atan2", "atan2", "The angle of the point (x2, x1).")
hypot = _binary("hypot", "hypot", "√(x1² + x2²), without overflow.")
logaddexp = _binary("logaddexp", "logaddexp", "ln(e^x1 + e^x2).")
copysign = _binary("copysign", "copysign", "The magnitude of x1 with the sign of x2.")
bitwise_and = _binary("bitwise_and", "bitwise_and", "x1 & x2.")
bitwise_or = _binary("bitwise_or", "bitwise_or", "x1 | x2.")
bitwise_xor = _binary("bitwise_xor", "bitwise_xor", "x1 ^ x2.")
bitwise_left_shift = _binary("bitwise_left_shift", "shift_left", "x1 << x2.")
bitwise_right_shift = _binary("bitwise_right_shift", "shift_right", "x1 >> x2.")
bitwise_invert = _unary("bitwise_invert", "bitwise_not", "Every bit flipped.")
equal = _binary("equal", "eq", "x1 = x2.")
not_equal = _binary("not_equal", "ne", "x1 ≠ x2.")
less = _binary("less", "lt", "x1 < x2.")
less_equal = _binary("less_equal", "le", "x1 ≤ x2.")
greater = _binary("greater", "gt", "x1 > x2.")
greater_equal = _binary("greater_equal", "ge", "x1 ≥ x2.")
logical_and = _binary("logical_and", "logical_and", "x1 and x2.")
logical_or = _binary("logical_or", "logical_or", "x1 or x2.")
logical_xor = _binary("logical_xor", "logical_xor", "x1 or x2, not both.")


def _whole(rounding: Unary) -> Unary:
    """A rounding: integers and bools are whole already."""

    def function(x: ArrayLike, /) -> Array:
        array = as_array(x)
        return array.alias() if array.dtype.kind in ("int", "uint", "bool") else rounding(array)

    return _named(function, rounding.__name__, rounding.__doc__ or "")  # type: ignore[attr-defined, no-any-return]


floor = _whole(_unary("floor", "floor", "The next whole number towards −inf."))
ceil = _whole(_unary("ceil", "ceil", "The next whole number towards +inf."))
round = _whole(_unary("round", "round", "The nearest whole number, halves to the even one."))
trunc = _whole(_unary("trunc", "trunc", "The next whole number towards 0."))


def _flagged(flag: Unary, of_whole: builtins.bool) -> Unary:
    """A question about floats, whose answer for integers and bools is known."""

    def build(g: Graph, x: Value) -> Any:
        return g.eq(x, x) if of_whole else g.ne(x, x)

    def function(x: ArrayLike, /) -> Array:
        array = as_array(x)
        return (
            apply(build, [array], elementwise=True)
            if array.dtype.kind in ("int", "uint", "bool")
            else flag(array)
        )

    return _named(function, flag.__name__, flag.__doc__ or "")  # type: ignore[attr-defined, no-any-return]


isfinite = _flagged(_isfinite, True)
isinf = _flagged(_isinf, False)
isnan = _flagged(_isnan, False)


def abs(x: ArrayLike, /) -> Array:
    """The magnitude of each element."""
    array = as_array(x)
    return array.alias() if array.dtype.kind in ("uint", "bool") else _abs(array)


def positive(x: ArrayLike, /) -> Array:
    """The same elements."""
    return as_array(x).alias()


def _where(g: Graph, condition: Value, a: Value, b: Value) -> Any:
    return g.where(condition, a, b)


def where(condition: ArrayLike, x1: ArrayLike, x2: ArrayLike, /) -> Array:
    """x1 where the condition holds, else x2."""
    flags = as_array(condition)
    if flags.dtype.kind != "bool":
        raise ArrayTypeError(
            "not a condition", where="where", got=flags.dtype, expected="bool",
            hint="compare with 0: x != 0",
        )  # fmt: skip
    return apply(_where, [flags, *with_scalars(x1, x2)], elementwise=True)


def _clip(g: Graph, x: Value, *bounds: Any) -> Any:
    *given, which = bounds
    for kind, bound in zip(which, given, strict=True):
        x = g.maximum(x, bound) if kind == "low" else g.minimum(x, bound)
    return x


def clip(x: ArrayLike, /, min: ArrayLike | None = None, max: ArrayLike | None = None) -> Array:
    """Each element limited to min … max, which broadcast with x."""
    array = as_array(x)
    named = [("low", min), ("high", max)]
    which = tuple([kind for kind, bound in named if bound is not None])
    bounds = [_bound(array, bound) for _, bound in named if bound is not None]
    return apply(_clip, [array, *bounds], which, elementwise=True) if which else array.alias()


def _bound(x: Array, bound: ArrayLike) -> Array:
    """A bound in a type that promotes with x's; a whole number beyond it is its limit."""
    if type(bound) is int and x.dtype.is_integer:
        least, most = _limits(x.dtype)
        bound = builtins.min(builtins.max(bound, least), most)
    return with_scalars(x, bound)[1]


def _limits(element: DType) -> tuple[int, int]:
    """The least and the greatest integer of a type."""
    bits = element.bits - (element.kind == "int")
    return (-(1 << bits) if element.kind == "int" else 0), (1 << bits) - 1


def _part(op: str) -> Unary:
    def build(g: Graph, x: Value) -> Any:
        return getattr(g, op)(x)

    def function(x: ArrayLike, /) -> Array:
        array = as_array(x)
        if array.dtype.kind != "complex":
            if op == "real":
                return array.alias()
            raise ArrayTypeError(
                "the imaginary part of real numbers", where=op, got=array.dtype,
                expected="complex64 or complex128",
            )  # fmt: skip
        return apply(build, [array], elementwise=True)

    doc = "The real part." if op == "real" else "The imaginary part."
    return _named(function, op, doc)  # type: ignore[no-any-return]


real = _part("real")
imag = _part("imag")


def _conj(g: Graph, x: Value) -> Any:
    return g.complex(g.real(x), -g.imag(x))


def conj(x: ArrayLike, /) -> Array:
    """The complex conjugate; real arrays are their own."""
    array = as_array(x)
    return (
        apply(_conj, [array], elementwise=True) if array.dtype.kind == "complex" else array.alias()
    )


# bits of the significand and the least positive number
_FLOATS = {f16: (11, 2.0**-24), bf16: (8, 2.0**-133), f32: (24, 2.0**-149), f64: (53, 2.0**-1074)}


def _nextafter(g: Graph, a: Value, b: Value) -> Any:
    """By Rump, Zimmermann, Boldo and Melquiond: x ± φ|x| rounds to the neighbour for φ just above
    half a unit; small numbers are scaled first, and near 0 the neighbours are equally spaced."""
    element = a.shape.dtype
    bits, least = _FLOATS[element]
    wide = f64 if element is f64 else f32
    a, b = a.astype(wide), b.astype(wide)
    half = 2.0**-bits
    step = g.where(a < b, g.constant(1.0, wide), g.constant(-1.0, wide))

    def moved(x: Value) -> Value:
        around = x + step * (g.abs(x) * (half * (1 + 2 * half)))
        return around.astype(element).astype(wide)

    size = g.abs(a)
    small = moved(a * (1 / half)) * half
    near = g.where(size < least / half, a + step * least, small)
    found = g.where(size < least / half**2 / 2, near, moved(a))
    largest = g.constant((2 - 2 * half) * 2.0 ** (127 if bits in (24, 8) else 15 if bits == 11
                                                   else 1023), wide)  # fmt: skip
    found = g.where(g.is_inf(a), g.copysign(largest, a), found)
    found = g.where(found.eq(0.0), g.copysign(found, a), found)  # −least towards 0 is −0
    found = g.where(g.eq(a, b), b, found)
    found = g.where(g.logical_or(g.is_nan(a), g.is_nan(b)), a + b, found)
    return found.astype(element)


def nextafter(x1: ArrayLike, x2: ArrayLike, /) -> Array:
    """The next representable number after x1 towards x2."""
    a, b = with_scalars(x1, x2)
    for x in (a, b):
        if x.dtype not in _FLOATS or a.dtype is not b.dtype:
            raise ArrayTypeError(
                "not two floats of one type", where="nextafter", got=f"{a.dtype} and {b.dtype}"
            )
    return apply(_nextafter, [a, b], elementwise=True)


relu = _unary("relu", "relu", "max(x, 0).")
sigmoid = _unary("sigmoid", "sigmoid", "1 / (1 + e^−x).")
silu = _unary("silu", "silu", "x · sigmoid(x).")
gelu = _unary("gelu", "gelu", "x · (1 + erf(x / √2)) / 2.")
gelu_tanh = _unary("gelu_tanh", "gelu_tanh", "GELU by its approximation with tanh.")
softplus = _unary("softplus", "softplus", "ln(1 + e^x).")
erf = _unary("erf", "erf", "The error function.")
