"""Trees of arguments and results: dicts, lists, tuples, named tuples, dataclasses and None.

A class with `tree_flatten(self)`, which returns hashable keys and the children, and a class method
`tree_unflatten(keys, children)` is a tree too; keys after those of the children are static values.

    leaves, structure = flatten({"w": w, "b": [b1, b2]})
    unflatten(structure, leaves)

A structure is a hashable tuple: it is part of the key by which `rlx.jit` finds a trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from rlx.errors import InputError

Structure: TypeAlias = Any  # LEAF, or (type, keys, structures of the children)
LEAF = "leaf"
_LEAVES = {bool, int, float, complex, str, np.ndarray}  # leaves for sure


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of `tree` in order, and its structure. Dicts are ordered by their keys."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


_leaf_kinds: set[type] = set()  # types of leaves met so far: what is a tree depends on its type


def _flatten(tree: Any, leaves: list[Any]) -> Structure:
    kind = type(tree)
    if kind in _leaf_kinds:
        leaves.append(tree)
        return LEAF
    if kind is tuple or kind is list:
        return (kind, (), tuple([_flatten(child, leaves) for child in tree]))
    parts = None if kind in _LEAVES else children_of(tree)
    if parts is None:
        _leaf_kinds.add(kind)
        leaves.append(tree)
        return LEAF
    keys, children = parts
    return (kind, keys, tuple([_flatten(child, leaves) for child in children]))


def children_of(tree: Any) -> tuple[tuple[Any, ...], Sequence[Any]] | None:
    """The keys and the children of a container; None for a leaf."""
    if tree is None:
        return (), ()
    kind = type(tree)
    if kind is dict:
        try:
            keys = tuple(sorted(tree))
        except TypeError:
            keys = tuple(tree)  # keys of several types keep their order
        return keys, [tree[k] for k in keys]
    if kind in (list, tuple):
        return (), tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return (), tree
    if hasattr(kind, "tree_flatten"):
        flattened: tuple[tuple[Any, ...], Sequence[Any]] = tree.tree_flatten()
        return flattened
    if dataclasses.is_dataclass(kind):
        keys = tuple(f.name for f in dataclasses.fields(tree))
        return keys, [getattr(tree, k) for k in keys]
    return None


def is_tree(x: object) -> bool:
    """Whether `x` is a container of other trees, not a leaf."""
    return children_of(x) is not None


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """The tree of that structure with other leaves."""
    remaining = iter(leaves)
    tree = _unflatten(structure, remaining)
    if next(remaining, remaining) is not remaining:
        raise InputError("more leaves than the structure has", where="unflatten", got=len(leaves))
    return tree


def _unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure is LEAF:
        try:
            return next(leaves)
        except StopIteration:
            raise InputError("fewer leaves than the structure has", where="unflatten") from None
    kind, keys, parts = structure
    children = [_unflatten(part, leaves) for part in parts]
    if kind is type(None):
        return None
    if kind is dict:
        return dict(zip(keys, children, strict=True))
    if kind in (list, tuple):
        return kind(children)
    if hasattr(kind, "tree_unflatten"):
        return kind.tree_unflatten(keys, children)
    if not keys:
        return kind(*children)
    return kind(**dict(zip(keys, children, strict=True)))


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`function` applied to every leaf; further trees must have the same structure."""
    leaves, structure = flatten(tree)
    columns = [leaves]
    for other in others:
        more, found = flatten(other)
        if found != structure:
            raise InputError(
                "trees differ in structure", where="tree_map", got=str(found), expected=structure
            )
        columns.append(more)
    return unflatten(structure, [function(*row) for row in zip(*columns, strict=True)])


def leaf_names(tree: Any, prefix: str = "", separator: str = "_") -> list[str]:
    """A name for each leaf, by its path: `params_w`, `xs_0`. Private attributes, as those of module
    lists, are left out."""
    parts = children_of(tree)
    if parts is None:
        return [prefix]
    keys, children = parts
    names: list[str] = []
    for i, child in enumerate(children):
        key = str(keys[i]) if keys else str(i)
        path = [n for n in (prefix, key) if n and not (n is key and key.startswith("_"))]
        names += leaf_names(child, separator.join(path), separator)
    return names
