"""A template: a graph lowered, fused and legalised with symbolic dims, then specialised often.

Variants of one graph share plan templates. Sizes affect little of a plan's structure: which results
are views, and where copies are inserted. Variants that agree in these share a `PlanTemplate`.
Planning one then costs some work per node class and an arena layout, instead of bind, rewrite, plan
and verify on the whole graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from operator import is_

from rlx.backends.base import Backend, Executable
from rlx.ir.binding import DimBinding, bind_graph, require_bound, require_known
from rlx.ir.dim import DERIVED
from rlx.ir.graph import Graph
from rlx.ir.hir import FusionPolicy, lower
from rlx.ir.lir import Lir
from rlx.ir.module import GraphModule, as_module
from rlx.ir.node import Node
from rlx.ir.phase import PhaseSchedule, check_phases
from rlx.ir.text import inspect_graph, inspect_lir
from rlx.ir.verify import require_results, verify
from rlx.passes.node_classes import BoundClasses, NodeClasses, rows_of
from rlx.passes.pipeline import PipelineResult, run_pipeline
from rlx.passes.plan import PlanTemplate, Scratch, Variant, own_outputs, plan
from rlx.passes.rewrite import Rule
from rlx.passes.views import find_views
from rlx.runtime.variants import Signature
from rlx.specialize.options import CompileOptions
from rlx.support.gc_pause import without_gc
from rlx.support.pickling import COMPILE_AGAIN, Unpicklable
from rlx.support.records import dataclass
from rlx.support.settings import debug, debug_level

_MAX_TEMPLATES = 8  # each keeps a graph


class PlanCache:
    """Plans variants of a template's `graph`.

    `rewrite` is the device's rewrite of a bound graph. One that inserts nothing but copies may
    depend on ops, on which values are views, and on which of these are row-major.
    """

    def __init__(
        self,
        graph: Graph,
        symbols: frozenset[str],
        prepare: Graph | None,
        rewrite: Callable[[Graph], Graph],
        scratch: Scratch,
        donated: Mapping[str, str] | None = None,
    ) -> None:
        self.graph, self.symbols, self.prepare, self.donated = graph, symbols, prepare, donated
        self.rewrite, self.scratch = rewrite, scratch
        self._known: dict[tuple[bool, ...], PlanTemplate | None] = {}
        self._lock = threading.Lock()

    @cached_property
    def classes(self) -> NodeClasses:
        return NodeClasses.of(self.graph)

    def plan(self, binding: DimBinding) -> Variant:
        """Bind and plan the graph."""
        if not all(symbol in binding for symbol in self.symbols):
            require_bound(bind_graph(self.graph, binding, self.symbols))
        dynamic = {s: bound for s, bound in binding.dynamic.items() if s in self.symbols}
        bound = BoundClasses(self.classes, binding.sizes, dynamic)
        template = self._find(bound.structure, binding)
        if template is None:
            return self._plan_rewritten(binding)
        if template.classes is not self.classes:
            bound = BoundClasses(template.classes, binding.sizes, dynamic)
        if not template.fits(bound):
            return self._plan_rewritten(binding)
        made = template.plan(bound, self.scratch)
        if not bound.is_sound():
            bound.require_fit(template.graph)
            verify(made.graph, after="bind")  # names the node
        return made

    def _plan_rewritten(self, binding: DimBinding) -> Variant:
        """Plan without the cache: the device inserted nodes other than copies."""
        made = plan(self._rewritten(binding)[0], prepare=self.prepare, scratch=self.scratch)
        verify(made.graph, after="plan")
        return made

    def _find(self, structure: tuple[bool, ...], binding: DimBinding) -> PlanTemplate | None:
        with self._lock:
            if structure not in self._known:
                if len(self._known) >= _MAX_TEMPLATES:
                    self._known.pop(next(iter(self._known)))
                self._known[structure] = self._make_template(*self._rewritten(binding))
            return self._known[structure]

    def _rewritten(self, binding: DimBinding) -> tuple[Graph, list[Node]]:
        """The bound graph after the device's rewrite, and its nodes before."""
        bound = bind_graph(self.graph, binding, self.symbols)
        require_bound(bound)
        nodes = list(bound.nodes)
        return self.rewrite(bound), nodes

    def _make_template(self, graph: Graph, nodes: list[Node]) -> PlanTemplate | None:
        """A template of the rewritten graph, `nodes` being those before the rewrite.

        None when the device inserted nodes other than copies: they may depend on the sizes.
        """
        own_outputs(graph, find_views(graph.nodes))
        if len(graph) == len(nodes) and all(map(is_, graph.nodes, nodes)):
            return PlanTemplate(graph, self.classes, self.prepare, donated=self.donated)
        symbolic = {
            new: (old.op, tuple([v.shape for v in old.outputs]))
            for new, old in zip(nodes, self.graph.nodes, strict=True)
        }
        if any(n not in symbolic and n.op.name != "contiguous" for n in graph.nodes):
            return None
        classes = NodeClasses(rows_of(graph.nodes, symbolic))
        return PlanTemplate(graph, classes, self.prepare, donated=self.donated)


