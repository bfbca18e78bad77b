"""The table of batching rules, and what rules are written with.

    @batched("reshape")
    def _(op, g, inputs, mapped, over):
        return [g.reshape(inputs[0], shape=(over.size, *op.resolved(one(inputs[0]).dims)))]

A mapped value has the batch in front, as axis 0; one that is not mapped is the same for every
element of the batch, and stays as it is as long as possible. A rule is called when an operand is
mapped (`mapped` says which are) and gives the results, all of them mapped. It may return None for
what it does not cover. Control flow says with `batched_flags` which of its results are mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.shape import Shape

Values: TypeAlias = Sequence[Value]
Flags: TypeAlias = Sequence[bool]


class MappedAxis(NamedTuple):
    """The axis that is added: its size, and the name by which collectives refer to it."""

    size: Dim
    name: str | None = None


Rule: TypeAlias = Callable[[Any, Graph, Values, Flags, MappedAxis], Values | None]
FlagRule: TypeAlias = Callable[[Any, Graph, Values, Flags, MappedAxis], tuple[Values, Flags] | None]

RULES: dict[str, FlagRule] = {}

_FILES = ("pointwise", "axes", "lookups", "contractions", "folded", "control_flow", "wrappers",
          "collectives")  # fmt: skip


@cache
def load_rules() -> None:
    """Import the files of rules; late, because most programs batch nothing."""
    for name in _FILES:
        import_module(f"rlx.passes.batching.{name}")


def batched(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule whose results are all mapped."""

    def enter(rule: Rule) -> Rule:
        for name in names:
            RULES[name] = _with_flags(rule)
        return rule

    return enter


def batched_flags(*names: str) -> Callable[[FlagRule], FlagRule]:
    """Enter a rule that says which of its results are mapped."""

    def enter(rule: FlagRule) -> FlagRule:
        for name in names:
            RULES[name] = rule
        return rule

    return enter


def _with_flags(rule: Rule) -> FlagRule:
    def flagged(
        op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
    ) -> tuple[Values, Flags] | None:
        found = rule(op, g, inputs, mapped, over)
        return None if found is None else (found, [True] * len(found))

    return flagged


# -- shapes -----------------------------------------------------------------------------------


def one(x: Value) -> Shape:
    """The shape of one element of a mapped value."""
    return x.shape.with_dims(x.shape.dims[1:])


def element(x: Value, is_mapped: bool) -> Shape:
    """The shape that the op sees in one element of the batch."""
    return one(x) if is_mapped else x.shape


def widened(shape: Shape, is_mapped: bool, over: MappedAxis) -> Shape:
    """The shape of a value in the batched graph, from that in the graph of one element."""
    return shape.with_dims((over.size, *shape.dims)) if is_mapped else shape


def spread(g: Graph, x: Value, is_mapped: bool, over: MappedAxis) -> Value:
    """`x` as a mapped value: repeated where it is the same for all."""
    return x if is_mapped else g.expand(x, shape=(over.size, *x.shape.dims))


def spread_all(g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> list[Value]:
    return [spread(g, x, m, over) for x, m in zip(inputs, mapped, strict=True)]


def aligned(g: Graph, x: Value, is_mapped: bool, rank: int) -> Value:
    """A mapped value with axes of size 1 behind the batch, so that its elements broadcast as if
    they had that rank."""
    if not is_mapped or x.shape.rank == rank + 1:
        return x
    size, *dims = x.shape.dims
    return g.reshape(x, shape=(size, *[1] * (rank - len(dims)), *dims))


def moved(g: Graph, x: Value, source: int, to: int) -> Value:
    """`x` with one axis moved, the others in order."""
    if source == to:
        return x
    axes = [i for i in range(x.shape.rank) if i != source]
    axes.insert(to, source)
    return g.transpose(x, axes=tuple(axes))


def folded(g: Graph, x: Value, is_mapped: bool, over: MappedAxis, axis: int = 0) -> Value:
    """The batch as a part of an axis of each element: [S, …, n, …] as [S·n, …] for axis 0."""
    x = moved(g, spread(g, x, is_mapped, over), 0, axis)
    dims = x.shape.dims
    return g.reshape(x, shape=(*dims[:axis], dims[axis] * dims[axis + 1], *dims[axis + 2 :]))


def unfolded(g: Graph, y: Value, n: Dim, over: MappedAxis, axis: int = 0) -> Value:
    """The reverse of `folded`, for an axis of size n in each element."""
    dims = y.shape.dims
    y = g.reshape(y, shape=(*dims[:axis], over.size, n, *dims[axis + 1 :]))
    return moved(g, y, axis, 0)
