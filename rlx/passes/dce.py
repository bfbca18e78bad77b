"""What no output and no effect needs is removed. Named sources stay: they are the signature."""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.rewrite import is_kept


def dce(graph: Graph) -> Graph:
    """Remove dead nodes; inputs, params, states and writes to states are never dead."""
    needed: set[Node] = {n for n in graph.nodes if is_kept(n)}
    needed.update(v.node for v in graph.outputs)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update([v.node for v in node.inputs])
    if len(needed) < len(graph.nodes):
        graph.nodes = [n for n in graph.nodes if n in needed]
        for i, node in enumerate(graph.nodes):
            node.id = i
    return graph
