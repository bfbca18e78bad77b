"""Redundancy elimination: constant folding, common subexpressions, dead code."""

from __future__ import annotations

from typing import Any

from rlx.errors import RlxError
from rlx.ir.attrs import Body, Data
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op import Op
from rlx.passes.rewrite import Editor, is_kept, size_of

MOST_BYTES = 1 << 16  # limit of a folded result that is larger than its operands


def fold(graph: Graph, most_bytes: int = MOST_BYTES) -> Graph:
    """Constant folding: evaluate nodes whose operands are constants, by the op's reference."""
    if not any(n.op.name in ("constant", "dim_value") for n in graph.nodes):
        return graph
    editor = Editor(graph, "fold")
    for node in list(graph.nodes):
        if _is_known(node) and _is_small(node, most_bytes):
            _fold(editor, node)
    return editor.finish()


def _is_known(node: Node) -> bool:
    op = node.op
    if op.is_source or op.has_effect or op.is_block:
        return False
    # iotas stay: fusion recognises masks by them
    if not node.inputs and op.name != "dim_value":
        return False
    if any(v.node.op.name != "constant" for v in node.inputs):
        return False
    return all(v.shape.is_static for v in node.outputs) and not op.has_symbols


def _is_small(node: Node, most_bytes: int) -> bool:
    size = sum(size_of(v) for v in node.outputs)
    return size <= most_bytes or size <= sum(size_of(v) for v in node.inputs)


def _fold(editor: Editor, node: Node) -> None:
    arrays = [v.node.op.data.array for v in node.inputs]  # type: ignore[attr-defined]
    try:
        result = node.op.reference(*arrays)
    except RlxError:
        return  # an index out of range, say: the run reports it with the node's origin
    results = result if isinstance(result, tuple) else (result,)
    values, _ = editor.build(
        node,
        lambda: [
            editor.graph.constant(Data(a, v.shape.dtype))
            for a, v in zip(results, node.outputs, strict=True)
        ],
    )
    for old, new in zip(node.outputs, values, strict=True):
        editor.replace(old, new)


def cse(graph: Graph) -> Graph:
    """Common subexpression elimination; nodes with effects are left alone."""
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
    """Whether a subgraph has an effect: such a node is not a common subexpression."""
    for field in op.fields:
        body = getattr(op, field)
        if isinstance(body, Body) and any(n.op.has_effect for n in body.graph.nodes):
            return True
    return False


def dce(graph: Graph) -> Graph:
    """Dead code elimination; inputs, params, states and state updates are never dead."""
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
