"""Reading and writing at indices; what selects by data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.ir.dtype import DType
from rlx.numpy.array import Array
from rlx.numpy.trace import Size
from rlx.onnx.call import Call
from rlx.onnx.graph_ops import graph_op
from rlx.onnx.table import op
from rlx.onnx.values import elements_of, type_of


@op("Gather")
def gather(node: Call, x: Array, indices: Array) -> Array:
    return graph_op("gather", x, indices, axis=node.int("axis", 0) % max(x.ndim, 1))


@op("GatherElements")
def gather_elements(node: Call, x: Array, indices: Array) -> Array:
    axis = node.int("axis", 0) % x.ndim
    key = tuple([
        slice(None) if a == axis else slice(0, n) for a, n in enumerate(indices.shape)
    ])  # fmt: skip
    return graph_op("take_along", x[key], indices, axis=axis)


@op("GatherND")
def gather_nd(node: Call, x: Array, indices: Array) -> Array:
    batch = node.int("batch_dims", 0)
    depth = int(indices.shape[-1])
    flat = _flat_index(indices, x.shape[batch : batch + depth])
    count = _product(x.shape[:batch])
    each = _product(x.shape[batch : batch + depth])
    if batch:
        rows = xp.reshape(xp.arange(count) * each, (*x.shape[:batch], *[1] * (flat.ndim - batch)))
        flat = flat + rows
    rest = x.shape[batch + depth :]
    return graph_op("gather", xp.reshape(x, (count * each, *rest)), flat, axis=0)


def _flat_index(indices: Array, sizes: Any) -> Array:
    """Positions among the elements of axes of these sizes, of vectors of indices."""
    total: Any = None
    for i, n in enumerate(sizes):
        one = indices[..., i].astype(xp.int64)
        one = xp.where(xp.less(one, 0), one + n, one)
        total = one if total is None else total * n + one
    return xp.zeros(indices.shape[:-1], dtype=xp.int64) if total is None else total


def _product(sizes: Any) -> Any:
    total: Any = 1
    for n in sizes:
        total = total * n
    return total


@op("ScatterND")
def scatter_nd(node: Call, x: Array, indices: Array, updates: Array) -> Array:
    depth = int(indices.shape[-1])
    flat = _flat_index(indices, x.shape[:depth])
    rest = x.shape[depth:]
    rows = xp.reshape(x, (_product(x.shape[:depth]), *rest))
    given = xp.reshape(updates, (_product(indices.shape[:-1]), *rest))
    made = scattered(rows, xp.reshape(flat, (-1,)), given, node.text("reduction", "none"))
    return xp.reshape(made, x.shape)


@op("ScatterElements", "Scatter")
def scatter_elements(node: Call, x: Array, indices: Array, updates: Array) -> Array:
    axis = node.int("axis", 0) % x.ndim
    at = indices.astype(xp.int64)
    at = xp.where(xp.less(at, 0), at + x.shape[axis], at)
    total: Any = None
    for a, n in enumerate(x.shape):
        if a == axis:
            one = at
        else:
            shape = [1] * x.ndim
            shape[a] = -1
            one = xp.reshape(xp.arange(indices.shape[a]), tuple(shape))
        total = one if total is None else total * n + one
    flat = xp.reshape(xp.broadcast_to(total, indices.shape), (-1,))
    made = scattered(
        xp.reshape(x, (-1,)), flat, xp.reshape(updates, (-1,)), node.text("reduction", "none")
    )
    return xp.reshape(made, x.shape)


_HOW = {"mul": "mul", "max": "maximum", "min": "minimum"}


def scattered(x: Array, indices: Array, updates: Array, how: str) -> Array:
    """`x` with rows replaced by `updates`, or combined with them."""
    if how == "none":
        return graph_op("scatter", x, indices, updates, axis=0)
    if how == "add":
        return graph_op("scatter_add", x, indices, updates, axis=0)
    return graph_op("scatter_reduce", x, indices, updates, axis=0, how=_HOW.get(how, how))


@op("TensorScatter")
def tensor_scatter(node: Call, past: Array, update: Array, start: Array | None = None) -> Array:
    """A KV cache with new rows written at a position of each sequence."""
    axis, batch = node.int("axis", -2) % past.ndim, past.shape[0]
    length, size = update.shape[axis], past.shape[axis]
    front = [0, axis, *[a for a in range(1, past.ndim) if a != axis]]
    back = [front.index(a) for a in range(past.ndim)]
    cache, rows = xp.permute_dims(past, front), xp.permute_dims(update, front)
    first = xp.zeros((batch,), dtype=xp.int64) if start is None else start.astype(xp.int64)
    at = xp.reshape(first, (-1, 1)) + xp.arange(length)
    if node.text("mode", "linear") == "circular":
        at = xp.remainder(at, size)
    at = at + xp.reshape(xp.arange(batch) * size, (-1, 1))
    rest = cache.shape[2:]
    made = scattered(
        xp.reshape(cache, (batch * size, *rest)), xp.reshape(at, (-1,)),
        xp.reshape(rows, (batch * length, *rest)), "none",
    )  # fmt: skip
    return xp.permute_dims(xp.reshape(made, cache.shape), back)


@op("OneHot", known=(1,))
def one_hot(node: Call, indices: Array, depth: Any, values: Array) -> Array:
    axis = node.int("axis", -1)
    count: Any = np.reshape(depth, -1)[0]
    count = count if isinstance(count, Size) else int(count)
    rank = indices.ndim + 1
    axis = axis % rank
    at = indices.astype(xp.int64)
    at = xp.where(xp.less(at, 0), at + count, at)
    shape = [1] * rank
    shape[axis] = -1
    numbers = xp.reshape(xp.arange(count), tuple(shape))
    hot = xp.equal(xp.expand_dims(at, axis), numbers)
    return xp.where(hot, values[1], values[0])


@op("ReverseSequence")
def reverse_sequence(node: Call, x: Array, lengths: Array) -> Array:
    time, batch = node.int("time_axis", 0), node.int("batch_axis", 1)
    shape = [1] * x.ndim
    shape[time] = -1
    step = xp.reshape(xp.arange(x.shape[time]), tuple(shape))
    shape = [1] * x.ndim
    shape[batch] = -1
    length = xp.reshape(lengths.astype(xp.int64), tuple(shape))
    source = xp.where(xp.less(step, length), length - 1 - step, step)
    return graph_op("take_along", x, xp.broadcast_to(source, x.shape), axis=time)


@op("Trilu", known=(1,))
def trilu(node: Call, x: Array, k: Any = None) -> Array:
    shift = 0 if k is None else int(np.reshape(k, -1)[0])
    return (xp.triu if node.int("upper", 1) else xp.tril)(x, k=shift)


@op("Range", raw=True)
def arange(node: Call, start: Any, limit: Any, delta: Any) -> Any:
    dtype = type_of(start)
    first, last, step = (np.reshape(elements_of(x), -1)[0] for x in (start, limit, delta))
    if not isinstance(step, Size) and step == 0:
        raise node.fault("a step of 0")
    if any(isinstance(x, Size) for x in (first, last, step)):
        return xp.arange(_size(first), _size(last), _size(step)).astype(DType.of(dtype))
    whole = dtype.kind in "iu"
    exact: Any = int if whole else float
    count = max(math.ceil((float(last) - float(first)) / float(step)), 0)
    if count >= 2**31:
        raise node.fault("too many elements", got=count)
    index = xp.arange(count, dtype=dtype if whole else xp.float64)
    return (index * exact(step) + exact(first)).astype(DType.of(dtype))


def _size(x: Any) -> Any:
    return x if isinstance(x, Size) else int(x)


# -- by data --------------------------------------------------------------------------------------


@op("NonZero", on_host=True)
def nonzero(node: Call, x: Any) -> Any:
    return (
        np.stack(np.nonzero(x)).astype(np.int64) if x.ndim else np.zeros((0, int(x != 0)), np.int64)
    )


@op("Compress", on_host=True)
def compress(node: Call, x: Any, condition: Any) -> Any:
    axis = node.int("axis", None)
    if axis is None:
        x, axis = x.reshape(-1), 0
    if len(condition) > x.shape[axis]:
        raise node.fault("a condition longer than the axis", got=len(condition))
    return np.compress(condition, x, axis)


@op("Unique", on_host=True)
def unique(node: Call, x: Any) -> Any:
    axis = node.int("axis", None)
    values, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = np.reshape(inverse, -1)
    if not node.int("sorted", 1):
        order = np.argsort(first)
        values = np.take(values, order, 0 if axis is None else axis)
        first, counts = first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return values, *[a.astype(np.int64) for a in (first, inverse, counts)]
