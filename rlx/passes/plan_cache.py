"""Plan templates of one graph, kept for its variants.

Sizes decide little about the structure of a plan: where copies stand, and which results are views
of operands. Variants that agree in that share a `PlanTemplate`, which costs work per node class and
a layout of the arena, not a walk through bind, rewrite, plan and verification.
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

    `rewrite` is the device's rewriting of a bound graph. Where it puts in no nodes but copies, it
    may depend on ops, and on which values are views and which of these are row-major.
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
        """The graph bound and planned."""
        if not all(symbol in binding for symbol in self.symbols):
            require_bound(bind_graph(self.graph, binding, self.symbols))
        dynamic = {s: bound for s, bound in binding.live.items() if s in self.symbols}
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
            verify(made.graph, after="bind")  # says which node
        return made

    def _plan_rewritten(self, binding: DimBinding) -> Variant:
        """The same on a template for this variant alone: the device put in nodes of its own."""
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
        """The bound graph as the device rewrites it, and its nodes before that."""
        bound = bind_graph(self.graph, binding, self.symbols)
        require_bound(bound)
        nodes = list(bound.nodes)
        return self.rewrite(bound), nodes

    def _make_template(self, graph: Graph, nodes: list[Node]) -> PlanTemplate | None:
        """The structure of this graph; None where the device put in nodes other than copies, whose
        meaning for other sizes is not known. `nodes` are those that it did not put in."""
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