@dataclass
class Template(Unpicklable):
    instead = COMPILE_AGAIN
    source: Graph  # MIR before passes: names, shapes and types of all arguments
    result: PipelineResult  # the graph after all passes, and their reports
    backend: Backend
    options: CompileOptions
    donated: Mapping[str, str] = field(default_factory=dict)  # by output, an input given up for it

    @property
    def binding(self) -> DimBinding:
        return self.options.binding

    @property
    def dynamic_dims(self) -> dict[str, int]:
        """The dynamic dimensions that the graph uses, and their upper bounds."""
        return {s: b for s, b in self.binding.live.items() if s in self._symbols}

    def with_options(self, options: CompileOptions) -> Template:
        """The same template with another binding; cached properties are shared."""
        require_known(options.binding, self._symbols, self.source.name)
        other = replace(self, options=options)
        for name in ("_symbols", "signature", "_plans"):
            other.__dict__[name] = getattr(self, name)
        return other

    @cached_property
    def _symbols(self) -> frozenset[str]:
        return _symbols_of(self.source, self.result.graph)

    @cached_property
    def _plans(self) -> PlanCache:
        device = self.backend
        graph, prepare = self.result.graph, self.prepare
        donated = self.donated if device.updates_in_place else None
        rewrite, scratch = device.rewrite_variant, device.scratch
        return PlanCache(graph, self._symbols, prepare, rewrite, scratch, donated)

    @cached_property
    def open_symbols(self) -> frozenset[str]:
        """Symbols that the options do not bind: the inputs of each run do."""
        return frozenset(s for s in self._symbols if s not in self.binding)

    @property
    def prepare(self) -> Graph | None:
        return self.result.prepare

    @cached_property
    def signature(self) -> Signature:
        return Signature.of(self.source)

    @without_gc()
    def plan(self, open_sizes: Mapping[str, int]) -> Lir:
        """Bind all symbols and plan memory: a variant without machine code."""
        binding = DimBinding(dict(self.binding.items()))
        for symbol, size in open_sizes.items():
            binding.set(symbol, size)
        lir = self._plans.plan(binding)
        if debug_level() >= 4:
            debug(4, inspect_lir(lir))
        return lir

    @without_gc()
    def specialize(self, open_sizes: Mapping[str, int]) -> Executable:
        return self.backend.compile(self.plan(open_sizes), self.options)


def _symbols_of(*graphs: Graph) -> frozenset[str]:
    found: set[str] = set()
    for s in set[str]().union(*(g.symbols() for g in graphs)):
        found |= DERIVED[s].symbols if s in DERIVED else {s}
    return frozenset(found)


@without_gc()
def make_template(
    graph: Graph | GraphModule,
    options: CompileOptions,
    device: Backend,
    donated: Mapping[str, str] | None = None,
) -> Template:
    """Run all passes on a graph with symbolic dims. `donated` names inputs whose memory outputs may
    have."""
    source, phases = _lowered(graph, options)
    require_results(source)
    require_known(options.binding, _symbols_of(source), source.name)
    backend = device.for_profile(options.profile)
    debug(1, f"{source.name}: {len(source)} nodes for {backend.name}")
    backend.expect_graph(len(source))
    result = run_pipeline(
        source,
        on_fire=_show_rule if debug_level() >= 6 else None,
        has_native=backend.has_native,
        choose=options.dispatch.choose,
        lower=backend.rewrite_template,
        layout=backend.choose_layouts,
        passes=options.profile.passes,
        phases=phases,
        precision=options.profile.precision,
        quant=options.quant,
    )
    result.dispatch_report.count_host(result.graph, backend.runs_on_host)
    if debug_level() >= 3:
        debug(3, inspect_graph(result.graph), result.explain())
    return Template(source, result, backend, options, donated or {})


def _show_rule(name: str, rule: Rule, root: Node, new: Sequence[Node]) -> None:
    debug(6, f"{name}: {rule.name}: {root!r} became {', '.join(n.op.name for n in new)}")


def _lowered(
    graph: Graph | GraphModule, options: CompileOptions
) -> tuple[Graph, PhaseSchedule | None]:
    """The MIR of a graph, and the given schedule of its nodes."""
    module, phases = as_module(graph), options.phases
    hir = module.as_hir()
    if hir is None:
        return module.into_graph(), phases
    fusable = options.profile.fusion == "fusable"
    policy = FusionPolicy.FUSABLE if fusable else module.fusion_policy
    if phases is not None:
        check_phases(hir, phases)
    starts: list[int] = []
    lowered = lower(hir, policy, starts)
    verify(lowered, after="lower_hir")
    return lowered, None if phases is None else phases.spread(starts, len(lowered))
