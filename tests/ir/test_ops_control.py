"""cond, while_loop and scan, against the same loops in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from applied import normal

from rlx.errors import AttributeValueError, DTypeError, InputError, ShapeError
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.ops.control import make_body
from rlx.ir.shape import Shape

VECTOR = Shape([3])
FLAG = Shape([], "bool")
SCALAR = Shape([], "i32")


def cond_graph(then: Any, otherwise: Any) -> Graph:
    g = Graph()
    pred, x = g.input("pred", FLAG), g.input("x", VECTOR)
    return g.set_outputs(g.cond(pred, x, then=then, otherwise=otherwise))


def test_cond_runs_the_chosen_graph() -> None:
    then = make_body(lambda g, x: x + 1.0, VECTOR)
    otherwise = make_body(lambda g, x: x * 3.0, VECTOR)
    g = cond_graph(then, otherwise)
    x = np.float32([1, 2, 3])
    assert evaluate(g, [np.bool_(True), x])[0].tolist() == [2, 3, 4]
    assert evaluate(g, [np.bool_(False), x])[0].tolist() == [3, 6, 9]


def test_cond_does_not_run_the_other_graph() -> None:
    endless = make_body(
        lambda g, x: g.while_loop(
            x,
            condition=make_body(lambda h, v: h.constant(np.array(True)), VECTOR),
            body=make_body(lambda h, v: v, VECTOR),
            n_carry=1,
        ),
        VECTOR,
    )
    g = cond_graph(make_body(lambda h, x: x, VECTOR), endless)
    assert evaluate(g, [np.bool_(True), np.float32([1, 2, 3])])[0].tolist() == [1, 2, 3]


def test_cond_rejects_branches_that_differ() -> None:
    plain = make_body(lambda g, x: x, VECTOR)
    with pytest.raises(ShapeError, match="results of the two branches") as e:
        cond_graph(plain, make_body(lambda g, x: g.narrow(x, 0, 0, 2), VECTOR))
    assert "test_ops_control.py" in str(e.value.origin)
    with pytest.raises(DTypeError, match="results of the two branches"):
        cond_graph(plain, make_body(lambda g, x: g.cast(x, "f16"), VECTOR))
    with pytest.raises(ShapeError, match="inputs of the otherwise graph"):
        cond_graph(plain, make_body(lambda g, x: x, Shape([4])))
    with pytest.raises(ShapeError, match="inputs of the then graph: wrong number"):
        cond_graph(make_body(lambda g, x, y: x, VECTOR, VECTOR), plain)


def test_cond_rejects_a_predicate_that_is_no_flag() -> None:
    g = Graph()
    pred, x = g.input("pred", [3], "bool"), g.input("x", VECTOR)
    plain = make_body(lambda h, v: v, VECTOR)
    with pytest.raises(DTypeError, match="predicate must be one truth value"):
        g.cond(pred, x, then=plain, otherwise=plain)


def test_nested_graphs_have_no_params() -> None:
    body = Graph("body")
    body.set_outputs(body.input("x", VECTOR) * body.param("w", VECTOR))
    with pytest.raises(InputError, match="has a param of its own; got w"):
        cond_graph(body, body)


def collatz(**attributes: Any) -> Graph:
    """Steps of n ← n/2 or 3n + 1 until 1; the factor 3 is an invariant operand."""

    def step(g: Graph, n: Any, count: Any, three: Any) -> list[Any]:
        odd = g.eq(g.mod(n, 2), 1)
        return [g.where(odd, n * three + 1, g.floor_div(n, 2)), count + 1]

    g = Graph()
    n = g.input("n", SCALAR)
    out = g.while_loop(
        n,
        g.constant(0),
        g.constant(3),
        condition=make_body(lambda h, v, c, t: h.gt(v, 1), SCALAR, SCALAR, SCALAR),
        body=make_body(step, SCALAR, SCALAR, SCALAR),
        n_carry=2,
        **attributes,
    )
    return g.set_outputs(*out)


def test_while_loop_counts_what_python_counts() -> None:
    for start in (1, 2, 7, 27):
        n, count = start, 0
        while n > 1:
            n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
        assert [int(v) for v in evaluate(collatz(), [np.int32(start)])] == [1, count]


def test_while_loop_stops_at_its_bound() -> None:
    n, count = evaluate(collatz(max_iterations=3), [np.int32(7)])
    assert (int(n), int(count)) == (34, 3)  # 7 -> 22 -> 11 -> 34
    assert [int(v) for v in evaluate(collatz(max_iterations=3), [np.int32(2)])] == [1, 1]


def while_graph(condition: Any, body: Any, n_carry: int = 1) -> Any:
    g = Graph()
    return g.while_loop(g.input("x", VECTOR), condition=condition, body=body, n_carry=n_carry)


def test_while_loop_rejects_bad_graphs() -> None:
    true = make_body(lambda g, x: g.constant(np.array(True)), VECTOR)
    plain = make_body(lambda g, x: x, VECTOR)
    with pytest.raises(DTypeError, match="condition must be one truth value"):
        while_graph(plain, plain)
    with pytest.raises(ShapeError, match="condition gives one result"):
        while_graph(make_body(lambda g, x: [x, x], VECTOR), plain)
    with pytest.raises(ShapeError, match="carried values after one iteration"):
        while_graph(true, make_body(lambda g, x: g.narrow(x, 0, 0, 2), VECTOR))
    with pytest.raises(ShapeError, match="too few operands"):
        while_graph(true, plain, n_carry=2)
    with pytest.raises(AttributeValueError, match="at least one value"):
        while_graph(true, plain, n_carry=0)


def recurrence(reverse: bool = False, seq: object = "seq") -> Graph:
    """h ← a·h + x_t; y_t = 2·h, over [seq, 3], with a whole as an invariant."""
    body = make_body(
        lambda g, h, x, a: (lambda new: [new, new * 2.0])(h * a + x), VECTOR, VECTOR, VECTOR
    )
    g = Graph()
    h, x, a = g.input("h", VECTOR), g.input("x", [seq, 3]), g.input("a", VECTOR)
    return g.set_outputs(*g.scan(h, x, a, body=body, n_carry=1, n_xs=1, reverse=reverse))


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_is_the_loop_written_out(reverse: bool) -> None:
    h, x, a = normal(0, 3), normal(1, 5, 3), normal(2, 3)
    last, ys = evaluate(recurrence(reverse), [h, x, a])
    expected = np.zeros((5, 3), np.float32)
    for t in reversed(range(5)) if reverse else range(5):
        h = (h * a).astype(np.float32) + x[t]
        expected[t] = 2 * h
    assert np.array_equal(last, h)  # the same f32 operations in the same order
    assert np.array_equal(ys, expected)


def test_scan_over_nothing_gives_the_start_and_empty_results() -> None:
    h = normal(0, 3)
    last, ys = evaluate(recurrence(), [h, np.zeros((0, 3), np.float32), h])
    assert np.array_equal(last, h)
    assert ys.shape == (0, 3)


def test_scan_with_a_length_alone() -> None:
    g = Graph()
    x = g.input("x", ["n"])
    body = make_body(lambda h, i, v: [i + 1, i * i], SCALAR, Shape(["n"]))
    last, squares = g.scan(g.constant(0), x, body=body, n_carry=1, n_xs=0, length="n + 1")
    assert str(squares.shape) == "[n + 1] i32"
    g.set_outputs(last, squares)
    final, found = evaluate(g, [np.zeros(3, np.float32)])
    assert int(final) == 4
    assert found.tolist() == [0, 1, 4, 9]


def test_symbols_inside_a_body_are_bound() -> None:
    g = Graph()
    x = g.input("x", ["seq", "batch"])
    body = make_body(
        lambda h, total, row: [total + h.sum(row) * h.cast(h.dim_value("batch"), "f32")],
        Shape([]),
        Shape(["batch"]),
    )
    g.set_outputs(g.scan(g.constant(0.0), x, body=body, n_carry=1, n_xs=1))
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert float(evaluate(g, [array])[0]) == array.sum() * 2


def test_scan_rejects_bad_operands() -> None:
    body = make_body(lambda g, h, x: [h, x], VECTOR, VECTOR)
    g = Graph()
    h, x = g.input("h", VECTOR), g.input("x", ["seq", 3])
    with pytest.raises(ShapeError, match="length of scanned operand 0"):
        g.scan(h, x, body=body, n_carry=1, n_xs=1, length=4)
    with pytest.raises(ShapeError, match="nothing is scanned and no length"):
        g.scan(h, h, body=body, n_carry=2, n_xs=0)
    with pytest.raises(ShapeError, match="no axis to scan"):
        g.scan(h, g.constant(1.0), body=body, n_carry=1, n_xs=1)
    with pytest.raises(ShapeError, match="inputs of the body graph: shape of number 1"):
        g.scan(h, g.input("wide", ["seq", 4]), body=body, n_carry=1, n_xs=1)
    with pytest.raises(ShapeError, match="carried values after one iteration"):
        grow = make_body(lambda b, a, v: [b.concat(a, v, axis=0), v], VECTOR, VECTOR)
        g.scan(h, x, body=grow, n_carry=1, n_xs=1)
    with pytest.raises(AttributeValueError, match="negative count"):
        g.scan(h, x, body=body, n_carry=-1, n_xs=1)


def test_costs_multiply_the_body() -> None:
    g = recurrence(seq=10)
    node = g.nodes[-1]
    shapes = [v.shape for v in node.inputs], [v.shape for v in node.outputs]
    assert node.op.cost(*shapes).flops == 10 * (3 + 3 + 3)  # a·h, + x, · 2, over 3 elements
    loop = collatz(max_iterations=5).nodes[-1]
    once = collatz().nodes[-1]
    cost, single = (
        n.op.cost([v.shape for v in n.inputs], [v.shape for v in n.outputs]) for n in (loop, once)
    )
    assert cost.flops == 5 * single.flops > 0
