"""Memory: a bound graph becomes LIR.

Values whose lifetimes do not meet share bytes; a result takes over the memory of an operand that
dies there when the op allows it; views need none. Inputs and outputs keep their place for the whole
run, so that a caller can write and read them at the manifest's offsets. Sizes are those of the
upper bounds of live dimensions. One walk over the nodes, near-linear.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from rlx.ir.graph import Graph
from rlx.ir.lir import Lir, Slot, aligned
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.ir.phase import PhaseSchedule, derive_phases
from rlx.ir.shape import Shape
from rlx.passes.bind import require_bound
from rlx.passes.count import counters
from rlx.passes.views import Placed, find_views, is_plain

Scratch = Callable[[Node], int]  # bytes of working memory a backend wants while a node runs


def plan(
    graph: Graph,
    *,
    prepare: Graph | None = None,
    phases: PhaseSchedule | None = None,
    scratch: Scratch | None = None,
    nested: bool = False,
) -> Lir:
    """The graph with a place for every value. `graph` gains copies of outputs that are views.

    `phases` are those of the graph's nodes, where they are known already. Inputs and outputs of a
    `nested` graph get no place: they lie where the node around it has them.
    """
    counters.plans += 1
    require_bound(graph)
    views, nodes = find_views(graph.nodes), len(graph)
    _own_outputs(graph, views)
    if phases is None or len(graph) != nodes:
        phases = derive_phases(graph)
    return _Planner(graph, views, scratch, nested).run(prepare, phases)


def _own_outputs(graph: Graph, views: dict[Value, Placed]) -> None:
    """Give every output memory of its own: views, sources and repeated outputs are copied.

    The copy stands right behind what it copies, so that a later write to a state is not seen.
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


class _Arena:
    """Free gaps kept in order of offset; the smallest gap that fits is taken."""

    def __init__(self) -> None:
        self.size = 0
        self.gaps: list[tuple[int, int]] = []  # offset, size

    def take(self, size: int) -> int:
        best = -1
        for i, (_, room) in enumerate(self.gaps):
            if room >= size and (best < 0 or room < self.gaps[best][1]):
                best = i
        if best >= 0:
            offset, room = self.gaps.pop(best)
            if room > size:
                self.gaps.insert(best, (offset + size, room - size))
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


class _Planner:
    def __init__(
        self, graph: Graph, views: dict[Value, Placed], scratch: Scratch | None, nested: bool
    ) -> None:
        self.graph, self.views, self.scratch, self.nested = graph, views, scratch, nested
        self.arena = _Arena()
        self.slots: dict[Value, Slot] = {}
        self.working: dict[int, tuple[int, int]] = {}
        self.last = self._last_uses()
        self.dying: dict[int, list[Value]] = {}
        self._bytes: dict[Shape, int] = {}

    def bytes_of(self, value: Value) -> int:
        """Bytes at the upper bounds; there are few different shapes, however many values."""
        found = self._bytes.get(value.shape)
        if found is None:
            found = self._bytes[value.shape] = value.shape.upper_bytes(self.graph.live)
        return found

    def _last_uses(self) -> dict[Value, int]:
        last: dict[Value, int] = {}
        for node in self.graph.nodes:
            for v in node.inputs:
                last[self.root(v)] = node.id
        for v in self.graph.outputs:
            last[self.root(v)] = len(self.graph.nodes)
        return last

    def root(self, value: Value) -> Value:
        placed = self.views.get(value)
        return value if placed is None else placed[0]

    def run(self, prepare: Graph | None, phases: PhaseSchedule) -> Lir:
        for node in self.graph.sources("input"):
            self._place_new(node.output, "input")
        outputs = set(self.graph.outputs)
        for node in self.graph.nodes:
            self._visit(node, outputs)
        return Lir(self.graph, self.slots, self.arena.size, phases, prepare, self.working)

    def _visit(self, node: Node, outputs: set[Value]) -> None:
        if node.op.is_source:
            if node.op.name != "input":
                value = node.output
                size = self.bytes_of(value)
                last = self.last.get(value, node.id)
                self.slots[value] = Slot(node.op.name, size, first=node.id, last=last)
            return
        for value in node.outputs:
            if value in self.views:
                self._place_view(value)
            else:
                self._place(node, value, "output" if value in outputs else "arena")
        self._take_scratch(node)
        for value in self.dying.pop(node.id, ()):
            slot = self.slots[value]
            if slot.offset is not None:
                self.arena.give(slot.offset, aligned(slot.size))

    def _take_scratch(self, node: Node) -> None:
        size = aligned(self.scratch(node)) if self.scratch else 0
        if size:
            offset = self.arena.take(size)
            self.arena.give(offset, size)
            self.working[node.id] = (offset, size)

    def _place_view(self, value: Value) -> None:
        root, view = self.views[value]
        position = value.node.id
        size = self.bytes_of(value)
        self.slots[value] = Slot("alias", size, None, root, view, position, self.last[root])

    def _place(self, node: Node, value: Value, kind: str) -> None:
        heir = self._takes_over(node, value) if kind == "arena" else None
        if heir is None:
            self._place_new(value, kind)
            return
        old = self.slots[heir]
        self.dying[node.id].remove(heir)
        last = self.last.get(value, node.id)
        self.slots[value] = Slot(kind, old.size, old.offset, None, None, node.id, last)
        self.dying.setdefault(last, []).append(value)

    def _place_new(self, value: Value, kind: str) -> None:
        size = self.bytes_of(value)
        outside = self.nested and kind != "arena"
        offset = None if outside else self.arena.take(aligned(size))
        first = 0 if kind == "input" else value.node.id
        last = self.last.get(value, first)
        if kind != "arena":
            last = len(self.graph.nodes)
        self.slots[value] = Slot(kind, size, offset, None, None, first, last)
        self.dying.setdefault(last, []).append(value)

    def _takes_over(self, node: Node, value: Value) -> Value | None:
        """An operand that dies here, lies like the result, and is read only where it is written."""
        if not _writes_where_it_reads(node):
            return None
        dying = self.dying.get(node.id)
        if not dying:
            return None
        for operand in node.inputs:
            root, view = self.views.get(operand) or (operand, None)
            if (
                root in dying
                and self.slots[root].kind == "arena"
                and operand.shape.dims == value.shape.dims
                and operand.shape.dtype.bytes == value.shape.dtype.bytes
                and self.slots[root].size == self.bytes_of(value)
                and (view is None or (view.offset == 0 and is_plain(view, operand.shape)))
                and self._only_reader(node, root, operand)
            ):
                return root
        return None

    def _only_reader(self, node: Node, root: Value, operand: Value) -> bool:
        """No other operand of the node looks at the same memory in another way."""
        return all(v is operand or self.root(v) is not root for v in node.inputs)


def _writes_where_it_reads(node: Node) -> bool:
    if len(node.outputs) != 1:
        return False
    op = node.op
    if op.name == "elementwise_region":
        body: Graph = op.body.graph  # type: ignore[attr-defined]
        return all(n.op.is_elementwise or n.op.is_source for n in body.nodes)
    return op.is_elementwise
