"""The printer: a graph as text that parses back to the same graph.

The attribute format is unambiguous: the text of a value determines its type.
"""

from __future__ import annotations

import base64
import json
import os
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError
from rlx.ir import attrs
from rlx.ir.attrs import Body, Data, MaskKind
from rlx.ir.dim import Dim, Expr, FloorDiv
from rlx.ir.dtype import BY_NAME, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Origin
from rlx.ir.op import Op
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.shape import Shape

INLINE = 32  # constants of more elements are written as base64
# symbols with these names are quoted
RESERVED = frozenset(["true", "false", "none", "inf", "nan", *BY_NAME])
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PLAIN_NAN = 0x7FF8000000000000


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=not text.isprintable())


def identifier(text: str) -> str:
    """An identifier as it is, anything else quoted."""
    return text if _IDENTIFIER.match(text) else quote(text)


def write_float(value: float) -> str:
    if value == value:
        return repr(value)
    bits = struct.unpack("<Q", struct.pack("<d", value))[0]
    return "nan" if bits == _PLAIN_NAN else f"nan({bits:#x})"


def write_dim(dim: Dim) -> str:
    if isinstance(dim, int) or RESERVED.isdisjoint(dim.symbols):
        return str(dim)
    return " + ".join(
        " * ".join([str(factor) if factor >= 0 else f"({factor})", *map(_write_atom, monomial)])
        for monomial, factor in dim.terms
    )


def _write_atom(atom: str | FloorDiv) -> str:
    if isinstance(atom, FloorDiv):
        return f"(({write_dim(atom.numerator)}) // {atom.divisor})"
    return f'sym("{atom}")' if atom in RESERVED else atom


def write_shape(shape: Shape) -> str:
    if shape.is_static:
        return str(shape)
    return f"[{', '.join(map(write_dim, shape.dims))}] {shape.dtype.name}"


def write_array(data: Data) -> str:
    """The elements: nested lists when few, base64 of the little-endian bytes otherwise."""
    array = data.array
    if 0 < array.size <= INLINE:
        items = array.ravel().tolist()
        texts = [_element(x, data.shape.dtype) for x in items]
        if _reads_back(texts, array):
            return _nest(texts, array.shape)
    return f'base64 "{base64.b64encode(attrs.to_bytes(array)).decode()}"'


def _element(value: Any, dtype: DType) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, complex):
        return f"({write_float(value.real)}, {write_float(value.imag)})"
    if isinstance(value, int):
        return str(value)
    # the shortest exact text of an f32 or f16, not that of the double of the same value
    return str(dtype.numpy.type(value)) if dtype.name in ("f32", "f16") else repr(float(value))


def _reads_back(texts: list[str], array: Any) -> bool:
    """Whether the texts parse back to the same bits: NaNs with a payload do not."""
    if array.dtype.kind == "c":
        return bool(np.isfinite(array).all())
    if array.dtype.kind in "biu":
        return True
    again = np.array([float(t) for t in texts], dtype=array.dtype)
    return bool(again.tobytes() == array.tobytes())


def _nest(texts: Sequence[str], dims: tuple[int, ...]) -> str:
    if not dims:
        return texts[0]
    step = len(texts) // dims[0]
    rows = [_nest(texts[i : i + step], dims[1:]) for i in range(0, len(texts), step)]
    return f"[{', '.join(rows)}]"


def write_value(value: Any, write_body: Callable[[Body], str]) -> str:
    """The text of an attribute; `write_body` prints a subgraph."""
    if isinstance(value, tuple):
        return f"[{', '.join([write_value(item, write_body) for item in value])}]"
    if isinstance(value, Body):
        return write_body(value)
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise AttributeValueError(
            "an attribute that has no text", got=f"{value!r} ({type(value).__name__})"
        )
    return writer(value)


_WRITERS: dict[type, Callable[[Any], str]] = {
    type(None): lambda v: "none",
    bool: lambda v: "true" if v else "false",
    int: str,
    float: write_float,
    str: quote,
    Expr: write_dim,
    DType: lambda v: v.name,
    Shape: write_shape,
    MaskKind: lambda v: f"mask.{v}",
    QuantScheme: lambda v: f"quant.{v}",
    Data: lambda v: f"data({v.shape}, {write_array(v)})",
}


def is_default(value: Any, default: Any) -> bool:
    """Whether an attribute has its default, sign of zero included, and is left out."""
    if type(value) is not type(default):
        return False
    if type(value) is tuple:
        return len(value) == len(default) and all(map(is_default, value, default))
    return repr(value) == repr(default) if type(value) is float else bool(value == default)


_MISSING = object()
_BARE = re.compile(r'[^\s,":>]+\Z')  # origin text that needs no quotes


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
    """Text that `parse_graph` parses to the same graph; `origins=False` omits comments."""
    files = Files() if origins else None
    if files is not None:
        files.collect(graph)
    lines = [f"graph {identifier(graph.name)} {{"]
    for path, label in files.labels.items() if files else ():
        if label != path:
            lines.append(f"  file {quote(label)} = {quote(path)}")
    lines += _inner_lines(graph, "  ", files)
    return "\n".join([*lines, "}"]) + "\n"


def _inner_lines(graph: Graph, indent: str, files: Files | None) -> list[str]:
    lines = []
    if graph.dynamic:
        bounds = ", ".join(f"{identifier(s)} <= {bound}" for s, bound in graph.dynamic.items())
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
        return "\n".join([f"graph {identifier(body.graph.name)} {{", *inner, indent + "}"])

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
    name = ".".join(map(identifier, op.name.split(".")))  # names of blocks have a dot: hir.linear
    return f"{name}({operands}{attributes})"


def _write_source(node: Node) -> str:
    """Sources: the shape is on the left-hand side already."""
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
