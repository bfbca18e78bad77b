"""Ops that users define."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rlx.ir.ops  # noqa: F401 - registers the ops
from rlx.errors import AttributeValueError, NameConflictError, OptionError, ShapeError
from rlx.ir import dtype as dt
from rlx.ir.dim import sym
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.op import make_op
from rlx.ir.ops import custom
from rlx.ir.ops.custom import Custom, CustomOp, custom_op
from rlx.ir.shape import Shape


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Definitions of one test do not reach the next."""
    monkeypatch.setattr(custom, "_DEFINED", {})
    yield


def scaled() -> CustomOp:
    return custom_op(
        "test.scaled",
        infer=lambda x, *, alpha=1.0: x,
        reference=lambda x, *, alpha: x * x.dtype.type(alpha),
    )


def test_calling_the_definition_builds_a_node() -> None:
    my_op = scaled()
    g = Graph()
    x = g.input("x", ["n"])
    g.set_outputs(my_op(g, x, alpha=2.5, name="y"), my_op(g, x))
    a = np.float32([2, 4])
    y, same = evaluate(g, [a])
    assert y.tolist() == [5, 10]
    assert same.tolist() == [2, 4]
    assert g.output_names[0] == "y"


def test_the_builder_method_makes_the_same_record() -> None:
    my_op = scaled()
    g = Graph()
    x = g.input("x", [2])
    by_call = my_op(g, x, alpha=2.5).node.op
    assert g.custom(x, op="test.scaled", options={"alpha": 2.5}).node.op == by_call
    assert g.custom(x, op="test.scaled", options=(("alpha", 2.5),)).node.op == by_call
    assert by_call.options == (("alpha", 2.5),)


def test_equal_numbers_of_other_types_are_other_records() -> None:
    scaled()
    g = Graph()
    x = g.input("x", [2])
    records = [g.custom(x, op="test.scaled", options=(("alpha", v),)).node.op for v in (1, 1.0)]
    assert records[0] != records[1]
    assert [type(r.keywords["alpha"]) for r in records] == [int, float]
    assert Custom("test.scaled", {"alpha": 1}) != Custom("test.scaled", {"alpha": True})


def test_several_operands_results_and_a_symbolic_attribute() -> None:
    def infer(x: Shape, y: Shape, *, rows: Any) -> tuple[Shape, Shape]:
        return Shape([rows], x.dtype), y

    def reference(x: np.ndarray, y: np.ndarray, *, rows: int) -> tuple[np.ndarray, np.ndarray]:
        assert isinstance(rows, int)
        return np.full(rows, x.sum(), x.dtype), y + x

    my_op = custom_op("test.pair", infer=infer, reference=reference)
    g = Graph()
    x, y = g.input("x", ["n"]), g.input("y", ["n"])
    first, second = my_op(g, x, y, rows=sym("n") + 1)
    assert str(first.shape) == "[n + 1] f32"
    g.set_outputs(first, second)
    a, b = evaluate(g, [np.float32([1, 2]), np.float32([3, 4])])
    assert a.tolist() == [3, 3, 3]
    assert b.tolist() == [4, 6]


def test_every_type_of_attribute_is_kept() -> None:
    my_op = custom_op("test.any", infer=lambda x, **rest: x, reference=lambda x, **rest: x)
    given = {
        "a": 3, "b": 2.5, "c": "text", "d": True, "e": sym.SEQ, "f": dt.bf16, "g": None,
        "h": [1, [2, "x"]], "i": np.float32(0.5), "j": Shape([2]),
    }  # fmt: skip
    node = my_op(g := Graph(), g.input("x", [1]), **given).node
    kept = node.op.keywords
    assert kept["h"] == (1, (2, "x"))
    assert kept["i"] == 0.5
    assert type(kept["i"]) is float
    for name in "abcdefgj":
        assert kept[name] is given[name]
    assert hash(node.op) == hash(Custom("test.any", given))
    assert node.op == Custom("test.any", dict(reversed(given.items())))
    with pytest.raises(AttributeValueError, match=r"\[test.any.bad\] not an attribute value"):
        my_op(g, g.find("x"), bad=object())


def test_a_name_is_registered_once() -> None:
    scaled()
    with pytest.raises(NameConflictError, match=r"an op of that name exists; got test\.scaled"):
        scaled()
    with pytest.raises(NameConflictError, match="got matmul"):
        custom_op("matmul", infer=lambda x: x, reference=lambda x: x)
    with pytest.raises(OptionError, match="needs a name"):
        custom_op("", infer=lambda x: x, reference=lambda x: x)


def test_an_unregistered_name_says_what_to_import() -> None:
    scaled()
    with pytest.raises(OptionError, match=r"unknown custom op; got test\.scale; expected") as e:
        make_op("custom", {"op": "test.scale", "options": ()})
    assert "import the module that defines it" in e.value.hint
    assert e.value.expected == "test.scaled"


def test_attributes_and_operands_are_checked_against_the_definition() -> None:
    my_op = scaled()
    g = Graph()
    x = g.input("x", [2])
    with pytest.raises(AttributeValueError, match=r"unknown attribute; got beta; expected alpha"):
        my_op(g, x, beta=1)
    with pytest.raises(ShapeError, match=r"\[test.scaled\] wrong number of operands; got 2"):
        my_op(g, x, x)
    needs = custom_op("test.needs", infer=lambda x, *, k: x, reference=lambda x, *, k: x)
    with pytest.raises(AttributeValueError, match="missing attribute"):
        needs(g, x)
    with pytest.raises(AttributeValueError, match="not a set of named values"):
        g.custom(x, op="test.scaled", options=(("alpha", 1.0), ("alpha", 2.0)))
    wrong = custom_op("test.wrong", infer=lambda x: [2], reference=lambda x: x)
    with pytest.raises(ShapeError, match="inference of a custom op gives shapes"):
        wrong(g, x)


def test_kernel_and_gradient_are_found_through_the_record() -> None:
    def gradient(g: Graph, inputs: Any, outputs: Any, grads: Any) -> list[Any]:
        return [grads[0]]

    my_op = custom_op(
        "test.full", infer=lambda x: x, reference=lambda x: x, kernel="k", gradient=gradient
    )
    node = my_op(g := Graph(), g.input("x", [1])).node
    assert node.op.definition is my_op
    assert node.op.definition.kernel == "k"
    assert node.op.definition.gradient is gradient
