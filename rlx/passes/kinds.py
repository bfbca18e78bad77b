"""Nodes that are alike whatever the sizes: what is found out about one holds for its whole kind.

Binding, views, memory and lowering ask for an op, for shapes, and for how operands lie in memory.
The layers of a model agree in all of these, so that a graph of a thousand nodes has some thirty
kinds, and giving it sizes means giving them to its kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from rlx.errors import RlxError
from rlx.ir.attrs import has_symbols
from rlx.ir.bind import bind_op
from rlx.ir.build import record
from rlx.ir.graph import Graph
from rlx.ir.lir import View
from rlx.ir.node import Node, Value, infer
from rlx.ir.op import Op, lookup
from rlx.ir.origin import Origin
from rlx.ir.shape import Shape
from rlx.passes.views import is_plain, is_view_kind, view_of

# An op, the numbers of its operands, and the shapes of its results; values are numbered in order.
Row = tuple[Op, tuple[int, ...], tuple[Shape, ...]]


class ValueKind(NamedTuple):
    shape: Shape
    view: Op | None  # the op that makes it, where that may be a view of its first operand
    source: int  # the kind of that operand


class NodeKind(NamedTuple):
    op: Op
    operands: tuple[int, ...]  # kinds of values
    results: tuple[int, ...]
    same: tuple[int, ...]  # for each operand, the first that is the same value
    first: int  # the first node of the kind


class Kinds:
    """The kinds of a graph's nodes and values, with symbolic sizes."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.values: list[ValueKind] = []
        self.nodes: list[NodeKind] = []
        self.of_value: list[int] = []
        self.of_node: list[int] = []
        self._values: dict[tuple[Any, ...], int] = {}
        self._nodes: dict[tuple[Any, ...], int] = {}
        for row in rows:
            self._add(*row)

    def _add(self, op: Op, operands: tuple[int, ...], shapes: tuple[Shape, ...]) -> None:
        kinds = tuple([self.of_value[i] for i in operands])
        same = tuple([operands.index(i) for i in operands])
        key = (id(op), kinds, shapes, same)  # graphs share ops that are equal, and keep them
        number = self._nodes.get(key)
        if number is None:
            number = self._nodes[key] = len(self.nodes)
            # a dimension given as −1 cannot be found again once others are 0
            exact = op.replace(shape=shapes[0].dims) if op.name == "reshape" else op
            results = tuple([self._value(op, exact, shape, kinds) for shape in shapes])
            self.nodes.append(NodeKind(exact, kinds, results, same, len(self.of_node)))
        self.of_node.append(number)
        self.of_value += self.nodes[number].results

    def _value(self, op: Op, exact: Op, shape: Shape, operands: tuple[int, ...]) -> int:
        view, source = (exact, operands[0]) if is_view_kind(op) else (None, -1)
        key = (shape, None if view is None else id(op), source)
        number = self._values.get(key)
        if number is None:
            number = self._values[key] = len(self.values)
            self.values.append(ValueKind(shape, view, source))
        return number

    @staticmethod
    def of(graph: Graph) -> Kinds:
        return Kinds(rows_of(graph.nodes, {}))


def rows_of(nodes: Iterable[Node], known: Mapping[Node, tuple[Op, tuple[Shape, ...]]]) -> list[Row]:
    """Nodes as rows; `known` gives the op and shapes that stand for a node's own."""
    numbers: dict[Value, int] = {}
    shapes: list[Shape] = []
    rows: list[Row] = []
    for node in nodes:
        operands = tuple([numbers[v] for v in node.inputs])
        if not known:
            found = node.op, tuple([v.shape for v in node.outputs])
        else:
            found = known.get(node) or (
                node.op, infer(node.op, tuple([shapes[i] for i in operands]))
            )  # fmt: skip
        for v in node.outputs:
            numbers[v] = len(numbers)
        shapes += found[1]
        rows.append((found[0], operands, found[1]))
    return rows


