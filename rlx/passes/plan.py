"""Memory planning: a bound graph becomes LIR.

Planning goes by node classes. A `PlanTemplate` is the structure of a planned graph: nodes, their
classes, and which values are views. With sizes it becomes a `Variant`, at the cost of some work per
class and one arena layout. `plan` does both for a single graph; `PlanCache` keeps templates for
many variants. Memory is planned for the upper bounds of dynamic dims.

Values whose live ranges do not overlap share bytes. A result may overwrite an operand that dies at
the node, when the op works in place. Views need no memory. Inputs and outputs keep their offsets
for the whole run, so that callers can use the manifest's. Live ranges do not depend on sizes: they
are found once, in near-linear time, and each variant is then laid out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from rlx.errors import OutOfMemoryError, VerifyError
from rlx.ir.binding import require_bound
from rlx.ir.graph import Graph
from rlx.ir.lir import ALIGNMENT, Argument, Lir, Slot, View, aligned
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.ir.phase import Phase, PhaseSchedule, derive_phases
from rlx.ir.shape import MAX_BYTES
from rlx.ir.verify import verify
from rlx.passes.in_place import in_place_outputs, overwritable
from rlx.passes.node_classes import BoundClasses, NodeClasses, rows_of
from rlx.passes.report import counters
from rlx.passes.views import Alias, find_views


class _Arena:
    """Best-fit allocator: free gaps sorted by offset, the smallest that fits is taken."""

    def __init__(self) -> None:
        self.size = 0
        self.gaps: list[tuple[int, int]] = []  # offset, size

    def take(self, size: int) -> int:
        best = -1
        for i, (_, gap) in enumerate(self.gaps):
            if gap >= size and (best < 0 or gap < self.gaps[best][1]):
                best = i
        if best >= 0:
            offset, gap = self.gaps.pop(best)
            if gap > size:
                self.gaps.insert(best, (offset + size, gap - size))
            return offset
        if self.gaps and sum(self.gaps[-1]) == self.size:  # grow the gap at the end
            offset, _ = self.gaps.pop()
        else:
            offset = self.size
        self.size = offset + size
        return offset

    def give(self, offset: int, size: int) -> None:
        if not size:
            return
        i = bisect_left(self.gaps, (offset, size))
        if i < len(self.gaps) and offset + size == self.gaps[i][0]:
            size += self.gaps.pop(i)[1]
        if i and sum(self.gaps[i - 1]) == offset:
            offset, before = self.gaps.pop(i - 1)
            size, i = size + before, i - 1
        self.gaps.insert(i, (offset, size))


class ArenaLayout(NamedTuple):
    """Arena offsets of a variant's values, by value number."""

    offsets: list[int | None]  # None: not in the arena
    scratch: dict[int, tuple[int, int]]  # node id → offset, size
    size: int


