"""Results in the memory of an operand.

Inside the arena a result may overwrite an operand that dies at its node (`overwritable`). An output
may have the memory of an input that the caller donates (`in_place_outputs`): it becomes an alias of
the input in the plan, so that lowering and barriers see one piece of memory. That is safe where
nothing reads the input after the output is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.ir.graph import Graph
from rlx.ir.lir import View, works_in_place
from rlx.ir.node import Node, Value
from rlx.ir.shape import Shape
from rlx.passes.node_classes import BoundClasses
from rlx.passes.views import is_plain


def same_layout(operand: Shape, view: View | None, result: Shape) -> bool:
    """Whether an operand has the memory layout that the result needs to overwrite it."""
    return (
        operand.dims == result.dims
        and operand.dtype.bytes == result.dtype.bytes
        and (view is None or (view.offset == 0 and is_plain(view, operand)))
    )


def overwritable(bound: BoundClasses, number: int) -> tuple[bool, ...]:
    """For each operand of a node class, whether the result may be written over it."""
    c = bound.classes.nodes[number]
    if len(c.results) != 1 or not works_in_place(c.op):
        return ()
    result = c.results[0]
    return tuple(
        [
            bound.bytes[bound.root(k)] == bound.bytes[result]
            and same_layout(bound.shapes[k], bound.views[k], bound.shapes[result])
            for k in c.operands
        ]
    )


# their result is the first operand, or that with some elements changed
_UPDATES = ("scatter", "scatter_add", "scatter_reduce", "contiguous")


def in_place_outputs(
    graph: Graph,
    roots: Mapping[Value, Value],
    donated: Mapping[str, str],
    shapes: Mapping[Value, Shape],
) -> dict[Value, Value]:
    """Outputs that can have the memory of an input, and that input. `donated` names an input for
    an output; `roots` are the values that views are views of; `shapes` are those of the variant."""
    inputs = {node.name: node.output for node in graph.sources("input")}
    readers = _readers(graph, roots, [inputs[name] for name in donated.values() if name in inputs])
    found: dict[Value, Value] = {}
    for name, output in zip(graph.output_names, graph.outputs, strict=True):
        source = inputs.pop(donated.get(name, ""), None)
        if source is None or output in roots:
            continue
        if shapes[source] == shapes[output] and _is_safe(
            readers[source], output.node, source, roots, shapes
        ):
            found[output] = source
    return found


def _readers(
    graph: Graph, roots: Mapping[Value, Value], sources: Sequence[Value]
) -> dict[Value, list[Node]]:
    """The nodes that read these values; views are read through their own readers."""
    found: dict[Value, list[Node]] = {source: [] for source in sources}
    for node in graph.nodes:
        read = {root for v in node.inputs if (root := roots.get(v, v)) in found}
        if read and not all(v in roots for v in node.outputs):
            for source in read:
                found[source].append(node)
    return found


def _is_safe(
    readers: Sequence[Node],
    writer: Node,
    source: Value,
    roots: Mapping[Value, Value],
    shapes: Mapping[Value, Shape],
) -> bool:
    if any(n.id > writer.id for n in readers):
        return False
    if writer not in readers:
        return True
    read = [i for i, v in enumerate(writer.inputs) if roots.get(v, v) is source]
    if len(read) != 1 or writer.inputs[read[0]] is not source:
        return False
    if writer.op.name in _UPDATES:
        return read == [0]
    # a kernel loads an element of all operands before it stores the element of any result
    return works_in_place(writer.op) and all(
        shapes[v].dims == shapes[source].dims for v in writer.outputs
    )
