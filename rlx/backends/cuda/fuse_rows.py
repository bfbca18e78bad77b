"""Products take over what stands behind them: a residual, or the gate of an FFN. Those of float
weights do so for a few rows, those of packed ones for any number.

A launch of its own costs microseconds. A norm of a sum becomes a sum in the product and a norm of
its result, which the next product computes itself.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.kernels.gemm.problem import MOST_ROWS, is_product
from rlx.backends.cuda.kernels.qgemm.digits import takes_bytes
from rlx.backends.cuda.lowering import is_multiple
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Op, lookup

_PACKED = "packed_planes_matmul"


def fuse_rows(graph: Graph) -> Graph:
    """Fuse residuals and gates into products of a few rows of f32."""
    users, kept = graph.users(), set(graph.outputs)
    known: dict[Value, Value] = {}
    place = {node: i for i, node in enumerate(graph.nodes)}
    order: list[Node] = []

    def alone(value: Value) -> bool:
        return len(users.get(value, [])) == 1 and value not in kept

    for node in list(graph.nodes):
        node.inputs = tuple([known.get(v, v) for v in node.inputs])
        if node.op.name == "fused_residual_rms_norm" and len(node.inputs) == 3:
            if _add_to_product(node, alone, place):
                order.append(_norm_of(graph, node, known))
                continue
        elif node.op.name == "fused_gated_act" and alone(node.inputs[0]):
            made = _gated(graph, node)
            if made is not None:
                order = [made if n is node.inputs[0].node else n for n in order]
                place[made] = place[node.inputs[0].node]
                known[node.output] = made.output
                continue
        order.append(node)
    graph.nodes = order
    graph.outputs = [known.get(v, v) for v in graph.outputs]
    for position, node in enumerate(order):
        node.id = position
    return graph


def _add_to_product(node: Node, alone: Any, place: dict[Node, int]) -> bool:
    """Let the product that gives x add the residual; False where none can."""
    x, residual, _ = node.inputs
    product = x.node
    if not alone(x) or not _has_rows(product) or product not in place:
        return False
    if residual.dtype.name != "f32" or place.get(residual.node, len(place)) >= place[product]:
        return False
    if product.op.name == _PACKED and len(product.inputs) == 2:
        old: Any = product.op
        product.op = lookup(_PACKED)(scheme=old.scheme, gate=old.gate)
    elif product.op.name == "matmul" and is_product(product):
        product.op = lookup("fused_matmul_bias_act")(has_residual=True)
    else:
        return False
    product.inputs = (*product.inputs, residual)
    return True


def _norm_of(graph: Graph, node: Node, known: dict[Value, Value]) -> Node:
    """The norm of a sum that the product gives."""
    old: Any = node.op
    x, _, gamma = node.inputs
    made = _appended(graph, node, lookup("rms_norm")(eps=old.eps), (x, gamma))
    known[node.outputs[0]], known[node.outputs[1]] = made.output, x
    return made


def _gated(graph: Graph, node: Node) -> Node | None:
    """A packed product of gate and up with the activation behind it."""
    joined: Any = node.op
    product = node.inputs[0].node
    if product.op.name != _PACKED or not _has_rows(product) or len(product.inputs) > 2:
        return None
    old: Any = product.op
    if old.gate:
        return None
    op = lookup(_PACKED)(scheme=old.scheme, gate=joined.activation)
    return _appended(graph, node, op, product.inputs)


def _appended(graph: Graph, like: Node, op: Op, inputs: tuple[Value, ...]) -> Node:
    """A node that is not yet in the order."""
    with graph.origin(like.origin.touched("rows")):
        graph.append(op, inputs)
    return graph.nodes.pop()


def _has_rows(node: Node) -> bool:
    """Whether a product in f32 can add and gate its rows: few, or those of packed weights; or any
    number, where that must not matter."""
    if node.op.name not in (_PACKED, "matmul"):
        return False
    rows = prod(node.inputs[0].shape.dims[:-1], start=1)
    floats = node.inputs[0].dtype.name == node.output.dtype.name == "f32"
    if is_asked():
        return floats
    if node.op.name == _PACKED and takes_bytes(node):
        return floats and is_multiple(node.output.shape.dims[-1], 4)
    return floats and isinstance(rows, int) and rows <= MOST_ROWS
