"""Activations: elementwise functions, gated ones, and softmax with its kin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rlx.numpy as rnp
from rlx import random
from rlx.errors import ShapeError
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.nn.functional.operands import ArrayLike, call, call_elementwise, require_option
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array

Activation = Callable[[ArrayLike], Array]


def _op(g: Graph, x: Value, op: str, *options: float) -> Any:
    return getattr(g, op)(x, *options)


def relu(x: ArrayLike) -> Array:
    """max(x, 0)."""
    return call_elementwise(_op, x, "relu")


def sigmoid(x: ArrayLike) -> Array:
    """1 / (1 + e^−x)."""
    return call_elementwise(_op, x, "sigmoid")


def tanh(x: ArrayLike) -> Array:
    """The hyperbolic tangent."""
    return call_elementwise(_op, x, "tanh")


def silu(x: ArrayLike) -> Array:
    """x · sigmoid(x), also called swish."""
    return call_elementwise(_op, x, "silu")


def gelu(x: ArrayLike, approximate: str = "none") -> Array:
    """x · Φ(x); `approximate="tanh"` by tanh, `"quick"` as x · sigmoid(1.702 x)."""
    ops = {"none": "gelu", "tanh": "gelu_tanh", "quick": "gelu_quick"}
    require_option(approximate, list(ops), "gelu.approximate")
    return call_elementwise(_op, x, ops[approximate])


def gelu_tanh(x: ArrayLike) -> Array:
    """GELU by its approximation with tanh."""
    return call_elementwise(_op, x, "gelu_tanh")


def elu(x: ArrayLike, alpha: float = 1.0) -> Array:
    """x where x ≥ 0, else alpha · (e^x − 1)."""
    return call_elementwise(_op, x, "elu", float(alpha))


def leaky_relu(x: ArrayLike, negative_slope: float = 0.01) -> Array:
    """x where x ≥ 0, else negative_slope · x."""
    return call_elementwise(_op, x, "leaky_relu", float(negative_slope))


def _scaled_elu(g: Graph, x: Value, scale: float, alpha: float) -> Any:
    return g.mul(g.elu(x, alpha), scale)


def selu(x: ArrayLike) -> Array:
    """ELU scaled such that layers keep mean 0 and variance 1 (Klambauer et al., 2017)."""
    return call_elementwise(_scaled_elu, x, 1.0507009873554805, 1.6732632423543772)


def _celu(g: Graph, x: Value, alpha: float) -> Any:
    negative = g.mul(g.expm1(g.div(g.minimum(x, 0.0), alpha)), alpha)
    return g.add(g.maximum(x, 0.0), negative)


def celu(x: ArrayLike, alpha: float = 1.0) -> Array:
    """max(x, 0) + min(alpha · (e^(x / alpha) − 1), 0)."""
    return call_elementwise(_celu, x, float(alpha))


def _softplus(g: Graph, x: Value, beta: float, threshold: float) -> Any:
    scaled = g.mul(x, beta)
    smooth = g.div(g.softplus(scaled), beta)
    return g.where(g.gt(scaled, threshold), x, smooth)


def softplus(x: ArrayLike, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """ln(1 + e^(beta x)) / beta; x itself where beta · x is above the threshold."""
    return call_elementwise(_softplus, x, float(beta), float(threshold))


def _mish(g: Graph, x: Value) -> Any:
    return g.mul(x, g.tanh(g.softplus(x)))


def mish(x: ArrayLike) -> Array:
    """x · tanh(softplus(x))."""
    return call_elementwise(_mish, x)


def _clipped(g: Graph, x: Value, low: float, high: float) -> Any:
    return g.clamp(x, low, high)


def relu6(x: ArrayLike) -> Array:
    """x limited to 0 … 6."""
    return call_elementwise(_op, x, "relu6")


def hardtanh(x: ArrayLike, min_val: float = -1.0, max_val: float = 1.0) -> Array:
    """x limited to min_val … max_val."""
    return call_elementwise(_clipped, x, float(min_val), float(max_val))


def hardsigmoid(x: ArrayLike) -> Array:
    """(x + 3) / 6 limited to 0 … 1."""
    return call_elementwise(_op, x, "hard_sigmoid")


def hardswish(x: ArrayLike) -> Array:
    """x · hardsigmoid(x)."""
    return call_elementwise(_op, x, "hard_swish")


def _logsigmoid(g: Graph, x: Value) -> Any:
    return g.neg(g.softplus(g.neg(x)))


def logsigmoid(x: ArrayLike) -> Array:
    """ln sigmoid(x)."""
    return call_elementwise(_logsigmoid, x)


def _softsign(g: Graph, x: Value) -> Any:
    return g.div(x, g.add(g.abs(x), 1.0))


def softsign(x: ArrayLike) -> Array:
    """x / (1 + |x|)."""
    return call_elementwise(_softsign, x)


def _tanhshrink(g: Graph, x: Value) -> Any:
    return g.sub(x, g.tanh(x))


def tanhshrink(x: ArrayLike) -> Array:
    """x − tanh x."""
    return call_elementwise(_tanhshrink, x)


def _shrink(g: Graph, x: Value, bound: float, soft: bool) -> Any:
    moved = g.sub(x, g.mul(g.sign(x), bound)) if soft else x
    return g.where(g.gt(g.abs(x), bound), moved, g.mul(x, 0.0))


def softshrink(x: ArrayLike, lambd: float = 0.5) -> Array:
    """x moved towards 0 by `lambd`, 0 where that would cross it."""
    return call_elementwise(_shrink, x, float(lambd), True)


def hardshrink(x: ArrayLike, lambd: float = 0.5) -> Array:
    """x where |x| > lambd, else 0."""
    return call_elementwise(_shrink, x, float(lambd), False)


def _threshold(g: Graph, x: Value, bound: float, value: float) -> Any:
    return g.where(g.gt(x, bound), x, value)


def threshold(x: ArrayLike, bound: float, value: float) -> Array:
    """x where it is above the bound, else `value`."""
    return call_elementwise(_threshold, x, float(bound), float(value))


def _prelu(g: Graph, x: Value, weight: Value, after: int) -> Any:
    if weight.shape.rank and after:
        weight = g.reshape(weight, (*weight.shape.dims, *[1] * after))
    return g.where(g.gt(x, 0.0), x, g.mul(x, weight))


def prelu(x: ArrayLike, weight: ArrayLike) -> Array:
    """x where x > 0, else weight · x; a weight per channel (axis 1), or one for all."""
    x, weight = as_array(x), as_array(weight)
    return call(_prelu, [x, weight], max(x.ndim - 2, 0))


def _gated(g: Graph, x: Value, axis: int, activation: str, first: bool) -> Any:
    half = x.shape.dims[axis] // 2
    a, b = (g.narrow(x, axis=axis, start=s, length=half) for s in (0, half))
    gate, other = (a, b) if first else (b, a)
    return g.mul(other, gate if activation == "none" else getattr(g, activation)(gate))


def _require_halves(x: ArrayLike, axis: int, where: str) -> Array:
    made = as_array(x)
    if not made.ndim or int(made.shape[axis] % 2):
        raise ShapeError("an axis without two halves", where=where, got=str(list(made.shape)))
    return made


def glu(x: ArrayLike, axis: int = -1) -> Array:
    """first half · sigmoid(second half) of an axis."""
    made = _require_halves(x, axis, "glu")
    return call(_gated, [made], axis % made.ndim, "sigmoid", False)


def swiglu(x: ArrayLike, axis: int = -1) -> Array:
    """silu(first half) · second half of an axis."""
    made = _require_halves(x, axis, "swiglu")
    return call(_gated, [made], axis % made.ndim, "silu", True)


def geglu(x: ArrayLike, axis: int = -1) -> Array:
    """gelu(first half) · second half of an axis."""
    made = _require_halves(x, axis, "geglu")
    return call(_gated, [made], axis % made.ndim, "gelu", True)


def softmax(x: ArrayLike, axis: int = -1) -> Array:
    """e^x over its sum along an axis."""
    return rnp.softmax(x, axis)


def log_softmax(x: ArrayLike, axis: int = -1) -> Array:
    """The logarithm of the softmax along an axis."""
    return rnp.log_softmax(x, axis)


def softmin(x: ArrayLike, axis: int = -1) -> Array:
    """The softmax of −x."""
    return rnp.softmax(-as_array(x), axis)


def _log_sum_exp(g: Graph, x: Value, axis: int, keepdims: bool) -> Any:
    top = g.max(x, axis=(axis,), keepdims=True)
    safe = g.where(g.is_finite(top), top, 0.0)
    total = g.add(g.log(g.sum(g.exp(g.sub(x, safe)), axis=(axis,), keepdims=True)), safe)
    if keepdims:
        return total
    dims = [d for i, d in enumerate(total.shape.dims) if i != axis % x.shape.rank]
    return g.reshape(total, dims)


def logsumexp(x: ArrayLike, axis: int = -1, keepdims: bool = False) -> Array:
    """ln Σ e^x along an axis, without overflow."""
    return call(_log_sum_exp, [x], axis, keepdims)


def gumbel_softmax(
    logits: ArrayLike, key: Array, temperature: float = 1.0, hard: bool = False, axis: int = -1
) -> Array:
    """A draw from a categorical distribution, softened; one-hot where `hard`."""
    x = as_array(logits)
    noisy = rnp.divide(rnp.add(x, random.gumbel(key, x.shape, x.dtype)), float(temperature))
    if not hard:
        return softmax(noisy, axis)
    best = rnp.max(noisy, axis=axis, keepdims=True)
    return rnp.astype(rnp.equal(noisy, best), x.dtype)
