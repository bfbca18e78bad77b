"""The plan cache: variants of one graph share plan templates.

Sizes affect little of a plan's structure: which results are views, and where copies are inserted.
Variants that agree in these share a `PlanTemplate`. Planning one then costs some work per node
class and an arena layout, instead of bind, rewrite, plan and verify on the whole graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property

from rlx.ir.binding import DimBinding
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.verify import verify
from rlx.passes.bind import bind_graph, require_bound
from rlx.passes.node_classes import BoundClasses, NodeClasses, rows_of
from rlx.passes.plan import PlanTemplate, Scratch, Variant, own_outputs, plan
from rlx.passes.views import find_views

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
    ) -> None:
        self.graph, self.symbols, self.prepare = graph, symbols, prepare
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
        if len(graph) == len(nodes):
            return PlanTemplate(graph, self.classes, self.prepare)
        symbolic = {
            new: (old.op, tuple([v.shape for v in old.outputs]))
            for new, old in zip(nodes, self.graph.nodes, strict=True)
        }
        if any(n not in symbolic and n.op.name != "contiguous" for n in graph.nodes):
            return None
        return PlanTemplate(graph, NodeClasses(rows_of(graph.nodes, symbolic)), self.prepare)
