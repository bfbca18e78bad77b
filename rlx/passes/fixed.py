"""Which values are fixed: they depend on params and constants alone, whatever the variant."""

from __future__ import annotations

from collections.abc import Iterable

from rlx.ir.node import Node, Value


def is_fixed_node(node: Node, fixed: set[Node]) -> bool:
    """Whether a node is fixed, when `fixed` tells which of its operands are."""
    op = node.op
    if op.is_source:
        return op.name in ("param", "constant") and node.outputs[0].shape.is_static
    for v in node.inputs:
        if v.node not in fixed:
            return False
    if op.has_effect or not all(v.shape.is_static for v in node.outputs):
        return False
    return not (op.fields and op.has_symbols)


def fixed_nodes(nodes: Iterable[Node]) -> set[Node]:
    """The fixed ones of `nodes`, which are in an order that runs."""
    fixed: set[Node] = set()
    for node in nodes:
        if is_fixed_node(node, fixed):
            fixed.add(node)
    return fixed


def size_of(value: Value) -> int:
    """Bytes of a value with a static shape."""
    size = value.shape.size_bytes
    assert isinstance(size, int)
    return size