class SizedKinds:
    """Kinds with their sizes: what there is to know about every node of a variant."""

    def __init__(self, kinds: Kinds, sizes: Mapping[str, int], live: Mapping[str, int]) -> None:
        self.kinds, self.sizes, self.live = kinds, sizes, dict(live)
        self.ops = [bind_op(kind.op, sizes) for kind in kinds.nodes]
        self.shapes = [kind.shape.bind(sizes) for kind in kinds.values]
        self.views: list[View | None] = []
        for kind, shape in zip(kinds.values, self.shapes, strict=True):
            self.views.append(None if kind.view is None else self._view(kind, shape))
        pairs = zip(self.views, self.shapes, strict=True)
        self.plain = [view is None or is_plain(view, shape) for view, shape in pairs]
        self._bounds = tuple(sorted(live.items()))

    def _view(self, kind: ValueKind, shape: Shape) -> View | None:
        assert kind.view is not None
        source = self.shapes[kind.source]
        op = bind_op(kind.view, self.sizes)
        return view_of(op, source, shape, self.views[kind.source])

    @cached_property
    def structure(self) -> tuple[bool, ...]:
        """What a device may look at when it puts copies between nodes."""
        return (*[view is None for view in self.views], *self.plain)

    @cached_property
    def bytes(self) -> list[int]:
        """Of every kind of value, at the upper bounds."""
        return [shape.upper_bytes(self.live) for shape in self.shapes]

    def root(self, kind: int) -> int:
        """The kind of the value whose memory a value of this kind has."""
        while self.views[kind] is not None:
            kind = self.kinds.values[kind].source
        return kind

    def is_sound(self) -> bool:
        """Whether the shapes of all results are those that inference gives."""
        try:
            return all(self._fits(*pair) for pair in zip(self.kinds.nodes, self.ops, strict=True))
        except RlxError:
            return False

    def _fits(self, kind: NodeKind, op: Op) -> bool:
        found = infer(op, tuple([self.shapes[i] for i in kind.operands]))
        wanted = [self.shapes[i] for i in kind.results]
        return len(found) == len(wanted) and all(
            a is b or (a.dtype is b.dtype and a.same_dims(b))
            for a, b in zip(found, wanted, strict=True)
        )

    def identity(self, number: int) -> tuple[Any, ...]:
        """All that a device may look at in a node of the kind; equal for equal variants."""
        kind, op, shapes, views = (
            self.kinds.nodes[number],
            self.ops[number],
            self.shapes,
            self.views,
        )
        touched = (*kind.operands, *kind.results)
        key = (op, kind.same, *[shapes[i] for i in touched], *[views[i] for i in kind.operands])
        fixed = all(shapes[i].is_static and self._is_fixed(views[i]) for i in touched)
        return key if fixed and not op.has_symbols else (*key, self._bounds)

    def _is_fixed(self, view: View | None) -> bool:
        return view is None or not has_symbols((view.offset, view.strides))

    @cached_property
    def _alone(self) -> Graph:
        graph = Graph("kinds")
        graph.live = self.live
        return graph

    def node(self, number: int) -> Node:
        """A node of the kind by itself: its operands come from nowhere in particular."""
        kind, graph = self.kinds.nodes[number], self._alone
        operands: list[Value] = []
        for place, (value, first) in enumerate(zip(kind.operands, kind.same, strict=True)):
            operands.append(operands[first] if first < place else self._loose(self.shapes[value]))
        made = Node(graph, kind.first, self.ops[number], tuple(operands), "", Origin())
        made.outputs = tuple([Value(made, i, self.shapes[k]) for i, k in enumerate(kind.results)])
        return made

    def _loose(self, shape: Shape) -> Value:
        source = Node(self._alone, 0, record(lookup("input"), {"shape": shape}), (), "", Origin())
        source.outputs = (Value(source, 0, shape),)
        return source.outputs[0]
