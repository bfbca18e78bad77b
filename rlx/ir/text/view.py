"""Readable views: a graph in aligned columns, and LIR with slots, sizes, live ranges and phases."""

from __future__ import annotations

import numpy as np

from rlx.ir.attrs import Body, Data
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir, Slot
from rlx.ir.node import Node, Value
from rlx.ir.text.printer import (
    identifier,
    quote,
    write_array,
    write_call,
    write_dim,
    write_origin,
    write_shape,
)

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
