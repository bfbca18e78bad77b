"""The front door: a device, and graphs compiled for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.backends.registry import Device
from rlx.errors import OptionError
from rlx.ir.graph import Graph
from rlx.ir.module import FusionPolicy, GraphModule
from rlx.ir.node import Node
from rlx.ir.text import inspect_graph
from rlx.passes.pipeline import run_pipeline
from rlx.passes.rewrite import Rule
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.runtime.template import Template
from rlx.settings import debug, debug_level
from rlx.specialize.options import CompileOptions


class Session:
    """Compiles graphs for one device. Sessions are cheap; they hold no state of their own."""

    def __init__(self, device: Device | str = "cpu") -> None:
        self.device = Device.of(device)

    def compile(
        self,
        graph: Graph | GraphModule,
        options: CompileOptions | Mapping[str, Any] | None = None,
        *,
        params: ParamStore | None = None,
    ) -> CompiledGraph:
        """An executable form of `graph`; `params` may be shared with other compiled graphs."""
        return CompiledGraph(self.template(graph, options), params)

    def template(
        self,
        graph: Graph | GraphModule,
        options: CompileOptions | Mapping[str, Any] | None = None,
    ) -> Template:
        """Lowered, fused and legalised, sizes still open."""
        chosen = CompileOptions.of(options)
        source = _lowered(graph, chosen)
        backend = self.device.backend
        debug(1, f"{source.name}: {len(source)} nodes for {self.device}")
        on_fire = _show_rule if debug_level() >= 6 else None
        result = run_pipeline(
            source,
            on_fire=on_fire,
            has_native=backend.has_native,
            choose=chosen.dispatch.choose,
            lower=backend.lower,
            passes=chosen.profile.passes,
            precision=chosen.profile.precision,
        )
        if debug_level() >= 3:
            debug(3, inspect_graph(result.graph), result.explain())
        return Template(source, result, backend, chosen)


def _show_rule(name: str, rule: Rule, root: Node, new: Sequence[Node]) -> None:
    debug(6, f"{name}: {rule.name}: {root!r} became {', '.join(n.op.name for n in new)}")


def _lowered(graph: Graph | GraphModule, options: CompileOptions) -> Graph:
    if isinstance(graph, Graph):
        graph = GraphModule.from_graph(graph)
    if not isinstance(graph, GraphModule):
        raise OptionError("not a graph", got=type(graph).__name__, expected="Graph or GraphModule")
    if options.profile.fusion == "fusable":
        graph = graph.with_fusion_policy(FusionPolicy.FUSABLE)
    return graph.into_graph()
