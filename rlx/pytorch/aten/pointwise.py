"""Elementwise ops: arithmetic, comparisons, logic, activations, casts and `where`.

PyTorch says the type of each result. Operands are brought to it first; where that is a truth value,
to the type that PyTorch would compare in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlx.ir.dtype import f32
from rlx.ir.node import Value
from rlx.pytorch.aten.table import aten

if TYPE_CHECKING:
    from rlx.pytorch.lower_aten import Lowering

_UNARY = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "cos",
    "cosh",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "log",
    "log10",
    "log1p",
    "log2",
    "neg",
    "reciprocal",
    "relu",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
    "bitwise_not",
]
_BINARY = {
    "mul": "mul", "maximum": "maximum", "minimum": "minimum", "atan2": "atan2", "hypot": "hypot",
    "copysign": "copysign", "logaddexp": "logaddexp", "bitwise_and": "bitwise_and",
    "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor", "pow": "pow",
    "floor_divide": "floor_div", "remainder": "mod", "fmax": "maximum", "fmin": "minimum",
    "bitwise_left_shift": "shift_left", "bitwise_right_shift": "shift_right",
    "__lshift__": "shift_left", "__rshift__": "shift_right",
}  # fmt: skip
_ONLY_FINITE_EXTREMA = ("fmax", "fmin")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_TESTS = {"isnan": "is_nan", "isinf": "is_inf", "isfinite": "is_finite", "signbit": "signbit"}
_LOGICAL = ("logical_and", "logical_or", "logical_xor")


def _unary(name: str) -> Callable[..., Value]:
    def build(low: Lowering, x: Value) -> Value:
        made: Value = low.g.apply(name, low.tensor(x, low.out.dtype))
        return made

    return build


def _binary(name: str) -> Callable[..., Value]:
    op = _BINARY[name]
    by_logic = op.startswith("bitwise_")

    def build(low: Lowering, a: Any, b: Any) -> Value:
        element = low.out.dtype
        left, right = low.tensor(a, element), low.tensor(b, element)
        if element.kind == "bool":  # of truth values only logic is left
            logic = {"mul": "logical_and", "maximum": "logical_or", "minimum": "logical_and"}
            chosen = op.replace("bitwise", "logical") if by_logic else logic[op]
            return low.g.apply(chosen, left, right)  # type: ignore[no-any-return]
        made: Value = low.g.apply(op, left, right)
        if name in _ONLY_FINITE_EXTREMA and element.is_float:  # a NaN loses
            made = low.g.where(low.g.is_nan(left), right, made)
            made = low.g.where(low.g.is_nan(right), left, made)
        return made

    return build


def _compare(name: str) -> Callable[..., Value]:
    def build(low: Lowering, a: Any, b: Any) -> Value:
        element = low.promoted(0, 1)
        if element.kind == "bool":
            left, right = low.tensor(a, element), low.tensor(b, element)
            if name in ("eq", "ne"):
                differ = low.g.logical_xor(left, right)
                return differ if name == "ne" else low.g.logical_not(differ)
            element = f32
        made: Value = low.g.apply(name, low.tensor(a, element), low.tensor(b, element))
        return made

    return build


def _test(name: str) -> Callable[..., Value]:
    def build(low: Lowering, x: Value) -> Value:
        made: Value = low.g.apply(_TESTS[name], x)
        return made

    return build


def _truth(low: Lowering, x: Value) -> Value:
    return x if x.shape.dtype.kind == "bool" else low.g.ne(x, low.scalar(0, x.shape.dtype))


def _logic(name: str) -> Callable[..., Value]:
    def build(low: Lowering, a: Value, b: Value) -> Value:
        made: Value = low.g.apply(name, _truth(low, a), _truth(low, b))
        return made

    return build


for _name in _UNARY:
    aten(f"{_name}.default")(_unary(_name))
for _name in ("mul", "bitwise_and", "bitwise_or", "bitwise_xor", "remainder"):
    aten(f"{_name}.Tensor", f"{_name}.Scalar")(_binary(_name))
for _name in ("bitwise_left_shift", "bitwise_right_shift", "copysign"):
    aten(f"{_name}.Tensor")(_binary(_name))
for _name in ("__lshift__", "__rshift__"):
    aten(f"{_name}.Scalar")(_binary(_name))
for _name in ("maximum", "minimum", "atan2", "hypot", "logaddexp", "fmax", "fmin", "floor_divide"):
    aten(f"{_name}.default")(_binary(_name))
aten("pow.Tensor_Tensor")(_binary("pow"))
for _name in _COMPARE:
    aten(f"{_name}.Tensor", f"{_name}.Scalar")(_compare(_name))
for _name in _TESTS:
    aten(f"{_name}.default")(_test(_name))
for _name in _LOGICAL:
    aten(f"{_name}.default")(_logic(_name))


@aten("add.Tensor", "add.Scalar")
def add(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> Value:
    element = low.out.dtype
    left, right = low.tensor(a, element), low.tensor(b, element)
    if element.kind == "bool":
        return low.g.logical_or(left, right)
    return low.g.add(left, right if alpha == 1 else low.g.mul(right, low.scalar(alpha, element)))


@aten("sub.Tensor", "sub.Scalar")
def sub(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> Value:
    element = low.out.dtype
    left, right = low.tensor(a, element), low.tensor(b, element)
    return low.g.sub(left, right if alpha == 1 else low.g.mul(right, low.scalar(alpha, element)))


@aten("rsub.Tensor", "rsub.Scalar")
def rsub(low: Lowering, a: Any, b: Any, alpha: Any = 1) -> Value:
    element = low.out.dtype
    return low.g.sub(low.tensor(b, element), low.g.mul(low.tensor(a, element),
                                                       low.scalar(alpha, element)))  # fmt: skip


@aten("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(low: Lowering, a: Any, b: Any) -> Value:
    element = low.out.dtype
    return low.g.div(low.tensor(a, element), low.tensor(b, element))


@aten("div.Tensor_mode", "div.Scalar_mode")
def div_mode(low: Lowering, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    element = low.out.dtype
    left, right = low.tensor(a, element), low.tensor(b, element)
    if rounding_mode == "floor":
        return low.g.floor_div(left, right)
    if rounding_mode == "trunc" and element.is_integer:  # towards zero: magnitudes, then the sign
        size = low.g.floor_div(low.g.abs(left), low.g.abs(right))
        return low.g.mul(size, low.g.mul(low.g.sign(left), low.g.sign(right)))
    quotient = low.g.div(left, right)
    return quotient if rounding_mode is None else low.g.trunc(quotient)


@aten("fmod.Tensor", "fmod.Scalar")
def fmod(low: Lowering, a: Any, b: Any) -> Value:
    """a − b · trunc(a / b): the sign is a's."""
    g, element = low.g, low.out.dtype
    left, right = low.tensor(a, element), low.tensor(b, element)
    size = g.mod(g.abs(left), g.abs(right))
    below = g.lt(left, low.scalar(0, element))
    return g.where(below, g.neg(size), size)


