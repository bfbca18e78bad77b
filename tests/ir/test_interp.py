"""The interpreter: sizes from shapes, checks of what is given, states, and located errors."""

from __future__ import annotations

import weakref
from typing import ClassVar

import numpy as np
import pytest

import rlx.ir.ops  # noqa: F401 - registers the ops
from rlx.errors import BindingError, InputError, ShapeError, StageError, VerifyError
from rlx.ir.attrs import Body
from rlx.ir.binding import bind_attr, bind_op, infer_sizes
from rlx.ir.dim import sym
from rlx.ir.graph import Graph
from rlx.ir.interp import Program, evaluate, run
from rlx.ir.op import Op, lookup
from rlx.ir.shape import Shape

SEQ, PAST = sym.SEQ, sym.PAST_SEQ


def cache_graph() -> Graph:
    """kv[past : past + seq] = x, twice; the second write doubles."""
    g = Graph("cache")
    kv = g.state("kv", ["capacity", 2])
    x = g.input("x", ["seq", 2])
    first = g.state_update(kv, x, axis=0, start=PAST)
    second = g.state_update(first, x * 2.0, axis=0, start=PAST)
    return g.set_outputs(second)


def test_a_sequence_goes_to_inputs_in_order_and_a_mapping_to_all_sources() -> None:
    g = Graph()
    a, b = g.input("a", ["n"]), g.input("b", ["n"])
    g.set_outputs(a - b)
    x, y = np.float32([5, 7]), np.float32([1, 2])
    assert evaluate(g, [x, y])[0].tolist() == [4, 5]
    assert evaluate(g, {"b": x, "a": y})[0].tolist() == [-4, -5]

    h = Graph()
    h.set_outputs(h.input("x", [2]) * h.param("w", [2]))
    assert evaluate(h, {"x": x, "w": y})[0].tolist() == [5, 14]
    with pytest.raises(InputError, match="missing param"):
        evaluate(h, [x])


def test_python_numbers_take_the_declared_element_type() -> None:
    g = Graph()
    g.set_outputs(g.input("x", [2], "f16") + 1)
    (y,) = evaluate(g, [[1, 2]])
    assert y.dtype == np.float16
    assert y.tolist() == [2, 3]


def test_states_come_back_in_their_last_version_and_start_as_zeros() -> None:
    x = np.float32([[1, 2], [3, 4]])
    sizes = {"capacity": 4, "past_seq": 1}
    result = run(cache_graph(), [x], sizes)
    expected = np.float32([[0, 0], [2, 4], [6, 8], [0, 0]])
    assert np.array_equal(result.states["kv"], expected)
    assert np.array_equal(result.outputs[0], expected)

    kept = np.full((4, 2), 9, np.float32)
    again = run(cache_graph(), {"x": x, "kv": kept}, {"past_seq": 2})
    assert np.array_equal(again.states["kv"], np.float32([[9, 9], [9, 9], [2, 4], [6, 8]]))
    assert np.all(kept == 9)  # the caller's array is not written to


def test_a_state_never_written_comes_back_as_given() -> None:
    g = Graph()
    g.set_outputs(g.state("s", [2]) + 1.0)
    result = run(g, {"s": np.float32([1, 2])})
    assert result.states["s"].tolist() == [1, 2]


def shape_of(dims: list[object]) -> Shape:
    return Shape(dims)


def test_sizes_from_plain_symbols_and_then_from_expressions() -> None:
    given = [
        ("k", shape_of([PAST + SEQ, 4]), (7, 4)),  # solved last although it comes first
        ("x", shape_of([SEQ * 2]), (6,)),
    ]
    assert infer_sizes(given) == {"seq": 3, "past_seq": 4}


def test_rows_follow_batch_and_seq() -> None:
    g = Graph()
    x = g.input("x", ["batch", "seq", 2])
    g.set_outputs(g.reshape(x, shape=("rows", 2)))
    (y,) = evaluate(g, [np.zeros((2, 3, 2), np.float32)])
    assert y.shape == (6, 2)


def test_a_symbol_with_two_sizes_names_both_axes() -> None:
    with pytest.raises(BindingError, match="bound to two sizes") as e:
        infer_sizes([("a", shape_of(["n"]), (3,)), ("b", shape_of([5, "n"]), (5, 4))])
    assert "axis 0 of a" in str(e.value)
    assert "axis 1 of b" in str(e.value)
    assert e.value.where == "n"


def test_an_expression_against_its_symbols_is_checked() -> None:
    given = [("x", shape_of([SEQ]), (2,)), ("m", shape_of([PAST + SEQ]), (7,))]
    with pytest.raises(BindingError, match="past_seq = 4 from the given sizes"):
        infer_sizes(given, {"past_seq": 4})


def test_rows_against_batch_times_seq_is_checked() -> None:
    given = [("x", shape_of(["rows"]), (7,)), ("y", shape_of(["batch", "seq"]), (2, 3))]
    with pytest.raises(BindingError, match="bound to two sizes"):
        infer_sizes(given)


@pytest.mark.parametrize("size", [-1, 2.5, True, "3"])
def test_a_size_is_an_int_from_zero_on(size: object) -> None:
    with pytest.raises(BindingError, match="not a size"):
        infer_sizes([], {"n": size})  # type: ignore[dict-item]


def test_no_size_solves_the_expression() -> None:
    with pytest.raises(BindingError, match="no size of a symbol fits"):
        infer_sizes([("x", shape_of([SEQ * 2]), (5,))])
    with pytest.raises(BindingError, match="no size of a symbol fits"):
        infer_sizes([("x", shape_of([SEQ + 4]), (3,))])


