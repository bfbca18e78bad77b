"""Elementwise ops from 8-bit tensors to 8-bit tensors as tables: the same numbers as without."""

from __future__ import annotations

import numpy as np
import pytest
from program_support import TARGETS, Native, kernels_for, reference

from rlx.backends.cpu.kernels.loops.byte_lookup import tabulate
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.ir.ops.conv_integer import integer_range
from rlx.llvm.target import Target
from rlx.passes.prepare import split_prepare


def make(shape=(2, 30, 7), given="u8", result="i8", other_users=False):
    """x dequantised, hard-swished and quantised again."""
    g, info = Graph(), np.iinfo(DType.of(given).numpy)
    rng = np.random.default_rng(5)
    arrays = {
        "x": rng.integers(info.min, info.max, shape, endpoint=True).astype(info.dtype),
        "scale": np.float32([0.05]), "zero": np.array([3], info.dtype), "to": np.float32(0.03),
    }  # fmt: skip
    x = g.input("x", shape, given)
    scale, zero = g.param("scale", (1,)), g.cast(g.param("zero", (1,), given), "i32")
    real = g.mul(g.cast(g.sub(g.cast(x, "i32"), zero), "f32"), scale)
    active = g.mul(real, g.clamp(g.add(g.mul(real, 1 / 6), 0.5), low=0.0, high=1.0))
    low, high = (float(n) for n in integer_range(DType.of(result)))
    near = g.round(g.div(active, g.param("to", ())))
    y = g.cast(g.clamp(near, low=low, high=high), result)
    outputs = (y, real) if other_users else (y,)
    return g.set_outputs(*outputs), arrays


@pytest.mark.parametrize("types", [("u8", "i8"), ("i8", "u8"), ("i8", "i8")])
@pytest.mark.parametrize("shape", [(2, 30, 7), (3,), (1, 20000), (0, 4)])
def test_results_are_those_of_the_ops(shape, types):
    for target in TARGETS:
        graph, arrays = make(shape, *types)
        [want] = reference(graph, arrays)
        main, prepared = split_prepare(tabulate(graph, target))
        assert [n.op.name for n in main.nodes if not n.op.is_source] == ["byte_lookup"]
        tables = evaluate(prepared, {k: v for k, v in arrays.items() if k != "x"})
        given = {"x": arrays["x"]} | dict(zip(prepared.output_names, tables, strict=True))
        np.testing.assert_array_equal(evaluate(main, given)[0], want)
        for workers in (1, 3):
            found = Native(main, target, workers, {}).run(given)[0]
            np.testing.assert_array_equal(found, want)


def test_other_results_of_the_chain_stay():
    graph, arrays = make(other_users=True)
    want = reference(graph, arrays)
    made = tabulate(graph, TARGETS[0])
    assert "byte_lookup" in {n.op.name for n in made.nodes}
    for a, b in zip(evaluate(made, arrays), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_function_of_x_times_x_is_one_table():
    """As tools write x · hard_sigmoid(x): the factor is quantised before the product."""
    for target in TARGETS:
        g = Graph()
        x = g.input("x", (300,), "i8")
        real = g.mul(g.cast(x, "f32"), 0.04)
        gate = g.clamp(g.add(g.mul(real, 1 / 6), 0.5), low=0.0, high=1.0)
        code = g.cast(g.clamp(g.round(g.mul(gate, 255.0)), low=0.0, high=255.0), "u8")
        both = g.mul(real, g.mul(g.cast(code, "f32"), 1 / 255))
        g.set_outputs(g.cast(g.clamp(g.round(g.div(both, 0.03)), low=-128.0, high=127.0), "i8"))
        arrays = {"x": np.arange(300).astype(np.int8)}
        [want] = reference(g, arrays)
        main, prepared = split_prepare(tabulate(g, target))
        assert [n.op.name for n in main.nodes if not n.op.is_source] == ["byte_lookup"]
        tables = zip(prepared.output_names, evaluate(prepared, {}), strict=True)
        found = Native(main, target, 2, {}).run(arrays | dict(tables))[0]
        np.testing.assert_array_equal(found, want)


def test_two_tensors_have_no_table():
    g = Graph()
    a, b = g.input("a", (4, 5), "u8"), g.input("b", (4, 5), "u8")
    both = g.add(g.cast(a, "f32"), g.cast(b, "f32"))
    g.set_outputs(g.cast(g.clamp(g.round(g.mul(both, 0.5)), low=0.0, high=255.0), "u8"))
    assert "byte_lookup" not in {n.op.name for n in tabulate(g, TARGETS[0]).nodes}


def test_a_scale_for_each_channel_has_no_table():
    g = Graph()
    x, scale = g.input("x", (4, 5), "u8"), g.param("s", (5,))
    real = g.mul(g.cast(x, "f32"), scale)
    g.set_outputs(g.cast(g.clamp(g.round(g.mul(real, 0.5)), low=0.0, high=255.0), "u8"))
    assert "byte_lookup" not in {n.op.name for n in tabulate(g, TARGETS[0]).nodes}


@pytest.mark.parametrize("name", ["x86-64-v3", "znver4", "aarch64"])
def test_other_targets(name):
    target = Target.named(name)
    main, _ = split_prepare(tabulate(make()[0], target))
    assert kernels_for(main, name) >= 1
