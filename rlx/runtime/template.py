"""A template: a graph lowered, fused and legalised with symbolic dims, then specialised often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from rlx.backends.base import Backend, Executable
from rlx.ir.binding import DimBinding, require_known
from rlx.ir.dim import DERIVED
from rlx.ir.graph import Graph
from rlx.ir.hir import FusionPolicy, lower
from rlx.ir.lir import Lir
from rlx.ir.module import GraphModule, as_module
from rlx.ir.node import Node
from rlx.ir.phase import PhaseSchedule, check_phases
from rlx.ir.text import inspect_graph, inspect_lir
from rlx.ir.verify import require_results, verify
from rlx.passes.pipeline import PipelineResult, run_pipeline
from rlx.passes.plan_cache import PlanCache
from rlx.passes.rewrite import Rule
from rlx.runtime.variants import Signature
from rlx.specialize.options import CompileOptions
from rlx.support.gc_pause import without_gc
from rlx.support.pickling import COMPILE_AGAIN, Unpicklable
from rlx.support.records import dataclass
from rlx.support.settings import debug, debug_level


@dataclass
class Template(Unpicklable):
    instead = COMPILE_AGAIN
    source: Graph  # MIR before passes: names, shapes and types of all arguments
    result: PipelineResult  # the graph after all passes, and their reports
    backend: Backend
    options: CompileOptions

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
        return PlanCache(graph, self._symbols, prepare, device.rewrite_variant, device.scratch)

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

    def specialize(self, open_sizes: Mapping[str, int]) -> Executable:
        return self.backend.compile(self.plan(open_sizes), self.options)


def _symbols_of(*graphs: Graph) -> frozenset[str]:
    found: set[str] = set()
    for s in set[str]().union(*(g.symbols() for g in graphs)):
        found |= DERIVED[s].symbols if s in DERIVED else {s}
    return frozenset(found)


@without_gc()
def make_template(graph: Graph | GraphModule, options: CompileOptions, device: Backend) -> Template:
    """Run all passes on a graph with symbolic dims."""
    source, phases = _lowered(graph, options)
    require_results(source)
    require_known(options.binding, _symbols_of(source), source.name)
    backend = device.for_target(options.profile.target)
    debug(1, f"{source.name}: {len(source)} nodes for {backend.name}")
    result = run_pipeline(
        source,
        on_fire=_show_rule if debug_level() >= 6 else None,
        has_native=backend.has_native,
        choose=options.dispatch.choose,
        lower=backend.rewrite_template,
        passes=options.profile.passes,
        phases=phases,
        precision=options.profile.precision,
        quant=options.quant,
    )
    result.dispatch_report.count_host(result.graph, backend.runs_on_host)
    if debug_level() >= 3:
        debug(3, inspect_graph(result.graph), result.explain())
    return Template(source, result, backend, options)


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
