"""Collectives: over the axis that is mapped here they become ops along axis 0; others stay."""

from __future__ import annotations

from typing import Any

from rlx.errors import ShapeError
from rlx.ir.dim import same
from rlx.ir.graph import Graph
from rlx.ir.ops._common import cast, size_value
from rlx.ir.shape import normalize_axis
from rlx.passes.batching.rules import (
    Flags,
    MappedAxis,
    Values,
    batched_flags,
    moved,
    one,
    spread,
)

_REDUCTIONS = {"psum": "sum", "pmean": "mean", "pmax": "max", "pmin": "min"}


@batched_flags(*_REDUCTIONS)
def _reduced(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> tuple[Values, Flags]:
    (x,) = inputs
    if op.axis_name != over.name:
        return [g.append_node(op, [x]).output], mapped
    if mapped[0]:
        return [g.apply(_REDUCTIONS[op.name], x, axis=(0,))], [False]
    result = op.infer(x.shape).dtype
    y = cast(g, x, result)
    return [g.mul(y, size_value(g, over.size, y)) if op.name == "psum" else y], [False]


@batched_flags("all_gather")
def _all_gather(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> tuple[Values, Flags]:
    (x,) = inputs
    rank = (one(x) if mapped[0] else x.shape).rank
    axis = normalize_axis(op.axis, rank + 1)
    if op.axis_name != over.name:
        return [g.append_node(op.replace(axis=axis + 1), [x]).output], mapped
    if not same(op.size, over.size):
        raise ShapeError(
            "the axis has another size", where=op.name, got=f"{op.axis_name}: {over.size}",
            expected=op.size,
        )  # fmt: skip
    return [moved(g, spread(g, x, mapped[0], over), 0, axis)], [False]


@batched_flags("axis_index")
def _axis_index(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> tuple[Values, Flags]:
    return [g.iota(shape=(over.size,))], [True]
