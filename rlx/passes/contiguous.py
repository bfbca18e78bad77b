"""Contiguous copies in front of nodes that cannot read a strided view."""

from __future__ import annotations

from collections.abc import Callable

from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.passes.views import find_views, is_plain


def insert_contiguous(graph: Graph, reads_strided: Callable[[Node], bool]) -> Graph:
    """Views that are not row-major become `contiguous` values before a node that needs that.

    One copy serves all such readers. A view that strides cannot express (a reshape of a transposed
    tensor) gets a copy of its operand, and is then a row-major view of the copy.
    """
    views = find_views(graph.nodes)
    copies: dict[Value, Value] = {}
    order: list[Node] = []

    def plain(value: Value) -> Value:
        placed = views.get(value)
        if placed is None or is_plain(placed[1], value.shape):
            return value
        if value not in copies:
            with graph.origin(value.node.origin.touched("copies")):
                copies[value] = graph.append(lookup("contiguous")(), (value,))
            order.append(graph.nodes.pop())
        return copies[value]

    for node in list(graph.nodes):
        is_lost = node.op.is_view and node.outputs[0] not in views
        if is_lost or not (node.op.is_view or reads_strided(node)):
            node.inputs = tuple([plain(v) for v in node.inputs])
        order.append(node)
    graph.nodes = order
    for position, node in enumerate(order):
        node.id = position
    return graph