@aten("pow.Tensor_Scalar")
def pow_scalar(low: Lowering, x: Value, exponent: Any) -> Value:
    g, element = low.g, low.out.dtype
    base = low.tensor(x, element)
    if exponent == 2:
        return g.square(base)
    if exponent == 3:
        return g.mul(g.square(base), base)
    if exponent == 0.5:
        return g.sqrt(base)
    if exponent == -0.5:
        return g.rsqrt(base)
    return g.pow(base, low.scalar(exponent, element))


@aten("pow.Scalar")
def scalar_pow(low: Lowering, base: Any, x: Value) -> Value:
    element = low.out.dtype
    return low.g.pow(low.scalar(base, element), low.tensor(x, element))


@aten("logical_not.default")
def logical_not(low: Lowering, x: Value) -> Value:
    return low.g.logical_not(_truth(low, x))


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(low: Lowering, condition: Value, a: Any, b: Any) -> Value:
    element = low.out.dtype
    return low.g.where(_truth(low, condition), low.tensor(a, element), low.tensor(b, element))


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(low: Lowering, x: Value, mask: Value, value: Any) -> Value:
    return low.g.where(mask, low.tensor(value, low.out.dtype), x)


@aten("clamp.default", "clip.default")
def clamp(low: Lowering, x: Value, low_bound: Any = None, high: Any = None, **named: Any) -> Value:
    g, element = low.g, low.out.dtype
    made = low.tensor(x, element)
    bottom, top = named.get("min", low_bound), named.get("max", high)
    if element.is_float:
        numbers = (-math.inf if bottom is None else bottom, math.inf if top is None else top)
        if all(isinstance(n, (int, float)) for n in numbers) and numbers[0] <= numbers[1]:
            return g.clamp(made, low=float(numbers[0]), high=float(numbers[1]))
    return clamp_tensor(low, made, bottom, top)


@aten("clamp.Tensor")
def clamp_tensor(low: Lowering, x: Value, bottom: Any = None, top: Any = None) -> Value:
    element = low.out.dtype
    made = low.tensor(x, element)
    if bottom is not None:
        made = low.g.maximum(made, low.tensor(bottom, element))
    return made if top is None else low.g.minimum(made, low.tensor(top, element))


@aten("clamp_min.default", "clamp_min.Tensor")
def clamp_min(low: Lowering, x: Value, bottom: Any) -> Value:
    return clamp_tensor(low, x, bottom)


@aten("clamp_max.default", "clamp_max.Tensor")
def clamp_max(low: Lowering, x: Value, top: Any) -> Value:
    return clamp_tensor(low, x, None, top)


# -- activations ------------------------------------------------------------------------------


@aten("gelu.default")
def gelu(low: Lowering, x: Value, approximate: str = "none") -> Value:
    return low.g.gelu_tanh(x) if approximate == "tanh" else low.g.gelu(x)


@aten("leaky_relu.default")
def leaky_relu(low: Lowering, x: Value, slope: float = 0.01) -> Value:
    return low.g.leaky_relu(x, alpha=float(slope))


