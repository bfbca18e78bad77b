"""The contents of a report as dataclasses; the page is drawn from their JSON alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from rlx.backends.inspection import Roof
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


@dataclass(frozen=True)
class Place:
    """The slot of a result and its liveness, as positions in the schedule."""

    kind: str  # arena, input, output, param, state, constant, alias
    size: int  # bytes, at the bounds of dynamic dims
    first: int
    last: int
    offset: int | None = None  # bytes from the start of the arena
    of: str = ""  # for an alias: the value whose memory it is


@dataclass(frozen=True)
class Result:
    shape: str
    dtype: str
    place: Place | None = None


@dataclass(frozen=True)
class Statement:
    """A node at one stage."""

    id: int
    op: str
    call: str  # operands and attributes, as the text of the IR has them
    results: Sequence[Result]
    name: str = ""
    source: bool = False  # an input, parameter, state or constant
    at: str = ""  # the line that built it
    via: Sequence[str] = ()  # passes that made or changed it
    phase: str = ""
    seconds: float = 0.0  # of a run


@dataclass
class Block:
    """A block and what directly belongs to it: indices into the statements of each stage."""

    name: str
    path: str
    parent: int  # index; −1: the model
    hir: list[int] = field(default_factory=list)
    mir: list[int] = field(default_factory=list)
    lir: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Arena:
    size: int
    positions: int  # of the schedule
    values: Sequence[Allocation]


@dataclass(frozen=True)
class KernelUse:
    """All launches of a kernel with the same amount of work."""

    kernel: str
    op: str
    shape: str
    blocks: Sequence[str]
    calls: int
    seconds: float
    flops: int
    bytes: int
    integer: bool  # an int8 GEMM: its roof is that of integer dot products


@dataclass(frozen=True)
class Measured:
    """Runs of this variant on this machine."""

    seconds: float  # of one run, the median
    sizes: str  # the dynamic dims it ran with
    weights: str  # where the params came from
    kernels: Sequence[KernelUse]
    roofs: Sequence[Roof]


@dataclass(frozen=True)
class Spent:
    """A part of the time that compiling takes."""

    part: str  # passes, plan, code, llvm, program, weights
    name: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class Fused:
    rule: str
    count: int
    blocks: Sequence[str]
    reason: str = ""  # why it did not apply; empty where it did


@dataclass(frozen=True)
class Dispatch:
    op: str
    outcome: str
    nodes: int
    why: str


@dataclass(frozen=True)
class Report:
    name: str
    facts: Sequence[tuple[str, str]]
    hir: Sequence[Statement]
    mir: Sequence[Statement]
    lir: Sequence[Statement]
    blocks: Sequence[Block]  # parents before children; the first is the model itself
    arena: Arena
    measured: Measured | None
    spent: Sequence[Spent]
    fused: Sequence[Fused]
    dispatch: Sequence[Dispatch]
