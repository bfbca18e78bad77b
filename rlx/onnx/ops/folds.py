"""Reductions, softmax and orders: sums, extrema, positions, the k greatest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.numpy.array import Array
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op, graph_ops
from rlx.onnx.ops.layout import axes_of
from rlx.onnx.table import op

Fold = Callable[[Array, tuple[int, ...], bool], Array]


def _sum(x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    return graph_op("sum", x, axis=axes, keepdims=keep)


def _mean(x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    made = graph_op("mean", x, axis=axes, keepdims=keep)
    return made.astype(x.dtype)


def _extremum(name: str) -> Fold:
    def fold(x: Array, axes: tuple[int, ...], keep: bool) -> Array:
        if x.dtype.kind == "bool":
            return graph_op("any" if name == "max" else "all", x, axis=axes, keepdims=keep)
        if any(type(x.shape[a]) is int and x.shape[a] == 0 for a in axes):
            return _of_none(x, axes, keep, name)
        return graph_op(name, x, axis=axes, keepdims=keep)

    return fold


def _of_none(x: Array, axes: tuple[int, ...], keep: bool, name: str) -> Array:
    """The extremum of no elements: the least value for a maximum."""
    sign = -1.0 if name == "max" else 1.0
    if x.dtype.is_integer:
        limits = np.iinfo(x.dtype.numpy)
        value: float = limits.min if name == "max" else limits.max
    else:
        value = sign * np.inf
    sizes = [1 if a in axes else n for a, n in enumerate(x.shape) if keep or a not in axes]
    return xp.full(tuple(sizes), value, dtype=x.dtype)


def _norm1(x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    return _sum(xp.abs(x), axes, keep)


def _norm2(x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    if x.dtype.is_integer:
        return xp.sqrt(_sum(xp.square(x).astype(xp.float64), axes, keep)).astype(x.dtype)
    return xp.sqrt(_sum(xp.square(x), axes, keep))


def _sum_square(x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    return _sum(xp.square(x), axes, keep)


def _log_sum(x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    return xp.log(_sum(x, axes, keep))


def _log_sum_exp(x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    if any(type(x.shape[a]) is int and x.shape[a] == 0 for a in axes):
        return _of_none(x, axes, keep, "max")
    most = _extremum("max")(x, axes, True)
    most = xp.where(xp.isfinite(most), most, xp.zeros_like(most))
    found = xp.log(_sum(xp.exp(x - most), axes, True)) + most
    return found if keep else xp.squeeze(found, axes)


_FOLDS: dict[str, Fold] = {
    "ReduceL1": _norm1,
    "ReduceL2": _norm2,
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _extremum("max"),
    "ReduceMean": _mean,
    "ReduceMin": _extremum("min"),
    "ReduceProd": lambda x, axes, keep: graph_op("prod", x, axis=axes, keepdims=keep),
    "ReduceSum": _sum,
    "ReduceSumSquare": _sum_square,
}


def _reduction(name: str, fold: Fold) -> None:
    @op(name, known=(1,))
    def reduce(node: Call, x: Array, axes: Any = None) -> Array:
        found = axes_of(node, axes, x.ndim)
        if not found:
            if node.int("noop_with_empty_axes", 0):
                found = ()
            else:
                found = tuple(range(x.ndim))
        return fold(x, tuple(sorted(found)), bool(node.int("keepdims", 1)))


for _name, _fold in _FOLDS.items():
    _reduction(_name, _fold)


@op("ArgMax")
def argmax(node: Call, x: Array) -> Array:
    return _position(node, x, "argmax")


@op("ArgMin")
def argmin(node: Call, x: Array) -> Array:
    return _position(node, x, "argmin")


def _position(node: Call, x: Array, name: str) -> Array:
    axis, keep = node.int("axis", 0) % x.ndim, bool(node.int("keepdims", 1))
    last = node.int("select_last_index", 0)
    found = graph_op(name, xp.flip(x, axis=axis) if last else x, axis=axis, keepdims=keep)
    found = found.astype(xp.int64)
    return (x.shape[axis] - 1) - found if last else found


@op("TopK", known=(1,))
def top_k(node: Call, x: Array, k: Any = None) -> Any:
    axis = node.int("axis", -1)
    count = int(node.int("k") if k is None else np.reshape(k, -1)[0])
    largest = bool(node.int("largest", 1))
    values, indices = graph_ops("top_k", x, k=count, axis=axis % x.ndim, largest=largest)
    return values, indices.astype(xp.int64)


# -- softmax --------------------------------------------------------------------------------------


@op("Softmax", since=13)
def softmax(node: Call, x: Array) -> Array:
    return xp.softmax(x, axis=node.int("axis", -1))


@op("LogSoftmax", since=13)
def log_softmax(node: Call, x: Array) -> Array:
    return xp.log_softmax(x, axis=node.int("axis", -1))


@op("Hardmax", since=13)
def hardmax(node: Call, x: Array) -> Array:
    axis = node.int("axis", -1) % x.ndim
    first = graph_op("argmax", x, axis=axis, keepdims=True)
    shape = [1] * x.ndim
    shape[axis] = -1
    index = xp.reshape(xp.arange(x.shape[axis], dtype=first.dtype), tuple(shape))
    return xp.equal(index, first).astype(x.dtype)


def _flat(function: Any) -> Any:
    """Before opset 13 all axes from `axis` on counted as one."""

    def compute(node: Call, x: Array) -> Array:
        axis = node.int("axis", 1) % x.ndim if x.ndim else 0
        rows: Any = 1
        for n in x.shape[:axis]:
            rows = rows * n
        columns: Any = 1
        for n in x.shape[axis:]:
            columns = columns * n
        return xp.reshape(function(xp.reshape(x, (rows, columns))), x.shape)

    return compute


def _hard(x: Array) -> Array:
    first = graph_op("argmax", x, axis=1, keepdims=True)
    return xp.equal(xp.arange(x.shape[1], dtype=first.dtype), first).astype(x.dtype)


op("Softmax")(_flat(lambda x: xp.softmax(x, axis=1)))
op("LogSoftmax")(_flat(lambda x: xp.log_softmax(x, axis=1)))
op("Hardmax")(_flat(_hard))
