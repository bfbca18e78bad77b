"""Comparisons and choices by condition."""

from __future__ import annotations

import rlx.numpy as xp
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.table import op


@op("Equal")
def equal(node: Call, a: Array, b: Array) -> Array:
    return xp.equal(a, b)


@op("Greater")
def greater(node: Call, a: Array, b: Array) -> Array:
    return xp.greater(a, b)


@op("GreaterOrEqual")
def greater_or_equal(node: Call, a: Array, b: Array) -> Array:
    return xp.greater_equal(a, b)


@op("Less")
def less(node: Call, a: Array, b: Array) -> Array:
    return xp.less(a, b)


@op("LessOrEqual")
def less_or_equal(node: Call, a: Array, b: Array) -> Array:
    return xp.less_equal(a, b)


@op("Where")
def where(node: Call, condition: Array, a: Array, b: Array) -> Array:
    return xp.where(condition, a, b)
