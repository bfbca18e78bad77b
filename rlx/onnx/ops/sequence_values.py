"""Sequences and optionals: lists of values, which no kernel ever sees."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.numpy as xp
from rlx.onnx.call import Call
from rlx.onnx.interpreter import as_array
from rlx.onnx.ops.layout import size_list
from rlx.onnx.table import op
from rlx.onnx.values import elements_of


def _position(node: Call, items: list[Any], at: Any, most: int) -> int:
    found = int(elements_of(at).reshape(-1)[0])
    if not -len(items) <= found < most:
        raise node.fault("a position out of range", got=found, expected=f"of {len(items)}")
    return found + len(items) if found < 0 else found


@op("SequenceEmpty", raw=True)
def sequence_empty(node: Call) -> Any:
    return []


@op("SequenceConstruct", raw=True)
def sequence_construct(node: Call, *items: Any) -> Any:
    return list(items)


@op("SequenceAt", raw=True)
def sequence_at(node: Call, items: Any, at: Any) -> Any:
    return items[_position(node, items, at, len(items))]


@op("SequenceInsert", raw=True)
def sequence_insert(node: Call, items: Any, item: Any, at: Any = None) -> Any:
    place = len(items) if at is None else _position(node, items, at, len(items) + 1)
    return [*items[:place], item, *items[place:]]


@op("SequenceErase", raw=True)
def sequence_erase(node: Call, items: Any, at: Any = None) -> Any:
    place = len(items) - 1 if at is None else _position(node, items, at, len(items))
    return [*items[:place], *items[place + 1 :]]


@op("SequenceLength", raw=True)
def sequence_length(node: Call, items: Any) -> Any:
    return np.asarray(len(items), np.int64)


@op("SplitToSequence", raw=True)
def split_to_sequence(node: Call, x: Any, sizes: Any = None) -> Any:
    array = as_array(x)
    axis = node.int("axis", 0) % array.ndim
    whole = array.shape[axis]
    if sizes is None:
        parts = [1] * int(whole)
    else:
        data = elements_of(sizes)
        parts = size_list(data)
        if data.ndim == 0:
            step, left = int(parts[0]), int(whole)
            if step < 1:
                raise node.fault("not a size of parts", got=step)
            parts = [min(step, left - i) for i in range(0, left, step)]
    keep = node.int("keepdims", 1) or sizes is not None
    found: list[Any] = []
    start: Any = 0
    for length in parts:
        key: list[Any] = [slice(None)] * array.ndim
        key[axis] = slice(start, start + length)
        part = array[tuple(key)]
        found.append(part if keep else xp.squeeze(part, axis))
        start = start + length
    return found


@op("ConcatFromSequence", raw=True)
def concat_from_sequence(node: Call, items: Any) -> Any:
    if not items:
        raise node.fault("an empty sequence")
    arrays, axis = [as_array(x) for x in items], node.int("axis")
    return xp.stack(arrays, axis=axis) if node.int("new_axis", 0) else xp.concat(arrays, axis=axis)


@op("SequenceMap", raw=True)
def sequence_map(node: Call, items: Any, *others: Any) -> Any:
    body = node.graph("body")
    columns: list[list[Any]] = [[] for _ in body.outputs]
    for i, item in enumerate(items):
        more = [x[i] if isinstance(x, list) else x for x in others]
        for column, result in zip(columns, node.run(body, item, *more), strict=True):
            column.append(result)
    return tuple(columns)


# -- optionals ------------------------------------------------------------------------------------


@op("Optional", raw=True)
def optional(node: Call, x: Any = None) -> Any:
    return x


@op("OptionalHasElement", raw=True)
def optional_has_element(node: Call, x: Any = None) -> Any:
    return np.asarray(x is not None)


@op("OptionalGetElement", raw=True)
def optional_get_element(node: Call, x: Any) -> Any:
    if x is None:
        raise node.fault("an optional without a value")
    return x
