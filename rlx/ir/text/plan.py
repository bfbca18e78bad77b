"""LIR for people: the schedule with places, sizes, lifetimes and phases."""

from __future__ import annotations

from rlx.ir.lir import Lir, Slot
from rlx.ir.node import Node, Value
from rlx.ir.printer import write_call


def inspect_lir(lir: Lir) -> str:
    """A header, then one line per node: phase, memory, lifetime, statement, origin."""
    header = [
        f"lir {lir.name}: {len(lir.graph)} nodes, arena {_size(lir.arena_size)}",
        f"  inputs  {_names(lir.inputs)}",
        f"  params  {_names(lir.params)}",
        f"  states  {_names(lir.states)}",
        f"  outputs {', '.join(lir.graph.output_names)}",
    ]
    if lir.live:
        header.append("  live    " + ", ".join(f"{s} ≤ {b}" for s, b in lir.live.items()))
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
    places = " + ".join(_place(lir, v) for v in node.outputs)
    first = lir.slots[node.outputs[0]] if node.outputs else None
    life = f"[{first.first}..{first.last}]" if first is not None else ""
    phase = lir.phases.get(node.id)
    stage = phase.name.lower() if phase is not None else ""
    return stage, places, life, f"{name}: {shapes} = {call}"


def _place(lir: Lir, value: Value) -> str:
    slot = lir.slots[value]
    if slot.kind == "alias":
        return f"view of {slot.root}{_lie(slot)}"
    if slot.offset is None:
        return f"{slot.kind} {_size(slot.size)}"
    return f"@{slot.offset} {_size(slot.size)}" + (f" {slot.kind}" if slot.kind != "arena" else "")


def _lie(slot: Slot) -> str:
    if slot.view is None or slot.view.offset == 0:
        return ""
    return f" + {slot.view.offset}"


def _names(nodes: list[Node]) -> str:
    names = [n.name for n in nodes]
    total = sum(n.output.shape.size_bytes for n in nodes if n.output.shape.is_static)
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return f"{shown} ({_size(int(total))})" if isinstance(total, int) and total else shown


def _size(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.4g} GiB"
