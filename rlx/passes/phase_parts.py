"""Passes under a given phase schedule: a graph is split by phase, and the parts are joined again.

Each part goes through the passes by itself, so that nothing is fused across phases. In a part,
values of earlier parts are inputs; a state stands for its latest version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value, infer
from rlx.ir.op import lookup
from rlx.ir.phase import Phase, PhaseSchedule, check_phases


class Part(NamedTuple):
    phase: Phase
    graph: Graph


def split_phases(graph: Graph, schedule: PhaseSchedule) -> list[Part]:
    """One graph per phase that has work; their outputs are what later parts or the caller read."""
    check_phases(graph, schedule)
    work = [n for n in graph.nodes if not n.op.is_source]
    parts = []
    for phase in Phase:
        nodes = [n for n in work if schedule.get(n) is phase]
        own = set(nodes)
        read = [v for n in work if n not in own for v in n.inputs] + graph.outputs
        wanted = dict.fromkeys(v for v in read if v.node in own)
        if nodes:
            parts.append(Part(phase, _Splitter(graph, nodes).part(list(wanted))))
    return parts


class _Splitter:
    """Copies the nodes of one phase, and sources for what they read."""

    def __init__(self, graph: Graph, nodes: Sequence[Node]) -> None:
        self.new = Graph(graph.name)
        self.new.dynamic = dict(graph.dynamic)
        self.values: dict[Value, Value] = {}
        self.states = _states(graph)
        for node in nodes:
            inputs = [self._operand(v) for v in node.inputs]
            with self.new.origin(node.origin):
                made = self.new.append_node(node.op, inputs, node.name)
            self.values.update(zip(node.outputs, made.outputs, strict=True))

    def part(self, wanted: Sequence[Value]) -> Graph:
        self.new.set_outputs({_label(v): self.values[v] for v in wanted})
        return self.new

    def _operand(self, value: Value) -> Value:
        if value not in self.values:
            node, name = value.node, self.states.get(value)
            with self.new.origin(node.origin):
                if name is not None:
                    made = self.new.state(name, value.shape)
                elif node.op.is_source:
                    made = self.new.append(node.op, (), node.name)
                else:
                    made = self.new.input(_label(value), value.shape)
            self.values[value] = made
        return self.values[value]


def join_phases(graph: Graph, parts: Sequence[Part]) -> Graph:
    """The graph of all parts in order, which knows the phase of every node."""
    joiner = _Joiner(graph.name)
    for part in parts:
        joiner.add(part)
    new, values = joiner.new, joiner.crossing
    new.dynamic = dict(graph.dynamic)
    outputs = [
        values[_label(v)] if _label(v) in values else joiner.first(v.node) for v in graph.outputs
    ]
    new.set_outputs(dict(zip(graph.output_names, outputs, strict=True)))
    return new


class _Joiner:
    def __init__(self, name: str) -> None:
        self.new = Graph(name)
        self.crossing: dict[str, Value] = {}  # by label
        self.states: dict[str, Value] = {}  # the latest version of each
        self.owner: dict[Value, str] = {}

    def add(self, part: Part) -> None:
        values: dict[Value, Value] = {}
        for node in part.graph.nodes:
            if node.op.is_source:
                values[node.output] = self.source(node)
                continue
            inputs = tuple([values[v] for v in node.inputs])
            made = self._append(node, inputs, part.phase)
            values.update(zip(node.outputs, made.outputs, strict=True))
            if node.op.name == "state_update":
                state = self.owner[made.output] = self.owner[inputs[0]]
                self.states[state] = made.output
        for label, value in zip(part.graph.output_names, part.graph.outputs, strict=True):
            found = values[value]
            if part.phase is Phase.PROLOGUE and _root(found).node.op.name == "input":
                # later phases read the copy: they run without the inputs of the prologue
                copy = Node(self.new, -1, lookup("contiguous")(), (found,), "", value.node.origin)
                found = self._append(copy, (found,), part.phase).output
            self.crossing[label] = found

    def source(self, node: Node) -> Value:
        name, op = node.name, node.op
        if name in self.crossing:
            return self.crossing[name]
        if name in self.states:
            return self.states[name]
        found = self.new._sources.get(name) if name else None
        if found is not None:
            return found.output
        made = self._append(node, ()).output
        if name:
            self.new._sources[name] = made.node
        if op.name == "state":
            self.states[name], self.owner[made] = made, name
        return made

    def first(self, node: Node) -> Value:
        """A source; the first version of a state."""
        found = self.new._sources.get(node.name)
        return self.source(node) if found is None else found.output

    def _append(self, node: Node, inputs: tuple[Value, ...], phase: Phase | None = None) -> Node:
        made = Node(self.new, len(self.new.nodes), node.op, inputs, node.name, node.origin)
        # shapes anew: equal dims may have another form in another part
        shapes = infer(node.op, tuple([v.shape for v in inputs]))
        made.outputs = tuple([Value(made, i, s) for i, s in enumerate(shapes)])
        self.new.nodes.append(made)
        if phase is not None:
            self.new.given_phases[made] = phase
        return made


def _root(value: Value) -> Value:
    while value.node.op.is_view:
        value = value.node.inputs[0]
    return value


def _label(value: Value) -> str:
    return f"%{value.node.id}.{value.index}"


def _states(graph: Graph) -> dict[Value, str]:
    """The versions of states, and whose they are."""
    found: dict[Value, str] = {}
    for node in graph.nodes:
        if node.op.name == "state":
            found[node.output] = node.name
        elif node.op.name == "state_update":
            found[node.output] = found[node.inputs[0]]
    return found