class Lifetimes:
    """The live ranges of a graph's values, independent of sizes; values are numbered in node order.

    `fits` lists, for a node with one result, which operands the result may overwrite: those of its
    size and layout, where the op `works_in_place`. Inputs and outputs of a `nested` graph get no
    arena slot: the enclosing node owns their memory. Values that are `kept` live to the end.
    """

    def __init__(
        self,
        graph: Graph,
        roots: Mapping[Value, Value],
        fits: Callable[[Node], Sequence[bool]],
        nested: bool,
        kept: Collection[Value] = (),
    ) -> None:
        self.graph, self.fits, self.nested = graph, fits, nested
        self.values = [v for node in graph.nodes for v in node.outputs]
        self.numbers = {v: i for i, v in enumerate(self.values)}
        self.roots = [self.numbers[roots.get(v, v)] for v in self.values]
        self.slot_kinds = [""] * len(self.values)
        self.spans = [(0, 0)] * len(self.values)  # positions that define and last read a value
        self.events: list[tuple[int, int, int]] = []
        self.in_place: dict[int, str] = {}  # outputs that have the memory of a donated input
        self._last = self._last_uses(kept)
        self._dying: dict[int, list[int]] = {}
        self._outputs = {self.numbers[v] for v in graph.outputs}
        for node in graph.sources("input"):
            self._begin(self.numbers[node.output], node, "input")
        for node in graph.nodes:
            self._visit(node)

    def _last_uses(self, kept: Collection[Value]) -> dict[int, int]:
        last: dict[int, int] = {}
        for node in self.graph.nodes:
            for v in node.inputs:
                last[self._root(v)] = node.id
        for v in (*self.graph.outputs, *kept):
            last[self._root(v)] = len(self.graph.nodes)
        return last

    def _root(self, value: Value) -> int:
        return self.roots[self.numbers[value]]

    def _visit(self, node: Node) -> None:
        if node.op.is_source:
            if node.op.name != "input":
                value = self.numbers[node.output]
                self.slot_kinds[value] = node.op.name
                self.spans[value] = (node.id, self._last.get(value, node.id))
            return
        for v in node.outputs:
            value = self.numbers[v]
            root = self.roots[value]
            if root != value:
                self.slot_kinds[value] = "alias"
                self.spans[value] = (node.id, self._last[root])
            else:
                self._begin(value, node, "output" if value in self._outputs else "arena")
        self.events.append((_SCRATCH, node.id, 0))
        gone = self._dying.pop(node.id, ())
        self.events += [(_GIVE, value, 0) for value in gone if self._has_offset(value)]

    def _begin(self, value: int, node: Node, kind: str) -> None:
        self.slot_kinds[value] = kind
        first, end = (0 if kind == "input" else node.id), len(self.graph.nodes)
        last = self._last.get(value, first) if kind == "arena" else end
        self.spans[value] = (first, last)
        old = self._predecessor(node) if kind == "arena" else None
        if old is not None:
            self._dying[node.id].remove(old)
            self.events.append((_INHERIT, value, old))
        elif self._has_offset(value):
            self.events.append((_TAKE, value, 0))
        self._dying.setdefault(last, []).append(value)

    def _has_offset(self, value: int) -> bool:
        return self.slot_kinds[value] == "arena" or not self.nested

    def _predecessor(self, node: Node) -> int | None:
        """An operand that dies here and that the result may overwrite."""
        dying = self._dying.get(node.id)
        if not dying or len(node.outputs) != 1:
            return None
        for operand, fits in zip(node.inputs, self.fits(node), strict=False):
            root = self._root(operand)
            if (
                fits
                and root in dying
                and self.slot_kinds[root] == "arena"
                and all(v is operand or self._root(v) != root for v in node.inputs)
            ):
                return root
        return None

    def lay_out(self, sizes: Sequence[int], scratch: Sequence[int]) -> ArenaLayout:
        """Byte offsets for values of these sizes and for the scratch memory of the nodes."""
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        offsets: list[int | None] = [None] * len(sizes)
        working: dict[int, tuple[int, int]] = {}
        arena = _Arena()
        for event, number, old in self.events:
            if event == _TAKE:
                offsets[number] = arena.take(padded[number])
            elif event == _GIVE:
                arena.give(offsets[number], padded[number])  # type: ignore[arg-type]
            elif event == _INHERIT:
                offsets[number] = offsets[old]
            elif scratch[number]:
                size = aligned(scratch[number])
                offset = arena.take(size)
                arena.give(offset, size)
                working[number] = (offset, size)
        return ArenaLayout(offsets, working, arena.size)

    def slots(
        self,
        values: Sequence[Value],
        views: Sequence[View | None],
        sizes: Sequence[int],
        offsets: Sequence[int | None],
    ) -> dict[Value, Slot]:
        """The slots of `values`, the values of a graph with this structure."""
        made: dict[Value, Slot] = {}
        rows = zip(
            values, self.slot_kinds, sizes, offsets, self.roots, views, self.spans, strict=True
        )
        for i, (value, kind, size, offset, root, view, span) in enumerate(rows):
            owner = None if root == i else values[root]
            made[value] = Slot(kind, size, offset, owner, None if root == i else view, *span)
        return made


_TAKE, _GIVE, _INHERIT, _SCRATCH = range(4)


Scratch = Callable[[Node], int]  # bytes of scratch memory a backend wants while a node runs

_MAX_SIZES = 4096


def plan(
    graph: Graph,
    *,
    prepare: Graph | None = None,
    scratch: Scratch | None = None,
    nested: bool = False,
) -> Variant:
    """Assign a slot to every value of a bound graph; outputs that are views are copied.

    Inputs and outputs of a `nested` graph get no arena slot: the enclosing node owns their memory.
    """
    require_bound(graph)
    own_outputs(graph, find_views(graph.nodes))
    classes = NodeClasses.of(graph)
    template = PlanTemplate(graph, classes, prepare, nested=nested)
    made = template.plan(BoundClasses(classes, {}, graph.dynamic), scratch or _no_scratch)
    made.graph = graph
    return made


def _no_scratch(node: Node) -> int:
    return 0


def own_outputs(graph: Graph, views: dict[Value, Alias]) -> None:
    """Give every output its own memory: views, sources and repeated outputs are copied.

    The copy directly follows the value, so that it does not see a later write to a state.
    """
    seen: set[Value] = set()
    for i, value in enumerate(graph.outputs):
        if value in seen or value in views or value.node.op.is_source:
            with graph.origin(value.node.origin.touched("plan")):
                graph.outputs[i] = graph.append(lookup("contiguous")(), (value,))
            graph.nodes.insert(value.node.id + 1, graph.nodes.pop())
            for position, node in enumerate(graph.nodes):
                node.id = position
        seen.add(graph.outputs[i])


