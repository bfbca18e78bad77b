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
    free = dict.fromkeys(range(len(left)))
    # From long ends to short ones, by hash: comparing all with all would be quadratic.
    for count in range(max([len(path) for path in paths], default=0), -1, -1):
        inputs: dict[Any, list[int]] = {}
        for j in reversed(free):
            source = left[j]
            inputs.setdefault((source.shape, _end(source.node.name, count)), []).append(j)
        for i, (_, output, path) in enumerate(rows):
            fitting = inputs.get((output.shape, _end(path, count))) if i not in found else None
            if fitting:
                found[i] = fitting.pop()
                del free[found[i]]
    return {rows[i][0]: left[j].node.name for i, j in sorted(found.items())}


def _end(name: str, count: int) -> str:
    return name[-count:] if count else ""
