"""Liveness analysis and arena allocation: live ranges of values and their byte offsets.

Values whose live ranges do not overlap share bytes. A result may overwrite an operand that dies at
the node, when the op works in place. Views need no memory. Inputs and outputs keep their offsets
for the whole run, so that callers can use the manifest's. Live ranges do not depend on sizes: they
are found once, in near-linear time, and each variant is then laid out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rlx.ir.graph import Graph
from rlx.ir.lir import ALIGNMENT, Slot, View, aligned
from rlx.ir.node import Node, Value
from rlx.ir.op import Op
from rlx.ir.shape import Shape
from rlx.passes.views import is_plain


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
    arena slot: the enclosing node owns their memory.
    """

    def __init__(
        self,
        graph: Graph,
        roots: Mapping[Value, Value],
        fits: Callable[[Node], Sequence[bool]],
        nested: bool,
    ) -> None:
        self.graph, self.fits, self.nested = graph, fits, nested
        self.values = [v for node in graph.nodes for v in node.outputs]
        self.numbers = {v: i for i, v in enumerate(self.values)}
        self.roots = [self.numbers[roots.get(v, v)] for v in self.values]
        self.slot_kinds = [""] * len(self.values)
        self.spans = [(0, 0)] * len(self.values)  # positions that define and last read a value
        self.events: list[tuple[int, int, int]] = []
        self._last = self._last_uses()
        self._dying: dict[int, list[int]] = {}
        self._outputs = {self.numbers[v] for v in graph.outputs}
        for node in graph.sources("input"):
            self._begin(self.numbers[node.output], node, "input")
        for node in graph.nodes:
            self._visit(node)

    def _last_uses(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for node in self.graph.nodes:
            for v in node.inputs:
                last[self._root(v)] = node.id
        for v in self.graph.outputs:
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


def same_layout(operand: Shape, view: View | None, result: Shape) -> bool:
    """Whether an operand has the memory layout that the result needs to overwrite it."""
    return (
        operand.dims == result.dims
        and operand.dtype.bytes == result.dtype.bytes
        and (view is None or (view.offset == 0 and is_plain(view, operand)))
    )


def works_in_place(op: Op) -> bool:
    """Whether the op may write its result over an operand: each element of the result depends on
    the same element of the operands alone."""
    if op.name == "elementwise_region":
        body: Graph = op.body.graph  # type: ignore[attr-defined]
        return all(n.op.is_elementwise or n.op.is_source for n in body.nodes)
    return op.is_elementwise
