"""Keys: made from a seed, split, and folded with numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import InputError
from rlx.ir.dtype import DType, i64, u8, u16, u32, u64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.dispatch import apply, as_array
from rlx.random.words import (
    FOLD,
    SPLIT,
    Dims,
    ShapeArg,
    as_key,
    draw,
    halves,
    joined,
    split_word,
    words,
)


def key(seed: int | Array) -> Array:
    """A key from a seed: an int of 64 bits, or an integer array without axes."""
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
        if not -(2**63) <= seed < 2**64:
            raise InputError("not a seed", where="rlx.random.key", got=seed, expected="64 bits")
        number = int(seed) % 2**64
        return Array(np.array([number & 0xFFFFFFFF, number >> 32], np.uint32))
    return apply(_key, [_integer(seed, "rlx.random.key")])


def _key(g: Graph, seed: Value) -> Value:
    return g.concat(*[g.reshape(w, (1,)) for w in split_word(g, g.cast(seed, i64))], axis=0)


def _integer(x: Any, where: str) -> Array:
    made = as_array(x)
    if not made.dtype.is_integer or made.ndim:
        raise InputError(
            "not an integer", where=where, got=f"{made.dtype} {list(made.shape)}",
            expected="an int, or an integer array without axes",
        )  # fmt: skip
    return made


def split(key: Array, num: int = 2) -> Array:
    """`num` new keys, u32 [num, 2]. They and the key are independent; use the old one no more."""
    return draw(_split, key, (num,), ())


def _split(g: Graph, key: Value, dims: Dims) -> Value:
    low, high, _, _ = words(g, key, dims, use=SPLIT)
    return g.concat(*[g.reshape(w, (*dims, 1)) for w in (low, high)], axis=1)


def fold_in(key: Array, data: int | Array) -> Array:
    """A new key from a key and a number, such as the index of a step or a layer."""
    number = _integer(data, "rlx.random.fold_in")
    made = as_key(key)
    if isinstance(number, Tracer) and not isinstance(made, Tracer):
        made = Tracer(number.trace, number.trace.capture(made))
    return apply(_fold_in, [made, number])


def _fold_in(g: Graph, key: Value, data: Value) -> Value:
    low, high = split_word(g, g.cast(data, i64))
    zero, use = g.constant(np.uint32(0)), g.constant(np.uint32(FOLD))
    a, b, _, _ = g.philox(low, high, zero, use, *halves(g, key))
    return g.concat(g.reshape(a, (1,)), g.reshape(b, (1,)), axis=0)


def bits(key: Array, shape: ShapeArg = (), dtype: Any = u32) -> Array:
    """Random bits as unsigned integers of 8, 16, 32 or 64 bits."""
    element = DType.of(dtype)
    if element not in (u8, u16, u32, u64):
        raise InputError(
            "not a type of bits", where="rlx.random.bits", got=element, expected="u8, u16, u32, u64"
        )
    return draw(_bits, key, shape, (), element)


def _bits(g: Graph, key: Value, dims: Dims, element: DType) -> Value:
    high, low, _, _ = words(g, key, dims)
    return joined(g, high, low) if element is u64 else g.cast(high, element)
