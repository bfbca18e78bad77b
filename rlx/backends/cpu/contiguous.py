"""Contiguous copies in front of kernels that cannot read a strided view."""

from __future__ import annotations

from rlx.backends.cpu.lowering import TABLE
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.passes.views import Alias, find_views, is_plain


def insert_contiguous(graph: Graph) -> Graph:
    """Views that are not row-major become `contiguous` values before a kernel that needs that.

    One copy serves all such readers. A view that strides cannot express (a reshape of a transposed
    tensor) gets a copy of its operand, and is then a row-major view of the copy.
    """
    views = find_views(graph.nodes)
    copied: dict[Value, Value] = {}
    order: list[Node] = []
    for node in list(graph.nodes):
        entry = TABLE.get(node.op.name)
        lost_view = node.op.is_view and node.outputs[0] not in views
        if lost_view or (not node.op.is_view and (entry is None or not entry.reads_strided(node))):
            node.inputs = tuple([_plain(graph, v, views, copied, order) for v in node.inputs])
        order.append(node)
    graph.nodes = order
    for position, node in enumerate(order):
        node.id = position
    return graph


def _plain(
    graph: Graph,
    value: Value,
    views: dict[Value, Alias],
    copied: dict[Value, Value],
    order: list[Node],
) -> Value:
    placed = views.get(value)
    if placed is None or is_plain(placed[1], value.shape):
        return value
    if value not in copied:
        with graph.origin(value.node.origin.touched("copies")):
            copied[value] = graph.append(lookup("contiguous")(), (value,))
        order.append(graph.nodes.pop())
    return copied[value]
