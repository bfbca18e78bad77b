"""The pass pipeline: `PIPELINE` lists every pass between the user's graph and memory planning.

A pass is a function from graph to graph; the verifier runs after each that changed the graph. After
the pipeline a variant is bound (`ir.binding`) and planned (`passes.plan`).

Under a given phase schedule a graph is split by phase, and the parts are joined again. Each part
goes through the passes by itself, so that nothing is fused across phases. In a part, values of
earlier parts are inputs; a state stands for its latest version.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import field
from time import perf_counter
from typing import Any, NamedTuple

from rlx.errors import OptionError
from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.hir import FusionPolicy, has_blocks, lower
from rlx.ir.node import Node, Value, infer
from rlx.ir.op import Op, lookup
from rlx.ir.phase import Phase, PhaseSchedule, check_phases, derive_phases
from rlx.ir.quant.scheme import QuantScheme
from rlx.ir.verify import verify
from rlx.passes.fusion import FUSIONS
from rlx.passes.legalize import Choose, HasNative, inline_calls, legalize, prefer_native
from rlx.passes.precision import lower_precision, quantize_weights
from rlx.passes.prepare import merge_prepared, split_prepare
from rlx.passes.report import DispatchReport, FusionReport, counters
from rlx.passes.rewrite import OnFire
from rlx.passes.simplify import cse, dce, fold, simplify
from rlx.support.records import dataclass


def lower_hir(graph: Graph, policy: FusionPolicy | str = FusionPolicy.DIRECT) -> Graph:
    """HIR to MIR: blocks become fused ops under DIRECT, primitives under FUSABLE."""
    chosen = FusionPolicy.of(policy)
    return lower(graph, chosen) if has_blocks(graph) else graph


def schedule_phases(graph: Graph) -> Graph:
    """Move the epilogue to the end, as far as dependences and state updates allow.

    Each phase is then a range of consecutive launches, so that a phase can run alone.
    """
    phases = derive_phases(graph)
    late = {n for n in graph.nodes if phases.get(n) is Phase.EPILOGUE}
    late -= _held_by_writes(graph, late)
    moved: list[Node] = []
    for node in graph.nodes:
        if node in late or any(v.node in late for v in node.inputs):
            late.add(node)
            moved.append(node)
    graph.nodes = [n for n in graph.nodes if n not in late] + moved
    for position, node in enumerate(graph.nodes):
        node.id = position
    return graph


def _held_by_writes(graph: Graph, late: set[Node]) -> set[Node]:
    """Late nodes, with their operands, that read a state which an earlier phase overwrites."""
    version: dict[Value, Value] = {}  # a state's value or a view of it → the version it reads
    overwritten: set[Value] = set()
    for node in graph.nodes:
        if node.op.name in ("state", "state_update"):
            version[node.output] = node.output
            if node.inputs and node not in late:
                overwritten.add(node.inputs[0])
        elif node.op.is_view and node.inputs[0] in version:
            version[node.output] = version[node.inputs[0]]
    held: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in held or (
            node in late and any(version.get(v) in overwritten for v in node.inputs)
        ):
            held.add(node)
            held.update(v.node for v in node.inputs)
    return held


@dataclass
class Context:
    """Options of the passes, and the reports they fill."""

    policy: FusionPolicy = FusionPolicy.DIRECT
    precision: str = "f32"
    has_native: HasNative | None = None  # None: the device runs every op
    choose: Choose = prefer_native
    lower: Callable[[Graph], Graph] | None = None
    layout: Callable[[Graph], Graph] | None = None
    on_fire: OnFire | None = None
    quant: QuantScheme | None = None
    fusion: FusionReport = field(default_factory=FusionReport)
    dispatch: DispatchReport = field(default_factory=DispatchReport)
    prepare: Graph | None = None
    packs_only: bool = False  # prepare only what the device has no kernel for


class Pass(NamedTuple):
    name: str
    run: Callable[[Graph, Context], Graph]
    required: bool = False  # runs even when a profile does not list it
    by_editor: bool = False  # a graph that it changes has a new list of nodes, as from an Editor


def _precision(graph: Graph, context: Context) -> Graph:
    """Casts around matmuls; adjacent ones cancel."""
    if context.precision == "f32":
        return graph
    return recursive(lambda g: simplify(lower_precision(g, context.precision)))(graph)


def _quantize(graph: Graph, context: Context) -> Graph:
    if context.quant is None:
        return graph
    return quantize_weights(graph, context.quant, context.fusion)


def _simplify(graph: Graph, context: Context) -> Graph:
    return recursive(lambda g: simplify(g, context.on_fire))(graph)


def _fusion(name: str) -> Pass:
    def run(graph: Graph, context: Context) -> Graph:
        fuse = FUSIONS[name]
        return recursive(lambda g: fuse(g, context.fusion, context.on_fire))(graph)

    return Pass(f"fuse.{name}", run, by_editor=True)


def _legalize(graph: Graph, context: Context) -> Graph:
    if context.has_native is None:
        return graph
    return legalize(graph, context.has_native, context.choose, context.dispatch)


def _lower(graph: Graph, context: Context) -> Graph:
    return graph if context.lower is None else context.lower(graph)


def _layout(graph: Graph, context: Context) -> Graph:
    return graph if context.layout is None else context.layout(graph)


def _prepare(graph: Graph, context: Context) -> Graph:
    stays = (context.has_native or (lambda node: True)) if context.packs_only else None
    main, prepared = split_prepare(graph, stays)
    context.prepare = prepared if prepared.outputs else None
    return main


PIPELINE: tuple[Pass, ...] = (
    Pass("lower_hir", lambda g, c: lower_hir(g, c.policy), required=True),
    Pass("inline", lambda g, c: recursive(inline_calls)(g), required=True, by_editor=True),
    Pass("quantize", _quantize, required=True, by_editor=True),
    Pass("simplify", _simplify, by_editor=True),
    Pass("fold", lambda g, c: recursive(fold)(g), by_editor=True),
    Pass("simplify", _simplify, by_editor=True),  # constant folding enables more rules
    Pass("cse", lambda g, c: recursive(cse)(g), by_editor=True),
    Pass("dce", lambda g, c: recursive(dce)(g), by_editor=True),
    *(_fusion(name) for name in FUSIONS if name != "regions"),
    Pass("precision", _precision, required=True, by_editor=True),
    Pass("layout", _layout),
    Pass("legalize", _legalize, required=True),
    _fusion("regions"),
    Pass("legalize", _legalize, required=True),  # decomposes regions that the device does not run
    Pass("lower", _lower, required=True),
    Pass("prepare", _prepare, required=True),
    Pass("dce", lambda g, c: dce(g)),
    Pass("schedule", lambda g, c: schedule_phases(g), required=True),
)

NAMES: tuple[str, ...] = tuple(dict.fromkeys(["fuse", *(p.name for p in PIPELINE)]))


class Stage(NamedTuple):
    """A pass that ran: its time and the nodes after it."""

    name: str
    seconds: float
    nodes: int


@dataclass
class PipelineResult:
    graph: Graph
    prepare: Graph | None  # work on parameters alone; its outputs are params of `graph`
    fusion_report: FusionReport
    dispatch_report: DispatchReport
    trace: list[Stage]

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.trace)

    def explain(self) -> str:
        """The trace and both reports as text."""
        width = max(len(s.name) for s in self.trace)
        lines = [
            f"{s.name:{width}}  {s.seconds * 1e3:8.2f} ms  {s.nodes} nodes" for s in self.trace
        ]
        return "\n".join([*lines, "", str(self.fusion_report), "", str(self.dispatch_report)])


def run_pipeline(
    graph: Graph,
    *,
    has_native: HasNative | None = None,
    choose: Choose = prefer_native,
    lower: Callable[[Graph], Graph] | None = None,
    layout: Callable[[Graph], Graph] | None = None,
    policy: FusionPolicy | str = FusionPolicy.DIRECT,
    precision: str = "f32",
    quant: QuantScheme | None = None,
    passes: Sequence[str] | None = None,
    phases: PhaseSchedule | None = None,
    on_stage: Callable[[str, Graph], None] | None = None,
    on_fire: OnFire | None = None,
) -> PipelineResult:
    """Run the pipeline on a copy of `graph`.

    `passes` names the passes to run (`fuse` means all of fuse.…; None means all). `quant` packs
    float weights. Under a schedule of `phases` each phase goes through the passes by itself.
    `on_stage` is called after each pass, `on_fire` for each rule that fires.
    """
    chosen = _selected(passes)
    fusion = FusionPolicy.of(policy)
    context = Context(fusion, precision, has_native, choose, lower, layout, on_fire, quant)
    context.packs_only = passes is not None and "prepare" not in passes
    trace: list[Stage] = []
    if phases is None:
        graph = _run_passes(graph.copy(), chosen, context, trace, on_stage)
    else:
        parts, prepared = [], list[Graph]()
        for part in split_phases(graph, phases):
            made = _run_passes(part.graph, chosen, context, trace, on_stage)
            parts.append(part._replace(graph=made))
            prepared += [] if context.prepare is None else [context.prepare]
        graph = join_phases(graph, parts)
        context.prepare = merge_prepared(prepared)
        verify(graph, after="phases")
    if context.prepare is not None:
        verify(context.prepare, after="prepare")
    _share_ops(graph)
    return PipelineResult(graph, context.prepare, context.fusion, context.dispatch, trace)


def _run_passes(
    graph: Graph, passes: Sequence[Pass], context: Context, trace: list[Stage],
    on_stage: Callable[[str, Graph], None] | None,
) -> Graph:  # fmt: skip
    context.prepare = None
    for each in passes:
        start, before = perf_counter(), graph.nodes
        graph = each.run(graph, context)
        if not each.by_editor or graph.nodes is not before:
            verify(graph, after=each.name)
        counters.passes += 1
        trace.append(Stage(each.name, perf_counter() - start, len(graph)))
        if on_stage is not None:
            on_stage(each.name, graph)
    return graph


def _share_ops(graph: Graph) -> None:
    """Make equal ops one object: per-op caches then work by identity."""
    known: dict[Op, Op] = {}
    for node in graph.nodes:
        node.op = known.setdefault(node.op, node.op)


def _selected(passes: Sequence[str] | None) -> list[Pass]:
    if passes is None:
        return list(PIPELINE)
    for name in passes:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            raise OptionError(
                "unknown pass", where="passes", got=repr(name), expected=", ".join(NAMES),
                hint=f"did you mean {near[0]}?" if near else "",
            )  # fmt: skip
    wanted = set(passes)
    return [
        p
        for p in PIPELINE
        if p.required or p.name in wanted or (p.name.startswith("fuse.") and "fuse" in wanted)
    ]


# -- subgraphs -----------------------------------------------------------------------------------

Change = Callable[[Graph], Graph]


def recursive(change: Change) -> Change:
    """The pass `change`, applied to subgraphs of control flow first, then to the graph."""

    def changed(graph: Graph) -> Graph:
        _Bodies(changed).run(graph)
        return change(graph)

    return changed


class _Bodies:
    def __init__(self, change: Change) -> None:
        self.change = change
        self.done: dict[Body, Body] = {}

    def run(self, graph: Graph) -> None:
        nodes = [node for node in graph.nodes if node.op.is_control_flow]
        if nodes:
            graph.nodes = list(graph.nodes)  # which says that it may have changed
        for node in nodes:
            node.op = self._op(node.op)

    def _op(self, op: Op) -> Op:
        changes: dict[str, Any] = {}
        for name in op.fields:
            body = getattr(op, name)
            if isinstance(body, Body):
                new = self._body(body)
                if new is not body:
                    changes[name] = new
        return op.replace(**changes) if changes else op

    def _body(self, body: Body) -> Body:
        if body not in self.done:
            new = self.change(body.graph.copy())
            self.done[body] = body if new.same_as(body.graph) else Body(new)
        return self.done[body]


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
