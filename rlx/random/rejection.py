"""Distributions by rejection: gamma, beta, Poisson. A loop of the graph draws again for all
elements until each has been accepted once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import rlx.numpy as rnp
from rlx.errors import InputError
from rlx.ir.dtype import DType, f32, f64, i32
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops.control import make_body
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array
from rlx.random import transforms
from rlx.random.distributions import Number, parameters, shape_of
from rlx.random.keys import split
from rlx.random.words import Dims, ShapeArg, draw, float_type, words

Propose = Callable[[Graph, Value, Value, Value], tuple[Value, Value]]
MAX_ROUNDS = 1000  # an element is refused with probability < 1/2: never reached, but finite


def _accepted(g: Graph, key: Value, dims: Dims, parameter: Value, propose: Propose) -> Value:
    """The first accepted proposal of each element.

    `propose(g, key, round, parameter)` gives a value and whether it is accepted, for each element.
    """

    def body(
        g: Graph, round_: Value, made: Value, done: Value, key: Value, p: Value
    ) -> tuple[Value, ...]:
        found, good = propose(g, key, round_, p)
        chosen = g.where(g.logical_or(done, g.logical_not(good)), made, found)
        return g.add(round_, g.constant(np.uint32(1))), chosen, g.logical_or(done, good)

    def unfinished(
        g: Graph, round_: Value, made: Value, done: Value, key: Value, p: Value
    ) -> Value:
        return g.logical_not(g.all(done))

    start = g.constant(np.uint32(0))
    made = g.expand(g.constant(np.array(0, parameter.shape.dtype.numpy)), dims)
    done = g.expand(g.constant(np.array(False)), dims)
    operands = [start, g.contiguous(made), g.contiguous(done), key, parameter]
    shapes = [v.shape for v in operands]
    results = g.while_loop(
        *operands, condition=make_body(unfinished, *shapes, name="unfinished"),
        body=make_body(body, *shapes, name="propose"), n_carry=3, max_iterations=MAX_ROUNDS,
    )  # fmt: skip
    return results[1]  # type: ignore[no-any-return]


def _streams(g: Graph, key: Value, round_: Value, like: Value) -> tuple[Any, Any]:
    """Two blocks of words for each element in a round."""
    first = g.mul(round_, g.constant(np.uint32(2)))
    dims = like.shape.dims
    second = g.add(first, g.constant(np.uint32(1)))
    return words(g, key, dims, first), words(g, key, dims, second)


def _marsaglia(g: Graph, key: Value, round_: Value, shape: Value) -> tuple[Value, Value]:
    """G. Marsaglia, W. W. Tsang, "A simple method for generating gamma variables", 2000, for
    shapes of 1 and more."""
    dtype = shape.shape.dtype
    one, two = _streams(g, key, round_, shape)
    d = g.sub(shape, 1 / 3)
    x = transforms.normal(g, one, dtype)
    root = g.add(g.mul(x, g.rsqrt(g.mul(d, 9.0))), 1.0)
    v = g.mul(g.square(root), root)
    log_u = g.log(transforms.open_unit(g, two, dtype))
    log_v = g.log(g.where(g.gt(v, 0.0), v, 1.0))
    bound = g.add(g.mul(g.square(x), 0.5), g.mul(d, g.add(g.sub(1.0, v), log_v)))
    return g.mul(d, v), g.logical_and(g.gt(v, 0.0), g.lt(log_u, bound))


def _gamma(g: Graph, key: Value, dims: Dims, a: Value, dtype: DType) -> Value:
    wide = transforms.wide_type(dtype)
    a = g.contiguous(g.expand(g.cast(a, wide), dims))
    valid = g.logical_and(g.gt(a, 0.0), g.is_finite(a))
    small = g.lt(a, 1.0)
    safe = g.where(valid, g.where(small, g.add(a, 1.0), a), 1.0)
    found = _accepted(g, key, dims, safe, _marsaglia)
    # a gamma number of shape a + 1 times u^(1/a) has shape a; this stream is in no round
    w = words(g, key, dims, 2**32 - 1)
    power = g.exp(g.neg(g.div(transforms.exponential(g, w, wide), a)))
    drawn = g.where(small, g.mul(found, power), found)
    return g.cast(g.where(valid, drawn, math.nan), dtype)


def gamma(key: Array, a: Number, shape: ShapeArg | None = None, dtype: Any = f32) -> Array:
    """Gamma of shape `a` > 0 with scale 1; NaN for other shapes."""
    element = float_type(dtype)
    given = parameters(element, a)
    return draw(_gamma, key, shape_of(shape, *given), given, element)


def beta(
    key: Array, a: Number, b: Number, shape: ShapeArg | None = None, dtype: Any = f32
) -> Array:
    """Beta of shapes a, b > 0: of two gamma numbers, the share of the first."""
    element = float_type(dtype)
    wide = transforms.wide_type(element)
    given = parameters(wide, a, b)
    dims = shape_of(shape, *given)
    keys = split(key)
    x, y = gamma(keys[0], given[0], dims, wide), gamma(keys[1], given[1], dims, wide)
    return rnp.astype(rnp.divide(x, rnp.add(x, y)), element)


_SMALL = 10.0  # of the mean: below, exponential numbers are counted


def _poisson(g: Graph, key: Value, dims: Dims, rate: Value, dtype: DType) -> Value:
    """In f64: counts up to 2⁵³."""
    rate = g.contiguous(g.expand(g.cast(rate, f64), dims))
    valid = g.logical_and(g.ge(rate, 0.0), g.is_finite(rate))
    small = g.lt(rate, _SMALL)
    few = _counted(g, key, dims, g.where(small, g.where(valid, rate, 0.0), 0.0))
    large = g.where(g.logical_and(valid, g.logical_not(small)), rate, _SMALL)
    many = _accepted(g, key, dims, large, _transformed)
    return g.cast(g.where(valid, g.where(small, few, many), -1.0), dtype)


def _counted(g: Graph, key: Value, dims: Dims, rate: Value) -> Value:
    """How many exponential numbers pass before their sum reaches the rate (Knuth)."""

    def body(g: Graph, round_: Value, left: Value, found: Value, key: Value) -> tuple[Value, ...]:
        # rounds of this loop take the streams from 2³¹ on, those of the other loop stay below
        stream = g.bitwise_or(round_, g.constant(np.uint32(2**31)))
        w = words(g, key, dims, stream)
        rest = g.sub(left, transforms.exponential(g, w, f64))
        more = g.add(found, g.cast(g.gt(rest, 0.0), f64))
        return g.add(round_, g.constant(np.uint32(1))), rest, more

    def unfinished(g: Graph, round_: Value, left: Value, found: Value, key: Value) -> Value:
        return g.any(g.gt(left, 0.0))

    zero = g.contiguous(g.expand(g.constant(np.array(0.0)), dims))
    operands = [g.constant(np.uint32(0)), rate, zero, key]
    shapes = [v.shape for v in operands]
    results = g.while_loop(
        *operands, condition=make_body(unfinished, *shapes, name="unfinished"),
        body=make_body(body, *shapes, name="count"), n_carry=3, max_iterations=MAX_ROUNDS,
    )  # fmt: skip
    return results[2]  # type: ignore[no-any-return]


def _transformed(g: Graph, key: Value, round_: Value, rate: Value) -> tuple[Value, Value]:
    """PTRS of W. Hörmann, "The transformed rejection method for generating Poisson random
    variables", 1993, for means of 10 and more."""
    w, _ = _streams(g, key, round_, rate)
    u = g.sub(transforms.unit(g, w[:2], f64), 0.5)
    v = transforms.open_unit(g, w[2:], f64)
    b = g.add(g.mul(g.sqrt(rate), 2.53), 0.931)
    a = g.add(g.mul(b, 0.02483), -0.059)
    inverse = g.add(g.div(1.1328, g.sub(b, 3.4)), 1.1239)
    near = g.sub(0.5, g.abs(u))
    slope = g.add(g.div(g.mul(a, 2.0), near), b)
    k = g.floor(g.add(g.add(g.mul(slope, u), rate), 0.43))
    quick = g.logical_and(g.ge(near, 0.07), g.le(v, g.sub(0.9277, g.div(3.6224, g.sub(b, 2.0)))))
    out = g.logical_or(g.lt(k, 0.0), g.logical_and(g.lt(near, 0.013), g.gt(v, near)))
    density = g.add(g.div(a, g.square(near)), b)
    left = g.sub(g.add(g.log(v), g.log(inverse)), g.log(density))
    count = g.maximum(k, 0.0)
    right = g.sub(g.sub(g.mul(count, g.log(rate)), rate), _log_factorial(g, count))
    good = g.logical_or(quick, g.logical_and(g.logical_not(out), g.le(left, right)))
    return k, good


