"""Recognises causal and sliding-window masks in comparisons of positions.

A mask made by comparing iotas is a set of linear inequalities in the row i (query) and the column j
(key). With Sq queries and Sk keys, query i is at position p = Sk − Sq + i:

    causal           p − j ≥ 0
    sliding window   p − j ≥ 0 and j − p + w − 1 ≥ 0
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim, expand, same
from rlx.ir.node import Node, Value
from rlx.passes.pattern import number


class _Linear(NamedTuple):
    """row · i + column · j + offset"""

    row: int
    column: int
    offset: Dim

    def plus(self, other: _Linear, sign: int = 1) -> _Linear:
        return _Linear(
            self.row + sign * other.row,
            self.column + sign * other.column,
            self.offset + other.offset * sign,
        )


def mask_kind(keep: Value, rows: Dim, keys: Dim) -> MaskKind | None:
    """CAUSAL or SLIDING_WINDOW when `keep` [..., rows, keys] is that mask."""
    if keep.node.op.name == "constant":
        return _of_constant(keep, rows, keys)
    found = _conditions(keep)
    if found is None:
        return None
    shift = keys - rows
    causal, window = False, 0
    for condition in found:
        row, column, offset = _normal(condition, rows, keys)
        if (row, column) == (1, -1) and same(offset, shift):
            causal = True
        elif (row, column) == (-1, 1):
            width = expand(offset + shift + 1)
            if not isinstance(width, int) or width < 1:
                return None
            window = min(window or width, width)
        else:
            return None
    if not causal:
        return None
    return MaskKind.SLIDING_WINDOW(window) if window else MaskKind.CAUSAL


def sees_itself(rows: Dim, keys: Dim) -> bool:
    """Whether every query of a causal mask sees a key: there are at least as many keys."""
    rest = expand(keys - rows)
    if isinstance(rest, int):
        return rest >= 0
    if same(rows, 1):
        return True  # the query sees the last key, if there is any key
    plain = all(isinstance(atom, str) for monomial, _ in rest.terms for atom in monomial)
    return plain and all(factor > 0 for _, factor in rest.terms)


def _normal(condition: _Linear, rows: Dim, keys: Dim) -> _Linear:
    """Normalise the coefficient of an axis of size 1, whose index is always 0."""
    row, column, offset = condition
    if same(rows, 1) and row == 0 and column:
        row = -column
    if same(keys, 1) and column == 0 and row:
        column = -row
    return _Linear(row, column, offset)


def _conditions(flags: Value) -> list[_Linear] | None:
    """Linear forms whose conjunction (all ≥ 0) is the mask."""
    node = flags.node
    name = node.op.name
    if name in ("logical_and", "bitwise_and"):
        first, second = map(_conditions, node.inputs)
        return None if first is None or second is None else first + second
    if name in ("expand", "reshape") and _keeps_axes(node):
        return _conditions(node.inputs[0])
    if name == "logical_not":
        inner = _conditions(node.inputs[0])
        if inner is None or len(inner) != 1:
            return None
        return [_Linear(0, 0, -1).plus(inner[0], -1)]
    if name not in ("le", "lt", "ge", "gt"):
        return None
    low, high = node.inputs if name in ("le", "lt") else node.inputs[::-1]
    a, b = _linear(low), _linear(high)
    if a is None or b is None:
        return None
    return [b.plus(a, -1).plus(_Linear(0, 0, -1 if name in ("lt", "gt") else 0))]


def _keeps_axes(node: Node) -> bool:
    """Whether an expand or reshape keeps the last two axes, up to 1s."""
    old, new = node.inputs[0].shape.dims, node.output.shape.dims
    if node.op.name == "expand":
        return True
    count = max(len(old), len(new), 2)
    a, b = ((1,) * (count - len(d)) + tuple(d) for d in (old, new))
    return all(map(same, a, b))


def _linear(value: Value) -> _Linear | None:
    """An integer tensor as a linear form of its last two indices."""
    node = value.node
    name, record = node.op.name, _record(node)
    if name == "iota":
        return _of_iota(record)
    if name == "dim_value":
        return _Linear(0, 0, record.dim)
    if name == "constant":
        found = number(value)
        return None if found is None or found != int(found) else _Linear(0, 0, int(found))
    if name in ("add", "sub"):
        a, b = map(_linear, node.inputs)
        return None if a is None or b is None else a.plus(b, 1 if name == "add" else -1)
    if name in ("cast", "expand"):
        return _linear(node.inputs[0])
    if name == "reshape":
        return _of_reshape(node)
    if name == "transpose" and record.axes == (1, 0):
        inner = _linear(node.inputs[0])
        return None if inner is None else _Linear(inner.column, inner.row, inner.offset)
    return None


def _record(node: Node) -> Any:
    return node.op


def _of_iota(record: Any) -> _Linear | None:
    rank = len(record.shape)
    axis = rank - record.axis % rank  # counted from the end
    if same(record.shape[record.axis], 1):
        return _Linear(0, 0, record.start)
    if axis > 2:
        return None
    return _Linear(int(axis == 2), int(axis == 1), record.start)


def _of_reshape(node: Node) -> _Linear | None:
    """[n] as [n, 1] or [1, n] and back."""
    inner = _linear(node.inputs[0])
    if inner is None or (inner.row and inner.column):
        return None
    old = [d for d in node.inputs[0].shape.dims if not same(d, 1)]
    new = node.output.shape.dims
    axes = [len(new) - i for i, d in enumerate(new) if not same(d, 1)]
    if not inner.row and not inner.column:
        return inner
    factor = inner.row or inner.column
    if len(old) != 1 or len(axes) != 1 or axes[0] > 2:
        return None
    return _Linear(factor * (axes[0] == 2), factor * (axes[0] == 1), inner.offset)


def _of_constant(keep: Value, rows: Dim, keys: Dim) -> MaskKind | None:
    array = np.asarray(_record(keep.node).data.array)
    if not isinstance(rows, int) or not isinstance(keys, int) or array.dtype != np.bool_:
        return None
    if array.size != rows * keys or array.shape[-2:] != (rows, keys):
        return None
    triangle = np.tri(rows, keys, keys - rows, dtype=np.bool_)
    return MaskKind.CAUSAL if np.array_equal(array.reshape(rows, keys), triangle) else None


def hidden_scores(bias: Value) -> tuple[Value, float] | None:
    """(mask, number) of a bias that is 0 where the mask is set and that number elsewhere."""
    node = bias.node
    if node.op.name != "where":
        return None
    flags, kept, hidden = node.inputs
    low = number(hidden)
    return (flags, low) if number(kept) == 0.0 and low is not None and low < 0 else None
