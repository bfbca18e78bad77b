"""Elementwise functions of the array API standard, each one op of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.errors import DTypeError
from rlx.ir.dtype import DType, c64, promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array
from rlx.numpy.dispatch import apply, as_array, with_scalars

Function = Callable[..., Array]


def _unary(name: str, op: str, doc: str) -> Function:
    def build(g: Graph, x: Value) -> Any:
        return getattr(g, op)(x)

    def function(x: Any, /) -> Array:
        return apply(build, [as_array(x)], elementwise=True)

    build.__name__ = function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _binary(name: str, op: str, doc: str) -> Function:
    def build(g: Graph, a: Value, b: Value) -> Any:
        return getattr(g, op)(a, b)

    def function(x1: Any, x2: Any, /) -> Array:
        return apply(build, with_scalars(x1, x2), elementwise=True)

    build.__name__ = function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


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
isfinite = _unary("isfinite", "is_finite", "Whether each element is neither NaN nor infinite.")
negative = _unary("negative", "neg", "−x.")
square = _unary("square", "square", "x².")
reciprocal = _unary("reciprocal", "reciprocal", "1 / x.")
logical_not = _unary("logical_not", "logical_not", "Whether each element is false.")
isnan = _unary("isnan", "is_nan", "Whether each element is NaN.")
isinf = _unary("isinf", "is_inf", "Whether each element is infinite.")
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


def _whole(name: str, op: str, doc: str) -> Function:
    """A rounding: integers are whole already."""
    rounding = _unary(name, op, doc)

    def function(x: Any, /) -> Array:
        x = as_array(x)
        return x if x.dtype.is_integer else rounding(x)

    function.__name__, function.__doc__ = name, doc
    return function


floor = _whole("floor", "floor", "The next whole number towards −inf.")
ceil = _whole("ceil", "ceil", "The next whole number towards +inf.")
round = _whole("round", "round", "The nearest whole number, halves to the even one.")
trunc = _whole("trunc", "trunc", "The next whole number towards 0.")


def abs(x: Any, /) -> Array:
    """The magnitude of each element."""
    x = as_array(x)
    return x if x.dtype.kind == "uint" else _abs(x)


def positive(x: Any, /) -> Array:
    """The array itself."""
    return as_array(x)


def _where(g: Graph, condition: Value, a: Value, b: Value) -> Any:
    return g.where(condition, a, b)


def where(condition: Any, x1: Any, x2: Any, /) -> Array:
    """x1 where the condition holds, else x2."""
    a, b = with_scalars(x1, x2)
    return apply(_where, [as_array(condition), a, b], elementwise=True)


def _clip(g: Graph, x: Value, *bounds: Any) -> Any:
    *given, which = bounds
    for kind, bound in zip(which, given, strict=True):
        bound = bound.astype(x.shape.dtype)
        x = g.maximum(x, bound) if kind == "low" else g.minimum(x, bound)
    return x


def clip(x: Any, /, min: Any = None, max: Any = None) -> Array:
    """Each element limited to min … max."""
    x = as_array(x)
    named = [("low", min), ("high", max)]
    which = tuple([kind for kind, bound in named if bound is not None])
    bounds = [with_scalars(x, bound)[1] for _, bound in named if bound is not None]
    return apply(_clip, [x, *bounds], which, elementwise=True) if which else x


def _part(op: str) -> Function:
    def build(g: Graph, x: Value) -> Any:
        return getattr(g, op)(x)

    def function(x: Any, /) -> Array:
        x = as_array(x)
        if x.dtype is not c64:
            raise DTypeError(f"{op} is of complex arrays", got=x.dtype, expected="complex64")
        return apply(build, [x], elementwise=True)

    build.__name__ = function.__name__ = op
    function.__doc__ = f"The {op} part."
    return function


real = _part("real")
imag = _part("imag")


def _conj(g: Graph, x: Value) -> Any:
    return g.complex(g.real(x), -g.imag(x))


def conj(x: Any, /) -> Array:
    """The complex conjugate; real arrays are their own."""
    x = as_array(x)
    return apply(_conj, [x], elementwise=True) if x.dtype is c64 else x


def _astype(g: Graph, x: Value, dtype: DType) -> Any:
    return x.astype(dtype)


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: object = None) -> Array:
    """The elements in another type."""
    x, element = as_array(x), DType.of(dtype)
    return x if x.dtype is element else apply(_astype, [x], element, elementwise=True)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The element type that the arrays and types promote to."""
    kinds = [x if isinstance(x, DType) else None for x in arrays_and_dtypes]
    pairs = zip(kinds, arrays_and_dtypes, strict=True)
    arrays = with_scalars(*[x for kind, x in pairs if kind is None])
    return promote(*[k for k in kinds if k is not None], *[x.dtype for x in arrays])


relu = _unary("relu", "relu", "max(x, 0).")
sigmoid = _unary("sigmoid", "sigmoid", "1 / (1 + e^−x).")
silu = _unary("silu", "silu", "x · sigmoid(x).")
gelu = _unary("gelu", "gelu", "x · (1 + erf(x / √2)) / 2.")
gelu_tanh = _unary("gelu_tanh", "gelu_tanh", "GELU by its approximation with tanh.")
softplus = _unary("softplus", "softplus", "ln(1 + e^x).")
erf = _unary("erf", "erf", "The error function.")
