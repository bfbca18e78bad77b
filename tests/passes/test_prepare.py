"""Work on parameters, split off to run once, under names that every variant agrees on."""

from __future__ import annotations

import numpy as np
from pass_support import op_names

from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.verify import verify
from rlx.passes.prepare import split_prepare


def prepared_names(graph: Graph) -> list[str]:
    return split_prepare(graph)[1].output_names


def test_work_on_parameters_runs_once() -> None:
    g = Graph("prepare")
    x, gamma = g.input("x", ["n", 4]), g.param("gamma", [4])
    y = x * (g.exp(gamma) + 1.0)
    g.set_outputs(y)
    before = g.copy()
    main, prepared = split_prepare(g)
    verify(main, after="prepare")
    verify(prepared, after="prepare")
    assert op_names(main) == ["mul"]
    assert op_names(prepared) == ["exp", "add"]
    (name,) = prepared.output_names
    assert [n.name for n in main.sources("param")] == [name]
    assert [n.name for n in prepared.sources("param")] == ["gamma"]
    data = {"gamma": np.arange(4, dtype=np.float32), "x": np.ones((3, 4), np.float32)}
    made = dict(zip([name], evaluate(prepared, {"gamma": data["gamma"]}), strict=True))
    after = evaluate(main, {"x": data["x"], **made})
    np.testing.assert_array_equal(after[0], evaluate(before, data)[0])


def test_names_come_from_the_structure_alone() -> None:
    """Other inputs, other nodes around, another order: the same tensor has the same name."""

    def variant(rows: object, extra: bool, weight: str = "w", by: float = 2.0) -> Graph:
        g = Graph(f"variant{rows}")
        x = g.input("x", [rows, 4])
        if extra:
            g.set_outputs(g.neg(x))
        w = g.param(weight, [4, 4])
        return g.set_outputs(g.matmul(x, g.exp(w) * by))

    (first,) = prepared_names(variant("n", False))
    assert prepared_names(variant(7, True)) == [first]
    assert first == "prepared.mul.2a49f31140885c51"  # the same in every process and version
    assert prepared_names(variant("n", False, "v")) != [first]
    assert prepared_names(variant("n", False, by=3.0)) != [first]


def test_views_and_what_grows_stay_in_the_main_graph() -> None:
    g = Graph("views")
    x, w = g.input("x", ["n", 4]), g.param("w", [6, 4])
    g.set_outputs(g.matmul(x, g.transpose(w, axes=(1, 0))))
    main, prepared = split_prepare(g)
    assert op_names(main) == ["transpose", "matmul"]
    assert not prepared.outputs
    h = Graph("grow")
    x, a = h.input("x", [2048, 2048]), h.param("a", [2048, 1])
    outer = h.exp(a) * h.reshape(h.sin(a), shape=(1, 2048))  # 16 MB from 8 kB
    h.set_outputs(x + outer)
    main, prepared = split_prepare(h)
    assert op_names(main) == ["reshape", "mul", "add"]
    assert op_names(prepared) == ["exp", "sin"]


def test_what_depends_on_a_size_of_the_variant_is_not_param_only() -> None:
    g = Graph("symbolic")
    x, w = g.input("x", ["n", 4]), g.param("w", [1, 4])
    wide = g.exp(g.expand(w, shape=("n", 4)))
    g.set_outputs(x + wide, g.sum(g.iota(shape=("n",))))
    main, prepared = split_prepare(g)
    assert not prepared.outputs
    assert "exp" in op_names(main)


def test_equal_work_has_one_name_and_one_param() -> None:
    g = Graph("twice")
    x, w = g.input("x", ["n", 4]), g.param("w", [4])
    g.set_outputs(x + g.exp(w), x * g.exp(w))
    main, prepared = split_prepare(g)
    verify(main, after="prepare")
    assert len(prepared.outputs) == 1
    assert len(main.sources("param")) == 1


def test_a_parameter_that_is_read_directly_too_stays_in_both() -> None:
    g = Graph("both")
    x, w = g.input("x", ["n", 4]), g.param("w", [4])
    unused = g.param("unused", [2])
    g.set_outputs(x + g.exp(w) + w)
    main, prepared = split_prepare(g)
    assert unused.node.name in [n.name for n in main.sources("param")]
    assert "w" in [n.name for n in main.sources("param")]
    assert [n.name for n in prepared.sources("param")] == ["w"]


def test_an_output_made_of_parameters_is_prepared() -> None:
    g = Graph("output")
    g.input("x", ["n"])
    g.set_outputs({"table": g.exp(g.param("w", [4]))})
    main, prepared = split_prepare(g)
    assert main.output_names == ["table"]
    assert op_names(main) == []
    assert op_names(prepared) == ["exp"]
