"""Applying builders with optional operands and sizes that must be numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from rlx.errors import InputError, OptionError, ShapeError
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array
from rlx.numpy.dispatch import apply, apply_many, as_array
from rlx.numpy.trace import TraceGraph

ArrayLike: TypeAlias = Array | np.ndarray[Any, Any] | float
Build = Callable[..., Any]
Sizes = tuple[int | None, ...]


def call(build: Build, operands: Sequence[ArrayLike | None], *options: Any) -> Array:
    """The one result of `build(g, *values, *options)`, with None for absent operands."""
    return call_many(build, operands, *options)[0]


def call_many(
    build: Build, operands: Sequence[ArrayLike | None], *options: Any
) -> tuple[Array, ...]:
    """All results of `build(g, *values, *options)`."""
    there = tuple([x is not None for x in operands])
    given = [as_array(x) for x in operands if x is not None]
    return apply_many(_with_absent(build), given, there, options)


@lru_cache(maxsize=512)
def _with_absent(build: Build) -> Build:
    def made(g: Graph, *rest: Any) -> Any:
        *values, there, options = rest
        following = iter(values)
        return build(g, *[next(following) if t else None for t in there], *options)

    made.__name__ = build.__name__.strip("_")
    return made


def call_elementwise(build: Build, x: ArrayLike, *options: Any) -> Array:
    """The result of `build(g, x, *options)`, which looks at one element at a time."""
    return apply(build, [as_array(x)], *options, elementwise=True)


def sizes_of(x: ArrayLike, *axes: int) -> Sizes:
    """The sizes of some axes as numbers, None for the others. Inside `rlx.jit` each is a guard."""
    made = as_array(x)
    chosen = {a % made.ndim for a in axes} if axes else set(range(made.ndim))
    return tuple([int(n) if i in chosen else None for i, n in enumerate(made.shape)])


def fixed(g: Graph, x: Value, sizes: Sizes) -> Value:
    """`x` with the given sizes as constants of the graph, where they were symbols."""
    for axis, size in enumerate(sizes):
        dim = x.shape.dims[axis]
        if size is None or isinstance(dim, int):
            continue
        if isinstance(g, TraceGraph):
            g.trace.same_size(dim, size, "a size of weights, heads or channels")
        else:
            x = g.narrow(x, axis=axis, start=0, length=size)
    return x


def root(g: Graph, x: Value, p: float = 2.0) -> Any:
    """The p-th root of sums of magnitudes, with a slope of 0 at 0: vectors of length 0 have a
    direction that nothing determines, and an infinite slope times 0 would be NaN."""
    zero, one = (g.constant(c, x.shape.dtype) for c in (0.0, 1.0))
    is_zero = g.eq(x, zero)
    inside = g.where(is_zero, one, x)
    return g.where(is_zero, zero, g.sqrt(inside) if p == 2 else g.pow(inside, 1 / p))


def require_rank(x: ArrayLike, ranks: Sequence[int], where: str, expected: str) -> Array:
    made = as_array(x)
    if made.ndim not in ranks:
        raise ShapeError(
            "wrong number of axes", where=where, got=str(list(made.shape)), expected=expected
        )
    return made


def require_float(x: ArrayLike, where: str) -> Array:
    made = as_array(x)
    if made.dtype.kind != "float":
        raise InputError("not a float array", where=where, got=made.dtype)
    return made


def require_option(value: str, known: Sequence[str], where: str) -> None:
    if value not in known:
        raise OptionError("unknown option", where=where, got=repr(value), expected=", ".join(known))


def per_axis(value: int | Sequence[int], rank: int, where: str) -> tuple[int, ...]:
    """A number for each spatial axis."""
    given = (value,) * rank if isinstance(value, int) else tuple([int(v) for v in value])
    if len(given) != rank:
        raise ShapeError("a number per axis", where=where, got=given, expected=f"{rank} numbers")
    return given
