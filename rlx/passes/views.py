"""View analysis: values that alias another's memory, with element offset and strides.

`Layouts` answers how values lie in memory; `PlanContext` is what a lowering may ask about a plan.

`insert_contiguous` copies a view in front of nodes that cannot read strides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from math import prod
from typing import Any

from rlx.ir.dim import Dim, same, upper_bound
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir, View, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.op import Op, lookup
from rlx.ir.shape import Shape, normalize_axis

Alias = tuple[Value, View]  # whose memory, and how


def find_views(nodes: list[Node]) -> dict[Value, Alias]:
    """Values that are views, each with its root value and its offset and strides."""
    views: dict[Value, Alias] = {}
    # by op, shape and view of the operand
    known: dict[tuple[int, Shape, View | None], View | None] = {}
    for node in nodes:
        if not may_be_view(node.op):
            continue
        source = node.inputs[0]
        root, view = views.get(source) or (source, None)
        key = (id(node.op), source.shape, view)
        if key in known:
            found = known[key]
        else:
            found = known[key] = view_of(node.op, source.shape, node.outputs[0].shape, view)
        if found is not None:
            views[node.outputs[0]] = (root, found)
    return views


def may_be_view(op: Op) -> bool:
    """Whether a result of the op may be a view of its first operand."""
    return op.name in _RULES


def view_of(op: Op, source: Shape, result: Shape, view: View | None) -> View | None:
    """The view of a result, given the `view` of its operand (None: all of it, row-major).

    None when offset and strides cannot express it.
    """
    return _RULES[op.name](op, source, result, plain_view(source) if view is None else view)


def plain_view(shape: Shape) -> View:
    return View(0, contiguous_strides(shape))


def is_plain(view: View, shape: Shape) -> bool:
    """Whether a view is contiguous; strides of axes of size 1 do not matter."""
    wanted = contiguous_strides(shape)
    return all(s == w or d == 1 for s, w, d in zip(view.strides, wanted, shape.dims, strict=True))


class Layouts:
    """How values lie in memory: those of a graph before it is planned, or of a plan."""

    def __init__(self, find: Callable[[Value], View | None]) -> None:
        self._find = find

    @staticmethod
    def of(graph: Graph) -> Layouts:
        views = find_views(graph.nodes)
        return Layouts(lambda value: views[value][1] if value in views else None)

    def view(self, value: Value) -> View:
        """Strides of a value, and elements from the start of the memory that it is a view of."""
        return self._find(value) or plain_view(value.shape)

    def strides(self, value: Value) -> tuple[Dim, ...]:
        return self.view(value).strides

    def offset(self, value: Value) -> Dim:
        """Elements from the start of the memory that the value is a view of."""
        view = self._find(value)
        return 0 if view is None else view.offset

    def is_plain(self, value: Value) -> bool:
        """Whether a value is contiguous: row-major without gaps."""
        view = self._find(value)
        return view is None or is_plain(view, value.shape)


class PlanContext(Layouts):
    """What a lowering may ask about the plan around its node; devices add their own questions."""

    def __init__(self, lir: Lir) -> None:
        super().__init__(lambda value: lir.slots[value].view)
        self.lir = lir

    def upper(self, dim: Dim) -> int:
        """The upper bound of a dimension."""
        return upper_bound(dim, self.lir.live)


def _transpose(op: Any, source: Shape, result: Shape, view: View) -> View:
    return View(view.offset, tuple(view.strides[p] for p in op.axes))


def _narrow(op: Any, source: Shape, result: Shape, view: View) -> View:
    axis = normalize_axis(op.axis, source.rank)
    return View(view.offset + op.start * view.strides[axis], view.strides)


def _slice(op: Any, source: Shape, result: Shape, view: View) -> View:
    offset, strides = view.offset, []
    for (first, _, step), stride in zip(op.bounds(source.dims), view.strides, strict=True):
        offset = offset + first * stride
        strides.append(stride * step)
    return View(offset, tuple(strides))


def _expand(op: Any, source: Shape, result: Shape, view: View) -> View:
    added = result.rank - source.rank
    strides: list[Dim] = [0] * added
    pairs = zip(source.dims, result.dims[added:], view.strides, strict=True)
    strides += [0 if d == 1 and r != 1 else s for d, r, s in pairs]
    return View(view.offset, tuple(strides))


def _reshape(op: Any, source: Shape, result: Shape, view: View) -> View | None:
    if is_plain(view, source):
        return View(view.offset, contiguous_strides(result))
    if 0 in source.dims:
        return None
    strides: list[Dim] = []
    i = j = 0
    while i < source.rank or j < result.rank:
        ends = _next_group(source.dims, result.dims, i, j)
        if ends is None:
            return None
        inner = _group_stride(source.dims[i : ends[0]], view.strides[i : ends[0]])
        if inner is None:
            return None
        group = contiguous_strides(result.dims[j : ends[1]])
        strides += [s * inner for s in group]
        i, j = ends
    return View(view.offset, tuple(strides))


def _next_group(
    old: tuple[Dim, ...], new: tuple[Dim, ...], i: int, j: int
) -> tuple[int, int] | None:
    """Ends of the smallest runs of axes from i and j with equal element counts."""
    for a in range(i, len(old) + 1):
        for b in range(j, len(new) + 1):
            if (a > i or b > j) and same(prod(old[i:a], start=1), prod(new[j:b], start=1)):
                return a, b
    return None


def _group_stride(dims: tuple[Dim, ...], strides: tuple[Dim, ...]) -> Dim | None:
    """The innermost stride of axes that are contiguous as a group; None otherwise."""
    kept = [(d, s) for d, s in zip(dims, strides, strict=True) if d != 1]
    if not kept:
        return 1
    for (_, outer), (inner_dim, inner) in pairwise(kept):
        if not same(outer, inner_dim * inner):
            return None
    return kept[-1][1]


def _state_update(op: Any, source: Shape, result: Shape, view: View) -> View:
    return view


_RULES: dict[str, Callable[[Any, Shape, Shape, View], View | None]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "narrow": _narrow,
    "slice": _slice,
    "expand": _expand,
    "state_update": _state_update,
}


def insert_contiguous(
    graph: Graph, reads_strided: Callable[[Node], bool | Collection[int]]
) -> Graph:
    """Views that are not row-major become `contiguous` values before a node that needs that.

    `reads_strided` says whether a node reads strided views, or which of its operands may be ones.

    One copy serves all such readers. A view that strides cannot express (a reshape of a transposed
    tensor) gets a copy of its operand, and is then a row-major view of the copy.
    """
    views = find_views(graph.nodes)
    copies: dict[Value, Value] = {}
    order: list[Node] = []

    def plain(value: Value) -> Value:
        placed = views.get(value)
        if placed is None or is_plain(placed[1], value.shape):
            return value
        if value not in copies:
            with graph.origin(value.node.origin.touched("copies")):
                copies[value] = graph.append(lookup("contiguous")(), (value,))
            order.append(graph.nodes.pop())
        return copies[value]

    for node in list(graph.nodes):
        is_lost = node.op.is_view and node.outputs[0] not in views
        readable = node.op.is_view or reads_strided(node)
        if is_lost or not readable:
            node.inputs = tuple([plain(v) for v in node.inputs])
        elif not isinstance(readable, bool):
            numbered = enumerate(node.inputs)
            node.inputs = tuple([v if i in readable else plain(v) for i, v in numbered])
        order.append(node)
    graph.nodes = order
    for position, node in enumerate(order):
        node.id = position
    return graph