@aten("elu.default")
def elu(low: Lowering, x: Value, alpha: Any = 1.0, scale: Any = 1.0, inner: Any = 1.0) -> Value:
    """scale · (x, or alpha · (e^(inner · x) − 1) where x ≤ 0)"""
    if inner == 1:
        y = low.g.elu(x, alpha=float(alpha))
    else:
        element = x.shape.dtype
        grown = low.g.expm1(low.g.mul(x, low.scalar(inner, element)))
        below = low.g.mul(grown, low.scalar(alpha, element))
        y = low.g.where(low.g.gt(x, low.scalar(0, element)), x, below)
    return y if scale == 1 else low.g.mul(y, low.scalar(scale, x.shape.dtype))


@aten("softplus.default")
def softplus(low: Lowering, x: Value, beta: Any = 1, threshold: Any = 20) -> Value:
    """ln(1 + e^(beta · x)) / beta; x itself where beta · x > threshold."""
    g, element = low.g, x.shape.dtype
    if beta == 1:
        y, scaled = g.softplus(x), x
    else:
        scaled = g.mul(x, low.scalar(beta, element))
        y = g.div(g.softplus(scaled), low.scalar(beta, element))
    return g.where(g.gt(scaled, low.scalar(threshold, element)), x, y)


@aten("hardtanh.default")
def hardtanh(low: Lowering, x: Value, bottom: Any = -1.0, top: Any = 1.0) -> Value:
    return clamp(low, x, bottom, top)


@aten("relu6.default")
def relu6(low: Lowering, x: Value) -> Value:
    return clamp(low, x, 0, 6)


@aten("hardsigmoid.default")
def hardsigmoid(low: Lowering, x: Value) -> Value:
    return low.g.hard_sigmoid(x)


@aten("hardswish.default")
def hardswish(low: Lowering, x: Value) -> Value:
    return low.g.hard_swish(x)


@aten("mish.default")
def mish(low: Lowering, x: Value) -> Value:
    return low.g.mul(x, low.g.tanh(low.g.softplus(x)))


@aten("log_sigmoid_forward.default")
def log_sigmoid_forward(low: Lowering, x: Value) -> tuple[Value, Value]:
    """−softplus(−x), and a buffer that is empty on this device."""
    y = low.g.neg(low.g.softplus(low.g.neg(x)))
    return y, low.full(0, low.outs(1))


@aten("prelu.default", "_prelu_kernel.default")
def prelu(low: Lowering, x: Value, weight: Value) -> Value:
    g, rank = low.g, x.shape.rank
    if weight.shape.rank == 1 and rank > 1 and weight.shape.dims[0] != 1:
        weight = low.reshape(weight, (weight.shape.dims[0], *[1] * (rank - 2)))
    return g.where(g.gt(x, low.scalar(0, x.shape.dtype)), x, g.mul(x, weight))


@aten("glu.default")
def glu(low: Lowering, x: Value, axis: int = -1) -> Value:
    at = axis % x.shape.rank
    half = x.shape.dims[at] // 2
    left, right = (low.g.narrow(x, axis=at, start=s, length=half) for s in (0, half))
    return low.g.mul(left, low.g.sigmoid(right))


@aten("addcmul.default")
def addcmul(low: Lowering, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    product = low.g.mul(low.tensor(a, low.out.dtype), low.tensor(b, low.out.dtype))
    if value != 1:
        product = low.g.mul(product, low.scalar(value, low.out.dtype))
    return low.g.add(low.tensor(x, low.out.dtype), product)


@aten("addcdiv.default")
def addcdiv(low: Lowering, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    quotient = low.g.div(low.tensor(a, low.out.dtype), low.tensor(b, low.out.dtype))
    if value != 1:
        quotient = low.g.mul(quotient, low.scalar(value, low.out.dtype))
    return low.g.add(low.tensor(x, low.out.dtype), quotient)


@aten("lerp.Scalar", "lerp.Tensor")
def lerp(low: Lowering, a: Value, b: Value, weight: Any) -> Value:
    part = low.tensor(weight, low.out.dtype)
    return low.g.add(a, low.g.mul(low.g.sub(b, a), part))


@aten("erfc.default")
def erfc(low: Lowering, x: Value) -> Value:
    return low.g.sub(1.0, low.g.erf(low.tensor(x, low.out.dtype)))


# -- casts and copies -------------------------------------------------------------------------


@aten("_to_copy.default", "to.dtype", "to.dtype_layout", "to.device")
def to_copy(low: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    """Another type; devices and layouts are those of the host."""
    if low.out.dtype.kind == "bool":
        return _truth(low, x)
    return low.cast(x, low.out.dtype)


@aten("copy.default")
def copy(low: Lowering, to: Value, source: Value, non_blocking: bool = False) -> Value:
    return low.expand(low.cast(source, to.shape.dtype), to.shape.dims)


@aten(
    "clone.default", "alias.default", "detach.default", "lift_fresh_copy.default",
    "lift_fresh.default", "contiguous.default", "positive.default", "view_as.default",
)  # fmt: skip
def same(low: Lowering, x: Value, *_: Any, **__: Any) -> Value:
    """The tensor itself: values do not change, so nothing needs a copy."""
    return x
