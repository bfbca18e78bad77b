"""Elementwise ops, and ops that have leading axes of their own: the batch is one more of them."""

from __future__ import annotations

from typing import Any

from rlx.ir.graph import Graph
from rlx.passes.batching.rules import (
    Flags,
    MappedAxis,
    Values,
    aligned,
    batched,
    batched_flags,
    element,
    spread_all,
)


@batched("elementwise", "solve")
def _elementwise(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    """Operands broadcast from the right: the batch must be left of the longest of them."""
    rank = max(element(x, m).rank for x, m in zip(inputs, mapped, strict=True))
    return g.append_node(
        op, [aligned(g, x, m, rank) for x, m in zip(inputs, mapped, strict=True)]
    ).outputs


@batched(
    "cholesky", "qr", "eigh", "eig", "svd", "slogdet", "fused_gated_act", "quantize_blocks",
    "quantize_weight", "stop_gradient", "contiguous",
)  # fmt: skip
def _leading(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    return g.append_node(op, inputs).outputs


ROWS = {
    "rms_norm": 1, "layer_norm": 1, "fused_residual_rms_norm": 2, "fused_residual_layer_norm": 2,
    "dequant_matmul": 1, "dequant_matmul_transposed": 1, "lora_matmul": 1,
}  # fmt: skip
"""How many operands of an op are rows [..., n]; the others are weights of all rows."""


@batched(*ROWS)
def _rows(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values | None:
    count = ROWS[op.name]
    if any(mapped[count:]):
        return None
    rows = spread_all(g, inputs[:count], mapped[:count], over)
    return g.append_node(op, [*rows, *inputs[count:]]).outputs


@batched("fused_swiglu", "fused_matmul_bias_act")
def _dense(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values | None:
    """x·w for rows x and one matrix w; a residual is as long as x."""
    x, *others = inputs
    residual = op.name == "fused_matmul_bias_act" and op.has_residual
    weights = len(inputs) - residual
    if not mapped[0] or any(mapped[1:weights]) or inputs[1].shape.rank != 2:
        return None
    rest = spread_all(g, inputs[weights:], mapped[weights:], over)
    return g.append_node(op, [x, *others[: weights - 1], *rest]).outputs


@batched_flags("optimization_barrier")
def _barrier(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> tuple[Values, Flags]:
    return g.append_node(op, inputs).outputs, mapped


@batched("searchsorted")
def _searchsorted(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> Values | None:
    """In one table for all; tables of their own are searched one after the other."""
    return None if mapped[0] else g.append_node(op, inputs).outputs
