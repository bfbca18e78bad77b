"""Ops whose operands have a batch axis already: the new batch becomes a part of it."""

from __future__ import annotations

from typing import Any

from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.passes.batching.rules import (
    Flags,
    MappedAxis,
    Values,
    aligned,
    batched,
    element,
    folded,
    spread,
    unfolded,
)

SHARED: dict[str, tuple[int, ...]] = {
    "max_pool": (), "avg_pool": (), "resize": (), "group_norm": (1, 2),
    "depthwise_conv1d_causal": (1,), "gated_delta_net": (), "selective_scan": (2, 5),
}  # fmt: skip
"""The operands that have no batch axis: weights, the same for the whole batch."""


@batched(*SHARED)
def _batched_rows(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> Values | None:
    shared = _shared(op, len(inputs))
    if any(mapped[i] for i in shared):
        return None
    batch = element(inputs[0], mapped[0]).dims[0]
    operands = [x if i in shared else folded(g, x, mapped[i], over) for i, x in enumerate(inputs)]
    return [unfolded(g, y, batch, over) for y in g.append_node(op, operands).outputs]


def _shared(op: Any, count: int) -> tuple[int, ...]:
    shared = [i for i in SHARED[op.name] if i < count]
    if op.name == "selective_scan" and not op.has_d:  # the fifth is the state
        shared = [2]
    return tuple(shared)


@batched("lstm", "gru")
def _batched_cells(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> Values | None:
    """The weight and the bias are the same for all; the batch is the second axis of sequences."""
    states = 1 + (op.name == "lstm")
    if mapped[1] or any(mapped[2 + states :]):
        return None
    batch = element(inputs[0], mapped[0]).dims[1]
    x_gates = folded(g, inputs[0], mapped[0], over, 1)
    first = [folded(g, inputs[2 + i], mapped[2 + i], over) for i in range(states)]
    y, *last = g.append_node(op, [x_gates, inputs[1], *first, *inputs[2 + states :]]).outputs
    return [unfolded(g, y, batch, over, 1), *[unfolded(g, s, batch, over) for s in last]]


# -- attention --------------------------------------------------------------------------------


@batched("attention")
def _attention(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values | None:
    if op.has_sinks and mapped[-1]:
        return None
    batch = element(inputs[0], mapped[0]).dims[0]
    operands = [folded(g, x, m, over) for x, m in zip(inputs[:3], mapped[:3], strict=True)]
    extra = list(inputs[3:])
    if op.extras(*extra)[0] is not None:
        extra[0] = _mask(g, extra[0], mapped[3], batch, over)
    return [unfolded(g, g.append_node(op, [*operands, *extra]).output, batch, over)]


def _mask(g: Graph, mask: Value, is_mapped: bool, batch: Dim, over: MappedAxis) -> Value:
    """A mask for the folded batch; one that all elements and their sequences share stays."""
    dims = element(mask, is_mapped).dims
    if not is_mapped and (len(dims) < 4 or dims[0] == 1):
        return mask
    whole = aligned(g, spread(g, mask, is_mapped, over), True, 4)
    whole = g.expand(whole, shape=(over.size, batch, *whole.shape.dims[2:]))
    return folded(g, whole, True, over)


@batched("rope", "fused_qk_norm_rope")
def _rope(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values | None:
    """The tables are the same for all; positions are one row for all, or one per sequence."""
    tables = 3 if op.name == "rope" else 4  # operands before the positions
    if any(mapped[1:tables]):
        return None
    batch = element(inputs[0], mapped[0]).dims[0]
    operands = [folded(g, inputs[0], mapped[0], over), *inputs[1:tables]]
    for positions, is_mapped in zip(inputs[tables:], mapped[tables:], strict=True):
        rank = element(positions, is_mapped).rank
        if is_mapped and rank == 1:
            size, length = positions.shape.dims
            rows = g.reshape(positions, shape=(size, 1, length))
            positions = g.expand(rows, shape=(size, batch, length))
        shared = rank == 1 and not is_mapped
        operands.append(positions if shared else folded(g, positions, is_mapped or rank == 1, over))
    return [unfolded(g, g.append_node(op, operands).output, batch, over)]
