"""LIR: optimised MIR plus the memory plan: slot, live range and phase of every value.

An `arena` slot has a byte offset in one shared buffer. `input` and `output` slots are in the arena
too, for the whole run. `param`, `state` and `constant` slots are outside. An `alias` is a view of
another value's memory: an element offset and strides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from typing import Any, NamedTuple

from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Op
from rlx.ir.phase import Phase, PhaseSchedule, check_phases
from rlx.ir.shape import Shape
from rlx.support.records import dataclass

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a root value; offset and strides in elements."""

    offset: Dim
    strides: tuple[Dim, ...]


@dataclass(slots=True)
class Slot:
    kind: str  # arena, input, output, param, state, constant, alias
    size: int  # bytes at the upper bounds
    offset: int | None = None  # bytes from the start of the arena
    root: Value | None = None  # for an alias: whose memory it is
    view: View | None = None  # for an alias: its offset and strides
    first: int = 0  # schedule position that defines it
    last: int = 0  # last position that reads it, or an alias of it


class Argument(NamedTuple):
    """An input, param, state or output, and its slot."""

    role: str  # input, param, state, output
    name: str
    shape: Shape
    size: int  # bytes at the upper bounds
    offset: int | None  # in the arena
    is_view: bool


@dataclass
class Lir:
    """A planned graph. The schedule is the order of `graph.nodes`."""

    graph: Graph
    slots: dict[Value, Slot]
    arena_size: int
    phases: PhaseSchedule
    prepare: Graph | None = None  # run once per set of parameters; feeds params `prepared.…`
    scratch: dict[int, tuple[int, int]] = field(default_factory=dict)  # node id → offset, size

    def __reduce__(self) -> tuple[Any, ...]:
        from rlx.ir.serial import from_bytes, to_bytes  # late: it imports this file

        return from_bytes, (to_bytes(self),)

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def dynamic(self) -> dict[str, int]:
        """Symbols whose size each run gives, and their upper bounds."""
        return self.graph.dynamic

    @property
    def live(self) -> dict[str, int]:
        """Alias of `dynamic`."""
        return self.dynamic

    @property
    def inputs(self) -> list[Node]:
        return self.graph.sources("input")

    @property
    def params(self) -> list[Node]:
        return self.graph.sources("param")

    @property
    def states(self) -> list[Node]:
        return self.graph.sources("state")

    @property
    def outputs(self) -> list[Value]:
        return self.graph.outputs

    @property
    def donations(self) -> dict[int, str]:
        """By the number of an output, the donated input whose memory it has."""
        return {}

    def check_phases(self) -> None:
        """Raise unless the phases, which may be edited, cover the graph and fit its edges."""
        check_phases(self.graph, self.phases)

    def has_work(self, node: Node) -> bool:
        """Whether a run computes something for the node: it is neither a source nor a view."""
        is_alias = node.op.is_view and self.slots[node.outputs[0]].kind == "alias"
        return not node.op.is_source and not is_alias

    def phase_orders(self) -> list[int]:
        """The order of each node's phase, ascending: a node that stands before one of an earlier
        phase runs in that phase, and sources and views with what follows them."""
        orders, current = [], Phase.EPILOGUE.order
        for node in reversed(self.graph.nodes):
            if self.has_work(node):
                phase = self.phases.get(node)
                current = min(current, 0 if phase is None else phase.order)
            orders.append(current)
        return orders[::-1]

    @property
    def output_phases(self) -> list[Phase]:
        """Which phase computes each output."""
        return [self.phases.get(v) or Phase.STEADY_STATE for v in self.outputs]

    def arguments(self) -> list[Argument]:
        """Inputs, params, states and outputs, each in order."""
        named = [(n.op.name, n.name, n.output) for n in self.inputs + self.params + self.states]
        outputs = zip(self.graph.output_names, self.outputs, strict=True)
        named += [("output", name, value) for name, value in outputs]
        found = []
        for role, name, value in named:
            slot = self.slots[value]
            is_view = slot.kind == "alias"
            found.append(Argument(role, name, value.shape, slot.size, slot.offset, is_view))
        return found

    def copy(self) -> Lir:
        """The same plan of a copy of the graph, to change on its own."""
        graph = self.graph.copy()
        pairs = zip(self.graph.nodes, graph.nodes, strict=True)
        values = {a: b for old, new in pairs for a, b in zip(old.outputs, new.outputs, strict=True)}
        slots = {
            values[v]: replace(s, root=None if s.root is None else values[s.root])
            for v, s in self.slots.items()
        }
        prepare = None if self.prepare is None else self.prepare.copy()
        phases, scratch = self.phases.copy(), dict(self.scratch)
        return Lir(graph, slots, self.arena_size, phases, prepare, scratch)

    def slot(self, value: Value) -> Slot:
        return self.slots[value]

    def home(self, value: Value) -> tuple[Value, Slot]:
        """The value that owns the memory of `value`, and its slot."""
        slot = self.slots[value]
        return (value, slot) if slot.root is None else (slot.root, self.slots[slot.root])

    def __len__(self) -> int:
        return len(self.graph)


def works_in_place(op: Op) -> bool:
    """Whether the op may write its result over an operand of its shape: each element of the result
    depends on the same element of such operands alone."""
    if op.name == "elementwise_region":
        body: Graph = op.body.graph  # type: ignore[attr-defined]
        return all(n.op.is_elementwise or n.op.is_source for n in body.nodes)
    return op.is_elementwise or op.overwrites_first


def contiguous_strides(shape: Shape | Iterable[Dim]) -> tuple[Dim, ...]:
    """Row-major strides in elements."""
    strides: list[Dim] = []
    stride: Dim = 1
    for d in reversed(shape.dims if isinstance(shape, Shape) else tuple(shape)):
        strides.append(stride)
        stride = stride * d
    return tuple(reversed(strides))


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
