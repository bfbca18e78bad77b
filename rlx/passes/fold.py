"""Constants through ops: what can be computed now is not computed later."""

from __future__ import annotations

from rlx.errors import RlxError
from rlx.ir.attrs import Data
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.passes.param_only import size_of
from rlx.passes.rewrite import Editor

MOST_BYTES = 1 << 16  # of a result larger than its operands; `prepare` has no such bound


def fold(graph: Graph, most_bytes: int = MOST_BYTES) -> Graph:
    """Replace nodes on constants alone by their results, through each op's reference."""
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
    # generators stay: masks are recognised by the iotas they are made of
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
        return  # an index out of range, say: the run will tell, with the node's origin
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
