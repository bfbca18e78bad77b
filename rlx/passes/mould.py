"""Variants of one template: structure is found once, after that only numbers are new.

Sizes decide little about a plan's structure: where copies stand, and which results take over the
memory of operands. Variants that agree in that come from one mould, which costs work per kind of
node and a placement of what lives when, not a walk through bind, lowering, plan and verification.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from rlx.ir.binding import DimBinding
from rlx.ir.graph import Graph
from rlx.ir.lir import Argument, Lir, Slot
from rlx.ir.node import Node, Value
from rlx.ir.phase import Phase, derive_phases
from rlx.ir.verify import verify
from rlx.passes.bind import bind_graph, require_bound
from rlx.passes.count import counters
from rlx.passes.kinds import Kinds, SizedKinds, rows_of
from rlx.passes.plan import (
    Lifetimes,
    Placement,
    Scratch,
    lies_like,
    own_outputs,
    plan,
    writes_where_it_reads,
)
from rlx.passes.views import find_views

_MOST = 8  # moulds of a template: each keeps a graph
_MOST_SIZES = 4096


class Moulds:
    """Plans variants of a template's `graph`.

    `lower` is the device's rewriting of a bound graph. Where it puts in no nodes but copies, it may
    look at op kinds, and at which values are views and which of these are row-major.
    """

    def __init__(
        self,
        graph: Graph,
        symbols: frozenset[str],
        prepare: Graph | None,
        lower: Callable[[Graph], Graph],
        scratch: Scratch,
    ) -> None:
        self.graph, self.symbols, self.prepare = graph, symbols, prepare
        self.lower, self.scratch = lower, scratch
        self._known: dict[tuple[bool, ...], Mould | None] = {}
        self._lock = threading.Lock()

    @cached_property
    def kinds(self) -> Kinds:
        return Kinds.of(self.graph)

    def plan(self, binding: DimBinding) -> Lir:
        """The graph bound and planned."""
        if not all(symbol in binding for symbol in self.symbols):
            require_bound(bind_graph(self.graph, binding, self.symbols))
        live = {s: bound for s, bound in binding.live.items() if s in self.symbols}
        sized = SizedKinds(self.kinds, binding.sizes, live)
        mould = self._find(sized.structure, binding)
        made = None if mould is None else mould.plan(sized, self.scratch)
        return made or self._by_node(binding)

    def _find(self, structure: tuple[bool, ...], binding: DimBinding) -> Mould | None:
        with self._lock:
            if structure not in self._known:
                if len(self._known) >= _MOST:
                    self._known.pop(next(iter(self._known)))
                self._known[structure] = self._mould(*self._bound(binding))
            return self._known[structure]

    def _bound(self, binding: DimBinding) -> tuple[Graph, list[Node]]:
        bound = bind_graph(self.graph, binding, self.symbols)
        require_bound(bound)
        nodes = list(bound.nodes)
        return self.lower(bound), nodes

    def _by_node(self, binding: DimBinding) -> Lir:
        lir = plan(self._bound(binding)[0], prepare=self.prepare, scratch=self.scratch)
        verify(lir.graph, after="plan")
        return lir

    def _mould(self, graph: Graph, nodes: list[Node]) -> Mould | None:
        """What variants of this structure have in common; None when a device put in nodes whose
        meaning for other sizes is not known. `nodes` are those that it did not put in."""
        own_outputs(graph, find_views(graph.nodes))
        if len(graph) == len(nodes):
            return Mould(graph, self.kinds, self.prepare)
        symbolic = {
            new: (old.op, tuple([v.shape for v in old.outputs]))
            for new, old in zip(nodes, self.graph.nodes, strict=True)
        }
        if any(n not in symbolic and n.op.name != "contiguous" for n in graph.nodes):
            return None
        return Mould(graph, Kinds(rows_of(graph.nodes, symbolic)), self.prepare)


class Mould:
    """The structure of a planned graph, that of its first variant."""

    def __init__(self, graph: Graph, kinds: Kinds, prepare: Graph | None) -> None:
        self.graph, self.kinds, self.prepare = graph, kinds, prepare
        self.phases = derive_phases(graph)
        self.kept: dict[Any, Any] = {}  # what devices remember about variants of this structure
        self.values = [v for node in graph.nodes for v in node.outputs]
        views = find_views(graph.nodes)
        self._roots = {v: root for v, (root, _) in views.items()}
        self._viewed = [v in views for v in self.values]
        self._lives: dict[tuple[tuple[bool, ...], ...], Lifetimes] = {}
        self._scratch: dict[tuple[Any, ...], int] = {}

    def plan(self, sized: SizedKinds, scratch: Scratch) -> Variant | None:
        """The variant of these sizes; None when its structure is another after all."""
        if sized.kinds is not self.kinds:
            sized = SizedKinds(self.kinds, sized.sizes, sized.live)
        of_value, of_node = self.kinds.of_value, self.kinds.of_node
        views = sized.views
        if [views[k] is not None for k in of_value] != self._viewed:
            return None
        counters.plans += 1
        lives = self._lifetimes(sized)
        sizes = [sized.bytes[k] for k in of_value]
        wanted = [self._wanted(sized, k, scratch) for k in range(len(self.kinds.nodes))]
        placed = lives.place(sizes, [wanted[k] for k in of_node])
        made = Variant(self, lives, sized, sizes, placed)
        if not sized.is_sound():
            verify(made.graph, after="bind")  # says which node
        return made

    def _lifetimes(self, sized: SizedKinds) -> Lifetimes:
        fits = tuple([_fits(sized, k) for k in range(len(self.kinds.nodes))])
        found = self._lives.get(fits)
        if found is None:
            of_node = self.kinds.of_node
            lives = Lifetimes(self.graph, self._roots, lambda n: fits[of_node[n.id]], False)
            found = self._lives[fits] = lives
        return found

    def _wanted(self, sized: SizedKinds, kind: int, scratch: Scratch) -> int:
        if self.kinds.nodes[kind].op.is_source:
            return 0
        key = sized.identity(kind)
        found = self._scratch.get(key)
        if found is None:
            if len(self._scratch) >= _MOST_SIZES:
                self._scratch.clear()
            found = self._scratch[key] = scratch(sized.node(kind))
        return found

    def nodes(self, sized: SizedKinds) -> Iterator[Node]:
        """One node of each kind, with the origin of the first."""
        for number, kind in enumerate(self.kinds.nodes):
            node = sized.node(number)
            node.origin = self.graph.nodes[kind.first].origin
            yield node

    @cached_property
    def arguments(self) -> list[tuple[str, str, int]]:
        """Role, name and number of the value of all that callers bring or get."""
        graph, numbers = self.graph, {v: i for i, v in enumerate(self.values)}
        roles = ("input", "param", "state")
        found = [(r, n.name, numbers[n.output]) for r in roles for n in graph.sources(r)]
        outputs = zip(graph.output_names, graph.outputs, strict=True)
        return found + [("output", name, numbers[v]) for name, v in outputs]


def _fits(sized: SizedKinds, number: int) -> tuple[bool, ...]:
    """For each operand of a kind, whether the result may be written over it."""
    kind = sized.kinds.nodes[number]
    if len(kind.results) != 1 or not writes_where_it_reads(kind.op):
        return ()
    result = kind.results[0]
    return tuple(
        [
            sized.bytes[sized.root(k)] == sized.bytes[result]
            and lies_like(sized.shapes[k], sized.views[k], sized.shapes[result])
            for k in kind.operands
        ]
    )


class Variant(Lir):
    """A plan in numbers: its graph is made when somebody looks at it, a run does not."""

    def __init__(
        self,
        mould: Mould,
        lives: Lifetimes,
        sized: SizedKinds,
        sizes: list[int],
        placed: Placement,
    ) -> None:
        self.mould, self.lives, self.sized, self.sizes = mould, lives, sized, sizes
        self.offsets, self.scratch, self.arena_size = placed
        self.phases, self.prepare = mould.phases, mould.prepare

    @cached_property
    def graph(self) -> Graph:  # type: ignore[override]
        sized, kinds = self.sized, iter(self.mould.kinds.of_node)

        def bind(op: Any, shapes: Any) -> Any:
            kind = next(kinds)
            results = self.mould.kinds.nodes[kind].results
            return sized.ops[kind], tuple([sized.shapes[k] for k in results])

        made = self.mould.graph.rebuild(bind)
        made.live = dict(sized.live)
        verify(made, after="plan")
        return made

    @cached_property
    def slots(self) -> dict[Value, Slot]:  # type: ignore[override]
        values = [v for node in self.graph.nodes for v in node.outputs]
        views = [self.sized.views[k] for k in self.mould.kinds.of_value]
        return self.lives.slots(values, views, self.sizes, self.offsets)

    @property
    def name(self) -> str:
        return self.mould.graph.name

    @property
    def live(self) -> dict[str, int]:
        return self.sized.live

    @property
    def output_phases(self) -> list[Phase]:
        return [self.phases.get(v) or Phase.STEADY_STATE for v in self.mould.graph.outputs]

    def arguments(self) -> list[Argument]:
        shapes, of_value = self.sized.shapes, self.mould.kinds.of_value
        sizes, offsets, roots = self.sizes, self.offsets, self.lives.roots
        return [
            Argument(role, name, shapes[of_value[i]], sizes[i], offsets[i], roots[i] != i)
            for role, name, i in self.mould.arguments
        ]

    def __len__(self) -> int:
        return len(self.mould.graph)
