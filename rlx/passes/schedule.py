"""The schedule of phases: nodes that only the end of a chunked or streamed run needs come last.

Then a run of some phases is a run of consecutive launches.
"""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.phase import Phase, derive_phases


def schedule_phases(graph: Graph) -> Graph:
    """Move the nodes of the epilogue to the end, where dependences and state updates allow it."""
    phases = derive_phases(graph)
    late = {n for n in graph.nodes if phases.get(n) is Phase.EPILOGUE}
    late -= _held_by_writes(graph, late)
    moved: list[Node] = []
    for node in graph.nodes:
        if node in late or any(v.node in late for v in node.inputs):
            late.add(node)
            moved.append(node)
    graph.nodes = [n for n in graph.nodes if n not in late] + moved
    for position, node in enumerate(graph.nodes):
        node.id = position
    return graph


def _held_by_writes(graph: Graph, late: set[Node]) -> set[Node]:
    """Late nodes, and what they need, that read a state which an earlier phase overwrites."""
    shown: dict[Value, Value] = {}  # a state's value or a view of it → the version it shows
    overwritten: set[Value] = set()
    for node in graph.nodes:
        if node.op.name in ("state", "state_update"):
            shown[node.output] = node.output
            if node.inputs and node not in late:
                overwritten.add(node.inputs[0])
        elif node.op.is_view and node.inputs[0] in shown:
            shown[node.output] = shown[node.inputs[0]]
    held: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in held or (node in late and any(shown.get(v) in overwritten for v in node.inputs)):
            held.add(node)
            held.update(v.node for v in node.inputs)
    return held
