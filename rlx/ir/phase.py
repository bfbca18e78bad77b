"""Phases of a run: prologue, steady state, epilogue.

Sources are in the prologue, the bulk of the model in the steady state. The epilogue is what only
the last chunk of a chunked or streamed run needs: logits and sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import total_ordering
from typing import TypeAlias

from rlx.errors import InputError, OptionError
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Op


@total_ordering
class Phase(Enum):
    PROLOGUE = "prologue"
    STEADY_STATE = "steady_state"
    EPILOGUE = "epilogue"

    @property
    def order(self) -> int:
        return _ORDER[self]

    @staticmethod
    def of(value: object) -> Phase:
        """The phase itself, or the one of that name."""
        try:
            return value if isinstance(value, Phase) else Phase(str(value).lower())
        except ValueError:
            known = ", ".join(p.value for p in Phase)
            raise OptionError("unknown phase", got=repr(value), expected=known) from None

    def __lt__(self, other: object) -> bool:
        return self.order < other.order if isinstance(other, Phase) else NotImplemented

    def __str__(self) -> str:
        return self.value


_ORDER = {phase: i for i, phase in enumerate(Phase)}

NodeLike: TypeAlias = Node | Value | int


class PhaseSchedule:
    """The phase of every node, by node id."""

    def __init__(self, phases: Mapping[int, Phase] | None = None) -> None:
        self._phases: dict[int, Phase] = dict(phases or {})

    def set(self, node: NodeLike, phase: Phase | str) -> None:
        self._phases[_id(node)] = Phase.of(phase)

    def get(self, node: NodeLike) -> Phase | None:
        """The node's phase; None for one that was never given any."""
        return self._phases.get(_id(node))

    def nodes_in(self, phase: Phase | str, schedule: Iterable[NodeLike] | None = None) -> list[int]:
        """Ids of the nodes in `phase`: ascending, or in the order of `schedule`."""
        wanted = Phase.of(phase)
        order = sorted(self._phases) if schedule is None else map(_id, schedule)
        return [i for i in order if self._phases.get(i) is wanted]

    def __iter__(self) -> Iterator[tuple[int, Phase]]:
        """(node id, phase), ids ascending."""
        return iter(sorted(self._phases.items()))

    def __len__(self) -> int:
        return len(self._phases)

    def __bool__(self) -> bool:
        return True  # an empty schedule is a schedule

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PhaseSchedule) and self._phases == other._phases

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        counts = [f"{p}: {len(self.nodes_in(p))}" for p in Phase]
        return f"<PhaseSchedule {', '.join(counts)}>"


def _id(node: NodeLike) -> int:
    if isinstance(node, Value):
        return node.node.id
    if isinstance(node, Node):
        return node.id
    if isinstance(node, int) and not isinstance(node, bool):
        return node
    raise InputError("not a node", got=repr(node), expected="a node, a value or a node id")


def derive_phases(graph: Graph) -> PhaseSchedule:
    """Phases by position and dependence, over the order of `graph.nodes`.

    Sources are prologue. A compute anchor and everything it depends on is steady state, including a
    `top_k` that routes to experts. Other choices (`sample`, `top_k`) are epilogue, as is what
    follows the last `sample` or the last anchor. The rest is steady state.

    A state update counts as an anchor, unless its value depends on such a choice: later chunks read
    the state, so the update cannot wait for the last chunk.
    """
    routed = _feeds(graph, [n for n in graph.nodes if n.op.is_anchor])
    steady = routed | _feeds(graph, _lasting_writes(graph, routed))
    last_anchor = _last(graph, lambda op: op.is_anchor)
    last_sample = _last(graph, lambda op: op.name == "sample")
    schedule = PhaseSchedule()
    for position, node in enumerate(graph.nodes):
        if node.op.is_source:
            phase = Phase.PROLOGUE
        elif node in steady:
            phase = Phase.STEADY_STATE
        elif node.op.is_choice or position > min(last_anchor, last_sample):
            phase = Phase.EPILOGUE
        else:
            phase = Phase.STEADY_STATE
        schedule._phases[node.id] = phase
    return schedule


def _last(graph: Graph, wanted: Callable[[Op], bool]) -> float:
    """Position of the last wanted node; infinite when there is none."""
    found = [i for i, n in enumerate(graph.nodes) if wanted(n.op)]
    return found[-1] if found else float("inf")


def _lasting_writes(graph: Graph, routed: set[Node]) -> list[Node]:
    """State updates that do not depend on a choice in the epilogue."""
    chosen: set[Node] = set()
    found = []
    for node in graph.nodes:
        choice = node.op.is_choice and node not in routed
        if choice or any(v.node in chosen for v in node.inputs):
            chosen.add(node)
        elif node.op.name == "state_update":
            found.append(node)
    return found


def _feeds(graph: Graph, targets: Iterable[Node]) -> set[Node]:
    """`targets` and everything they depend on."""
    found = set(targets)
    for node in reversed(graph.nodes):
        if node in found:
            found.update(v.node for v in node.inputs)
    return found