def _log_factorial(g: Graph, k: Value) -> Value:
    """ln k! by Stirling's series at k + 8: an error below 1e−13 from 0 on."""
    shifted, product = g.add(k, 8.0), g.add(k, 1.0)
    for i in range(2, 8):
        product = g.mul(product, g.add(k, float(i)))
    x = shifted
    inverse = g.reciprocal(x)
    square = g.square(inverse)
    series = g.mul(inverse, _series(g, square))
    stirling = g.add(
        g.sub(g.mul(g.sub(x, 0.5), g.log(x)), x), g.add(series, 0.5 * math.log(2 * math.pi))
    )
    return g.sub(stirling, g.log(product))


_STIRLING = (1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)


def _series(g: Graph, square: Value) -> Value:
    y = g.add(g.mul(square, -691 / 360360), _STIRLING[0])
    for c in _STIRLING[1:]:
        y = g.add(g.mul(y, square), c)
    return y


def poisson(key: Array, lam: Number, shape: ShapeArg | None = None, dtype: Any = i32) -> Array:
    """Poisson with mean `lam`; −1 where that is negative or not finite."""
    rate = as_array(lam)
    if rate.dtype.kind != "float":
        rate = rnp.astype(rate, f64)
    element = DType.of(dtype)
    if element.kind not in ("int", "uint", "float"):
        raise InputError("no such type of counts", where="poisson", got=element)
    return draw(_poisson, key, shape_of(shape, rate), [rate], element)
