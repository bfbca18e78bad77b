"""One op on arrays, through a graph: so inference, binding and the reference must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import rlx.ir.ops  # noqa: F401 - registers the ops
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.shape import Shape


def apply(
    op: str,
    arrays: Sequence[np.ndarray],
    *,
    dims: Sequence[Sequence[object]] | None = None,
    bind: dict[str, int] | None = None,
    **attributes: Any,
) -> Any:
    """The result, or the list of results; `dims` declares symbolic shapes for the arrays."""
    graph = Graph(op)
    values = [
        graph.input(f"x{i}", a.shape if dims is None else dims[i], a.dtype)
        for i, a in enumerate(arrays)
    ]
    made = graph.apply(op, *values, **attributes)
    results = evaluate(graph.set_outputs(made), arrays, bind)
    return results if isinstance(made, tuple) else results[0]


def inferred(op: str, *shapes: object, **attributes: Any) -> Any:
    """The shape, or tuple of shapes, that `op` infers for operands of `shapes`."""
    graph = Graph(op)
    values = [graph.input(f"x{i}", Shape.of(s)) for i, s in enumerate(shapes)]
    made = graph.apply(op, *values, **attributes)
    return tuple(v.shape for v in made) if isinstance(made, tuple) else made.shape


def normal(seed: int, *shape: int, dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
