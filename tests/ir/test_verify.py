"""Each rule of the IR, broken once; and the message that says what, where and after which pass."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from sample_graphs import SAMPLES, mlp

from rlx.errors import VerifyError
from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import Origin, Value
from rlx.ir.op import lookup
from rlx.ir.shape import Shape
from rlx.ir.verify import verify


@pytest.mark.parametrize("build", SAMPLES, ids=lambda b: b.__name__)
def test_sound_graphs_pass(build: Callable[[], Graph]) -> None:
    graph = build()
    verify(graph)
    verify(graph.copy(), after="copy")


def fault(graph: Graph) -> VerifyError:
    with pytest.raises(VerifyError) as caught:
        verify(graph, after="fuse")
    assert caught.value.after == "fuse"
    assert str(caught.value).startswith("[verify after fuse")
    return caught.value


def chain(length: int = 8) -> Graph:
    g = Graph("chain")
    x = g.input("x", [4])
    for i in range(length):
        with g.origin(Origin(f"layers.{i}", "net.py", 10 + i, ("cse",))):
            x = g.neg(x)
    return g.set_outputs(x)


def test_the_message_shows_the_node_its_origin_and_its_neighbours() -> None:
    g = chain()
    g.nodes[4].outputs[0].shape = Shape([5], "f32")
    error = fault(g)
    lines = str(error).split("\n")
    assert lines[0] == (
        "[verify after fuse] %4 neg: the shape of a result is not the inferred one; "
        "got [5] f32; expected [4] f32"
    )
    assert lines[1] == "  from block layers.3, net.py:13, via cse"
    assert [line[:6] for line in lines[2:]] == ["    %2", "    %3", "  > %4", "    %5", "    %6"]
    assert lines[4].startswith("  > %4: [5] f32 = neg(%3)  // block layers.3, net.py:13")


def test_ids_are_positions() -> None:
    g = chain()
    g.nodes[3].id = 7
    assert "%7 neg: an id that is not the position; got 7; expected 3" in str(fault(g))


def test_operands_come_before_their_use() -> None:
    g = chain()
    g.nodes[2].inputs = (g.nodes[5].output,)
    assert "%2 neg: an operand used before it is defined; got %5" in str(fault(g))


def test_a_cycle_is_found() -> None:
    g = chain()
    g.nodes[2].inputs = (g.nodes[2].output,)
    assert "an operand used before it is defined" in str(fault(g))


def test_operands_are_of_this_graph() -> None:
    g, other = chain(), chain()
    g.nodes[2].inputs = (other.nodes[1].output,)
    assert "%2 neg: an operand of another graph; got %1 of graph chain" in str(fault(g))


def test_operands_are_results_of_their_nodes() -> None:
    g = chain()
    g.nodes[2].inputs = (Value(g.nodes[1], 0, Shape([4])),)
    assert "an operand that is no result of its node" in str(fault(g))
    g = chain()
    g.nodes[2].outputs[0].node = g.nodes[1]
    assert "a result that is not its node's own" in str(fault(g))


def test_removed_nodes_are_not_used() -> None:
    g = chain()
    removed = g.nodes.pop(2)
    for i, node in enumerate(g.nodes):
        node.id = i
    error = fault(g)
    assert "an operand whose node is not in the graph" in str(error)
    assert repr(removed) in str(error)


def test_nodes_of_another_graph_are_found() -> None:
    g = chain()
    g.nodes[2].graph = Graph("elsewhere")
    assert "%2 neg: a node of another graph; got elsewhere" in str(fault(g))


def test_the_number_and_types_of_results_are_checked() -> None:
    g = chain()
    g.nodes[2].outputs = (*g.nodes[2].outputs, Value(g.nodes[2], 1, Shape([4])))
    assert "wrong number of results; got 2; expected 1" in str(fault(g))
    g = chain()
    g.nodes[8].outputs[0].shape = Shape([4], "f16")
    assert "got [4] f16; expected [4] f32" in str(fault(g))


def test_operands_that_inference_refuses_are_reported() -> None:
    g = mlp()
    g.nodes[2].inputs = (g.nodes[1].output, g.nodes[0].output)
    error = fault(g)
    assert "%2 matmul:" in str(error)
    assert error.__cause__ is not None


def test_two_forms_of_one_size_are_the_same_shape() -> None:
    g = Graph()
    x = g.input("x", ["batch * seq", 4])
    y = g.neg(x)
    y.shape = Shape(["rows", 4])
    g.set_outputs(y)
    verify(g)


def test_source_names_are_unique_and_there() -> None:
    g = Graph()
    g.input("x", [2])
    g.param("w", [2])
    g.nodes[1].name = "x"
    assert "%1 param: a source name used twice; got 'x', also of %0 input" in str(fault(g))
    g.nodes[1].name = ""
    assert "%1 param: a nameless param" in str(fault(g))


def test_outputs_are_values_of_the_graph_with_names_of_their_own() -> None:
    g, other = chain(), chain()
    g.outputs = [other.nodes[-1].output]
    assert "graph chain: output 'output_0' is not a value of the graph" in str(fault(g))
    g = chain()
    g.outputs, g.output_names = [g.nodes[0].output, g.nodes[1].output], ["a", "a"]
    assert "two outputs of one name; got a" in str(fault(g))
    g.output_names = ["a"]
    assert "output names and outputs differ in number; got 1; expected 2" in str(fault(g))


@pytest.mark.parametrize("bound", [0, -4, True, 2.0])
def test_dynamic_bounds_are_positive(bound: object) -> None:
    g = chain()
    g.live = {"seq": bound}  # type: ignore[dict-item]
    assert "live symbol seq" in str(fault(g))
    g.live = {"seq": 1}
    verify(g)


# -- states --------------------------------------------------------------------------------------


def cache() -> tuple[Graph, Value, Value]:
    g = Graph("cache")
    return g, g.state("s", [8, 4]), g.input("x", [1, 4])


def test_a_chain_of_updates_read_in_order_passes() -> None:
    g, s, x = cache()
    before = g.sum(s)  # a read of the first version, before it is overwritten
    s1 = g.state_update(s, x, start=0)
    s2 = g.state_update(s1, g.narrow(s1, 0, 0, 1), start=1)
    verify(g.set_outputs(before, g.sum(s2), s2))


def test_an_older_version_is_not_read_after_the_update() -> None:
    g, s, x = cache()
    s1 = g.state_update(s, x)
    g.set_outputs(g.add(s, s1))
    error = fault(g)
    assert "%3 add: an older version of a state is read after its update" in str(error)
    assert "got %0, overwritten by %2" in str(error)
    assert "hint:" in str(error)


def test_a_view_of_an_older_version_counts_as_the_version() -> None:
    g, s, x = cache()
    view = g.reshape(g.narrow(s, 0, 0, 2), [8])
    g.state_update(s, x)
    g.set_outputs(g.neg(view))
    assert "an older version of a state is read after its update; got %3" in str(fault(g))


def test_a_copy_of_an_older_version_may_be_read_later() -> None:
    g, s, x = cache()
    copy = g.neg(s)
    g.state_update(s, x)
    verify(g.set_outputs(g.neg(copy)))


def test_outputs_are_read_after_everything() -> None:
    g, s, x = cache()
    g.state_update(s, x)
    g.set_outputs({"old": s})
    assert "output 'old' is an older version of a state" in str(fault(g))


def test_updates_do_not_branch() -> None:
    g, s, x = cache()
    g.state_update(s, x)
    g.state_update(s, x, start=1)
    assert "%3 state_update: two updates of one version of a state" in str(fault(g))


def test_only_states_are_updated() -> None:
    g, s, x = cache()
    g.state_update(g.neg(s), x)
    assert "an update of something that is not a state; got %2 = neg(%0)" in str(fault(g))
    g = Graph()
    view = g.reshape(g.state("s", [8, 4]), [8, 4])
    g.state_update(view, g.input("x", [1, 4]))
    assert "expected a state, or an update of one" in str(fault(g))
    g = Graph()
    g.state_update(g.input("s", [8, 4]), g.input("x", [1, 4]))
    assert "an update of something that is not a state" in str(fault(g))


# -- nested graphs -------------------------------------------------------------------------------


def region(spoil: Callable[[Graph], object]) -> Graph:
    inner = Graph("inner")
    inner.set_outputs(inner.relu(inner.neg(inner.input("a", [4]))))
    g = Graph("outer")
    g.set_outputs(g.elementwise_region(g.input("x", [4]), body=inner))
    spoil(inner)
    return g


def test_nested_graphs_are_verified() -> None:
    def spoil(inner: Graph) -> None:
        inner.nodes[2].inputs = (inner.nodes[2].output,)

    error = fault(region(spoil))
    head = "[verify after fuse, in %1 elementwise_region of outer] %2 relu: an operand used before"
    assert str(error).startswith(head)


def test_nested_graphs_have_neither_params_nor_states() -> None:
    error = fault(region(lambda inner: inner.param("w", [3])))
    assert "a param in a nested graph" in str(error)


def test_a_sound_body_is_verified_once() -> None:
    g = region(lambda inner: None)
    verify(g)
    body = g.nodes[1].op.body  # type: ignore[attr-defined]
    assert isinstance(body, Body)
    body.graph.nodes[1].id = 9  # bodies are frozen: a change after the first look is not looked for
    verify(g)
    other = g.copy()
    other.nodes[1].op = lookup("elementwise_region")(body=Body(body.graph))  # type: ignore[call-arg]
    assert "an id that is not the position" in str(fault(other))


def test_verification_is_fast_enough_to_stay_on() -> None:
    g = Graph()
    x = g.input("x", ["batch", 64])
    for i in range(400):
        w = g.param(f"w{i}", [64, 64])
        x = g.add(g.relu(g.matmul(x, w)), x)
    g.set_outputs(x)
    verify(g)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        verify(g)
        times.append(time.perf_counter() - start)
    # about 0.9 µs a node where this was written; the rest is room for slower and busier machines
    assert min(times) / len(g) < 5e-6
