"""Node classes: value numbering of a graph by op, operand shapes and operand layout.

Binding, views, memory planning and lowering depend on a node's op, on the shapes of its operands
and on their strides. The layers of a model agree in all of these, so a graph of a thousand nodes
has some thirty classes, and the work is done once per class. A node whose lowering depends on its
neighbours is a class of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from rlx.errors import BindingError, RlxError
from rlx.ir.attrs import has_symbols
from rlx.ir.binding import bind_op
from rlx.ir.graph import Graph, record
from rlx.ir.lir import View
from rlx.ir.node import Node, Origin, Value, infer
from rlx.ir.op import Op, lookup
from rlx.ir.shape import Shape
from rlx.passes.views import is_plain, may_be_view, view_of

# An op, the numbers of its operands, and the shapes of its results; values are numbered in order.
Row = tuple[Op, tuple[int, ...], tuple[Shape, ...]]


class ValueClass(NamedTuple):
    shape: Shape
    view_op: Op | None  # the producing op, where its result may be a view of the first operand
    source: int  # class of that operand
    view: View | None = None  # strides that the plan prescribes


class NodeClass(NamedTuple):
    op: Op
    operands: tuple[int, ...]  # value classes
    results: tuple[int, ...]
    same: tuple[int, ...]  # for each operand, the first one that is the same value
    first: int  # id of the first node of the class
    depends_on_neighbours: bool  # then the class has one node


class NodeClasses:
    """The classes of a graph's nodes and values, with symbolic sizes.

    `views` are the strides that a plan prescribes; otherwise the ops determine them.
    """

    def __init__(self, rows: Iterable[Row], views: Sequence[View | None] | None = None) -> None:
        self.values: list[ValueClass] = []
        self.nodes: list[NodeClass] = []
        self.of_value: list[int] = []
        self.of_node: list[int] = []
        self.views = views
        self._values: dict[tuple[Any, ...], int] = {}
        self._nodes: dict[tuple[Any, ...], int] = {}
        self._unshared: set[int] = set()  # results of nodes that depend on their neighbours
        for row in rows:
            self._add(*row)

    @staticmethod
    def of(graph: Graph) -> NodeClasses:
        return NodeClasses(rows_of(graph.nodes, {}))

    def _add(self, op: Op, operands: tuple[int, ...], shapes: tuple[Shape, ...]) -> None:
        classes = tuple([self.of_value[i] for i in operands])
        same = tuple([operands.index(i) for i in operands])
        start = len(self.of_value)
        given = None if self.views is None else tuple(self.views[start : start + len(shapes)])
        alone = self._depends_on_neighbours(op, operands)
        if alone:
            self._unshared.update(range(start, start + len(shapes)))
        # equal ops are one object that the graph keeps alive: its id is enough
        key = (id(op), classes, shapes, same, given, start if alone else -1)
        number = self._nodes.get(key)
        if number is None:
            number = self._nodes[key] = len(self.nodes)
            # a −1 cannot be inferred again once other dims are 0
            exact = op.replace(shape=shapes[0].dims) if op.name == "reshape" else op
            views = given or (None,) * len(shapes)
            pairs = zip(shapes, views, strict=True)
            results = tuple([self._value(op, exact, s, classes, view) for s, view in pairs])
            self.nodes.append(NodeClass(exact, classes, results, same, len(self.of_node), alone))
        self.of_node.append(number)
        self.of_value += self.nodes[number].results

    def _depends_on_neighbours(self, op: Op, operands: tuple[int, ...]) -> bool:
        """State updates too: the producer of the operand may have written the state already."""
        if op.depends_on_neighbours:
            return True
        return op.name == "state_update" and operands[1] in self._unshared

    def _value(
        self, op: Op, exact: Op, shape: Shape, operands: tuple[int, ...], view: View | None
    ) -> int:
        view_op, source = (exact, operands[0]) if may_be_view(op) else (None, -1)
        key = (shape, None if view_op is None else id(op), source, view)
        number = self._values.get(key)
        if number is None:
            number = self._values[key] = len(self.values)
            self.values.append(ValueClass(shape, view_op, source, view))
        return number


def rows_of(nodes: Iterable[Node], known: Mapping[Node, tuple[Op, tuple[Shape, ...]]]) -> list[Row]:
    """Nodes as rows; `known` overrides the op and shapes of some nodes."""
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


class BoundClasses:
    """Node classes with sizes: ops, shapes and views of every node of a variant.

    `dynamic` are the symbols whose size each run gives, with their upper bounds.
    """

    def __init__(
        self, classes: NodeClasses, sizes: Mapping[str, int], dynamic: Mapping[str, int]
    ) -> None:
        self.classes, self.sizes, self.dynamic = classes, sizes, dict(dynamic)
        self.ops = [bind_op(c.op, sizes) for c in classes.nodes]
        self.shapes = [c.shape.bind(sizes) for c in classes.values]
        self.views: list[View | None] = []
        if classes.views is not None:
            self.views += [c.view for c in classes.values]
        else:
            for c, shape in zip(classes.values, self.shapes, strict=True):
                self.views.append(None if c.view_op is None else self._view(c, shape))
        pairs = zip(self.views, self.shapes, strict=True)
        self.plain = [view is None or is_plain(view, shape) for view, shape in pairs]
        self._bounds = tuple(sorted(dynamic.items()))

    def _view(self, c: ValueClass, shape: Shape) -> View | None:
        assert c.view_op is not None
        op = bind_op(c.view_op, self.sizes)
        return view_of(op, self.shapes[c.source], shape, self.views[c.source])

    @cached_property
    def structure(self) -> tuple[bool, ...]:
        """What a device may depend on when it inserts copies: views, and which are row-major."""
        return (*[view is None for view in self.views], *self.plain)

    @cached_property
    def bytes(self) -> list[int]:
        """Bytes of every value class, at the upper bounds."""
        return [shape.upper_bytes(self.dynamic) for shape in self.shapes]

    def root(self, value: int) -> int:
        """The class of the value whose memory a value of this class has."""
        while self.views[value] is not None:
            value = self.classes.values[value].source
        return value

    def is_sound(self) -> bool:
        """Whether the shapes of all results are those that inference gives."""
        try:
            return all(self._fits(*pair) for pair in zip(self.classes.nodes, self.ops, strict=True))
        except RlxError:
            return False

    def require_fit(self, graph: Graph) -> None:
        """Raise for the first op of `graph` that cannot take these sizes."""
        for c, op in zip(self.classes.nodes, self.ops, strict=True):
            try:
                infer(op, tuple([self.shapes[i] for i in c.operands]))
            except RlxError as error:
                sizes = ", ".join(f"{symbol}={size}" for symbol, size in self.sizes.items())
                raise BindingError(
                    error.what, where=op.name, got=f"{error.got} with {sizes}",
                    expected=error.expected, origin=graph.nodes[c.first].origin,
                    hint="the sizes of this run do not fit this op",
                ) from error  # fmt: skip

    def _fits(self, c: NodeClass, op: Op) -> bool:
        found = infer(op, tuple([self.shapes[i] for i in c.operands]))
        wanted = [self.shapes[i] for i in c.results]
        return len(found) == len(wanted) and all(
            a is b or (a.dtype is b.dtype and a.same_dims(b))
            for a, b in zip(found, wanted, strict=True)
        )

    def key(self, number: int) -> tuple[Any, ...]:
        """The cache key of the lowering of a node class: everything it may depend on."""
        c, op, shapes, views = self.classes.nodes[number], self.ops[number], self.shapes, self.views
        touched = (*c.operands, *c.results)
        key = (op, c.same, *[shapes[i] for i in touched], *[views[i] for i in touched])
        static = all(shapes[i].is_static and self._is_static(views[i]) for i in touched)
        return key if static and not op.has_symbols else (*key, self._bounds)

    def _is_static(self, view: View | None) -> bool:
        return view is None or not has_symbols((view.offset, view.strides))

    @cached_property
    def _detached(self) -> Graph:
        graph = Graph("class")
        graph.dynamic = self.dynamic
        return graph

    def node(self, number: int) -> Node:
        """A detached node of the class, whose operands are inputs of a graph of their own."""
        c, graph = self.classes.nodes[number], self._detached
        operands: list[Value] = []
        for i, (value, first) in enumerate(zip(c.operands, c.same, strict=True)):
            operands.append(operands[first] if first < i else self._input(self.shapes[value]))
        made = Node(graph, c.first, self.ops[number], tuple(operands), "", Origin())
        made.outputs = tuple([Value(made, i, self.shapes[k]) for i, k in enumerate(c.results)])
        return made

    def _input(self, shape: Shape) -> Value:
        source = Node(
            self._detached, 0, record(lookup("input"), {"shape": shape}), (), "", Origin()
        )
        source.outputs = (Value(source, 0, shape),)
        return source.outputs[0]
