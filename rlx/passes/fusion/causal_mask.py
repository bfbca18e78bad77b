"""Masks built from positions: which keys does a query see?

Flags made by comparing iotas are read as linear inequalities in the row i (query) and the column j
(key). With Sq queries and Sk keys, query i stands at position p = Sk − Sq + i:

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
    """CAUSAL or SLIDING_WINDOW when the flags `keep` [..., rows, keys] are that mask."""
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
    """Whether every query of a causal mask has a key: there are at least as many keys."""
    rest = expand(keys - rows)
    if isinstance(rest, int):
        return rest >= 0
    if same(rows, 1):
        return True  # it sees the last key; without any key there is nothing to see for anyone
    plain = all(isinstance(atom, str) for monomial, _ in rest.terms for atom in monomial)
    return plain and all(factor > 0 for _, factor in rest.terms)


def _normal(condition: _Linear, rows: Dim, keys: Dim) -> _Linear:
    """An axis of size 1 has index 0 alone; its factor is taken to be the one looked for."""
    row, column, offset = condition
    if same(rows, 1) and row == 0 and column:
        row = -column
    if same(keys, 1) and column == 0 and row:
        column = -row
    return _Linear(row, column, offset)


def _conditions(flags: Value) -> list[_Linear] | None:
    """Linear forms that must all be ≥ 0 for a flag to be set."""
    node = flags.node
    kind = node.op.name
    if kind in ("logical_and", "bitwise_and"):
        first, second = map(_conditions, node.inputs)
        return None if first is None or second is None else first + second
    if kind in ("expand", "reshape") and _keeps_axes(node):
        return _conditions(node.inputs[0])
    if kind == "logical_not":
        inner = _conditions(node.inputs[0])
        if inner is None or len(inner) != 1:
            return None
        return [_Linear(0, 0, -1).plus(inner[0], -1)]
    if kind not in ("le", "lt", "ge", "gt"):
        return None
    low, high = node.inputs if kind in ("le", "lt") else node.inputs[::-1]
    a, b = _linear(low), _linear(high)
    if a is None or b is None:
        return None
    return [b.plus(a, -1).plus(_Linear(0, 0, -1 if kind in ("lt", "gt") else 0))]


def _keeps_axes(node: Node) -> bool:
    """Whether an expand or reshape leaves the last two axes where they are, but for 1s."""
    old, new = node.inputs[0].shape.dims, node.output.shape.dims
    if node.op.name == "expand":
        return True
    count = max(len(old), len(new), 2)
    a, b = ((1,) * (count - len(d)) + tuple(d) for d in (old, new))
    return all(map(same, a, b))


def _linear(value: Value) -> _Linear | None:
    """An integer tensor as a linear form of its last two indices."""
    node = value.node
    kind, record = node.op.name, _record(node)
    if kind == "iota":
        return _of_iota(record)
    if kind == "dim_value":
        return _Linear(0, 0, record.dim)
    if kind == "constant":
        found = number(value)
        return None if found is None or found != int(found) else _Linear(0, 0, int(found))
    if kind in ("add", "sub"):
        a, b = map(_linear, node.inputs)
        return None if a is None or b is None else a.plus(b, 1 if kind == "add" else -1)
    if kind in ("cast", "expand"):
        return _linear(node.inputs[0])
    if kind == "reshape":
        return _of_reshape(node)
    if kind == "transpose" and record.axes == (1, 0):
        inner = _linear(node.inputs[0])
        return None if inner is None else _Linear(inner.column, inner.row, inner.offset)
    return None


def _record(node: Node) -> Any:
    return node.op


def _of_iota(record: Any) -> _Linear | None:
    rank = len(record.shape)
    place = rank - record.axis % rank  # counted from the end
    if same(record.shape[record.axis], 1):
        return _Linear(0, 0, record.start)
    if place > 2:
        return None
    return _Linear(int(place == 2), int(place == 1), record.start)


def _of_reshape(node: Node) -> _Linear | None:
    """[n] as [n, 1] or [1, n] and back."""
    inner = _linear(node.inputs[0])
    if inner is None or (inner.row and inner.column):
        return None
    old = [d for d in node.inputs[0].shape.dims if not same(d, 1)]
    new = node.output.shape.dims
    places = [len(new) - i for i, d in enumerate(new) if not same(d, 1)]
    if not inner.row and not inner.column:
        return inner
    factor = inner.row or inner.column
    if len(old) != 1 or len(places) != 1 or places[0] > 2:
        return None
    return _Linear(factor * (places[0] == 2), factor * (places[0] == 1), inner.offset)


def _of_constant(keep: Value, rows: Dim, keys: Dim) -> MaskKind | None:
    array = np.asarray(_record(keep.node).data.array)
    if not isinstance(rows, int) or not isinstance(keys, int) or array.dtype != np.bool_:
        return None
    if array.size != rows * keys or array.shape[-2:] != (rows, keys):
        return None
    triangle = np.tri(rows, keys, keys - rows, dtype=np.bool_)
    return MaskKind.CAUSAL if np.array_equal(array.reshape(rows, keys), triangle) else None


def hidden_scores(bias: Value) -> tuple[Value, float] | None:
    """(flags, number) of a bias that is 0 where flags are set and that number elsewhere."""
    node = bias.node
    if node.op.name != "where":
        return None
    flags, kept, hidden = node.inputs
    low = number(hidden)
    return (flags, low) if number(kept) == 0.0 and low is not None and low < 0 else None
