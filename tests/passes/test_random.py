"""Random graphs over all op groups: each pass on its own, dead nodes and all, keeps the results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from random_graphs import arguments, graphs

from rlx.ir.graph import Graph
from rlx.ir.interp import run
from rlx.ir.verify import verify
from rlx.passes.fusion import FUSIONS, fuse
from rlx.passes.legalize import legalize
from rlx.passes.precision import lower_precision
from rlx.passes.prepare import split_prepare
from rlx.passes.simplify import cse, dce, fold, simplify

SIZES = {"n": 3, "m": 2}
QUICK = settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def compare(before: Graph, after: Graph, prepared: Graph | None = None) -> None:
    """Both graphs give the same; f32 sums in another order differ in the last digits."""
    given_ = arguments(before, SIZES)
    extra = {}
    if prepared is not None:
        names = {n.name for n in prepared.nodes}
        made = run(prepared, {k: v for k, v in given_.items() if k in names}, SIZES).outputs
        extra = dict(zip(prepared.output_names, made, strict=True))
    known = {n.name for n in after.nodes}
    arrays = {k: v for k, v in {**given_, **extra}.items() if k in known}
    expected, found = run(before, given_, SIZES), run(after, arrays, SIZES)
    assert after.output_names == before.output_names
    for a, b in zip(expected.outputs, found.outputs, strict=True):
        assert a.dtype == b.dtype
        # twelve f32 ops on numbers near 1: 2e-5 is some hundred roundings
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)


PASSES: dict[str, Callable[[Graph], Graph]] = {
    "simplify": simplify,
    "fold": fold,
    "cse": cse,
    "dce": dce,
    "fuse": fuse,
    "legalize": lambda g: legalize(g, lambda n: not n.op.has_decomposition()),
}


@pytest.mark.parametrize("name", PASSES)
@QUICK
@given(graph=graphs())
def test_pass_preserves_results(name: str, graph: Graph) -> None:
    after = PASSES[name](graph.copy())
    verify(after, after=name)
    compare(graph, after)


@pytest.mark.parametrize("name", [n for n in FUSIONS if n != "views"])
@QUICK
@given(graph=graphs())
def test_fusion_preserves_results(name: str, graph: Graph) -> None:
    after = FUSIONS[name](graph.copy(), None, None)
    verify(after, after=name)
    compare(graph, after)


@QUICK
@given(graph=graphs())
def test_prepare_preserves_results(graph: Graph) -> None:
    main, prepared = split_prepare(graph.copy())
    verify(main, after="prepare")
    verify(prepared, after="prepare")
    compare(graph, main, prepared if prepared.outputs else None)


@QUICK
@given(graph=graphs(max_ops=6))
def test_lower_precision_changes_no_signature(graph: Graph) -> None:
    after = lower_precision(graph.copy(), "f16")
    verify(after, after="precision")
    assert [v.shape for v in after.outputs] == [v.shape for v in graph.outputs]
