"""Random graphs: every pass, every policy and both forms on disk keep what a graph computes."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from random_graphs import arguments, graphs

from rlx import Session
from rlx.ir.binding import DimBinding, bind_graph
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.phase import Phase, PhaseSchedule
from rlx.ir.serial import from_bytes, to_bytes
from rlx.ir.text import parse_graph, print_graph
from rlx.passes.pipeline import run_pipeline
from rlx.specialize.options import CompileOptions

SIZES = st.fixed_dictionaries({"n": st.integers(1, 3), "m": st.integers(1, 3)})
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def assert_close(got: np.ndarray, wanted: np.ndarray) -> None:
    """Fusions reorder sums of at most some dozens of f32 terms of size about 1 and round once
    instead of several times: a handful of units in the last place, amplified by at most a few
    dozen through exp and products of a random graph of twelve ops."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    scale = np.max(np.abs(wanted[np.isfinite(wanted)]), initial=1.0)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5 * float(scale))


def check_same(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert_close(b, a)


@given(graphs(), SIZES)
@QUIET
def test_every_pass_preserves_results(graph: Graph, sizes: dict[str, int]) -> None:
    data = arguments(graph, sizes)
    expected = evaluate(graph, data, sizes)
    seen = []

    def look(name: str, after: Graph) -> None:
        seen.append(name)
        if any(n.name.startswith("prepared.") for n in after.sources("param")):
            return  # needs the prepared parameters; the session test covers that
        needed = {n.name for n in after.nodes if n.op.is_source}
        check_same(expected, evaluate(after, {k: v for k, v in data.items() if k in needed}, sizes))

    run_pipeline(graph, has_native=lambda node: True, on_stage=look)
    assert "simplify" in seen
    assert "fuse.regions" in seen


@given(graphs(max_ops=6), SIZES)
@QUIET
def test_decompositions_compute_the_same(graph: Graph, sizes: dict[str, int]) -> None:
    """A device without any op that has a decomposition gets primitives only."""
    data = arguments(graph, sizes)
    result = run_pipeline(
        graph,
        has_native=lambda node: not node.op.has_decomposition() or node.op.name == "scan",
        passes=["dce"],
    )
    needed = {n.name for n in result.graph.nodes if n.op.is_source}
    given_data = {k: v for k, v in data.items() if k in needed}
    check_same(evaluate(graph, data, sizes), evaluate(result.graph, given_data, sizes))


@given(graphs(), SIZES)
@QUIET
def test_a_session_gives_what_the_oracle_gives(graph: Graph, sizes: dict[str, int]) -> None:
    data = arguments(graph, sizes)
    expected = evaluate(graph, data, sizes)
    live = CompileOptions(binding=DimBinding().set_dynamic("n", 4).set_dynamic("m", 5))
    for options in (None, CompileOptions(binding=DimBinding(sizes)), live):
        compiled = Session("reference").compile(graph, options)
        for node in graph.sources("param"):
            compiled.set_param(node.name, data[node.name])
        inputs = {n.name: data[n.name] for n in graph.sources("input")}
        check_same(expected, list(compiled.run(inputs)))


@given(graphs())
@QUIET
def test_text_and_bytes_come_back_equal(graph: Graph) -> None:
    text = print_graph(graph)
    parsed = parse_graph(text)
    assert parsed.same_as(graph)
    assert print_graph(parsed) == text
    data = to_bytes(graph)
    read = from_bytes(data)
    assert isinstance(read, Graph)
    assert read.same_as(graph)
    assert to_bytes(read) == data
    optimised = run_pipeline(graph).graph
    assert parse_graph(print_graph(optimised)).same_as(optimised)


@given(graphs(), SIZES)
@QUIET
def test_binding_changes_sizes_only(graph: Graph, sizes: dict[str, int]) -> None:
    bound = bind_graph(graph, {s: n for s, n in sizes.items() if s in graph.symbols()})
    assert not bound.symbols()
    data = arguments(graph, sizes)
    for a, b in zip(evaluate(graph, data, sizes), evaluate(bound, data), strict=True):
        assert np.array_equal(a, b, equal_nan=True)


if __name__ == "__main__":
    pytest.main([__file__])


def check_phases(device: str, graph: Graph, sizes: dict[str, int], dice: random.Random) -> None:
    """Phase by phase under a random schedule: the same results, also from a second round."""
    data = arguments(graph, sizes)
    expected = evaluate(graph, data, sizes)
    schedule = PhaseSchedule()
    for node in graph.nodes:
        least = max(
            [schedule.get(v) or Phase.PROLOGUE for v in node.inputs], default=Phase.PROLOGUE
        )
        allowed = [p for p in Phase if p >= least]
        schedule.set(node, Phase.PROLOGUE if node.op.is_source else dice.choice(allowed))
    compiled = Session(device).compile(graph, CompileOptions(phases=schedule))
    for node in graph.sources("param"):
        compiled.set_param(node.name, data[node.name])
    inputs = {n.name: data[n.name] for n in graph.sources("input")}
    for phases in ([*Phase], [Phase.STEADY_STATE, Phase.EPILOGUE]):
        found: list[Any] = [None] * len(expected)
        for phase in phases:
            part = compiled.run(inputs, sizes=sizes, phase=phase)
            found = [a if b is None else b for a, b in zip(found, part, strict=True)]
        rows = [(a, b) for a, b in zip(expected, found, strict=True) if b is not None]
        check_same([a for a, _ in rows], [b for _, b in rows])
        assert len(rows) == len(expected) or phases[0] is not Phase.PROLOGUE
    check_same(expected, list(compiled.run(inputs, sizes=sizes)))


@given(graphs(), SIZES, st.randoms(use_true_random=False))
@settings(QUIET, max_examples=30)
def test_phases_of_a_random_schedule_compute_the_same(
    graph: Graph, sizes: dict[str, int], dice: random.Random
) -> None:
    check_phases("reference", graph, sizes, dice)


@pytest.mark.slow
@given(graphs(max_ops=8), SIZES, st.randoms(use_true_random=False))
@settings(QUIET, max_examples=15)
def test_phases_of_a_random_schedule_compute_the_same_natively(
    graph: Graph, sizes: dict[str, int], dice: random.Random
) -> None:
    check_phases("cpu", graph, sizes, dice)
