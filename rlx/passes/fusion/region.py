"""Loop fusion: chains of elementwise ops and reductions over the last axes -> elementwise_region.

A region has one iteration space, its `full` dims. A value in it has those dims or is a row value:
its last `reduced` axes are 1 (or gone), since a reduction removed them or since it broadcasts along
the row. Every value is computed once: ops that an outer axis would recompute stay outside. A region
is convex: no path leaves it and re-enters, so that it can run as one launch.

Constants of one element are literals of the body, unless many regions differ in them alone: these
take them as operands and share one kernel, so that compile time follows what is different.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlx.ir.attrs import Body
from rlx.ir.dim import Dim, same
from rlx.ir.graph import Graph
from rlx.ir.node import UNKNOWN, Node, Value
from rlx.passes.fusion.recompute import recompute_far
from rlx.passes.report import FusionReport
from rlx.passes.rewrite import Editor

NAME = "elementwise region"
MOST_NODES = 64
MOST_SPAN = 400  # nodes between first and last member; a longer span would extend live ranges
MIN_SHARED = 16  # bodies that differ in constants alone, from which on they are made one

Dims = tuple[Dim, ...]


def fuse_regions(graph: Graph, report: FusionReport | None = None) -> Graph:
    """Group nodes that one loop nest can compute."""
    editor = Editor(graph, "fuse")
    recompute_far(editor, MOST_SPAN)
    if editor.changed:
        editor = Editor(editor.finish(), "fuse")
    groups = _Grouping(editor).run()
    passed = _varying_constants(groups)
    bodies: dict[Any, Body] = {}
    for group in groups:
        _replace(editor, group, passed, bodies, report)
    return editor.finish()


class _Group:
    __slots__ = ("first", "full", "last", "nodes", "reduced")

    def __init__(self, node: Node, full: Dims, reduced: int) -> None:
        self.nodes: set[Node] = {node}
        self.full, self.reduced = full, reduced
        self.first = self.last = node.id


def _row_length(rows: Dims, full: Dims) -> int:
    """k when `rows` are `full` with the last k axes 1; 0 otherwise."""
    if len(rows) != len(full):
        return 0
    k = 0
    while k < len(full) and rows[-1 - k] == 1 and full[-1 - k] != 1:
        k += 1
    return k if k and all(map(same, rows[: len(rows) - k], full[: len(full) - k])) else 0


def _same_dims(a: Dims, b: Dims) -> bool:
    return a == b or (len(a) == len(b) and all(map(same, a, b)))


def _space(a: _Group, b: _Group) -> tuple[Dims, int] | None:
    """The iteration space that two groups share, or None."""
    if _same_dims(a.full, b.full):
        if a.reduced and b.reduced and a.reduced != b.reduced:
            return None
        return a.full, a.reduced or b.reduced
    for small, large in ((a, b), (b, a)):
        if small.reduced:
            continue
        k = _row_length(small.full, large.full)
        if k and large.reduced in (0, k):
            return large.full, k
        k = large.reduced
        if k and _same_dims(small.full, large.full[: len(large.full) - k]):
            return large.full, k
    return None


class _Grouping:
    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.of: dict[Node, _Group] = {}

    def run(self) -> list[_Group]:
        for node in self.editor.graph.nodes:
            group = self._alone(node)
            if group is not None:
                self.of[node] = group
                for value in node.inputs:
                    self._try_join(node, value)
        found = dict.fromkeys(g for g in self.of.values() if _is_worth(g))
        return list(found)

    def _alone(self, node: Node) -> _Group | None:
        """A group of `node` alone, when regions can contain its op."""
        op = node.op
        if op.is_elementwise:
            dims = node.outputs[0].shape.dims
            reduced = 0
        elif op.is_reduction:
            dims = node.inputs[0].shape.dims
            reduced = _trailing(op, len(dims))
            if not reduced:
                return None
        else:
            return None
        if not dims or node.outputs[0].shape.dtype.kind == "complex":
            return None
        if any(v.shape.dtype.kind == "complex" for v in node.inputs):
            return None
        return None if self.editor.is_param_only(node.outputs[0]) else _Group(node, dims, reduced)

    def _try_join(self, node: Node, value: Value) -> None:
        """Merge the group of `node` with the one that computes `value`, also through views."""
        views: list[Node] = []
        while value.node.op.name in ("expand", "reshape") and self.editor.uses(value) == 1:
            views.append(value.node)
            value = value.node.inputs[0]
        mine, other = self.of[node], self.of.get(value.node)
        if other is None or other is mine or (views and not _are_unit_views(views, mine, other)):
            return
        space = _space(mine, other)
        if space is None or not self._small(mine, other, views):
            return
        if node.op.is_reduction and not _same_dims(value.shape.dims, space[0]):
            return
        members = mine.nodes | other.nodes | set(views)
        if not self._is_convex(members, min(mine.first, other.first)):
            return
        mine.nodes = members
        mine.full, mine.reduced = space
        mine.first, mine.last = min(mine.first, other.first), max(mine.last, other.last)
        for member in members:
            self.of[member] = mine

    def _small(self, a: _Group, b: _Group, views: list[Node]) -> bool:
        span = max(a.last, b.last) - min(a.first, b.first)
        return span <= MOST_SPAN and len(a.nodes) + len(b.nodes) + len(views) <= MOST_NODES

    def _is_convex(self, members: set[Node], first: int) -> bool:
        """Whether no path between members leads outside the group."""
        seen: set[Node] = set()
        todo = self._outside(members, members)
        while todo:
            node = todo.pop()
            group = self.of.get(node)
            last = node.id if group is None else group.last
            if node in seen or last < first:
                continue
            inside = {node} if group is None else group.nodes
            seen |= inside
            for before in self._outside(inside, inside):
                if before in members:
                    return False
                todo.append(before)
        return True

    def _outside(self, nodes: Iterable[Node], inside: set[Node]) -> list[Node]:
        return [n for node in nodes for n in self.editor.before(node) if n not in inside]


def _trailing(op: Any, rank: int) -> int:
    """How many trailing axes a reduction covers; 0 for other axes, or when it covers all."""
    axes = range(rank) if op.axis is None else sorted(a % rank for a in op.axis)
    count = len(axes)
    if count == rank > 1:
        return 0  # a single row: no outer axis to parallelise
    return count if list(axes) == list(range(rank - count, rank)) else 0


def _are_unit_views(views: list[Node], mine: _Group, other: _Group) -> bool:
    """Whether views only add or drop trailing 1s of row values, or broadcast them."""
    full = mine.full if len(mine.full) >= len(other.full) else other.full
    k = mine.reduced or other.reduced
    if not k:
        return False
    short = full[: len(full) - k]
    forms = (full, short, (*short, *(1,) * k))
    return all(any(_same_dims(v.output.shape.dims, f) for f in forms) for v in views)


def _is_worth(group: _Group) -> bool:
    return sum(not n.op.is_view for n in group.nodes) > 1


def _replace(
    editor: Editor,
    group: _Group,
    passed: dict[_Group, set[Value]],
    bodies: dict[Any, Body],
    report: FusionReport | None,
) -> None:
    nodes = sorted(group.nodes, key=lambda n: n.id)
    last = nodes[-1]
    inside = group.nodes
    constants = passed.get(group, ())
    operands: dict[Value, int] = {}
    for node in nodes:
        for value in node.inputs:
            if value.node not in inside and (not _is_literal(value) or _viewed(value) in constants):
                operands.setdefault(value, len(operands))
    results = [
        v
        for node in nodes
        for v in node.outputs
        if v in editor.returned or any(u not in inside for u in editor.users[v])
    ]
    if not results:
        return  # dead already
    body = _body(nodes, list(operands), results, bodies)
    with editor.building(last) as new:
        made = editor.graph.elementwise_region(list(operands), body=body)
    if not editor.allows([], new):
        editor.drop(new)
        return
    for old, value in zip(results, made if isinstance(made, tuple) else (made,), strict=True):
        editor.replace(old, value)
    if report is not None:
        report.add(NAME, last.origin)


def _is_literal(value: Value) -> bool:
    """Whether a value is copied into the body: kernels compute it without a load.

    A constant of one element or an index, possibly reshaped.
    """
    op: Any = value.node.op
    if op.name in ("reshape", "expand", "transpose"):
        return _is_literal(value.node.inputs[0])
    return op.name in ("iota", "dim_value") or (op.name == "constant" and op.data.array.size == 1)


def _viewed(value: Value) -> Value:
    while value.node.op.is_view:
        value = value.node.inputs[0]
    return value


def _varying_constants(groups: list[_Group]) -> dict[_Group, set[Value]]:
    """The constants that groups of equal structure take as operands: those that differ."""
    found: dict[_Group, set[Value]] = {}
    if len(groups) < MIN_SHARED:
        return found
    classes: dict[Any, list[tuple[_Group, list[Value]]]] = {}
    for group in groups:
        key, constants = _structure(group)
        if constants:
            classes.setdefault(key, []).append((group, constants))
    for members in classes.values():
        columns = list(zip(*([v.node.op for v in values] for _, values in members), strict=True))
        if len(set(zip(*columns, strict=True))) < MIN_SHARED:
            continue
        varying = [i for i, column in enumerate(columns) if len(set(column)) > 1]
        for group, values in members:
            found[group] = {values[i] for i in varying}
    return found


def _structure(group: _Group) -> tuple[Any, list[Value]]:
    """A key that is equal for groups that differ in constants alone, and those constants."""
    numbers: dict[Value, Any] = {}
    constants: list[Value] = []

    def reference(value: Value) -> Any:
        known = numbers.get(value)
        if known is None:
            op = value.node.op
            if not _is_literal(value):
                known = (len(numbers), value.shape)
            elif op.name == "constant":
                known = ("constant", len(constants), value.shape)
                constants.append(value)
            else:
                known = (op, *map(reference, value.node.inputs))
            numbers[value] = known
        return known

    rows: list[Any] = []
    for node in sorted(group.nodes, key=lambda n: n.id):
        rows.append((node.op, *map(reference, node.inputs)))
        for v in node.outputs:
            numbers[v] = (len(rows), v.index)
    return tuple(rows), constants


def _body(
    nodes: list[Node], operands: list[Value], results: list[Value], bodies: dict[Any, Body]
) -> Body:
    """The subgraph of a region; equal ones, as in repeated layers, are shared."""
    numbers: dict[Value, Any] = {v: i for i, v in enumerate(operands)}
    rows: list[Any] = []
    for node in nodes:
        refs = tuple([_reference(v, numbers) for v in node.inputs])
        for v in node.outputs:
            numbers[v] = (len(rows), v.index)
        rows.append((node.op, refs))
    shapes = tuple([v.shape for v in operands])
    key = (shapes, tuple(rows), tuple([numbers[v] for v in results]))
    found = bodies.get(key)
    if found is None:
        found = bodies[key] = Body(_body_graph(nodes, operands, results))
    return found


def _reference(value: Value, numbers: dict[Value, Any]) -> Any:
    """A member's operand as a key that is equal for equal regions."""
    known = numbers.get(value)
    if known is None:
        node = value.node
        known = numbers[value] = (node.op, *[_reference(v, numbers) for v in node.inputs])
    return known


def _body_graph(nodes: list[Node], operands: list[Value], results: list[Value]) -> Graph:
    g = Graph("region")
    values: dict[Value, Value] = {}
    literals: dict[Any, Value] = {}

    def copied(v: Value) -> Value:
        if v not in values:  # a literal, copied once
            key = (v.node.op, *map(copied, v.node.inputs))
            if key not in literals:
                literals[key] = g.append(v.node.op, key[1:])
            values[v] = literals[key]
        return values[v]

    with g.origin(UNKNOWN):
        for i, v in enumerate(operands):
            values[v] = g.input(f"x{i}", v.shape)
        for node in nodes:
            new = g.append_node(node.op, list(map(copied, node.inputs)))
            values.update(zip(node.outputs, new.outputs, strict=True))
    return g.set_outputs([values[v] for v in results])
