"""Any op as a graph that regions take: itself, or its decomposition."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rlx.backends.cpu.kernels.loops.elements import has_vector_code
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Op
from rlx.ir.ops.composite import decomposed
from rlx.ir.origin import UNKNOWN
from rlx.ir.shape import Shape


def is_decomposed(op: Op | type[Op]) -> bool:
    """Whether a region computes the op by its decomposition."""
    return op.runs_as_region or (op.is_elementwise and not has_vector_code(op))


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
    if is_decomposed(op):
        body = decomposed(op, tuple([v.shape for v in inputs]))
        if body is not None:
            return _inlined(g, body, inputs)
    return g.append_node(op, inputs).outputs
