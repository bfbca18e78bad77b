"""Recursion of passes into subgraphs: the bodies of branches and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.op import Op

Change = Callable[[Graph], Graph]


def recursive(change: Change) -> Change:
    """The pass `change`, applied to the bodies of control flow first and then to the graph."""

    def changed(graph: Graph) -> Graph:
        _Bodies(changed).run(graph)
        return change(graph)

    return changed


class _Bodies:
    def __init__(self, change: Change) -> None:
        self.change = change
        self.done: dict[Body, Body] = {}

    def run(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op.is_control_flow:
                node.op = self._op(node.op)

    def _op(self, op: Op) -> Op:
        changes: dict[str, Any] = {}
        for field in op.fields:
            body = getattr(op, field)
            if isinstance(body, Body):
                new = self._body(body)
                if new is not body:
                    changes[field] = new
        return op.replace(**changes) if changes else op

    def _body(self, body: Body) -> Body:
        if body not in self.done:
            new = self.change(body.graph.copy())
            self.done[body] = body if new.same_as(body.graph) else Body(new)
        return self.done[body]
