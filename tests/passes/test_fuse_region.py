"""Regions: what is grouped, what is not, and why."""

from __future__ import annotations

from typing import Any

import pytest
from pass_support import assert_same_results, fused, op_names, parsed

from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.verify import verify
from rlx.passes.fusion.region import MOST_NODES, fuse_regions

LAST: dict[str, Any] = {"axis": (-1,), "keepdims": True}


def regions(graph: Graph) -> tuple[Graph, list[Graph]]:
    """The graph after grouping, and the bodies of its regions."""
    after, report = fused(graph, "regions", clean=False)
    found = [n.op.body.graph for n in after.nodes if n.op.name == "elementwise_region"]  # type: ignore[attr-defined]
    assert report.count("elementwise region") == len(found)
    return after, found


def test_a_chain_becomes_one_region_with_its_numbers_inside() -> None:
    g = Graph("chain")
    x, b = g.input("x", ["n", 4]), g.input("b", [4])
    g.set_outputs(g.tanh(x * 2.0 + b) - 1.0)
    after, (body,) = regions(g)
    assert op_names(after) == ["elementwise_region"]
    assert op_names(body) == ["mul", "add", "tanh", "sub"]
    assert [n.output.shape for n in body.sources("input")] == [x.shape, b.shape]
    assert len([n for n in body.nodes if n.op.name == "constant"]) == 2


def test_indices_are_counted_inside() -> None:
    g = Graph("mask")
    x = g.input("x", ["n", "m"])
    n, m = x.shape.dims
    row = g.reshape(g.iota(shape=(n,)), shape=(n, 1)) + g.dim_value(dim=m - n)
    g.set_outputs(g.where(g.le(g.iota(shape=(m,)), row), x * 2.0, -1.0))
    after, (body,) = regions(g)
    assert op_names(after) == ["elementwise_region"]
    assert op_names(body).count("iota") == 2
    assert [v.node.name for v in after.outputs[0].node.inputs] == ["x"]
    flat = Graph("flat")
    x = flat.input("x", ["n", 4])
    at = flat.reshape(flat.iota(shape=("n",)), shape=("n", 1))
    flat.set_outputs(flat.exp(x) * flat.cast(at, "f32"))
    after, (body,) = regions(flat)
    assert op_names(after) == ["elementwise_region"]
    assert [v.node.name for v in after.outputs[0].node.inputs] == ["x"]


def test_one_op_alone_stays_itself() -> None:
    g = Graph("one")
    g.set_outputs(g.exp(g.input("x", ["n", 4])))
    after, found = regions(g)
    assert op_names(after) == ["exp"]
    assert not found


def softmax(g: Graph, x: Value) -> Any:
    e = g.exp(x - g.max(x, **LAST))
    return e / g.sum(e, **LAST)


def layer_norm(g: Graph, x: Value) -> Any:
    d = x - g.mean(x, **LAST)
    return d * g.rsqrt(g.mean(g.square(d), **LAST) + 1e-5)


@pytest.mark.parametrize("build", [softmax, layer_norm])
def test_reductions_over_the_last_axis_with_what_follows_them(build: Any) -> None:
    g = Graph("rows")
    g.set_outputs(build(g, g.input("x", ["n", 3, 4])))
    after, (body,) = regions(g)
    assert op_names(after) == ["elementwise_region"]
    assert len(body.outputs) == 1


def test_a_reduction_without_keepdims_and_the_reshape_after_it() -> None:
    g = Graph("short")
    x = g.input("x", ["n", 3, 4])
    total = g.sum(g.square(x), axis=(2,))
    g.set_outputs(x / g.reshape(g.sqrt(total), shape=("n", 3, 1)))
    after, _ = regions(g)
    assert op_names(after) == ["elementwise_region"]


def test_a_value_used_outside_is_one_more_result_not_computed_twice() -> None:
    g = Graph("two")
    x = g.input("x", ["n", 4])
    h = g.exp(x) + 1.0
    y = g.tanh(h) * 2.0
    g.set_outputs(y, g.matmul(h, g.param("w", [4, 2])))
    after, (body,) = regions(g)
    assert op_names(after) == ["elementwise_region", "matmul"]
    assert len(body.outputs) == 2
    assert op_names(body).count("exp") == 1


def test_matmuls_divide_regions() -> None:
    g = Graph("anchor")
    x = g.input("x", ["n", 4])
    h = g.matmul(g.exp(x) + 1.0, g.param("w", [4, 4]))
    g.set_outputs(g.tanh(h) * 2.0 + x)
    after, found = regions(g)
    assert op_names(after) == ["elementwise_region", "matmul", "elementwise_region"]
    assert len(found) == 2


def test_what_leaves_and_comes_back_is_not_enclosed() -> None:
    """exp -> matmul -> add, and exp -> add: a region of exp and add would need itself."""
    g = Graph("diamond")
    x = g.input("x", ["n", 4])
    e = g.exp(x)
    m = g.matmul(e, g.param("w", [4, 4]))
    g.set_outputs(g.tanh(e + m))
    after, (body,) = regions(g)
    assert op_names(after) == ["exp", "matmul", "elementwise_region"]
    assert op_names(body) == ["add", "tanh"]