def require_scratch(lir: Lir, scratch: Scratch) -> None:
    """Raise if a plan that was written by hand has too little scratch memory for a node."""
    for node in [] if isinstance(lir, Variant) else lir.graph.nodes:
        wanted = 0 if node.op.is_source else scratch(node)
        _, found = lir.scratch.get(node.id, (0, 0))
        if found < wanted:
            raise VerifyError(
                "too little scratch memory in the plan", where=node.op.name,
                got=f"{found} bytes for %{node.id}", expected=f"{wanted} bytes or more",
                origin=node.origin, hint=f"add a line `%{node.id} scratch {wanted} at OFFSET`",
            )  # fmt: skip


class PlanTemplate:
    """What variants of one structure share: nodes, classes, views, phases."""

    def __init__(
        self,
        graph: Graph,
        classes: NodeClasses,
        prepare: Graph | None,
        *,
        phases: PhaseSchedule | None = None,
        nested: bool = False,
        donated: Mapping[str, str] | None = None,
    ) -> None:
        self.graph, self.classes, self.prepare, self.nested = graph, classes, prepare, nested
        self.donated = donated or {}  # by output, the input whose memory it may have
        self.phases = derive_phases(graph) if phases is None else phases
        self.values = [v for node in graph.nodes for v in node.outputs]
        self.numbers = {v: i for i, v in enumerate(self.values)}
        self._lifetimes_known: dict[tuple[Any, ...], Lifetimes] = {}
        self._scratch_known: dict[tuple[Any, ...], int] = {}

    @cached_property
    def _roots(self) -> dict[Value, Value]:
        return {v: root for v, (root, _) in find_views(self.graph.nodes).items()}

    @cached_property
    def _is_view(self) -> list[bool]:
        return [v in self._roots for v in self.values]

    def fits(self, bound: BoundClasses) -> bool:
        """Whether these sizes make the same values views as in this structure."""
        views = bound.views
        return [views[c] is not None for c in self.classes.of_value] == self._is_view

    def plan(self, bound: BoundClasses, scratch: Scratch) -> Variant:
        """Plan the memory of the variant with these sizes."""
        counters.plans += 1
        of_value, of_node = self.classes.of_value, self.classes.of_node
        lifetimes = self._lifetimes(bound)
        sizes = [bound.bytes[c] for c in of_value]
        wanted = [self._scratch(bound, c, scratch) for c in range(len(self.classes.nodes))]
        arena = lifetimes.lay_out(sizes, [wanted[c] for c in of_node])
        if max(arena.size, *sizes, 0) >= MAX_BYTES:
            self._raise_too_large(bound, sizes)
        return Variant(self, bound, lifetimes, sizes, arena)

    def _raise_too_large(self, bound: BoundClasses, sizes: list[int]) -> NoReturn:
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        node, shape = self.values[largest].node, bound.shapes[self.classes.of_value[largest]]
        bounds = ", ".join(f"{symbol} up to {most}" for symbol, most in bound.dynamic.items())
        raise OutOfMemoryError(
            "more memory than can be addressed", where=node.op.name,
            got=f"{shape}" + (f" with {bounds}" if bounds else ""),
            expected="less than 2^63 bytes", origin=node.origin,
            hint="memory is planned for the bounds of dynamic dimensions" if bounds else "",
        )  # fmt: skip

    def _lifetimes(self, bound: BoundClasses) -> Lifetimes:
        fits = tuple([overwritable(bound, c) for c in range(len(self.classes.nodes))])
        same: dict[Value, Value] = {}
        if self.donated:
            shapes = dict(
                zip(self.values, map(bound.shapes.__getitem__, self.classes.of_value), strict=False)
            )
            same = in_place_outputs(self.graph, self._roots, self.donated, shapes)
        key = (fits, *same)
        found = self._lifetimes_known.get(key)
        if found is None:
            of_node, roots = self.classes.of_node, self._roots | same
            found = self._lifetimes_known[key] = Lifetimes(
                self.graph, roots, lambda n: fits[of_node[n.id]], self.nested, self._kept
            )
            found.in_place = {self.numbers[v]: source.node.name for v, source in same.items()}
        return found

    @cached_property
    def _kept(self) -> set[Value]:
        """Results of the prologue that later phases read: these may run often, it runs once."""
        first = {n for n, phase in self.graph.given_phases.items() if phase is Phase.PROLOGUE}
        readers = [n for n in self.graph.nodes if n not in first] if first else []
        return {v for n in readers for v in n.inputs if v.node in first}

    def _scratch(self, bound: BoundClasses, number: int, scratch: Scratch) -> int:
        if self.classes.nodes[number].op.is_source:
            return 0
        key = bound.key(number)
        found = self._scratch_known.get(key)
        if found is None:
            if len(self._scratch_known) >= _MAX_SIZES:
                self._scratch_known.clear()
            found = self._scratch_known[key] = scratch(bound.node(number))
        return found

    @cached_property
    def arguments(self) -> list[tuple[str, str, int]]:
        """Role, name and value number of inputs, params, states and outputs."""
        graph, numbers = self.graph, self.numbers
        roles = ("input", "param", "state")
        found = [(r, n.name, numbers[n.output]) for r in roles for n in graph.sources(r)]
        outputs = zip(graph.output_names, graph.outputs, strict=True)
        return found + [("output", name, numbers[v]) for name, v in outputs]


