"""Composite ops, defined by their decomposition: inference, reference and cost derive from it.

    @op("fused_gated_act")
    class FusedGatedAct(Composite):
        def check_operands(self, joined: Shape) -> None: ...
        def decompose(self, g: Graph, joined: Value) -> Value: ...

A backend adds a kernel. An op may still override `infer`, when checking the operands yields the
result anyway; `cost`, when a customary count ignores small terms; and `reference`, when a
hand-written kernel needs an oracle with another algorithm (attention, convolutions, …).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rlx.errors import RlxError
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.interp import Program
from rlx.ir.node import UNKNOWN
from rlx.ir.op import Array, Cost, Inferred, Op
from rlx.ir.ops._common import traffic
from rlx.ir.shape import Shape


@lru_cache(maxsize=4096)
def decomposed(op: Op, shapes: tuple[Shape, ...]) -> Graph | None:
    """The decomposition of `op` as a graph with one input for each operand; None without one."""
    g = Graph(op.name)
    with g.origin(UNKNOWN):
        inputs = [g.input(f"x{i}", s) for i, s in enumerate(shapes)]
        made = op.decompose(g, *inputs)
    if made is None:
        return None
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    return g


def graph_flops(graph: Graph, free: tuple[str, ...] = ()) -> Dim:
    """The FLOPs of all nodes except ops named in `free`."""
    work: Dim = 0
    for node in graph.nodes:
        if not (node.op.is_source or node.op.name in free):
            shapes = [v.shape for v in node.inputs], [v.shape for v in node.outputs]
            work = work + node.op.cost(*shapes).flops
    return work


class Composite(Op):
    """Base of ops that are defined by their decomposition."""

    def check_operands(self, *shapes: Any) -> None:
        """Raise an error that names the mismatched operand."""

    def infer(self, *inputs: Any) -> Inferred:
        """The shapes that the decomposition gives."""
        self.check_operands(*inputs)
        try:
            graph = self._graph(tuple(inputs))
        except RlxError as e:
            what = f"{e.what} (in its {e.where})" if e.where else e.what
            raise type(e)(what, got=e.got, expected=e.expected, hint=e.hint) from None
        return tuple([v.shape for v in graph.outputs])

    infer.is_derived = True  # type: ignore[attr-defined]  # the signature is that of `decompose`

    def _graph(self, shapes: tuple[Shape, ...]) -> Graph:
        graph = decomposed(self, shapes)
        assert graph is not None  # composite ops have one by definition
        return graph

    def reference(self, *inputs: Any) -> Any:
        """The decomposition, evaluated by the references of its ops."""
        arrays: list[Array] = [a for a in inputs if a is not None]
        graph = self._graph(tuple([Shape(a.shape, a.dtype) for a in arrays]))
        results = Program(graph).call(*arrays)
        return results[0] if len(results) == 1 else tuple(results)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """The FLOPs of the decomposition; only operands and results touch memory.

        Casts to the accumulator type are free: kernels cast while loading.
        """
        return Cost(graph_flops(self._graph(tuple(inputs)), ("cast",)), traffic(inputs, outputs))
