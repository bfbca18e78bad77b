"""The random graphs of the core's property test, run natively."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from random_graphs import arguments, graphs

from rlx import CompileOptions, DimBinding, Session
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate

SIZES = st.fixed_dictionaries({"n": st.integers(1, 9), "m": st.integers(1, 3)})


@given(graphs(max_ops=8), SIZES, st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_native_results_are_the_oracles(graph: Graph, sizes: dict[str, int], live: bool) -> None:
    data = arguments(graph, sizes)
    expected = evaluate(graph, data, sizes)
    bounds = DimBinding().set_live("n", 9).set_live("m", 3)
    compiled = Session("cpu").compile(graph, CompileOptions(binding=bounds) if live else None)
    compiled.set_params({n.name: data[n.name] for n in graph.sources("param")})
    inputs = {n.name: data[n.name] for n in graph.sources("input")}
    first = compiled.run(inputs)
    again = compiled.run(inputs)
    for got, repeated, wanted in zip(first, again, expected, strict=True):
        assert got.tobytes() == repeated.tobytes(), "the same run must give the same bits"
        assert got.shape == wanted.shape
        # eight ops, sums of at most some dozens of terms, functions within a few units: the
        # worst amplification is exp and products of numbers of size some tens
        scale = float(np.max(np.abs(wanted[np.isfinite(wanted)]), initial=1.0))
        np.testing.assert_allclose(got, wanted, rtol=5e-5, atol=5e-5 * scale)
