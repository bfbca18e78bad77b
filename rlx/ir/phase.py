"""Phases of a run: prologue, steady state, epilogue.

Sources are in the prologue, the bulk of the model in the steady state. The epilogue is what only
the last chunk of a chunked or streamed run needs: logits and sampling.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import total_ordering
from typing import TYPE_CHECKING, Any, TypeAlias

from rlx.errors import InputError, OptionError
from rlx.ir.graph import Graph
from rlx.ir.hir import FusionPolicy, template
from rlx.ir.node import Node, Value

if TYPE_CHECKING:
    from rlx.ir.module import GraphModule


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

    def copy(self) -> PhaseSchedule:
        return PhaseSchedule(self._phases)

    def spread(self, starts: Sequence[int], count: int) -> PhaseSchedule:
        """The schedule of a graph of `count` nodes, in which node i became those from starts[i]."""
        ends = [*starts[1:], count]
        spans = {i: range(a, b) for i, (a, b) in enumerate(zip(starts, ends, strict=True))}
        return PhaseSchedule({n: p for i, p in self for n in spans.get(i, ())})

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


def derive_phases(graph: Graph | GraphModule, once: Collection[str] = ()) -> PhaseSchedule:
    """Phases by position and dependence, over the order of `graph.nodes`.

    Sources are prologue. A compute anchor and everything it depends on is steady state, including a
    `top_k` that routes to experts. Other choices (`sample`, `top_k`) are epilogue, as is what
    follows the last of them or the last anchor. The rest is steady state. An HIR block is an anchor
    if it contains one.

    `once` names inputs that stay the same for many runs, such as a prompt. Work that depends on
    them, params and constants alone is prologue: it need run only once.

    A state update counts as an anchor, unless its value depends on such a choice: later chunks read
    the state, so the update cannot wait for the last chunk.
    """
    graph = _graph_of(graph)
    if graph.given_phases:
        return _given(graph)
    anchors = [n for n in graph.nodes if _is_anchor(n)]
    routed = _feeds(graph, anchors)
    steady = routed | _feeds(graph, _lasting_writes(graph, routed))
    first = _depend_on(graph, once) if once else set()
    last_anchor = _last(graph, set(anchors))
    last_choice = _last(graph, {n for n in graph.nodes if n.op.is_choice and n not in steady})
    schedule = PhaseSchedule()
    for position, node in enumerate(graph.nodes):
        if node.op.is_source or node in first:
            phase = Phase.PROLOGUE
        elif node in steady:
            phase = Phase.STEADY_STATE
        elif node.op.is_choice or position > min(last_anchor, last_choice):
            phase = Phase.EPILOGUE
        else:
            phase = Phase.STEADY_STATE
        schedule._phases[node.id] = phase
    return schedule


def _graph_of(graph: Graph | GraphModule) -> Graph:
    if isinstance(graph, Graph):
        return graph
    held = graph.as_hir() or graph.as_graph()
    assert held is not None
    return held


def _given(graph: Graph) -> PhaseSchedule:
    """The schedule that was given. Nodes that passes inserted go with those before them."""
    schedule, phase = PhaseSchedule(), Phase.PROLOGUE
    for node in graph.nodes:
        if not node.op.is_source:
            phase = graph.given_phases.get(node, phase)
        schedule._phases[node.id] = Phase.PROLOGUE if node.op.is_source else phase
    return schedule


def check_phases(graph: Graph, schedule: PhaseSchedule) -> None:
    """Raise unless the schedule covers the graph and no phase needs a result of a later one."""
    for number, _ in schedule:
        if not 0 <= number < len(graph):
            raise _wrong("no such node", f"%{number}", f"%0 … %{len(graph) - 1}", graph)
    for node in graph.nodes:
        phase = schedule.get(node)
        if node.op.is_source:
            if phase not in (None, Phase.PROLOGUE):
                raise _wrong(
                    "a source is in a later phase", f"{node!r} in {phase}", "prologue", node
                )
            continue
        if phase is None:
            raise _wrong("a node without a phase", repr(node), "a phase for every node", node)
        late = [v for v in node.inputs if (schedule.get(v) or Phase.PROLOGUE) > phase]
        if late:
            got = f"{node!r} in {phase}, {late[0]} in {schedule.get(late[0])}"
            raise _wrong(
                "a node before one that it needs", got, "no phase before its operands'", node
            )


def _wrong(what: str, got: str, expected: str, where: Node | Graph) -> OptionError:
    origin = where.origin if isinstance(where, Node) else None
    return OptionError(what, where="phases", got=got, expected=expected, origin=origin)


def _is_anchor(node: Node) -> bool:
    op: Any = node.op
    if not op.is_block:
        return bool(op.is_anchor)
    inside = template(op, tuple([v.shape for v in node.inputs]), FusionPolicy.DIRECT)
    return any(n.op.is_anchor for n in inside.nodes)


def _depend_on(graph: Graph, once: Collection[str]) -> set[Node]:
    """Nodes that depend on these inputs, params and constants alone."""
    names = [n.name for n in graph.sources("input")]
    for name in once:
        if name not in names:
            raise InputError("no such input", where="once", got=repr(name), expected=names)
    fixed: set[Node] = set()
    found: set[Node] = set()
    for node in graph.nodes:
        op = node.op
        if op.is_source:
            if op.name in ("param", "constant") or (op.name == "input" and node.name in once):
                fixed.add(node)
        elif not op.has_effect and not op.is_choice and all(v.node in fixed for v in node.inputs):
            fixed.add(node)
            found.add(node)
    return found


def _last(graph: Graph, wanted: Collection[Node]) -> float:
    """Position of the last wanted node; infinite when there is none."""
    found = [i for i, n in enumerate(graph.nodes) if n in wanted]
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
