"""Keys and random words: Philox counters for the elements of a shape.

A key is a u32 array [2]. Element i of a draw, in row-major order, is the block of Philox at counter
(i low, i high, stream, use) under the key, so what is drawn does not depend on the device, on
threads, or on whether it runs inside `rlx.jit`; a shorter draw is the beginning of a longer one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rlx.errors import DTypeError, InputError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, i64, u32, u64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.dispatch import apply, as_array
from rlx.numpy.trace import Size, Trace, dim_of

ShapeArg = int | Sequence[int]
Dims = tuple[Dim, ...]
Build = Callable[..., Any]

DRAW, SPLIT, FOLD = 0, 1, 2  # what a block of words is used for: word 3 of its counter


# -- words in a graph -------------------------------------------------------------------------


def halves(g: Graph, key: Value) -> tuple[Value, Value]:
    """The two words of a key."""
    low, high = (g.reshape(g.narrow(key, axis=0, start=i, length=1), ()) for i in (0, 1))
    return low, high


def split_word(g: Graph, x: Value) -> tuple[Value, Value]:
    """The low and the high word of a 64-bit integer."""
    shift = g.constant(np.array(32, x.shape.dtype.numpy))
    return g.cast(x, u32), g.cast(g.shift_right(x, shift), u32)


def count(g: Graph, dims: Dims) -> Value:
    """0, 1, … in row-major order."""
    total: Dim = 1
    for d in dims:
        total = total * d
    return g.reshape(g.iota((total,), dtype=i64), dims)


def words(
    g: Graph, key: Value, dims: Dims, stream: Value | int = 0, use: int = DRAW
) -> tuple[Value, ...]:
    """Four random words for each element of a shape."""
    low, high = split_word(g, count(g, dims))
    chosen = stream if isinstance(stream, Value) else g.constant(np.uint32(stream))
    made = g.philox(low, high, chosen, g.constant(np.uint32(use)), *halves(g, key))
    return tuple(made)


def joined(g: Graph, high: Value, low: Value) -> Value:
    """A 64-bit integer from two words."""
    shifted = g.shift_left(g.cast(high, u64), g.constant(np.uint64(32)))
    return g.bitwise_or(shifted, g.cast(low, u64))


# -- drawing ----------------------------------------------------------------------------------


def sizes(shape: object) -> tuple[Any, ...]:
    """A shape as a tuple of ints and symbolic sizes."""
    given = (shape,) if isinstance(shape, (int, Size, np.integer)) else shape
    if not isinstance(given, Sequence):
        raise ShapeError("not a shape", where="rlx.random", got=repr(shape))
    for n in given:
        if isinstance(n, Size):
            continue
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
            raise ShapeError("not a shape", where="rlx.random", got=repr(shape), expected="sizes")
    return tuple(given)


def as_key(key: Any) -> Array:
    made = as_array(key)
    if made.dtype is not u32 or made.ndim != 1 or (made.shape[0] != 2):
        raise InputError(
            "not a key", where="rlx.random", got=f"{made.dtype} {list(made.shape)}",
            expected="u32 [2]", hint="make one with rlx.random.key(seed); split keys are rows",
        )  # fmt: skip
    return made


def draw(build: Build, key: Any, shape: Any, operands: Sequence[Array], *options: Any) -> Array:
    """`build(g, key, dims, *values, *options)` for the sizes of a shape.

    Sizes are no part of what is compiled: outside a trace an empty operand brings them, an array
    with one more axis of size 0.
    """
    made, dims = as_key(key), sizes(shape)
    trace = _trace([made, *operands], dims)
    if trace is not None:
        lifted = [made if isinstance(made, Tracer) else Tracer(trace, trace.capture(made))]
        given = tuple([dim_of(n) for n in dims])
        return apply(_inside(build), [*lifted, *operands], given, options)
    carrier = Array(np.empty((*[int(n) for n in dims], 0), np.int8))
    return apply(_outside(build), [made, *operands, carrier], options)


def _trace(operands: Sequence[Array], dims: Sequence[Any]) -> Trace | None:
    for x in operands:
        if isinstance(x, Tracer):
            return x.trace.innermost()
    return next((n.trace.innermost() for n in dims if isinstance(n, Size)), None)


@lru_cache(maxsize=256)
def _inside(build: Build) -> Build:
    def traced(g: Graph, key: Value, *rest: Any) -> Any:
        *values, dims, options = rest
        return build(g, key, dims, *values, *options)

    return traced


@lru_cache(maxsize=256)
def _outside(build: Build) -> Build:
    def eager(g: Graph, key: Value, *rest: Any) -> Any:
        *values, carrier, options = rest
        return build(g, key, carrier.shape.dims[:-1], *values, *options)

    eager.__name__ = getattr(build, "__name__", "draw").strip("_")
    return eager


def float_type(dtype: Any) -> DType:
    made = DType.of(dtype)
    if made.kind != "float" or made.bits < 16:
        raise DTypeError(
            "not a type to draw", where="rlx.random", got=made, expected="f16, bf16, f32 or f64"
        )
    return made
