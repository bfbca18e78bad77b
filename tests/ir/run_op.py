"""Runs one op through a graph: builder, inference and reference, each checked against the other."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlx.ir.ops  # noqa: F401  (registers the ops)
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.op import Cost
from rlx.ir.shape import Shape


def run(name: str, *arrays: np.ndarray, **attributes: Any) -> Any:
    """The result of the op on arrays; a list when it has several."""
    g = Graph()
    xs = [g.input(f"x{i}", Shape(a.shape, a.dtype)) for i, a in enumerate(arrays)]
    g.set_outputs(g.apply(name, *xs, **attributes))
    results = evaluate(g, arrays)
    return results[0] if len(results) == 1 else results


def infer(name: str, *shapes: Any, **attributes: Any) -> Any:
    """The inferred shape of the op, as text; a list of them when it has several results."""
    g = Graph()
    xs = [g.input(f"x{i}", Shape.of(s)) for i, s in enumerate(shapes)]
    value = g.apply(name, *xs, **attributes)
    return [str(v.shape) for v in value] if isinstance(value, tuple) else str(value.shape)


def cost(name: str, *shapes: Any, **attributes: Any) -> Cost:
    g = Graph()
    xs = [g.input(f"x{i}", Shape.of(s)) for i, s in enumerate(shapes)]
    g.apply(name, *xs, **attributes)
    node = g.nodes[-1]
    return node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
