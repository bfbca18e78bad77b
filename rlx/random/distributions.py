"""Distributions with a closed form: uniform, normal and their kin, choices and permutations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import rlx.numpy as rnp
from rlx.errors import InputError, ShapeError
from rlx.ir.dtype import DType, f32, i32, i64, u64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array
from rlx.random import transforms
from rlx.random.keys import bits
from rlx.random.words import Dims, ShapeArg, draw, float_type, sizes, words

Number = float | Array | np.ndarray[Any, Any]


def parameters(dtype: DType, *values: Number) -> list[Array]:
    return [rnp.astype(as_array(v), dtype) for v in values]


def shape_of(shape: ShapeArg | None, *values: Array) -> Any:
    """The given shape, or the one that the parameters broadcast to."""
    if shape is not None:
        return shape
    return values[0].shape if len(values) == 1 else rnp.add(*values).shape


def _uniform(
    g: Graph, key: Value, dims: Dims, low: Value, high: Value, dtype: DType
) -> Value:  # fmt: skip
    wide = transforms.wide_type(dtype)
    u = g.cast(transforms.unit(g, words(g, key, dims), dtype), wide)
    low, high = g.cast(low, wide), g.cast(high, wide)
    made = g.cast(g.add(g.mul(u, g.sub(high, low)), low), dtype)
    # rounding may reach the upper bound, which is not in the interval
    return g.where(g.lt(made, g.cast(high, dtype)), made, g.cast(low, dtype))


def _unit(g: Graph, key: Value, dims: Dims, dtype: DType) -> Value:
    return transforms.unit(g, words(g, key, dims), dtype)


def uniform(
    key: Array, shape: ShapeArg | None = None, dtype: Any = f32, minval: Number = 0.0,
    maxval: Number = 1.0,
) -> Array:  # fmt: skip
    """Uniform in [minval, maxval)."""
    element = float_type(dtype)
    if minval is not None and isinstance(minval, (int, float)) and isinstance(maxval, (int, float)):
        if not minval <= maxval:
            raise InputError("no such interval", where="uniform", got=f"[{minval}, {maxval})")
        if (minval, maxval) == (0, 1):
            return draw(_unit, key, () if shape is None else shape, (), element)
    bounds = parameters(element, minval, maxval)
    return draw(_uniform, key, shape_of(shape, *bounds), bounds, element)


def _standard(g: Graph, key: Value, dims: Dims, name: str, dtype: DType) -> Value:
    """A number of a standard distribution from one block of words."""
    wide = transforms.wide_type(dtype)
    return g.cast(getattr(transforms, name)(g, words(g, key, dims), wide), dtype)


def normal(key: Array, shape: ShapeArg = (), dtype: Any = f32) -> Array:
    """Normal with mean 0 and variance 1."""
    return draw(_standard, key, shape, (), "normal", float_type(dtype))


def exponential(key: Array, shape: ShapeArg = (), dtype: Any = f32) -> Array:
    """Exponential with mean 1."""
    return draw(_standard, key, shape, (), "exponential", float_type(dtype))


def gumbel(key: Array, shape: ShapeArg = (), dtype: Any = f32) -> Array:
    """Gumbel with location 0 and scale 1: the greatest of many, as in the Gumbel-max trick."""
    return draw(_standard, key, shape, (), "gumbel", float_type(dtype))


def _laplace(g: Graph, key: Value, dims: Dims, dtype: DType) -> Value:
    w, wide = words(g, key, dims), transforms.wide_type(dtype)
    size = transforms.exponential(g, w[:2], wide)
    return g.cast(g.where(_coin(g, w[2]), size, g.neg(size)), dtype)


def _coin(g: Graph, word: Value) -> Value:
    """Heads or tails by the top bit."""
    return g.lt(g.cast(word, i32), g.constant(np.int32(0)))


def laplace(key: Array, shape: ShapeArg = (), dtype: Any = f32) -> Array:
    """Laplace with location 0 and scale 1."""
    return draw(_laplace, key, shape, (), float_type(dtype))


def _rademacher(g: Graph, key: Value, dims: Dims, dtype: DType) -> Value:
    one = g.constant(np.array(1, dtype.numpy))
    return g.where(_coin(g, words(g, key, dims)[0]), one, g.neg(one))


def rademacher(key: Array, shape: ShapeArg = (), dtype: Any = i32) -> Array:
    """−1 or 1, each as likely."""
    element = DType.of(dtype)
    if element.kind not in ("int", "float"):
        raise InputError("no such signed type", where="rademacher", got=element)
    return draw(_rademacher, key, shape, (), element)


def _truncated(
    g: Graph, key: Value, dims: Dims, low: Value, high: Value, dtype: DType
) -> Value:  # fmt: skip
    wide = transforms.wide_type(dtype)
    low, high = g.cast(low, wide), g.cast(high, wide)
    below, above = (g.erf(g.mul(v, math.sqrt(0.5))) for v in (low, high))
    u = transforms.unit(g, words(g, key, dims), wide)
    at = g.add(g.mul(u, g.sub(above, below)), below)
    made = g.mul(transforms.erfinv(g, at, wide), math.sqrt(2.0))
    return g.cast(g.minimum(g.maximum(made, low), high), dtype)


def truncated_normal(
    key: Array, lower: Number, upper: Number, shape: ShapeArg | None = None, dtype: Any = f32
) -> Array:
    """Normal between two bounds, by the inverse of its distribution function. Bounds beyond 5
    (f32) or 8 (f64) standard deviations on one side leave no digits to draw from."""
    element = float_type(dtype)
    bounds = parameters(element, lower, upper)
    return draw(_truncated, key, shape_of(shape, *bounds), bounds, element)


def _bernoulli(g: Graph, key: Value, dims: Dims, p: Value) -> Value:
    wide = transforms.wide_type(p.shape.dtype)
    return g.lt(transforms.unit(g, words(g, key, dims), wide), g.cast(p, wide))


def bernoulli(key: Array, p: Number = 0.5, shape: ShapeArg | None = None) -> Array:
    """True with probability p."""
    chance = as_array(p)
    if chance.dtype.kind != "float":
        chance = rnp.astype(chance, f32)
    return draw(_bernoulli, key, shape_of(shape, chance), [chance])


def dropout_mask(key: Array, rate: Number, shape: ShapeArg) -> Array:
    """False with probability `rate`: what dropout keeps."""
    if isinstance(rate, (int, float)) and not 0 <= rate <= 1:
        raise InputError("not a probability", where="dropout_mask", got=rate, expected="0 … 1")
    return bernoulli(key, rnp.subtract(1.0, rate), shape)


def _randint(g: Graph, key: Value, dims: Dims, low: int, span: int, dtype: DType) -> Value:
    offset = transforms.integers(g, words(g, key, dims), span)
    start = g.constant(np.array(low % 2**64, np.uint64))
    return g.cast(g.add(offset, start), dtype)  # modulo 2⁶⁴, as two's complement


def _between(
    g: Graph, key: Value, dims: Dims, low: Value, high: Value, dtype: DType
) -> Value:  # fmt: skip
    low, high = g.cast(low, i64), g.cast(high, i64)
    span = g.cast(g.where(g.gt(high, low), g.sub(high, low), 1), u64)
    drawn = transforms.scaled_words(g, words(g, key, dims), span, dtype.bits <= 32)
    return g.cast(g.add(g.cast(drawn, i64), low), dtype)


def randint(
    key: Array, shape: ShapeArg | None = (), minval: int | Array | np.ndarray[Any, Any] = 0,
    maxval: int | Array | np.ndarray[Any, Any] = 2**31 - 1, dtype: Any = i32,
) -> Array:  # fmt: skip
    """Integers of minval … maxval − 1, each as likely. Bounds that are arrays, or symbolic sizes,
    broadcast to the shape; where they leave nothing, minval is drawn."""
    element = DType.of(dtype)
    if not element.is_integer:
        raise InputError("not an integer type", where="randint", got=element)
    if not all(isinstance(bound, (int, np.integer)) for bound in (minval, maxval)):
        bounds = [as_array(minval), as_array(maxval)]
        if any(not b.dtype.is_integer for b in bounds):
            raise InputError("bounds that are not integers", where="randint",
                             got=", ".join(str(b.dtype) for b in bounds))  # fmt: skip
        return draw(_between, key, shape_of(shape, *bounds), bounds, element)
    low, high = int(minval), int(maxval)
    limits = np.iinfo(element.numpy)
    if not limits.min <= low < high <= int(limits.max) + 1:
        raise InputError(
            "no such interval", where="randint", got=f"{low} … {high - 1}",
            expected=f"within {limits.min} … {limits.max}",
        )  # fmt: skip
    return draw(_randint, key, () if shape is None else shape, (), low, high - low, element)


def categorical(key: Array, logits: Number, axis: int = -1, shape: ShapeArg | None = None) -> Array:
    """Indices along an axis, drawn with the probabilities softmax(logits): the Gumbel-max trick.

    `shape` is that of the result; its last sizes are those of the logits without the axis.
    """
    x = as_array(logits)
    if x.dtype.kind != "float" or not x.ndim:
        raise InputError("not logits", where="categorical", got=f"{x.dtype} {list(x.shape)}")
    x = rnp.moveaxis(x, axis, -1)
    outer = x.shape[:-1] if shape is None else sizes(shape)
    noise = gumbel(key, (*outer, x.shape[-1]), x.dtype)
    return rnp.astype(rnp.argmax(rnp.add(noise, x), axis=-1), i32)


def permutation(
    key: Array, x: int | Array | np.ndarray[Any, Any], axis: int = 0, independent: bool = False
) -> Array:
    """The numbers 0 … x − 1, or the slices of an array along an axis, in random order. With
    `independent` every lane of the axis has an order of its own."""
    if isinstance(x, (int, np.integer)) or not isinstance(x, (Array, np.ndarray)):
        return rnp.argsort(bits(key, (x,), u64))
    made = as_array(x)
    if not made.ndim:
        raise ShapeError("no axis to permute", where="permutation", got="an array without axes")
    if independent:
        order = rnp.argsort(bits(key, made.shape, u64), axis=axis)
        return rnp.take_along_axis(made, order, axis=axis)
    order = rnp.argsort(bits(key, (made.shape[axis],), u64))
    return rnp.take(made, order, axis=axis)


def choice(
    key: Array, a: int | Array | np.ndarray[Any, Any], shape: ShapeArg = (), replace: bool = True,
    p: Array | np.ndarray[Any, Any] | None = None, axis: int = 0,
) -> Array:  # fmt: skip
    """Elements of 0 … a − 1, or slices of an array along an axis, with probabilities p."""
    values = None if isinstance(a, (int, np.integer)) else as_array(a)
    n = a if values is None else values.shape[axis]
    dims = sizes(shape)
    found = _chosen(key, n, dims, replace, p)
    if values is None:
        return found
    taken = rnp.take(values, rnp.reshape(found, (-1,)), axis=axis)
    at = axis % values.ndim
    return rnp.reshape(taken, (*values.shape[:at], *dims, *values.shape[at + 1 :]))


def _chosen(key: Array, n: Any, dims: Any, replace: bool, p: Any) -> Array:
    """Indices of 0 … n − 1 in a shape."""
    weights = None if p is None else as_array(p)
    if weights is not None and (weights.ndim != 1 or weights.dtype.kind != "float"):
        raise InputError("not probabilities", where="choice", got=list(weights.shape))
    if replace and weights is None:
        return randint(key, dims, 0, n, i64)
    if replace:
        assert weights is not None
        return rnp.astype(categorical(key, rnp.log(weights), shape=dims), i64)
    total = math.prod(dims)
    if total > n:
        raise InputError(
            "more than there are", where="choice", got=total, expected=f"at most {n}",
            hint="replace=True draws an element more than once",
        )  # fmt: skip
    if weights is None:
        order = permutation(key, n)
    else:  # the greatest of log p + Gumbel noise, in order: Efraimidis and Spirakis
        scores = rnp.add(rnp.log(weights), gumbel(key, (n,), weights.dtype))
        order = rnp.argsort(scores, descending=True)
    return rnp.reshape(order[:total], dims)
