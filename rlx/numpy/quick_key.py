"""The key of a call of a jitted function, in one pass over its arguments.

This is the short way for arguments that are arrays, numbers, and trees of them; `Arguments` is the
way for all others, and for the first call with a key. Dicts are taken in the
order they have: `order_of` says how their leaves lie in the trace, where dicts are sorted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.numpy.arguments import Data, Parameters
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array
from rlx.numpy.tree import children_of, flatten


class NoQuickKeyError(Exception):
    """The arguments need the long way."""


def key_of(
    parameters: Parameters, args: tuple[Any, ...], named: Mapping[str, Any], datas: list[Data]
) -> tuple[Any, ...]:
    """A key, which need not be hashable; `datas` gets the arrays."""
    key: list[Any] = []
    static = parameters.positions
    if static:
        for i, x in enumerate(args):
            if i in static:
                _add_static(x, key)
            else:
                _walk(x, key, datas)
    else:
        for x in args:
            _walk(x, key, datas)
    for name, x in named.items():
        key.append(name)
        if name in parameters.static:
            _add_static(x, key)
        else:
            _walk(x, key, datas)
    return tuple(key)


def _walk(tree: Any, key: list[Any], datas: list[Data]) -> None:
    # a node begins with its shape or type, and says how much follows: keys are unambiguous
    kind = type(tree)
    if kind is Array:
        data = tree.data
        datas.append(data)
        key.append(data.shape)
        key.append(data.dtype)
    elif kind is dict:
        key.append(dict)
        key.append(len(tree))
        key.extend(tree)
        for child in tree.values():
            _walk(child, key, datas)
    elif kind is list or kind is tuple:
        key.append(kind)
        key.append(len(tree))
        for child in tree:
            _walk(child, key, datas)
    elif kind is np.ndarray or kind is float or kind is int or kind is bool:
        data = tree if kind is np.ndarray else as_array(tree).data
        datas.append(data)
        key.append(data.shape)
        key.append(data.dtype)
    elif tree is None:
        key.append(None)
    else:
        parts = children_of(tree)
        if parts is None:
            raise NoQuickKeyError
        keys, children = parts
        key += (kind, keys, len(children))
        for child in children:
            _walk(child, key, datas)


def _add_static(value: Any, key: list[Any]) -> None:
    kind = type(value)
    if kind is tuple:  # 1, 1.0 and True are equal inside
        raise NoQuickKeyError
    key.append(kind)
    key.append(value.hex() if kind is float else value)


def order_of(parameters: Parameters, args: tuple[Any, ...], named: Mapping[str, Any]) -> list[int]:
    """For each leaf of the trace, its number among the arrays that `key_of` finds."""
    count = iter(range(1 << 30))
    given = [_numbered(x, count) for i, x in enumerate(args) if i not in parameters.positions]
    rest = {n: _numbered(x, count) for n, x in named.items() if n not in parameters.static}
    found: list[int] = flatten((tuple(given), rest))[0]
    return found


def _numbered(tree: Any, count: Any) -> Any:
    kind = type(tree)
    if kind is dict:
        return {k: _numbered(child, count) for k, child in tree.items()}
    parts = children_of(tree)
    return next(count) if parts is None else tuple([_numbered(x, count) for x in parts[1]])
