"""Attention written out, `softmax(q @ k.mT * s + mask) @ v`: which of its sizes become numbers.

A fusion turns it into the attention op (`passes.fusion.attention`), which has the number of heads
and their width as numbers. In a trace these are symbols, so the trace fixes them, once it is
complete: another number of heads, or another width, is another trace. Batch and lengths stay
symbolic. Nothing is fixed where the fusion would not apply, or not pay: weights that something else
reads, values of another width than queries, wide heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from rlx.ir.attrs import Body
from rlx.ir.dim import Dim, Expr
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value

WIDEST = 256  # two GEMMs take no longer for wider heads
_ON_SCORES = ("cast", "where", "add", "mul", "div", "tanh", "softmax")

Hint = Callable[[Dim], int]


def sizes_to_fix(graph: Graph, hint: Hint) -> Iterator[tuple[Node, list[Dim]]]:
    """Each product with attention weights, bodies included, and the sizes that must be numbers
    there. `hint` is what a size is in the call that is traced."""
    uses: dict[Value, int] = {}
    for value in chain(graph.outputs, *[node.inputs for node in graph.nodes]):
        uses[value] = uses.get(value, 0) + 1
    for node in graph.nodes:
        if node.op.name == "matmul":
            scores = _scores(node.inputs[0], uses, False)
            dims = [] if scores is None else _head_sizes(scores, node.inputs[1], hint)
            if any(isinstance(d, Expr) for d in dims):
                yield node, dims
        elif node.op.is_control_flow:
            for name in node.op.fields:
                body: Any = getattr(node.op, name)
                if isinstance(body, Body):
                    yield from sizes_to_fix(body.graph, hint)


def _scores(value: Value, uses: dict[Value, int], below: bool) -> Value | None:
    """q kᵀ that `value` is computed of, through a softmax over the last axis; `below`: that was
    passed. No value on the way has another use."""
    op: Any = value.node.op
    if uses[value] > 1:
        return None
    if op.name == "matmul":
        return value if below else None
    if op.name not in _ON_SCORES:
        return None
    if op.name == "softmax":
        if below or op.axis % value.shape.rank != value.shape.rank - 1:
            return None
        below = True
    for operand in value.node.inputs:
        if operand.shape.rank == value.shape.rank and operand.shape.dtype.is_float:
            found = _scores(operand, uses, below)
            if found is not None:
                return found
    return None


def _head_sizes(scores: Value, values: Value, hint: Hint) -> list[Dim]:
    """The width and, from rank 4 on, the numbers of heads of queries, keys and values."""
    queries, keys = scores.node.inputs  # keys [..., width, length]
    tensors = queries.shape.dims, keys.shape.dims, values.shape.dims
    rank = len(tensors[0])
    if any(len(dims) != rank for dims in tensors) or rank not in (2, 3, 4, 5):
        return []
    if hint(tensors[0][-1]) != hint(tensors[2][-1]) or hint(tensors[0][-1]) > WIDEST:
        return []
    widths = [tensors[0][-1], tensors[1][-2], tensors[2][-1]]
    return [*widths, *[d for dims in tensors for d in dims[1:-2]]]
