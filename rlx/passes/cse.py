"""Equal ops on equal operands are computed once."""

from __future__ import annotations

from typing import Any

from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op import Op
from rlx.passes.rewrite import Editor


def cse(graph: Graph) -> Graph:
    """Replace a node by an earlier one that computes the same; effects stay as they are."""
    editor: Editor | None = None
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        op = node.op
        if op.has_effect or (op.is_source and op.name != "constant") or _has_effect_inside(op):
            continue
        inputs = node.inputs
        if op.is_commutative and id(inputs[0]) > id(inputs[1]):
            key: Any = (op, inputs[1], inputs[0])
        else:
            key = (op, *inputs)
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if editor is None:
            editor = Editor(graph, "cse")
        for old, new in zip(node.outputs, first.outputs, strict=True):
            editor.replace(old, new)
    return graph if editor is None else editor.finish()


def _has_effect_inside(op: Op) -> bool:
    """A nested graph with an effect of its own runs as often as it is written."""
    for field in op.fields:
        body = getattr(op, field)
        if isinstance(body, Body) and any(n.op.has_effect for n in body.graph.nodes):
            return True
    return False
