"""Building graphs: inference, names, scopes, origins, literals, errors."""

from __future__ import annotations

import numpy as np
import pytest

import rlx.ir.ops
from rlx.errors import InputError, NameConflictError, OptionError, ShapeError
from rlx.ir.dim import sym
from rlx.ir.graph import Graph
from rlx.ir.shape import Shape


def test_shapes_are_inferred_and_a_stated_one_is_checked() -> None:
    g = Graph("t")
    x = g.input("x", ["batch", 64])
    y = g.matmul(x, g.param("w", [64, 10]), shape=["batch", 10])
    assert y.shape is Shape([sym.BATCH, 10])
    with pytest.raises(ShapeError, match="stated shape"):
        g.matmul(x, g.find("w"), shape=["batch", 11])


def test_numbers_take_the_element_type_of_their_neighbour() -> None:
    g = Graph("t")
    x = g.input("x", ["n"], "f16")
    assert (x * 2).shape is Shape([sym("n")], "f16")
    assert (1.5 - x).shape is Shape([sym("n")], "f16")
    i = g.input("i", ["n"], "i64")
    assert (i + 1).shape.dtype.name == "i64"
    assert (i * 0.5).shape.dtype.name == "f32"
    assert (np.ones(3, np.float32) + g.input("v", [3])).shape is Shape([3])


def test_names_are_unique() -> None:
    g = Graph("t")
    g.input("x", [1])
    with pytest.raises(NameConflictError, match="'x'"):
        g.param("x", [1])
    with pytest.raises(NameConflictError, match="two outputs"):
        g.set_outputs(g.find("x"), g.find("x"), names=["y", "y"])
    with pytest.raises(InputError, match="needs a name"):
        g.input("", [1])


def test_origin_names_block_and_line() -> None:
    g = Graph("t")
    x = g.input("x", [2])
    with g.block("layers.0"), g.block("mlp"):
        y = g.relu(x)
    assert y.node.origin.block == "layers.0.mlp"
    assert y.node.origin.file == __file__
    assert "test_graph.py:" in str(y.node.origin)
    assert g.relu(x).node.origin.block == ""


def test_an_error_names_op_operands_and_line() -> None:
    g = Graph("t")
    x, y = g.input("x", ["batch", 3]), g.input("y", ["batch", 4])
    with pytest.raises(ShapeError) as caught:
        g.add(x, y)
    text = str(caught.value)
    assert "[add]" in text
    assert "x [batch, 3] f32" in text
    assert "test_graph.py:" in text
    assert len(g) == 2, "a node that failed must not stay"


def test_values_of_another_graph_are_refused() -> None:
    a, b = Graph("a"), Graph("b")
    x = a.input("x", [1])
    with pytest.raises(InputError, match="another graph"):
        b.relu(x)
    with pytest.raises(InputError, match="not a value"):
        b.set_outputs(x)
    with pytest.raises(InputError, match="not a tensor"):
        a.add(x, "two")


def test_wrong_arguments() -> None:
    g = Graph("t")
    x = g.input("x", [2])
    with pytest.raises(InputError, match="unknown argument"):
        g.softmax(x, axes=1)
    with pytest.raises(InputError, match="missing argument"):
        g.top_k(x)
    with pytest.raises(OptionError, match="did you mean softmax"):
        g.softmaxx(x)
    with pytest.raises(ShapeError, match="number of operands"):
        g.append(rlx.ir.op.lookup("add")(), (x,))


def test_copies_are_equal_and_independent() -> None:
    g = Graph("t")
    x = g.input("x", ["n"])
    g.set_outputs({"y": g.relu(x)})
    h = g.copy()
    assert h.same_as(g)
    h.set_outputs({"y": h.relu(h.outputs[0])})
    assert not h.same_as(g)
    assert len(g) == 2
    assert h.output_names == ["y"]


def test_attributes_that_python_calls_equal_stay_apart() -> None:
    g = Graph("t")
    x = g.input("x", [2], "i32")
    one = g.clamp(x, 0, 1).node.op
    assert one == g.clamp(x, 0.0, 1.0).node.op, "both are floats by the field's type"
    assert g.constant(1).node.op != g.constant(1.0).node.op
    assert g.constant(True).node.op != g.constant(1).node.op


def test_a_number_after_the_required_tensors_is_an_attribute() -> None:
    g = Graph("t")
    x, gamma, beta = g.input("x", [2, 4]), g.param("g", [4]), g.param("b", [4])
    assert g.rms_norm(x, gamma, 0.5).node.op.eps == 0.5
    assert g.rms_norm(x, gamma, None, 0.5).node.op.eps == 0.5
    with_beta = g.rms_norm(x, gamma, beta, 0.5).node
    assert (len(with_beta.inputs), with_beta.op.eps) == (3, 0.5)
