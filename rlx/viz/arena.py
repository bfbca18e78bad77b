"""The arena as rectangles: bytes by time, a value each."""

from __future__ import annotations

from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.records import dataclass

_IN_ARENA = ("arena", "input", "output")


@dataclass(frozen=True)
class Placed:
    """Bytes of the arena that a value has from one node of the schedule to another."""

    name: str  # the value's own, or %id
    op: str
    block: str
    kind: str  # arena, input, output, scratch
    offset: int
    size: int  # at the upper bounds of live sizes
    first: int  # the node that writes it, as a place in the schedule
    last: int  # the last that reads it


def arena_plan(lir: Lir) -> list[Placed]:
    """Every value that has bytes of its own in the arena, and scratch memory, by first use."""
    found: list[Placed] = []
    for value, slot in lir.slots.items():
        if slot.kind in _IN_ARENA and slot.offset is not None and slot.size:
            place = slot.kind, slot.offset, slot.size, slot.first, slot.last
            found.append(_placed(value.name, value.node, *place))
    for number, (offset, size) in lir.scratch.items():
        node = lir.graph.nodes[number]
        name = f"{node.output.name} scratch"
        found.append(_placed(name, node, "scratch", offset, size, number, number))
    return sorted(found, key=lambda p: (p.first, p.offset))


def _placed(
    name: str, node: Node, kind: str, offset: int, size: int, first: int, last: int
) -> Placed:
    return Placed(name, node.op.name, node.origin.block, kind, offset, size, first, last)
