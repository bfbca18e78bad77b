"""A graph as text that parses back to the same graph."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op import Op
from rlx.ir.origin import Origin
from rlx.ir.spelling import is_default, quote, word, write_array, write_shape, write_value

_MISSING = object()
_BARE = re.compile(r'[^\s,":>]+\Z')  # what stands in an origin comment without quotes


class Files:
    """Short labels for source files: base names, numbered where two files share one."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {}
        self._taken: set[str] = set()

    def label(self, path: str) -> str:
        found = self.labels.get(path)
        if found is None:
            base = found = os.path.basename(path) or path
            number = 1
            while found in self._taken:
                number += 1
                found = f"{base}#{number}"
            self._taken.add(found)
            self.labels[path] = found
        return found

    def collect(self, graph: Graph) -> None:
        """Label every file of the graph and its nested graphs, in order of appearance."""
        for node in graph.nodes:
            if node.origin.file:
                self.label(node.origin.file)
            for body in bodies(node.op):
                self.collect(body.graph)


def bodies(op: Op) -> list[Body]:
    """The nested graphs among an op's attributes."""
    found: list[Body] = []
    pending = [getattr(op, field) for field in reversed(op.fields)]
    while pending:
        value = pending.pop()
        if isinstance(value, Body):
            found.append(value)
        elif isinstance(value, tuple):
            pending.extend(reversed(value))
    return found


def print_graph(graph: Graph, *, origins: bool = True) -> str:
    """Text that `parse_graph` turns into the same graph; `origins=False` leaves comments out."""
    files = Files() if origins else None
    if files is not None:
        files.collect(graph)
    lines = [f"graph {word(graph.name)} {{"]
    for path, label in files.labels.items() if files else ():
        if label != path:
            lines.append(f"  file {quote(label)} = {quote(path)}")
    lines += _inner_lines(graph, "  ", files)
    return "\n".join([*lines, "}"]) + "\n"


def _inner_lines(graph: Graph, indent: str, files: Files | None) -> list[str]:
    lines = []
    if graph.live:
        bounds = ", ".join(f"{word(s)} <= {bound}" for s, bound in graph.live.items())
        lines.append(f"{indent}live {bounds}")
    for node in graph.nodes:
        comment = write_origin(node.origin, files) if files is not None else ""
        tail = f"  // {comment}" if comment else ""
        lines.append(f"{indent}{node_line(node, indent, files)}{tail}")
    results = zip(graph.outputs, graph.output_names, strict=True)
    shown = ", ".join(f"{v} as {quote(name)}" for v, name in results)
    lines.append(f"{indent}return {shown}".rstrip())
    return lines


def node_line(node: Node, indent: str = "", files: Files | None = None) -> str:
    """The statement of one node, without its origin; nested graphs take lines of their own."""

    def body_text(body: Body) -> str:
        inner = _inner_lines(body.graph, indent + "  ", files)
        return "\n".join([f"graph {word(body.graph.name)} {{", *inner, indent + "}"])

    return f"{write_result(node)} = {write_call(node, body_text)}"


def write_result(node: Node) -> str:
    """The left-hand side: id, number of results unless one, name, shapes."""
    count = len(node.outputs)
    head = f"%{node.id}" if count == 1 else f"%{node.id}:{count}"
    if node.name:
        head += f" {quote(node.name)}"
    shapes = ", ".join([write_shape(v.shape) for v in node.outputs])
    return f"{head}: {shapes}" if count else head


def write_call(node: Node, body_text: Callable[[Body], str]) -> str:
    """The right-hand side: op, operands, attributes that are not their defaults."""
    op = node.op
    plain = _write_source(node)
    if plain:
        return plain
    parts = []
    for field in op.fields:
        value = getattr(op, field)
        if not is_default(value, op.defaults.get(field, _MISSING)):
            parts.append(f"{field}={write_value(value, body_text)}")
    operands = ", ".join(map(str, node.inputs))
    attributes = f"; {', '.join(parts)}" if parts else ""
    name = ".".join(map(word, op.name.split(".")))  # blocks are called hir.linear and the like
    return f"{name}({operands}{attributes})"


def _write_source(node: Node) -> str:
    """Sources whose attribute is the shape already written on the left."""
    op, shape = node.op, node.outputs[0].shape if node.outputs else None
    if op.name in ("input", "param", "state") and getattr(op, "shape", None) is shape:
        return op.name
    data = getattr(op, "data", None)
    if op.name == "constant" and data is not None and data.shape is shape:
        return f"constant({write_array(data)})"
    return ""


def write_origin(origin: Origin, files: Files | None = None) -> str:
    """`block layers.0, mlp.py:14, via fuse > cse`, as the parser reads it back."""
    parts = []
    if origin.block:
        parts.append(f"block {_bare(origin.block)}")
    if origin.file or origin.line:
        label = files.label(origin.file) if files is not None and origin.file else origin.file
        parts.append(f"{_bare(label)}:{origin.line}")
    if origin.passes:
        parts.append(f"via {' > '.join(map(_bare, origin.passes))}")
    return ", ".join(parts)


def _bare(text: str) -> str:
    return text if _BARE.match(text) else quote(text)
