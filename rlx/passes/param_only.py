"""Which nodes are param-only: they depend on params and constants alone, whatever the variant."""

from __future__ import annotations

from collections.abc import Iterable

from rlx.ir.node import Node, Value


def is_param_only(node: Node, known: set[Node]) -> bool:
    """Whether a node is param-only. `known` holds those of its operands that are."""
    op = node.op
    if op.is_source:
        return op.name in ("param", "constant") and node.outputs[0].shape.is_static
    for v in node.inputs:
        if v.node not in known:
            return False
    if op.has_effect or not all(v.shape.is_static for v in node.outputs):
        return False
    return not (op.fields and op.has_symbols)


def param_only_nodes(nodes: Iterable[Node]) -> set[Node]:
    """The param-only ones of `nodes`, which are in topological order."""
    found: set[Node] = set()
    for node in nodes:
        if is_param_only(node, found):
            found.add(node)
    return found


def size_of(value: Value) -> int:
    """Bytes of a value with a static shape."""
    size = value.shape.size_bytes
    assert isinstance(size, int)
    return size
