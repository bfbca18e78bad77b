"""Passes that say by a new list of nodes whether they changed a graph: the others are verified
after every run."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp
from rlx.errors import VerifyError
from rlx.ir.graph import Graph
from rlx.passes import pipeline
from rlx.passes.pipeline import PIPELINE, Context, Pass, run_pipeline

EDITING = [p for p in PIPELINE if p.by_editor]


def traced() -> Graph:
    """Something for most passes: a branch, a norm, constants, common and dead subexpressions."""

    def function(x: rnp.Array, w: rnp.Array) -> tuple[rnp.Array, rnp.Array]:
        y = rnp.sqrt(x * x) + rnp.sqrt(x * x) * 1.0
        y = rlx.cond(rnp.sum(y) > 0, lambda a: (a + 0.0) * 1.0, lambda a: a - 1.0, y)
        y = y / rnp.sqrt(rnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
        return rnp.exp(y @ w + 1.0), y.T.T

    x, w = np.ones((4, 8), np.float32), np.ones((8, 8), np.float32)
    return rlx.jit(function).lower(x, w).into_graph().copy()


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_graph_with_the_same_list_of_nodes_is_unchanged(precision: str) -> None:
    graph, changing = traced(), []
    context = Context(precision=precision)
    for each in EDITING:
        nodes, before = graph.nodes, graph.structure()
        graph = each.run(graph, context)
        if graph.nodes is not nodes:
            changing.append(each.name)
        else:
            assert graph.structure() == before, each.name
    assert {"simplify", "cse"} <= set(changing)  # so both cases were there
    assert len(changing) < len(EDITING)


def test_a_pass_that_breaks_the_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Graph, context: Context) -> Graph:
        graph.nodes = list(reversed(graph.nodes))
        return graph

    passes = (*PIPELINE[:3], Pass("broken", broken, required=True, by_editor=True))
    monkeypatch.setattr(pipeline, "PIPELINE", passes)
    with pytest.raises(VerifyError, match="after broken"):
        run_pipeline(traced())