def test_two_regions_do_not_wait_for_each_other() -> None:
    """Each could take a part of the other's chain; both together would make a cycle."""
    g = Graph("braid")
    x, y = g.input("x", [8, 4]), g.input("y", [8, 4])
    a, b = g.exp(x), g.exp(y)
    w = g.param("w", [4, 4])
    a2, b2 = g.tanh(a) + g.matmul(b, w), g.tanh(b) + g.matmul(a, w)
    g.set_outputs(g.sin(a2) * 2.0, g.sin(b2) * 3.0, g.sin(a2) + g.cos(b2))
    after, _ = regions(g)
    assert op_names(after).count("matmul") == 2


def test_smaller_tensors_are_not_recomputed_along_an_outer_axis() -> None:
    """exp(b) [4] meets [n, 4]: inside the region it would be computed n times."""
    g = Graph("outer")
    x, b = g.input("x", ["n", 4]), g.input("b", [4])
    g.set_outputs(g.tanh(x + g.exp(b)))
    after, (body,) = regions(g)
    assert op_names(after) == ["exp", "elementwise_region"]
    assert op_names(body) == ["add", "tanh"]


def test_one_number_per_row_belongs_to_the_rows() -> None:
    g = Graph("rows")
    x, r = g.input("x", ["n", 4]), g.input("r", ["n", 1])
    g.set_outputs(x * g.rsqrt(r + 1e-6))
    after, _ = regions(g)
    assert op_names(after) == ["elementwise_region"]


def test_other_reductions_stay_outside() -> None:
    g = Graph("outer sum")
    x = g.input("x", ["n", 3, 4])
    g.set_outputs(g.exp(g.sum(g.square(x), axis=(0,)) + 1.0), g.neg(g.mean(g.exp(x))))
    after, found = regions(g)
    assert "sum" in op_names(after)
    assert "mean" in op_names(after)
    assert all(set(op_names(b)) <= {"square", "exp", "add"} for b in found)


def test_reductions_over_different_axes_are_two_regions() -> None:
    g = Graph("axes")
    x = g.input("x", ["n", 3, 4])
    a = g.exp(x) * g.sum(g.exp(x), axis=(2,), keepdims=True)
    g.set_outputs(a / g.sum(a, axis=(1, 2), keepdims=True))
    _, found = regions(g)
    assert all(len({n.op.axis for n in b.nodes if n.op.name == "sum"}) <= 1 for b in found)  # type: ignore[attr-defined]


def test_work_on_parameters_is_left_to_prepare() -> None:
    g = Graph("params")
    x, gamma = g.input("x", ["n", 4]), g.param("gamma", [4])
    g.set_outputs(g.tanh(x * (g.exp(gamma) + 1.0)))
    after, (body,) = regions(g)
    assert op_names(after) == ["exp", "add", "elementwise_region"]
    assert op_names(body) == ["mul", "tanh"]


def test_complex_numbers_stay_outside() -> None:
    g = Graph("complex")
    x = g.input("x", ["n", 4], "c64")
    g.set_outputs(g.real(x * x) + 1.0)
    after, found = regions(g)
    assert not found
    assert op_names(after) == ["mul", "real", "add"]


def test_regions_have_a_largest_size() -> None:
    g = Graph("long")
    y = g.input("x", [4])
    for _ in range(3 * MOST_NODES):
        y = g.tanh(y)
    g.set_outputs(y)
    _, found = regions(g)
    assert all(len(op_names(b)) <= MOST_NODES for b in found)
    assert sum(len(op_names(b)) for b in found) == 3 * MOST_NODES


def test_layers_alike_share_one_body() -> None:
    g = Graph("layers")
    y = g.input("x", ["n", 4])
    for i in range(3):
        y = g.matmul(g.tanh(y * 0.5) + y, g.param(f"w{i}", [4, 4]))
    g.set_outputs(y)
    after, _ = fused(g, "regions")
    bodies = [n.op.body for n in after.nodes if n.op.name == "elementwise_region"]  # type: ignore[attr-defined]
    assert len(bodies) == 3
    assert bodies[0] is bodies[1] is bodies[2]


def test_a_read_of_a_state_stays_before_the_write() -> None:
    g = parsed("""
      %s "s": [4] f32 = state
      %x "x": [4] f32 = input
      %a = exp(%s)
      %new = state_update(%s, %x)
      %b = neg(%new)
      %y = add(%a, %b)
      %z = tanh(%y)
      return %z
    """)
    before = g.copy()
    after = fuse_regions(g)
    verify(after, after="regions")
    assert_same_results(before, after)
    reader = next(n for n in after.nodes if n.op.name == "exp")
    write = next(n for n in after.nodes if n.op.name == "state_update")
    assert reader.id < write.id


def test_the_report_names_the_block() -> None:
    g = Graph("blocks")
    x = g.input("x", ["n", 4])
    with g.block("layers.0"):
        y = g.tanh(x * 2.0)
    g.set_outputs(y)
    _, report = fused(g, "regions")
    assert report.blocks("elementwise region") == ["layers.0"]
