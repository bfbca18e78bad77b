"""Convolutions take over the activation behind them: results are read and written once less."""

from __future__ import annotations

from typing import Any

from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import REGISTRY, Array, op
from rlx.ir.ops._common import compute, rounded
from rlx.ir.ops.activation import activate, activation_ops, is_default, require_activation
from rlx.ir.ops.conv import Conv

_FLOATS = ("f32", "bf16", "f16")


@op("conv_act", runs_in_low_precision=True)
class ConvAct(Conv):
    """activation(`conv`)"""

    activation: str = "none"

    def check(self) -> None:
        super().check()
        require_activation(self.activation, self.name)

    def reference(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        made = super().reference(x, w, bias)
        return rounded(activate(self.activation, compute(made)), DType.of(made.dtype))

    def decompose(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Any:
        made = super().decompose(g, x, w, bias)
        return g.append_node(REGISTRY[self.activation](), [made]).output


def fuse_activations(graph: Graph) -> Graph:
    """Put activations into the convolutions in front of them that nobody else reads."""
    users, kept = graph.users(), set(graph.outputs)
    known: dict[Value, Value] = {}
    order: list[Node] = []
    for node in list(graph.nodes):
        node.inputs = tuple([known.get(v, v) for v in node.inputs])
        source = node.inputs[0].node if node.inputs else None
        if source is not None and _fuses(source, node):
            value = node.inputs[0]
            if users.get(value, []) == [node] and value not in kept:
                old: Any = source.op
                source.op = ConvAct(**old.attributes(), activation=node.op.name)
                known[node.output] = value
                continue
        order.append(node)
    graph.nodes = order
    graph.outputs = [known.get(v, v) for v in graph.outputs]
    for position, node in enumerate(order):
        node.id = position
    return graph


def _fuses(conv: Node, act: Node) -> bool:
    if conv.op.name != "conv" or act.op.name not in activation_ops() or not is_default(act.op):
        return False
    floats = all(v.dtype.name in _FLOATS for v in (*conv.inputs, act.output))
    static = all(isinstance(d, int) for d in conv.inputs[1].shape.dims)
    return floats and static and len(act.inputs) == 1 and act.output.dtype is conv.output.dtype
