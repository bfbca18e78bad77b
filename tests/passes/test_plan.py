"""The planner: no two live buffers overlap, dead ones are reused, views cost nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx.ir.ops  # noqa: F401
from rlx.errors import BindingError
from rlx.ir.binding import DimBinding, bind_graph
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.passes.plan import plan
from rlx.specialize.manifest import BindingManifest


def check_plan(lir: Lir) -> None:
    """The rules a plan must keep, stated from scratch over lifetimes and byte ranges."""
    nodes, slots = lir.graph.nodes, lir.slots
    end = len(nodes)
    uses: dict[object, list[int]] = {}
    for node in nodes:
        for v in node.outputs:
            assert v in slots
        for v in node.inputs:
            root, _ = lir.home(v)
            uses.setdefault(root, []).append(node.id)
    for v in lir.outputs:
        uses.setdefault(lir.home(v)[0], []).append(end)
    placed = []
    for v, slot in slots.items():
        if slot.offset is None:
            continue
        assert slot.offset % 64 == 0
        assert slot.offset + slot.size <= lir.arena_size
        assert slot.size == v.shape.upper_bytes(lir.dynamic)
        first = -1 if slot.kind == "input" else v.node.id
        last = end if slot.kind in ("input", "output") else max(uses.get(v, [v.node.id]))
        placed.append((slot.offset, slot.offset + slot.size, first, last, v))
    for i, (lo1, hi1, first1, last1, v1) in enumerate(placed):
        for lo2, hi2, first2, last2, v2 in placed[:i]:
            if lo1 >= hi2 or lo2 >= hi1:
                continue
            # a result may take over an operand that dies where the result is made
            heir = (first1 == last2 and _reads(v1.node, v2, lir)) or (
                first2 == last1 and _reads(v2.node, v1, lir)
            )
            apart = first1 > last2 or first2 > last1
            assert apart or heir, f"{v1!r} and {v2!r} share bytes while both are alive"
    for node_id, (offset, size) in lir.scratch.items():
        for lo, hi, first, last, v in placed:
            alive = first <= node_id <= last
            assert not (alive and offset < hi and lo < offset + size), f"scratch meets {v!r}"


def _reads(node: object, value: object, lir: Lir) -> bool:
    elementwise = node.op.is_elementwise  # type: ignore[attr-defined]
    return elementwise and any(lir.home(v)[0] is value for v in node.inputs)  # type: ignore[attr-defined]


@st.composite
def chains(draw: st.DrawFn) -> Graph:
    g = Graph("random")
    values = [g.input("x", ["n", 8]), g.input("y", ["n", 8])]
    for _ in range(draw(st.integers(1, 25))):
        v = draw(st.sampled_from(values))
        w = draw(st.sampled_from(values))
        kind = draw(st.integers(0, 6))
        if kind == 0:
            values.append(g.relu(v))
        elif kind == 1:
            values.append(v + w)
        elif kind == 2:
            values.append(g.transpose(g.transpose(v, (1, 0)), (1, 0)))
        elif kind == 3:
            values.append(g.concat(g.narrow(v, 1, 2, 3), g.narrow(w, 1, 0, 5), axis=1))
        elif kind == 4:
            values.append(g.softmax(v, -1))
        elif kind == 5:
            values.append(g.expand(g.sum(v, 1, keepdims=True), ["n", 8]))
        else:
            values.append(g.reshape(g.reshape(v, ["n", 2, 4]), ["n", 8]))
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))
    g.set_outputs(outputs, names=[f"o{i}" for i in range(len(outputs))])
    return g


@given(chains(), st.integers(1, 40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_live_buffers_never_overlap(graph: Graph, n: int, live: bool) -> None:
    binding = DimBinding().set_dynamic("n", n) if live else DimBinding(n=n)
    check_plan(plan(bind_graph(graph, binding), scratch=lambda node: 100 * (node.id % 3)))


def _chain(length: int) -> Graph:
    g = Graph("chain")
    v = g.input("x", ["seq", 256])
    for _ in range(length):
        v = g.softmax(v)
    g.set_outputs(v)
    return g


def test_disjoint_lifetimes_share_memory() -> None:
    short = plan(bind_graph(_chain(4), {"seq": 16})).arena_size
    long = plan(bind_graph(_chain(40), {"seq": 16})).arena_size
    assert long == short == 3 * 16 * 256 * 4  # the input, and two that take turns


def test_a_result_takes_over_an_operand_that_dies() -> None:
    g = Graph("t")
    x = g.input("x", [64])
    y = g.softmax(x)
    for _ in range(5):
        y = g.relu(y)
    g.set_outputs(g.softmax(y))
    lir = plan(g)
    offsets = {lir.slots[n.output].offset for n in g.nodes if n.kind == "relu"}
    assert offsets == {lir.slots[g.nodes[1].output].offset}
    h = Graph("t")
    y = h.softmax(h.input("x", [64]))
    z = h.relu(y)
    h.set_outputs(h.softmax(z) + y)  # y lives on: relu must not write over it
    lir = plan(h)
    assert lir.slots[z].offset != lir.slots[y].offset


def test_sizes_differ_and_nothing_a_user_must_know() -> None:
    template = _chain(3)
    small, large = (plan(bind_graph(template, {"seq": s})) for s in (8, 128))
    assert small.arena_size < large.arena_size
    a, b = BindingManifest.of(small), BindingManifest.of(large)
    assert [(e.role, e.name) for e in a] == [(e.role, e.name) for e in b]


def test_views_have_no_bytes_and_outputs_are_their_own() -> None:
    g = Graph("t")
    x = g.softmax(g.input("x", [4, 6]))
    t = g.transpose(x, (1, 0))
    n = g.narrow(t, 0, 1, 2)
    g.set_outputs({"sum": g.sum(n), "view": n, "again": n, "input": g.find("x")})
    lir = plan(g)
    slot = lir.slots[n]
    assert slot.kind == "alias"
    assert slot.root is x
    assert slot.view is not None
    assert slot.view.offset == 1
    assert slot.view.strides == (1, 6)
    manifest = BindingManifest.of(lir)
    places = [e.arena_offset for e in manifest.outputs]
    assert None not in places
    assert len(set(places)) == 4
    check_plan(lir)


def test_reshape_of_a_transposed_tensor_is_no_view() -> None:
    g = Graph("t")
    x = g.softmax(g.input("x", [4, 6]))
    flat = g.reshape(g.transpose(x, (1, 0)), [24])
    kept = g.reshape(g.transpose(x, (1, 0)), [6, 2, 2])
    g.set_outputs(g.sum(flat), g.sum(kept))
    lir = plan(g)
    assert lir.slots[flat].kind == "arena"
    assert lir.slots[kept].kind == "alias"
    assert lir.slots[kept].view.strides == (1, 12, 6)  # type: ignore[union-attr]


def test_states_live_outside_and_updates_are_in_place() -> None:
    g = Graph("t")
    cache = g.state("cache", [1, 32, 8], "f16")
    x = g.input("x", [1, "seq", 8], "f16")
    new = g.state_update(cache, x, axis=1, start="past_seq")
    seen = g.narrow(new, 1, 0, "past_seq + seq")
    g.set_outputs(g.sum(seen))
    lir = plan(bind_graph(g, DimBinding(seq=1).set_dynamic("past_seq", 31)))
    assert lir.slots[lir.states[0].output].offset is None
    update = next(n for n in lir.graph.nodes if n.kind == "state_update")
    assert lir.slots[update.output].root is lir.states[0].output
    assert BindingManifest.of(lir).find("cache").arena_offset is None


def test_a_parameter_shows_its_bytes() -> None:
    g = Graph("t")
    w = g.param("layer.w", [4, 3])
    g.set_outputs(g.matmul(g.input("x", [2, 4]), w))
    manifest = BindingManifest.of(plan(g))
    entry = manifest.find("layer.w")
    assert (entry.num_bytes, entry.num_elements, entry.dtype) == (48, 12, "f32")
    assert manifest.param_names == ["layer.w"]
    assert manifest.total_param_bytes == 48
    assert list(manifest.weight_blocks()) == ["layer"]


def test_an_unbound_symbol_cannot_be_planned() -> None:
    with pytest.raises(BindingError, match="seq"):
        plan(_chain(1))


def test_planning_is_near_linear() -> None:
    import time

    def cost(length: int) -> float:
        graph = bind_graph(_chain(length), {"seq": 4})
        start = time.process_time()
        plan(graph)
        return time.process_time() - start

    cost(100)
    small, large = min(cost(500) for _ in range(3)), min(cost(4000) for _ in range(3))
    assert large < 8 * small * 3  # eight times the nodes; a quadratic planner would take 64 times
