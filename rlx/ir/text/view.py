"""A graph laid out for people: a summary, columns, constants in short."""

from __future__ import annotations

import numpy as np

from rlx.ir.attrs import Body, Data
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.printer import write_call, write_origin
from rlx.ir.spelling import quote, word, write_array, write_dim, write_shape

_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"
_WIDEST = 44  # of a left column; a longer one pushes its own line only


def inspect_graph(graph: Graph, *, color: bool = False) -> str:
    """Readable text: what the graph takes and holds, then one aligned line per node."""
    lines = [f"graph {word(graph.name)}: {_summary(graph)}"]
    if graph.live:
        bounds = ", ".join(f"{symbol} ≤ {bound}" for symbol, bound in graph.live.items())
        lines.append(f"  live: {bounds}")
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
    """The op and its operands; constants abbreviated, nested graphs below."""
    nested: list[Body] = []

    def body_name(body: Body) -> str:
        nested.append(body)
        return f"graph {word(body.graph.name)}"

    data = getattr(node.op, "data", None)
    if node.op.name == "constant" and isinstance(data, Data):
        return f"constant({abbreviated(data)})"
    lines = [write_call(node, body_name)]
    for body in nested:
        lines.append(f"{indent}  graph {word(body.graph.name)}:")
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
