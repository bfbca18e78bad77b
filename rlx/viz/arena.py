"""The memory plan as rectangles: bytes of the arena by positions of the schedule."""

from __future__ import annotations

from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.support.records import dataclass

_IN_ARENA = ("arena", "input", "output")


@dataclass(frozen=True)
class Allocation:
    """Bytes of the arena that a value has while it is live."""

    name: str  # the value's own, or %id
    op: str
    block: str
    kind: str  # arena, input, output, scratch
    offset: int
    size: int  # at the bounds of dynamic dims
    first: int  # position in the schedule of the node that writes it
    last: int  # and of the last that reads it


def arena_plan(lir: Lir) -> list[Allocation]:
    """Every value with a slot in the arena, and scratch memory, by first use."""
    found: list[Allocation] = []
    for value, slot in lir.slots.items():
        if slot.kind in _IN_ARENA and slot.offset is not None and slot.size:
            place = slot.kind, slot.offset, slot.size, slot.first, slot.last
            found.append(_allocation(value.name, value.node, *place))
    for number, (offset, size) in lir.scratch.items():
        node = lir.graph.nodes[number]
        name = f"{node.output.name} scratch"
        found.append(_allocation(name, node, "scratch", offset, size, number, number))
    return sorted(found, key=lambda p: (p.first, p.offset))


def _allocation(
    name: str, node: Node, kind: str, offset: int, size: int, first: int, last: int
) -> Allocation:
    return Allocation(name, node.op.name, node.origin.block, kind, offset, size, first, last)
