"""Shape computations: operators on tensors whose elements are known, with NumPy.

Elements may be symbolic sizes, in arrays of objects: sums, products and quotients of sizes stay
symbolic, so that what is computed from a shape needs no other code for another length.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from rlx.numpy.trace import Size
from rlx.onnx.call import Call
from rlx.onnx.table import on_known
from rlx.onnx.values import Known, shrunk

_SIMPLE = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul}
_COMPARED = {
    "Equal": operator.eq, "Greater": operator.gt, "GreaterOrEqual": operator.ge,
    "Less": operator.lt, "LessOrEqual": operator.le,
}  # fmt: skip


def _numbers(*tensors: Known) -> bool:
    return not any(x.is_text for x in tensors)


def _arithmetic(function: Any) -> Any:
    def compute(node: Call, a: Known, b: Known) -> Any:
        if not _numbers(a, b):
            return NotImplemented
        with np.errstate(all="ignore"):
            return shrunk(function(a.data, b.data), a.dtype)

    return compute


def _comparison(function: Any) -> Any:
    def compute(node: Call, a: Known, b: Known) -> Any:
        if a.is_text or b.is_text:
            return np.asarray(function(a.data, b.data), bool)
        found = np.frompyfunc(function, 2, 1)(a.data, b.data)
        return np.asarray(found).astype(bool)

    return compute


for _name, _function in _SIMPLE.items():
    on_known(_name)(_arithmetic(_function))
for _name, _function in _COMPARED.items():
    on_known(_name)(_comparison(_function))


@on_known("Div")
def div(node: Call, a: Known, b: Known) -> Any:
    if not _numbers(a, b):
        return NotImplemented
    if a.dtype.kind not in "iu":
        with np.errstate(all="ignore"):
            return shrunk(a.data / b.data, a.dtype)
    if np.any(np.equal(b.data, 0)):
        return NotImplemented
    return shrunk(np.frompyfunc(_towards_zero, 2, 1)(a.data, b.data), a.dtype)


def _towards_zero(a: Any, b: Any) -> Any:
    if isinstance(a, Size) and not isinstance(b, Size) and b > 0:
        return a // int(b)
    a, b = int(a), int(b)
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@on_known("Gather")
def gather(node: Call, x: Known, indices: Known) -> Any:
    if indices.is_symbolic:
        return NotImplemented
    axis = node.int("axis", 0)
    if x.data.ndim == 0 or not -x.data.ndim <= axis < x.data.ndim:
        raise node.fault("axis out of range", got=axis)
    size = x.data.shape[axis]
    if np.any((indices.data < -size) | (indices.data >= size)):
        raise node.fault("an index out of range", got=indices.data.tolist(), expected=f"< {size}")
    return Known(np.take(x.data, indices.data, axis=axis), x.dtype)


@on_known("Concat")
def concat(node: Call, *tensors: Known) -> Any:
    try:
        found = np.concatenate([x.data for x in tensors], axis=node.int("axis", 1))
    except ValueError as error:
        raise node.fault("tensors do not fit together", got=str(error)) from None
    return Known(found, tensors[0].dtype)


@on_known("Unsqueeze")
def unsqueeze(node: Call, x: Known, axes: Known | None = None) -> Any:
    found = node.ints("axes") if axes is None else [int(a) for a in axes.data.reshape(-1)]
    rank = x.data.ndim + len(found)
    if any(not -rank <= a < rank for a in found) or len({a % rank for a in found}) != len(found):
        raise node.fault("not axes to add", got=list(found))
    return Known(np.expand_dims(x.data, tuple(found)), x.dtype)


@on_known("Squeeze")
def squeeze(node: Call, x: Known, axes: Known | None = None) -> Any:
    found = node.ints("axes", None) if axes is None else [int(a) for a in axes.data.reshape(-1)]
    try:
        return Known(np.squeeze(x.data, None if found is None else tuple(found)), x.dtype)
    except ValueError as error:
        raise node.fault("not axes to remove", got=str(error)) from None


@on_known("Slice")
def slices(node: Call, x: Known, *limits: Known) -> Any:
    if not limits or any(k.is_symbolic for k in limits):
        return NotImplemented
    starts, ends, *more = [k.data.tolist() for k in limits]
    axes = more[0] if more else range(len(starts))
    steps = more[1] if len(more) > 1 else [1] * len(starts)
    key: list[Any] = [slice(None)] * x.data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not -x.data.ndim <= axis < x.data.ndim or step == 0:
            raise node.fault("not a slice of this tensor", got=f"axis {axis}, step {step}")
        size = x.data.shape[axis]
        low = 0 if step > 0 else -1
        high = size if step > 0 else size - 1
        first = min(max(start + size if start < 0 else start, low), high)
        last = min(max(end + size if end < 0 else end, low), high)
        key[axis] = slice(first, None if last < 0 else last, step)
    return Known(x.data[tuple(key)], x.dtype)


@on_known("Reshape")
def reshape(node: Call, x: Known, shape: Known) -> Any:
    if shape.is_symbolic or (shape.data == 0).any():
        return NotImplemented
    try:
        return Known(x.data.reshape([int(n) for n in shape.data]), x.dtype)
    except ValueError as error:
        raise node.fault("elements do not fit the shape", got=str(error)) from None


@on_known("Transpose")
def transpose(node: Call, x: Known) -> Any:
    return Known(x.data.transpose(node.ints("perm", None)), x.dtype) if not x.is_constant else (
        NotImplemented if x.data.size > 64 else Known(x.data.transpose(node.ints("perm", None)),
        x.dtype)
    )  # fmt: skip


@on_known("ReduceProd")
def product(node: Call, x: Known, axes: Known | None = None) -> Any:
    if x.data.ndim != 1 or not x.data.size:
        return NotImplemented
    total: Any = 1
    for n in x.data:
        total = total * n
    found = np.empty(1 if node.int("keepdims", 1) else (), object)
    found[...] = total
    return shrunk(found, x.dtype)


@on_known("Where")
def where(node: Call, condition: Known, a: Known, b: Known) -> Any:
    if not _numbers(a, b):
        return Known(np.where(condition.data, a.data, b.data), a.dtype)
    return shrunk(np.where(condition.data, a.data, b.data), a.dtype)


@on_known("Not")
def negated(node: Call, x: Known) -> Any:
    return np.logical_not(x.data)


@on_known("And")
def both(node: Call, a: Known, b: Known) -> Any:
    return np.logical_and(a.data, b.data)


@on_known("Or")
def either(node: Call, a: Known, b: Known) -> Any:
    return np.logical_or(a.data, b.data)


@on_known("Range")
def arange(node: Call, start: Known, limit: Known, delta: Known) -> Any:
    if start.is_symbolic or limit.is_symbolic or delta.is_symbolic or delta.data == 0:
        return NotImplemented
    count = np.ceil((limit.data.item() - start.data.item()) / delta.data.item())
    if not count < 2**16:
        return NotImplemented
    return np.arange(max(int(count), 0), dtype=start.dtype) * delta.data + start.data
