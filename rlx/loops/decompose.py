"""Any op as a graph that regions take: itself, or its decomposition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.node import UNKNOWN, Value
from rlx.ir.op import Op
from rlx.ir.ops.composite import decomposed
from rlx.ir.shape import Shape

HasCode = Callable[[Op | type[Op]], bool]  # whether a target has code for an elementwise op


def is_decomposed(op: Op | type[Op], has_code: HasCode) -> bool:
    """Whether a region computes the op by its decomposition."""
    return op.runs_as_region or (op.is_elementwise and not has_code(op))


@lru_cache(maxsize=4096)
def graph_of(op: Op, shapes: tuple[Shape, ...], has_code: HasCode) -> Graph:
    """The op on operands of these shapes, as inputs of a graph of what the target has code for."""
    g = Graph(op.name)
    with g.origin(UNKNOWN):
        inputs = [g.input(f"x{i}", s) for i, s in enumerate(shapes)]
        if op.name == "elementwise_region":
            body: Any = op
            results: Sequence[Value] = _inlined(g, body.body.graph, inputs, has_code)
        else:
            results = _applied(g, op, inputs, has_code)
    g.outputs = list(results)
    return g


def _inlined(g: Graph, body: Graph, inputs: Sequence[Value], has_code: HasCode) -> list[Value]:
    given = iter(inputs)
    values: dict[Value, Value] = {}
    for node in body.nodes:
        if node.op.name == "input":
            results: Sequence[Value] = [next(given)]
        else:
            results = _applied(g, node.op, [values[v] for v in node.inputs], has_code)
        values.update(zip(node.outputs, results, strict=True))
    return [values[v] for v in body.outputs]


def _applied(g: Graph, op: Op, inputs: Sequence[Value], has_code: HasCode) -> Sequence[Value]:
    if is_decomposed(op, has_code):
        body = decomposed(op, tuple([v.shape for v in inputs]))
        if body is not None:
            return _inlined(g, body, inputs, has_code)
    return g.append_node(op, inputs).outputs
