"""Products of one input with several weights -> one product with the weights joined.

The join depends on params alone, so `prepare` does it once; the results are views of the product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rlx.ir.blocks import _parts as parts
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.passes.pattern import op
from rlx.passes.report import FusionReport
from rlx.passes.rewrite import Editor, OnFire, Rule

NAME = "matmuls sharing their input"
_KINDS = ("matmul", "fused_matmul_bias_act", "dequant_matmul")
_RULE = Rule(NAME, op(_KINDS), lambda m: None)


def share_inputs(
    graph: Graph, report: FusionReport | None = None, on_fire: OnFire | None = None
) -> Graph:
    """Join products of one x that differ in their fixed weights only."""
    products: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        if node.op.name in _KINDS:
            products.setdefault(node.inputs[0], []).append(node)
    shared = [nodes for nodes in products.values() if len(nodes) > 1]
    if not shared:
        return graph
    editor = Editor(graph, "fuse")
    for nodes in shared:
        for group in _groups(editor, nodes, report):
            new = _join(editor, group)
            if report is not None:
                report.add(NAME, group[0].node.origin)
            if on_fire is not None:
                on_fire("fuse", _RULE, group[0].node, new)
    return editor.finish()


class _Product(NamedTuple):
    node: Node
    weights: tuple[Value, ...]  # what is joined: w, or packed w, scale, zp
    bias: Value | None
    activation: str
    strassen: bool = False

    @property
    def size(self) -> Any:
        """Columns of the result."""
        return self.node.output.shape.dims[-1]


def _product(node: Node) -> _Product | None:
    record: Any = node.op
    if record.name == "dequant_matmul":
        return _Product(node, node.inputs[1:], None, "none")
    w = node.inputs[1]
    if w.shape.rank != 2 or node.inputs[0].shape.rank < 2:
        return None
    if record.name == "matmul":
        return _Product(node, (w,), None, "none")
    if record.has_residual:
        return None
    bias = node.inputs[2] if record.has_bias else None
    return _Product(node, (w,), bias, record.activation, record.strassen)


def joinable(editor: Editor, value: Value) -> str:
    """Why a weight should not be joined with others; empty when it may."""
    if not editor.is_fixed(value):
        return "a weight is not a parameter"
    while True:
        if editor.uses(value) != 1:
            return "a weight is used elsewhere and would be kept twice"
        if not value.node.op.is_view:
            return ""
        value = value.node.inputs[0]


def _groups(editor: Editor, nodes: list[Node], report: FusionReport | None) -> list[list[_Product]]:
    """Products that can be joined, those of one kind together."""
    groups: dict[Any, list[_Product]] = {}
    for node in nodes:
        product = _product(node)
        if product is None:
            continue
        tensors = [*product.weights, *([] if product.bias is None else [product.bias])]
        why = next((w for v in tensors if (w := joinable(editor, v))), "")
        if why:
            if report is not None:
                report.miss(NAME, why, node.origin)
            continue
        scheme = node.op if node.op.name == "dequant_matmul" else None
        types = tuple([v.shape.dtype for v in product.weights])
        key = (scheme, types, product.activation, product.strassen, node.output.shape.dtype)
        groups.setdefault(key, []).append(product)
    return [g for g in groups.values() if len(g) > 1]


def _join(editor: Editor, group: list[_Product]) -> list[Node]:
    first = min((p.node for p in group), key=lambda n: n.id)
    pieces, new = editor.build(first, lambda: _build(editor.graph, group))
    for product, piece in zip(group, pieces, strict=True):
        editor.replace(product.node.output, piece)
    return new


def _build(g: Graph, group: list[_Product]) -> list[Value]:
    node = group[0].node
    x = node.inputs[0]
    packed = node.op.name == "dequant_matmul"
    columns = zip(*[p.weights for p in group], strict=True)
    weights = [g.concat(*part, axis=0 if packed else 1) for part in columns]
    joined = g.append(node.op, [x, *weights]) if packed else _product_of(g, x, weights[0], group)
    axis = joined.shape.rank - 1
    pieces, start = [], 0
    for p in group:
        pieces.append(g.narrow(joined, axis=axis, start=start, length=p.size))
        start = start + p.size
    return pieces


def _product_of(g: Graph, x: Value, w: Value, group: list[_Product]) -> Any:
    activation, strassen = group[0].activation, group[0].strassen
    given = [p.bias for p in group if p.bias is not None]
    if not given:
        return parts.product(g, x, w, None, activation, strassen)
    # a product without a bias gets one of zeros
    biases = [
        p.bias if p.bias is not None
        else g.expand(g.constant(0.0, given[0].shape.dtype), shape=(p.size,))
        for p in group
    ]  # fmt: skip
    bias = g.concat(*biases, axis=0)
    return parts.product(g, x, w, bias, activation, strassen)
