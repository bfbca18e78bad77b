"""Cheap values that far uses compute again: when, and when they are kept."""

from __future__ import annotations

import pytest
from pass_support import assert_same_results

from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.verify import verify
from rlx.passes.fusion.recompute import recompute_far
from rlx.passes.fusion.region import MOST_SPAN, fuse_regions
from rlx.passes.rewrite import Editor


def far_away(g: Graph, x: Value) -> Value:
    """x through so many nodes that what stands before and what stands behind are far apart."""
    for _ in range(MOST_SPAN + 1):
        x = g.transpose(x, axes=[1, 0])
    return x if (MOST_SPAN + 1) % 2 == 0 else g.transpose(x, axes=[1, 0])


def gated(forms: str = "") -> Graph:
    """silu(gate) · up in front; far behind, the cotangents of both."""
    g = Graph("gated")
    x = g.input("x", [4, 4])
    gate, up = x @ g.input("a", [4, 4]), x @ g.input("b", [4, 4])
    s = g.silu(gate)
    ct = far_away(g, (s * up) @ g.input("c", [4, 4]))
    first = s @ ct if "product" in forms else s * ct
    found = [first] if "gate dies" in forms else [first, ct * up * g.sigmoid(gate)]
    if "many" in forms:
        found += [s * g.exp(ct), s * g.sin(far_away(g, ct)), s - far_away(g, far_away(g, ct))]
    return g.set_outputs([*found, s] if "returned" in forms else found)


def silus(graph: Graph) -> int:
    return sum(node.op.name == "silu" for node in graph.nodes)


def recomputed(graph: Graph) -> Graph:
    editor = Editor(graph.copy(), "fuse")
    recompute_far(editor, MOST_SPAN)
    after = editor.finish()
    verify(after, after="recompute")
    assert_same_results(graph, after, exact=True)
    return after


def test_a_far_use_computes_the_value_again() -> None:
    assert silus(gated()) == 1
    assert silus(recomputed(gated())) == 2


@pytest.mark.parametrize("forms", ["gate dies", "product", "returned", "many"])
def test_a_value_is_kept_where_its_operand_dies_or_a_use_needs_all_of_it(forms: str) -> None:
    assert silus(recomputed(gated(forms))) == 1


def test_near_uses_share_the_value() -> None:
    g = Graph("near")
    gate = g.input("x", [4, 4]) @ g.input("a", [4, 4])
    s = g.silu(gate)
    g.set_outputs([s * gate, g.exp(s) * gate])
    assert silus(recomputed(g)) == 1


def test_regions_keep_one_array_less() -> None:
    before = gated()
    after = fuse_regions(before.copy())
    verify(after, after="regions")
    assert_same_results(before, after)
    first = next(n for n in after.nodes if n.op.name == "elementwise_region")
    assert len(first.outputs) == 1  # silu(gate) · up, and not silu(gate) as well
