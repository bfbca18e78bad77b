"""Mixed precision: matmuls and attention run in 16 bits when a profile asks for it.

Their operands are cast down and their results back to f32; all other ops stay in f32. Weights are
cast once, by `prepare`. A cast up followed by a cast down cancels: it loses nothing.
"""

from __future__ import annotations

from rlx.errors import OptionError
from rlx.ir import dtype as dt
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.passes.rewrite import GONE, Editor


def lower_precision(graph: Graph, precision: str = "f32") -> Graph:
    """Run f32 matmuls in `precision`; the types of inputs, params and outputs do not change."""
    element = DType.of(precision)
    if element is dt.f32:
        return graph
    if element not in (dt.f16, dt.bf16):
        raise OptionError("not a precision", got=precision, expected="f32, f16 or bf16")
    editor = Editor(graph, "precision")
    casts: dict[Value, Value] = {}
    for node in list(graph.nodes):
        lowers = node.op.runs_in_low_precision and node.id != GONE
        if lowers and node.output.shape.dtype is dt.f32:
            _lower(editor, node, element, casts)
    return editor.finish()


def _lower(editor: Editor, node: Node, element: DType, casts: dict[Value, Value]) -> None:
    g = editor.graph

    def narrowed(value: Value) -> Value:
        if value.shape.dtype is not dt.f32 or _is_scale(node, value):
            return value
        if value not in casts:
            casts[value] = g.cast(value, dtype=element)
        return casts[value]

    def make() -> Value:
        result = g.append(node.op, [narrowed(v) for v in node.inputs])
        return g.cast(result, dtype=dt.f32)

    result, _ = editor.build(node, make)
    editor.replace(node.output, result)


def _is_scale(node: Node, value: Value) -> bool:
    """Whether `value` is a scale of a packed weight, whose type the scheme determines."""
    return node.op.name.startswith("dequant") and value is not node.inputs[0]