def test_unbound_symbols_are_listed() -> None:
    with pytest.raises(BindingError, match="capacity, past_seq") as e:
        run(cache_graph(), [np.zeros((1, 2), np.float32)])
    assert "pass sizes" in e.value.hint


def test_what_is_given_is_checked() -> None:
    g = Graph("sum")
    g.set_outputs(g.input("x", ["n", 2]) + g.input("y", ["n", 2]))
    x = np.zeros((3, 2), np.float32)
    with pytest.raises(InputError, match="wrong number of inputs"):
        evaluate(g, [x])
    with pytest.raises(InputError, match="missing input"):
        evaluate(g, {"x": x})
    with pytest.raises(InputError, match="unknown input; got 'z'"):
        evaluate(g, {"x": x, "y": x, "z": x})
    with pytest.raises(InputError, match=r"\[x\] wrong element type; got float64") as e:
        evaluate(g, [x.astype(np.float64), x])
    assert "float32" in e.value.hint
    with pytest.raises(InputError, match="wrong rank"):
        evaluate(g, [x[0], x])
    with pytest.raises(InputError, match="wrong size"):
        evaluate(g, [x[:, :1], x])


def test_an_error_inside_a_reference_says_which_node_and_where() -> None:
    with pytest.raises(ShapeError, match="write past the end") as e:
        run(cache_graph(), [np.zeros((2, 2), np.float32)], {"capacity": 4, "past_seq": 3})
    assert e.value.where == "state_update"
    assert "%2" in str(e.value.origin)
    assert "test_interp.py" in str(e.value.origin)


class Faulty(Op):
    """An op made to go wrong in the reference; not registered."""

    name = "faulty"
    num_required = 1
    result: ClassVar[object] = None

    def infer(self, x: Shape) -> Shape:
        return x

    def reference(self, x: np.ndarray) -> object:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def faulty_graph(result: object, **traits: object) -> Graph:
    g = Graph()
    x = g.input("x", [2])
    op = type("Faulty", (Faulty,), {"result": result, **traits})()
    return g.set_outputs(g.append(op, [x], "culprit"))


@pytest.mark.parametrize(
    "result",
    [np.zeros(3, np.float32), np.zeros(2, np.float64), (np.zeros(2, np.float32),) * 2],
    ids=["shape", "dtype", "count"],
)
def test_a_result_unlike_the_inferred_one_is_an_internal_error(result: object) -> None:
    with pytest.raises(VerifyError, match=r"\[faulty\] the reference does not give") as e:
        evaluate(faulty_graph(result), [np.zeros(2, np.float32)])
    assert "culprit" in str(e.value.origin)


def test_a_foreign_exception_keeps_its_cause() -> None:
    with pytest.raises(VerifyError, match="ZeroDivisionError: oops") as e:
        evaluate(faulty_graph(ZeroDivisionError("oops")), [np.zeros(2, np.float32)])
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert "culprit" in str(e.value)


def test_blocks_are_lowered_first() -> None:
    graph = faulty_graph(None, is_block=True)
    with pytest.raises(StageError, match="cannot be evaluated") as e:
        evaluate(graph, [np.zeros(2, np.float32)])
    assert "lower()" in e.value.hint


def test_values_die_after_their_last_use_and_the_hook_sees_every_node() -> None:
    g = Graph()
    x = g.input("x", [4])
    a = g.exp(x)
    b = g.neg(a)
    c = g.neg(b)
    g.set_outputs(g.add(c, b))
    seen: list[str] = []
    alive: dict[str, list[bool]] = {}
    refs = {}

    def hook(node, results) -> None:  # type: ignore[no-untyped-def]
        alive[f"{node.id}"] = [refs[i]() is not None for i in sorted(refs)]
        seen.append(node.op.name)
        refs[node.id] = weakref.ref(results[0])

    evaluate(g, [np.zeros(4, np.float32)], on_node=hook)
    assert seen == ["input", "exp", "neg", "neg", "add"]
    # when the last node reports, exp's result is gone, and those of both negations are still there
    assert alive["4"][1:] == [False, True, True]


def test_infinities_and_nans_raise_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    g = Graph()
    x = g.input("x", [2])
    g.set_outputs(g.log(x) / x)
    (y,) = evaluate(g, [np.float32([0, -1])])
    assert np.isinf(y[0])
    assert np.isnan(y[1])
    assert not recwarn.list


def test_binding_reaches_tuples_shapes_and_nested_graphs() -> None:
    inner = Graph("inner")
    x = inner.input("x", ["seq", 4])
    inner.set_outputs(inner.narrow(x, axis=0, start=SEQ - 1, length=1))
    body = bind_attr(Body(inner), {"seq": 5})
    assert body.graph.symbols() == frozenset()
    assert body.graph.nodes[1].op.start == 4
    assert body.graph.nodes[0].output.shape == Shape([5, 4])
    assert bind_attr((SEQ, (Shape([SEQ]), "seq")), {"seq": 5}) == (5, (Shape([5]), "seq"))


def test_binding_gives_one_record_per_op_and_sizes() -> None:
    op = lookup("state_update")(axis=0, start=PAST)
    assert bind_op(op, {"past_seq": 3}) is bind_op(op, {"past_seq": 3})
    assert bind_op(op, {"past_seq": 3}).start == 3
    assert bind_op(op, {"past_seq": 4}).start == 4
    plain = lookup("state_update")(axis=0, start=2)
    assert bind_op(plain, {"past_seq": 3}) is plain


def test_a_program_runs_many_times() -> None:
    g = Graph()
    g.set_outputs(g.input("x", ["n"]) + 1.0)
    program = Program(g, {"n": 2})
    x = np.float32([1, 2])
    for _ in range(3):
        (x,) = program.call(x)
    assert x.tolist() == [4, 5]
