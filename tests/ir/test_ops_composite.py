"""Ops that are their decomposition, rows of the elementwise table, and traits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from run_op import cost, infer, run

from rlx.errors import ShapeError
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.node import Value
from rlx.ir.op import REGISTRY, Op, op, registrations
from rlx.ir.ops.activation import activation_ops, activations
from rlx.ir.ops.composite import Composite, decomposed
from rlx.ir.ops.elementwise import Unary, unary
from rlx.ir.shape import Shape


@pytest.fixture
def registry() -> Iterator[None]:
    """Ops that a test registers are gone after it."""
    known = set(REGISTRY)
    yield
    for name in set(REGISTRY) - known:
        del REGISTRY[name]


def distance() -> type[Op]:
    @op("test_distance")
    class Distance(Composite):
        """√Σ(a − b)² · scale, over the last axis"""

        scale: float = 1.0

        def check_operands(self, a: Shape, b: Shape, c: Shape | None = None) -> None:
            if a.rank == 0:
                raise ShapeError("a is a scalar", got=a)

        def decompose(self, g: Graph, a: Value, b: Value, c: Value | None = None) -> Any:
            total = g.sum(g.square(g.sub(a, b)), (-1,))
            y = g.mul(g.sqrt(total), self.scale)
            return y if c is None else (y, g.add(y, c))

    return Distance


def test_inference_reference_and_cost_follow_from_the_decomposition(registry: None) -> None:
    cls = distance()
    assert (cls.num_required, cls.num_optional) == (2, 1)
    assert cls.input_names == ("a", "b", "c")
    assert infer("test_distance", ["n", 3], [3]) == "[n] f32"
    assert infer("test_distance", ["n", 3], [3], ["n"]) == ["[n] f32", "[n] f32"]
    a, b = np.array([[3, 4, 0], [1, 0, 0]], np.float32), np.zeros(3, np.float32)
    assert run("test_distance", a, b, scale=2.0).tolist() == [10.0, 2.0]
    first, second = run("test_distance", a, b, np.ones(2, np.float32))
    assert (first.tolist(), second.tolist()) == ([5.0, 1.0], [6.0, 2.0])
    # 6 differences, 6 squares, 6 terms of the sums, 2 roots of weight 8, 2 products
    assert cost("test_distance", [2, 3], [3]) == (6 + 6 + 6 + 2 * 8 + 2, 4 * (6 + 3 + 2))


def test_errors_name_the_operand_or_the_op_inside(registry: None) -> None:
    distance()
    with pytest.raises(ShapeError, match="a is a scalar"):
        infer("test_distance", [], [3])
    with pytest.raises(ShapeError) as caught:
        infer("test_distance", ["n", 3], [4])
    assert caught.value.where == "test_distance"
    assert "in its sub" in caught.value.what


def test_the_decomposition_is_a_graph_of_the_operands() -> None:
    graph = decomposed(REGISTRY["rms_norm"](), (Shape(["n", 8]), Shape([8])))
    assert graph is not None
    assert [n.op.name for n in graph.sources("input")] == ["input", "input"]
    assert decomposed(REGISTRY["exp"](), (Shape([2]),)) is None
    assert not REGISTRY["exp"].has_decomposition()


# devices have ops of their own, which are there once a device was used
COMPOSITES = sorted(
    n
    for n, cls in REGISTRY.items()
    if issubclass(cls, Composite) and cls.__module__.startswith("rlx.ir.")
)


def test_fused_ops_and_norms_are_composite() -> None:
    fused = {n for n in REGISTRY if n.startswith("fused_")}
    norms = {"rms_norm", "layer_norm", "group_norm", "l2_norm"}
    backward = {n for n in REGISTRY if n.endswith("_backward")}
    losses = {"softmax_cross_entropy"}
    others = {"elementwise_region", "lora_matmul", "dot_general"}
    assert fused | norms | backward | losses | others == set(COMPOSITES)


# -- rows -------------------------------------------------------------------------------------


def test_a_row_is_an_op_and_an_activation(registry: None) -> None:
    before = registrations()
    assert "test_softsign" not in activation_ops()
    cls = unary(
        "test_softsign",
        lambda x: x / (1 + np.abs(x)),
        "x / (1 + |x|)",
        lambda g, x: g.div(x, g.add(g.abs(x), 1.0)),
        derivative=lambda g, x, y: g.reciprocal(g.square(g.add(g.abs(x), 1.0))),
    )
    assert registrations() == before + 1
    assert "test_softsign" in activation_ops() and "test_softsign" in activations()
    assert (cls.__doc__, cls.is_elementwise) == ("x / (1 + |x|)", True)
    assert cls.has_decomposition()
    x = np.array([-3, 0, 1], np.float16)
    assert run("test_softsign", x).tolist() == [-0.75, 0.0, 0.5]
    assert infer("test_softsign", Shape([3], "i32")) == "[3] f32"
    g = Graph()
    at = g.input("x", [3])
    g.set_outputs(cls().derivative(g, at, at))
    found = evaluate(g, [x.astype(np.float32)])[0]
    np.testing.assert_allclose(found, [1 / 16, 1, 1 / 4], rtol=1e-6)


def test_a_row_without_a_formula_is_primitive(registry: None) -> None:
    cls = unary("test_cube_root", np.cbrt, "∛x")
    assert not cls.has_decomposition()
    assert run("test_cube_root", np.array([27.0])).tolist() == [3.0]
    kept = unary("test_half", lambda x: x // 2, "x // 2", base=Unary)
    assert kept().infer(Shape([2], "i8")) == Shape([2], "i8")
