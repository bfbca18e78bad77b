"""Donated arguments: arrays that a caller gives up, so that results can have their memory."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import numpy as np

from rlx.backends.recycle import is_only_view
from rlx.errors import InputError
from rlx.ir.graph import Graph
from rlx.numpy.array import Array

Data = np.ndarray[Any, Any]


class Donated(Array):
    """What an array becomes once a jitted function has taken its memory."""

    __slots__ = ()

    @property
    def data(self) -> NoReturn:  # type: ignore[override]
        raise InputError(
            "a donated array was used", got="memory that a jitted function has overwritten",
            expected="the function's result instead",
            hint="pass a copy, rlx.numpy.asarray(x, copy=True), to keep the array",
        )  # fmt: skip

    def __repr__(self) -> str:
        return "<donated array>"

    __str__ = __repr__


def _references(datas: list[Data], i: int) -> int:
    return sys.getrefcount(datas[i])


def _references_of_an_array() -> int:
    """References to the memory of an array that nothing else shares, in a list of a call."""
    array = Array(np.empty(1))
    return _references([array.data], 0)


_ALONE = _references_of_an_array()


def take(leaves: list[Array], datas: list[Data], donated: list[bool]) -> None:
    """Replace donated memory that must not change by a copy: that of a view, memory that a view or
    a user's array shares, and an argument given twice."""
    for i, is_donated in enumerate(donated):
        if not is_donated:
            continue
        alone = type(leaves[i]) is Array and _references(datas, i) <= _ALONE
        flags = datas[i].flags
        owns = flags.owndata or is_only_view(datas[i])
        if not (alone and owns and flags.writeable and flags.c_contiguous):
            datas[i] = np.array(datas[i], order="C")


def give_up(array: Array) -> None:
    """Make a donated array unusable."""
    if type(array) is Array:
        del array.data
        array.__class__ = Donated


def pairs(graph: Graph, donated: list[str], paths: list[str]) -> dict[str, str]:
    """For some of the first outputs, which have these paths in the results, an input of the same
    type and shape, each once. An input whose path ends alike comes first: that is the array which
    the output replaces, so that each element is written where it was read."""
    left = [graph.find(name) for name in donated]
    rows = list(zip(graph.output_names, graph.outputs, paths, strict=False))
    found: dict[int, int] = {}
    taken: set[int] = set()
    for least in _ENDS:  # longest first; all with all would be too many for hundreds of arrays
        inputs: dict[Any, list[int]] = {}
        for j, source in enumerate(left):
            if j not in taken:
                inputs.setdefault((source.shape, _end(source.node.name, least)), []).append(j)
        fitting = [
            (-_common_end(path, left[j].node.name), i, j)
            for i, (_, output, path) in enumerate(rows)
            if i not in found
            for j in inputs.get((output.shape, _end(path, least)), ())
        ]
        for _, i, j in sorted(fitting):
            if i not in found and j not in taken:
                found[i] = j
                taken.add(j)
    return {rows[i][0]: left[j].node.name for i, j in sorted(found.items())}


_ENDS = (32, 16, 8, 0)  # characters that two names have in common at least


def _end(name: str, count: int) -> str:
    return name[-count:] if count else ""


def _common_end(a: str, b: str) -> int:
    """How many characters two names have in common at their ends."""
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count
