"""Horizontal fusion: matmuls of one input with several weights become one matmul.

The concatenated weight is param-only, so `prepare` makes it once; the results are views.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rlx.ir.blocks.linear import dense
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.passes.pattern import op
from rlx.passes.report import FusionReport
from rlx.passes.rewrite import Editor, OnFire, Rule

NAME = "matmuls sharing their input"
_OPS = ("matmul", "fused_matmul_bias_act", "dequant_matmul")
_RULE = Rule(NAME, op(_OPS), lambda m: None)


def share_inputs(
    graph: Graph, report: FusionReport | None = None, on_fire: OnFire | None = None
) -> Graph:
    """Merge matmuls of the same x that differ in their param-only weights alone."""
    matmuls: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        if node.op.name in _OPS:
            matmuls.setdefault(node.inputs[0], []).append(node)
    shared = [nodes for nodes in matmuls.values() if len(nodes) > 1]
    if not shared:
        return graph
    editor = Editor(graph, "fuse")
    for nodes in shared:
        for group in _groups(editor, nodes, report):
            new = _merge(editor, group)
            if report is not None:
                report.add(NAME, group[0].node.origin)
            if on_fire is not None:
                on_fire("fuse", _RULE, group[0].node, new)
    return editor.finish()


class _MatMul(NamedTuple):
    node: Node
    weights: tuple[Value, ...]  # to concatenate: w, or packed w, scale, zp
    bias: Value | None
    activation: str
    strassen: bool = False

    @property
    def size(self) -> Any:
        """Columns of the result."""
        return self.node.output.shape.dims[-1]


def _matmul(node: Node) -> _MatMul | None:
    record: Any = node.op
    if record.name == "dequant_matmul":
        return _MatMul(node, node.inputs[1:], None, "none")
    w = node.inputs[1]
    if w.shape.rank != 2 or node.inputs[0].shape.rank < 2:
        return None
    if record.name == "matmul":
        return _MatMul(node, (w,), None, "none")
    if record.has_residual:
        return None
    bias = node.inputs[2] if record.has_bias else None
    return _MatMul(node, (w,), bias, record.activation, record.strassen)


def concat_obstacle(editor: Editor, value: Value) -> str:
    """Why a weight should not be concatenated with others; empty when it may."""
    if not editor.is_param_only(value):
        return "a weight is not a parameter"
    while True:
        if editor.uses(value) != 1:
            return "a weight is used elsewhere and would be kept twice"
        if not value.node.op.is_view:
            return ""
        value = value.node.inputs[0]


def _groups(editor: Editor, nodes: list[Node], report: FusionReport | None) -> list[list[_MatMul]]:
    """Groups of matmuls that can be merged."""
    groups: dict[Any, list[_MatMul]] = {}
    for node in nodes:
        matmul = _matmul(node)
        if matmul is None:
            continue
        tensors = [*matmul.weights, *([] if matmul.bias is None else [matmul.bias])]
        why = next((w for v in tensors if (w := concat_obstacle(editor, v))), "")
        if why:
            if report is not None:
                report.miss(NAME, why, node.origin)
            continue
        scheme = node.op if node.op.name == "dequant_matmul" else None
        types = tuple([v.shape.dtype for v in matmul.weights])
        key = (scheme, types, matmul.activation, matmul.strassen, node.output.shape.dtype)
        groups.setdefault(key, []).append(matmul)
    return [g for g in groups.values() if len(g) > 1]


def _merge(editor: Editor, group: list[_MatMul]) -> list[Node]:
    first = min((p.node for p in group), key=lambda n: n.id)
    slices, new = editor.build(first, lambda: _build(editor.graph, group))
    for matmul, part in zip(group, slices, strict=True):
        editor.replace(matmul.node.output, part)
    return new


def _build(g: Graph, group: list[_MatMul]) -> list[Value]:
    node = group[0].node
    x = node.inputs[0]
    packed = node.op.name == "dequant_matmul"
    columns = zip(*[p.weights for p in group], strict=True)
    weights = [g.concat(*part, axis=0 if packed else 1) for part in columns]
    merged = g.append(node.op, [x, *weights]) if packed else _merged(g, x, weights[0], group)
    axis = merged.shape.rank - 1
    slices, start = [], 0
    for p in group:
        slices.append(g.narrow(merged, axis=axis, start=start, length=p.size))
        start = start + p.size
    return slices


def _merged(g: Graph, x: Value, w: Value, group: list[_MatMul]) -> Any:
    activation, strassen = group[0].activation, group[0].strassen
    given = [p.bias for p in group if p.bias is not None]
    if not given:
        return dense(g, x, w, None, activation, strassen)
    # a matmul without a bias gets a zero bias
    biases = [
        p.bias if p.bias is not None
        else g.expand(g.constant(0.0, given[0].shape.dtype), shape=(p.size,))
        for p in group
    ]  # fmt: skip
    bias = g.concat(*biases, axis=0)
    return dense(g, x, w, bias, activation, strassen)
