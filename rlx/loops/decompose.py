"""Any op as a graph that regions take: itself, or what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Op
from rlx.ir.origin import UNKNOWN
from rlx.ir.shape import Shape
from rlx.passes.common import COMMON

# Ops that a region computes by their common bodies.
WRITTEN_OUT = frozenset(
    (
        "softmax",
        "log_softmax",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "l2_norm",
        "fused_residual_rms_norm",
        "fused_residual_layer_norm",
        "fused_gated_act",
        "quantize",
        "dequantize",
        "fake_quantize",
    )
)


@lru_cache(maxsize=4096)
def graph_of(op: Op, shapes: tuple[Shape, ...]) -> Graph:
    """The op on operands of these shapes, as inputs of a graph."""
    g = Graph(op.name)
    with g.origin(UNKNOWN):
        inputs = [g.input(f"x{i}", s) for i, s in enumerate(shapes)]
        if op.name == "elementwise_region":
            body: Any = op
            results: Sequence[Value] = _inlined(g, body.body.graph, inputs)
        else:
            results = _applied(g, op, inputs)
    g.outputs = list(results)
    return g


def _inlined(g: Graph, body: Graph, inputs: Sequence[Value]) -> list[Value]:
    given = iter(inputs)
    values: dict[Value, Value] = {}
    for node in body.nodes:
        values.update(zip(node.outputs, _copied(g, node, values, given), strict=True))
    return [values[v] for v in body.outputs]


def _copied(g: Graph, node: Node, values: dict[Value, Value], given: Any) -> Sequence[Value]:
    if node.op.name == "input":
        return [next(given)]
    return _applied(g, node.op, [values[v] for v in node.inputs])


def _applied(g: Graph, op: Op, inputs: Sequence[Value]) -> Sequence[Value]:
    if op.name not in WRITTEN_OUT:
        return g.append_node(op, inputs).outputs
    result = COMMON[op.name](g, op, inputs)
    return result if isinstance(result, tuple) else (result,)
