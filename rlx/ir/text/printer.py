"""The printer: a graph as text that parses back to the same graph, and as readable views.

The attribute format is unambiguous: the text of a value determines its type. A view has aligned
columns; that of LIR shows slots, sizes, live ranges and phases.
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
from rlx.ir.lir import Lir, Slot
from rlx.ir.node import Node, Origin, Value
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


_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"
_WIDEST = 44  # of a left column; a longer one pushes its own line only


def inspect_graph(graph: Graph, *, color: bool = False) -> str:
    """A summary of the graph, then one aligned line per node."""
    lines = [f"graph {identifier(graph.name)}: {_summary(graph)}"]
    if graph.dynamic:
        bounds = ", ".join(f"{symbol} ≤ {bound}" for symbol, bound in graph.dynamic.items())
        lines.append(f"  dynamic: {bounds}")
    lines += _rows(graph, "  ", color)
    return "\n".join(lines) + "\n"


def _summary(graph: Graph) -> str:
    params, states = graph.sources("param"), graph.sources("state")
    parts = [
        _count(len(graph), "node"),
        _count(len(graph.sources("input")), "input"),
        f"{_count(len(params), 'param')}{_size(params)}",
    ]
    if states:
        parts.append(f"{_count(len(states), 'state')}{_size(states)}")
    symbols = sorted(graph.symbols())
    if symbols:
        parts.append(f"symbols {', '.join(symbols)}")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(nodes: list[Node]) -> str:
    total: Dim = 0
    for node in nodes:
        total = total + node.output.shape.size_bytes
    if not nodes:
        return ""
    return f" ({human_bytes(total) if isinstance(total, int) else f'{write_dim(total)} bytes'})"


def human_bytes(size: int) -> str:
    """`48 B`, `1.5 KiB`, `2.3 GiB`."""
    value, unit = float(size), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def _rows(graph: Graph, indent: str, color: bool) -> list[str]:
    """The nodes with their ids, shapes, calls and origins in columns, and the results."""
    ids = [_id(n) for n in graph.nodes]
    shapes = [", ".join(write_shape(v.shape) for v in n.outputs) for n in graph.nodes]
    calls = [_call(n, indent, color) for n in graph.nodes]
    wide_id, wide_shape = _widest(ids), _widest(shapes)
    wide_call = _widest([c.partition("\n")[0] for c in calls])
    lines = []
    for node, name, shape, call in zip(graph.nodes, ids, shapes, calls, strict=True):
        first, newline, rest = call.partition("\n")
        origin = write_origin(node.origin._replace(file=_base(node.origin.file)))
        line = f"{indent}{name:<{wide_id}}  {shape:<{wide_shape}}  "
        line += f"{first:<{wide_call}}  {_dimmed(origin, color)}" if origin else first
        lines.append(line.rstrip() + newline + rest)
    results = zip(graph.outputs, graph.output_names, strict=True)
    shown = ", ".join(f"{v} as {quote(name)}" for v, name in results)
    lines.append(f"{indent}return {shown}".rstrip())
    return lines


def _widest(texts: list[str]) -> int:
    return max((len(t) for t in texts if len(t) <= _WIDEST), default=0)


def _id(node: Node) -> str:
    count = len(node.outputs)
    head = f"%{node.id}" if count == 1 else f"%{node.id}:{count}"
    return f"{head} {quote(node.name)}" if node.name else head


def _base(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _dimmed(origin: str, color: bool) -> str:
    return f"{_DIM}// {origin}{_NORMAL}" if color else f"// {origin}"


def _call(node: Node, indent: str, color: bool) -> str:
    """The op and its operands; constants abbreviated, subgraphs below."""
    nested: list[Body] = []

    def body_name(body: Body) -> str:
        nested.append(body)
        return f"graph {identifier(body.graph.name)}"

    data = getattr(node.op, "data", None)
    if node.op.name == "constant" and isinstance(data, Data):
        return f"constant({abbreviated(data)})"
    lines = [write_call(node, body_name)]
    for body in nested:
        lines.append(f"{indent}  graph {identifier(body.graph.name)}:")
        lines += _rows(body.graph, indent + "    ", color)
    return "\n".join(lines)


def abbreviated(data: Data) -> str:
    """Up to four elements; the range of more."""
    array, element = data.array, data.shape.dtype
    if 0 < array.size <= 4:
        return write_array(data)
    if not array.size or element.kind in ("bool", "complex"):
        return _count(array.size, "element")
    if element.is_float:
        with np.errstate(all="ignore"):  # a signalling NaN is a value like others here
            array = array.astype(np.float64)
    low, high = array.min(), array.max()
    return f"all {low:.7g}" if low == high else f"{low:.7g} … {high:.7g}"


def inspect_lir(lir: Lir) -> str:
    """A header, then one line per node: phase, memory, lifetime, statement, origin."""
    header = [
        f"lir {lir.name}: {len(lir.graph)} nodes, arena {_byte_size(lir.arena_size)}",
        f"  inputs  {_names(lir.inputs)}",
        f"  params  {_names(lir.params)}",
        f"  states  {_names(lir.states)}",
        f"  outputs {', '.join(lir.graph.output_names)}",
    ]
    if lir.dynamic:
        header.append("  dynamic " + ", ".join(f"{s} ≤ {b}" for s, b in lir.dynamic.items()))
    if lir.prepare is not None and len(lir.prepare):
        header.append(f"  prepare {len(lir.prepare.outputs)} tensors, computed once")
    rows = [_row(lir, node) for node in lir.graph.nodes]
    widths = [max((len(r[i]) for r in rows), default=0) for i in range(4)]
    lines = []
    for row, node in zip(rows, lir.graph.nodes, strict=True):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        origin = f"  // {node.origin}" if str(node.origin) else ""
        lines.append(f"  {cells}{origin}".rstrip())
    return "\n".join([*header, *lines]) + "\n"


def _row(lir: Lir, node: Node) -> tuple[str, str, str, str]:
    call = write_call(node, lambda body: f"{{{len(body.graph)} nodes}}")
    name = f'%{node.id} "{node.name}"' if node.name else f"%{node.id}"
    shapes = ", ".join(str(v.shape) for v in node.outputs)
    slots = " + ".join(_slot_text(lir, v) for v in node.outputs)
    first = lir.slots[node.outputs[0]] if node.outputs else None
    life = f"[{first.first}..{first.last}]" if first is not None else ""
    phase = lir.phases.get(node.id)
    stage = phase.name.lower() if phase is not None else ""
    return stage, slots, life, f"{name}: {shapes} = {call}"


def _slot_text(lir: Lir, value: Value) -> str:
    slot = lir.slots[value]
    if slot.kind == "alias":
        return f"view of {slot.root}{_view_text(slot)}"
    if slot.offset is None:
        return f"{slot.kind} {_byte_size(slot.size)}"
    return f"@{slot.offset} {_byte_size(slot.size)}" + (
        f" {slot.kind}" if slot.kind != "arena" else ""
    )


def _view_text(slot: Slot) -> str:
    if slot.view is None or slot.view.offset == 0:
        return ""
    return f" + {slot.view.offset}"


def _names(nodes: list[Node]) -> str:
    names = [n.name for n in nodes]
    total = sum(n.output.shape.size_bytes for n in nodes if n.output.shape.is_static)
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"{shown} ({_byte_size(int(total))})" if isinstance(total, int) and total else shown


def _byte_size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"