class Variant(Lir):
    """A plan by value numbers. Graph and slots are built lazily: a run does not need them."""

    def __init__(
        self,
        template: PlanTemplate,
        bound: BoundClasses,
        lifetimes: Lifetimes,
        sizes: list[int],
        arena: ArenaLayout,
    ) -> None:
        self.template, self.bound, self.sizes = template, bound, sizes
        self.slot_kinds, self.roots = lifetimes.slot_kinds, lifetimes.roots
        self.offsets, self.scratch, self.arena_size = arena
        self.phases, self.prepare = template.phases.copy(), template.prepare
        self._lifetimes, self.in_place = lifetimes, lifetimes.in_place

    @staticmethod
    def of(lir: Lir) -> Variant:
        """Any plan as a variant, also one that was parsed from text or loaded from disk."""
        return lir if isinstance(lir, Variant) else _ReadVariant(lir)

    @cached_property
    def graph(self) -> Graph:  # type: ignore[override]
        bound, classes = self.bound, self.template.classes
        results = [tuple([bound.shapes[c] for c in n.results]) for n in classes.nodes]
        pairs = [(bound.ops[number], results[number]) for number in classes.of_node]
        made = self.template.graph.rebuild(pairs)
        made.dynamic = dict(bound.dynamic)
        verify(made, after="plan")
        return made

    @cached_property
    def slots(self) -> dict[Value, Slot]:  # type: ignore[override]
        values = [v for node in self.graph.nodes for v in node.outputs]
        views = [self.bound.views[c] for c in self.template.classes.of_value]
        return self._lifetimes.slots(values, views, self.sizes, self.offsets)

    @cached_property
    def value_numbers(self) -> dict[Value, int]:
        """Numbers of the graph's values."""
        values = [v for node in self.graph.nodes for v in node.outputs]
        return {v: i for i, v in enumerate(values)}

    @property
    def name(self) -> str:
        return self.template.graph.name

    @property
    def dynamic(self) -> dict[str, int]:
        return self.bound.dynamic

    @property
    def live(self) -> dict[str, int]:
        return self.bound.dynamic

    @property
    def donations(self) -> dict[int, str]:
        numbers = [i for role, _, i in self.template.arguments if role == "output"]
        return {k: self.in_place[i] for k, i in enumerate(numbers) if i in self.in_place}

    def check_phases(self) -> None:
        if self.phases != self.template.phases:
            super().check_phases()

    @property
    def output_phases(self) -> list[Phase]:
        return [self.phases.get(v) or Phase.STEADY_STATE for v in self.template.graph.outputs]

    def arguments(self) -> list[Argument]:
        shapes, of_value = self.bound.shapes, self.template.classes.of_value
        sizes, offsets, roots = self.sizes, self.offsets, self.roots
        return [
            Argument(role, name, shapes[of_value[i]], sizes[i], offsets[i], roots[i] != i)
            for role, name, i in self.template.arguments
        ]

    def class_nodes(self) -> list[Node]:
        """One bound node of each class, with the origin of the first."""
        made = []
        for number, c in enumerate(self.template.classes.nodes):
            node = self.bound.node(number)
            node.origin = self.template.graph.nodes[c.first].origin
            made.append(node)
        return made

    def __len__(self) -> int:
        return len(self.template.graph)


class _ReadVariant(Variant):
    """A plan whose graph and slots are given."""

    def __init__(self, lir: Lir) -> None:
        self.graph, self.slots = lir.graph, lir.slots
        slots = [lir.slots[v] for node in lir.graph.nodes for v in node.outputs]
        classes = NodeClasses(rows_of(lir.graph.nodes, {}), [slot.view for slot in slots])
        self.template = PlanTemplate(lir.graph, classes, lir.prepare, phases=lir.phases)
        self.bound = BoundClasses(classes, {}, lir.dynamic)
        self.sizes, self.offsets = [s.size for s in slots], [s.offset for s in slots]
        self.slot_kinds = [slot.kind for slot in slots]
        numbers = self.template.numbers
        self.roots = [i if s.root is None else numbers[s.root] for i, s in enumerate(slots)]
        self.phases, self.prepare = lir.phases, lir.prepare
        self.scratch, self.arena_size, self.in_place = lir.scratch, lir.arena_size, {}
