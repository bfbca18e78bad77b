"""What the tests of passes share: text in, text out, and equal numbers before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

import rlx.ir.blocks
import rlx.ir.ops  # noqa: F401
from rlx.ir.graph import Graph
from rlx.ir.interp import run
from rlx.ir.text import parse_graph, print_graph
from rlx.ir.verify import verify
from rlx.passes.fusion import FUSIONS
from rlx.passes.report import FusionReport
from rlx.passes.simplify import cse, dce, fold, simplify

SIZES = {"batch": 2, "seq": 5, "past_seq": 3, "n": 3, "m": 4}


def parsed(body: str) -> Graph:
    """A graph from the lines between its braces."""
    return parse_graph("graph test {" + body + "}")


def assert_becomes(change: Callable[[Graph], Graph], before: str, after: str) -> None:
    """`change` makes one text of the other, and both compute the same."""
    source, expected = parsed(before), parsed(after)
    expected.output_names = list(source.output_names)
    found = change(source.copy())
    verify(found, after="test")
    assert found.same_as(expected), f"\n{print_graph(found)}\nexpected\n{print_graph(expected)}"
    assert_same_results(source, found, exact=True)


def assert_stays(change: Callable[[Graph], Graph], text: str) -> None:
    assert_becomes(change, text, text)


def op_names(graph: Graph) -> list[str]:
    """The ops of a graph, without sources."""
    return [n.op.name for n in graph.nodes if not n.op.is_source]


def arguments(
    graph: Graph, sizes: Mapping[str, int] = SIZES, seed: int = 0
) -> dict[str, np.ndarray]:
    """Numbers for every input, param and state; positive, so that roots and logs are real."""
    rng = np.random.default_rng(seed)
    made = {}
    for node in graph.nodes:
        if node.op.name in ("input", "param", "state"):
            shape = node.output.shape.bind(sizes)
            if shape.dtype.kind == "bool":
                made[node.name] = rng.random(shape.static_dims) > 0.4
            elif shape.dtype.is_integer:
                made[node.name] = rng.integers(0, 4, shape.static_dims).astype(shape.dtype.numpy)
            else:
                array = rng.uniform(-0.8, 1, shape.static_dims)
                made[node.name] = array.astype(shape.dtype.numpy)
    return made


def assert_same_results(
    before: Graph,
    after: Graph,
    *,
    exact: bool = False,
    given: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Equal outputs and states; `exact` to the bit, else within the rounding of the type."""
    data = dict(arguments(before), **(given or {}))
    a, b = (run(g, {k: data[k] for k in _sources(g)}, SIZES) for g in (before, after))
    assert after.output_names == before.output_names
    assert a.states.keys() == b.states.keys()
    pairs = [*zip(a.outputs, b.outputs, strict=True)]
    pairs += [(a.states[k], b.states[k]) for k in a.states]
    for x, y in pairs:
        assert x.dtype == y.dtype
        # fused f16 ops round once where the written-out form rounds at every step (some 2^-10
        # each); in f32 a few sums of up to 64 terms run in another order
        tolerance = 0.0 if exact else 6e-3 if x.dtype.itemsize == 2 else 1e-5
        np.testing.assert_allclose(
            y.astype(np.float64), x.astype(np.float64), rtol=tolerance, atol=tolerance
        )


def _sources(graph: Graph) -> list[str]:
    return [n.name for n in graph.nodes if n.op.name in ("input", "param", "state")]


def fused(
    graph: Graph, *only: str, clean: bool = True, exact: bool = False
) -> tuple[Graph, FusionReport]:
    """The graph simplified and fused (by the named fusions alone), checked to compute the same."""
    report = FusionReport()
    after = graph.copy()
    if clean:
        for change in (simplify, fold, simplify, cse, dce):
            after = change(after)
    for name in only or FUSIONS:
        after = FUSIONS[name](after, report, None)
        verify(after, after=name)
    after = dce(after)
    verify(after, after="fuse")
    assert_same_results(graph, after, exact=exact)
    return after, report


def reasons(report: FusionReport, rule: str) -> Sequence[str]:
    return [m.reason for m in report.missed if m.rule == rule]
