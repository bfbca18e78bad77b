"""Epilogue fusion of matmuls, decomposed activations, gated linear units, shared inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_support import assert_same_results, fused, op_names, reasons

import rlx.passes.fusion as fuse_package
from rlx.errors import OptionError
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.op import REGISTRY, Op
from rlx.ir.op import op as op_record
from rlx.ir.quant.scheme import QuantScheme, encode
from rlx.ir.shape import Shape
from rlx.passes.fusion import FUSIONS, add_rules, fuse
from rlx.passes.fusion.linear import ACTIVATION, formula_pattern
from rlx.passes.pattern import Capture, Match, OpPattern, op
from rlx.passes.prepare import split_prepare
from rlx.passes.rewrite import Rule

Build = Callable[[Graph, Value], Any]


def matmul_graph(dtype: str = "f32") -> tuple[Graph, Value, Value]:
    """(graph, x, x·w)"""
    g = Graph("linear")
    x = g.input("x", ["batch", "seq", 8], dtype)
    return g, x, g.matmul(x, g.param("w", [8, 6], dtype))


def only(graph: Graph, kind: str) -> Any:
    """The record of the one node of that kind."""
    (node,) = [n for n in graph.nodes if n.op.name == kind]
    return node.op


# -- activations -----------------------------------------------------------------------------

TANH = math.sqrt(2 / math.pi)
WRITTEN_OUT: list[tuple[str, Build]] = [
    ("silu", lambda g, x: x * g.sigmoid(x)),
    ("silu", lambda g, x: g.sigmoid(x) * x),
    ("silu", lambda g, x: x / (1.0 + g.exp(-x))),
    ("silu", lambda g, x: x * (1.0 / (1.0 + g.exp(-x)))),
    ("sigmoid", lambda g, x: 1.0 / (g.exp(-x) + 1.0)),
    ("sigmoid", lambda g, x: g.reciprocal(g.exp(-x) + 1.0)),
    ("gelu", lambda g, x: 0.5 * x * (1.0 + g.erf(x / math.sqrt(2)))),
    ("gelu", lambda g, x: x * 0.5 * (1.0 + g.erf(x * math.sqrt(0.5)))),
    ("gelu", lambda g, x: x * ((1.0 + g.erf(x / math.sqrt(2))) * 0.5)),
    ("gelu", lambda g, x: (x * (1.0 + g.erf(x / math.sqrt(2)))) / 2.0),
    ("gelu_tanh", lambda g, x: 0.5 * x * (1.0 + g.tanh(TANH * (x + 0.044715 * g.pow(x, 3.0))))),
    ("gelu_tanh", lambda g, x: 0.5 * x * (1.0 + g.tanh(TANH * (x + 0.044715 * (x * x * x))))),
    ("gelu_tanh", lambda g, x: 0.5 * x * (1.0 + g.tanh(TANH * x * (1.0 + 0.044715 * (x * x))))),
    ("gelu_quick", lambda g, x: x * g.sigmoid(1.702 * x)),
    ("relu", lambda g, x: g.maximum(x, 0.0)),
]


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("kind", "build"), WRITTEN_OUT)
def test_activations_written_out(kind: str, build: Build, dtype: str) -> None:
    g = Graph("act")
    g.set_outputs(build(g, g.input("x", ["n", 4], dtype)))
    after, _ = fused(g, "activations")
    assert op_names(after) == [kind]


NEARLY: list[Build] = [
    lambda g, x: x * g.sigmoid(x * 1.7),  # not 1.702
    lambda g, x: 0.5 * x * (1.0 + g.erf(x / 1.5)),
    lambda g, x: 0.5 * x * (2.0 + g.erf(x / math.sqrt(2))),
    lambda g, x: 0.5 * x * (1.0 + g.tanh(0.8 * (x + 0.044715 * g.pow(x, 3.0)))),
    lambda g, x: x * g.sigmoid(g.neg(x)),
]


@pytest.mark.parametrize("build", NEARLY)
def test_other_numbers_are_other_functions(build: Build) -> None:
    g = Graph("act")
    g.set_outputs(build(g, g.input("x", ["n", 4])))
    after, report = fused(g, "activations")
    assert not report.fused
    assert len(op_names(after)) > 1


def test_an_inner_value_that_is_an_output_is_not_fused_and_the_report_says_so() -> None:
    g = Graph("act")
    x = g.input("x", ["n", 4])
    s = g.sigmoid(x)
    g.set_outputs(x * s, s)
    after, report = fused(g, "activations")
    assert op_names(after) == ["sigmoid", "mul"]
    assert reasons(report, "decomposed silu") == ["the sigmoid inside is a graph output"]


# -- matmul + bias + activation + residual -----------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu", "tanh", "exp", "softplus"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_everything_after_a_matmul_becomes_one_op(
    dtype: str, activation: str, has_bias: bool, has_residual: bool
) -> None:
    g, _, y = matmul_graph(dtype)
    if has_bias:
        y = g.param("b", [6], dtype) + y
    if activation != "none":
        y = g.apply(activation, y)
    if has_residual:
        y = g.input("r", ["batch", "seq", 6], dtype) + y
    g.set_outputs(y)
    after, _ = fused(g, "linear")
    if activation == "none" and not has_bias and not has_residual:
        assert op_names(after) == ["matmul"]
        return
    assert op_names(after) == ["fused_matmul_bias_act"]
    record = only(after, "fused_matmul_bias_act")
    assert record.attributes() == {
        "activation": activation, "has_bias": has_bias, "has_residual": has_residual,
        "strassen": False,
    }  # fmt: skip


def test_a_bias_of_higher_rank_is_flattened() -> None:
    g, _, y = matmul_graph()
    g.set_outputs(y + g.param("b", [1, 1, 6]))
    after, _ = fused(g, "linear")
    assert op_names(after) == ["reshape", "fused_matmul_bias_act"]


def test_the_sum_of_two_matmuls_uses_one_as_the_residual_of_the_other() -> None:
    g, x, y = matmul_graph()
    g.set_outputs(y + g.matmul(x, g.param("v", [8, 6])))
    after, _ = fused(g, "linear")
    assert sorted(op_names(after)) == ["fused_matmul_bias_act", "matmul"]


def test_where_one_matmul_has_another_user_the_other_one_is_fused() -> None:
    g, x, y = matmul_graph()
    z = g.matmul(x, g.param("v", [8, 6]))
    g.set_outputs(y + z, y)
    after, _ = fused(g, "linear")
    node = next(n for n in after.nodes if n.op.name == "fused_matmul_bias_act")
    assert node.inputs[1].node.name == "v"
    assert node.inputs[2].node.op.name == "matmul"


@pytest.mark.parametrize("how", ["user", "output"])
def test_a_matmul_with_another_user_is_left_alone(how: str) -> None:
    g, _, y = matmul_graph()
    total = y + g.param("b", [6])
    g.set_outputs(total, y if how == "output" else g.exp(y))
    after, report = fused(g, "linear")
    assert "fused_matmul_bias_act" not in op_names(after)
    why = "has another user" if how == "user" else "is a graph output"
    assert f"the matmul inside {why}" in reasons(report, "matmul + bias")


def test_an_activation_with_other_attributes_is_not_a_name() -> None:
    g, _, y = matmul_graph()
    g.set_outputs(g.leaky_relu(y, alpha=0.3))
    after, report = fused(g, "linear")
    assert op_names(after) == ["matmul", "leaky_relu"]
    assert "not the default leaky_relu" in reasons(report, "matmul + activation")[0]
    g.set_outputs(g.leaky_relu(y))
    assert op_names(fused(g, "linear")[0]) == ["fused_matmul_bias_act"]


REFUSED: dict[str, Callable[[], Graph]] = {}


def refused(build: Callable[[], Graph]) -> Callable[[], Graph]:
    REFUSED[build.__name__] = build
    return build


@refused
def a_residual_that_broadcasts() -> Graph:
    g, _, y = matmul_graph()
    return g.set_outputs(y + g.input("r", ["seq", 6]))


@refused
def a_bias_of_a_wider_type() -> Graph:
    """The product is rounded to f16 before the f32 sum; the fused op would not do that."""
    g, _, y = matmul_graph("f16")
    return g.set_outputs(y + g.param("b", [6], "f32"))


@refused
def a_residual_of_a_wider_type() -> Graph:
    g, _, y = matmul_graph("f16")
    return g.set_outputs(y + g.input("r", ["batch", "seq", 6], "f32"))


@refused
def a_batched_product() -> Graph:
    g = Graph("batched")
    x = g.input("x", ["batch", "seq", 8])
    w = g.input("w", ["batch", 8, 6])
    return g.set_outputs(g.relu(g.matmul(x, w)))


@refused
def an_integer_product() -> Graph:
    g = Graph("ints")
    x = g.input("x", ["n", 8], "i32")
    return g.set_outputs(g.add(g.matmul(x, g.param("w", [8, 6], "i32")), g.param("b", [6], "i32")))


@refused
def a_bias_per_row() -> Graph:
    g, _, y = matmul_graph()
    return g.set_outputs(y + g.input("b", ["seq", 1]))


@pytest.mark.parametrize("name", REFUSED)
def test_not_a_linear_layer(name: str) -> None:
    graph = REFUSED[name]()
    after, report = fused(graph, "linear", exact=True)
    assert "fused_matmul_bias_act" not in op_names(after)
    assert not report.fused


def test_lora_written_out() -> None:
    g, x, y = matmul_graph()
    adapter = g.matmul(g.matmul(x, g.param("a", [8, 2])), g.param("b", [2, 6])) * 0.5
    g.set_outputs(y + adapter)
    after, _ = fused(g, "linear")
    assert op_names(after) == ["lora_matmul"]
    assert only(after, "lora_matmul").scale == 0.5


def test_the_bias_of_a_convolution() -> None:
    g = Graph("conv")
    x = g.input("x", ["n", 3, 5, 5])
    y = g.conv(x, g.param("w", [4, 3, 2, 2]))
    g.set_outputs(y + g.param("b", [4, 1, 1]))
    after, _ = fused(g, "linear")
    assert op_names(after) == ["reshape", "conv"]
    g.set_outputs(y + g.param("c", [4]))  # broadcasts over the last axis, not over channels
    assert "add" in op_names(fused(g, "linear")[0])


# -- gates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "sigmoid", "none"])
def test_gated_linear_units(activation: str, dtype: str) -> None:
    g, x, gate = matmul_graph(dtype)
    if activation != "none":
        gate = g.apply(activation, gate)
    g.set_outputs(g.matmul(x, g.param("up", [8, 6], dtype)) * gate)
    after, report = fused(g, "glu")
    assert op_names(after) == ["fused_swiglu"]
    node = after.outputs[0].node
    assert node.op.activation == activation  # type: ignore[attr-defined]
    if activation != "none":
        assert [v.node.name for v in node.inputs] == ["x", "w", "up"]
    assert report.count("gated linear unit") == 1


def test_a_gate_with_biases_is_one_matmul_and_prepare_joins_the_weights() -> None:
    g, x, gate = matmul_graph()
    gate = g.silu(gate + g.param("gb", [6]))
    up = g.matmul(x, g.param("up", [8, 6])) + g.param("ub", [6])
    g.set_outputs(gate * up)
    after, _ = fused(g, "glu", "linear")
    assert sorted(op_names(after)) == [
        "concat",
        "concat",
        "fused_gated_act",
        "fused_matmul_bias_act",
    ]
    main, prepared = split_prepare(after)
    assert op_names(main) == ["fused_matmul_bias_act", "fused_gated_act"]
    assert op_names(prepared) == ["concat", "concat"]


def test_halves_of_one_matmul() -> None:
    g, x, _ = matmul_graph()
    both = g.matmul(x, g.param("both", [8, 12]))
    gate, up = (g.narrow(both, axis=2, start=s, length=6) for s in (0, 6))
    g.set_outputs(g.gelu(gate) * up)
    after, _ = fused(g, "glu")
    assert op_names(after) == ["matmul", "fused_gated_act"]


@pytest.mark.parametrize(
    ("start", "length"), [(0, 6), (4, 6)], ids=["the same half twice", "overlapping"]
)
def test_pieces_that_are_not_halves(start: int, length: int) -> None:
    g, x, _ = matmul_graph()
    both = g.matmul(x, g.param("both", [8, 12]))
    gate, up = (g.narrow(both, axis=2, start=s, length=length) for s in (0, start))
    g.set_outputs(g.gelu(gate) * up)
    after, _ = fused(g, "glu")
    assert "fused_gated_act" not in op_names(after)


def quantised(
    g: Graph, name: str, scheme: QuantScheme
) -> tuple[list[Value], dict[str, np.ndarray]]:
    rng = np.random.default_rng(len(name))
    parts = encode(scheme, rng.standard_normal((6, 32)).astype(np.float32))
    arrays = {f"{name}{i}": a for i, a in enumerate(parts) if a is not None}
    return [g.param(k, a.shape, a.dtype) for k, a in arrays.items()], arrays


@pytest.mark.parametrize("name", ["int8", "int8_b32_asym", "Q8_0"])
def test_quantised_matmuls_of_one_input_share_it(name: str) -> None:
    scheme = QuantScheme.parse(name)
    g = Graph("quant")
    x = g.input("x", ["n", 32])
    data: dict[str, np.ndarray] = {}
    results = []
    for weight in ("q", "kk"):
        parts, arrays = quantised(g, weight, scheme)
        data |= arrays
        results.append(g.dequant_matmul(x, *parts, scheme=scheme))
    g.set_outputs(results)
    after = FUSIONS["shared_input"](g.copy(), None, None)
    assert op_names(after).count("dequant_matmul") == 1
    assert op_names(after).count("narrow") == 2
    assert_same_results(g, after, given=data)
    g.set_outputs(g.silu(results[0]) * results[1])
    gated = FUSIONS["glu"](g.copy(), None, None)
    assert op_names(gated).count("dequant_matmul") == 1
    assert op_names(gated)[-1] == "fused_gated_act"
    assert_same_results(g, gated, given=data)


# -- one input, several weights ----------------------------------------------------------------


def three(dtype: str = "f32") -> tuple[Graph, Value, list[Value]]:
    g = Graph("qkv")
    x = g.input("x", ["batch", "seq", 8], dtype)
    return g, x, [g.matmul(x, g.param(n, [8, s], dtype)) for n, s in (("q", 6), ("k", 4), ("v", 2))]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_matmuls_of_one_input_become_one(dtype: str) -> None:
    g, _, parts = three(dtype)
    g.set_outputs(parts)
    after, report = fused(g, "shared_input")
    assert op_names(after) == ["concat", "matmul", "narrow", "narrow", "narrow"]
    assert report.count("matmuls sharing their input") == 1
    main, prepared = split_prepare(after)
    assert op_names(main) == ["matmul", "narrow", "narrow", "narrow"]
    assert [n.name for n in main.sources("param")] == prepared.output_names


def test_biases_join_too_and_a_missing_one_is_zeros() -> None:
    g, _, (q, k, v) = three()
    g.set_outputs(q + g.param("qb", [6]), k, v + g.param("vb", [2]))
    after, _ = fused(g, "linear", "shared_input")
    assert op_names(after).count("fused_matmul_bias_act") == 1
    assert "matmul" not in op_names(after)


def test_matmuls_with_different_activations_do_not_join() -> None:
    g, _, (q, k, v) = three()
    g.set_outputs(g.relu(q), g.relu(k), v)
    after, _ = fused(g, "linear", "shared_input")
    assert sorted(k for k in op_names(after) if "matmul" in k) == [
        "fused_matmul_bias_act",
        "matmul",
    ]


def test_weights_that_are_not_parameters_do_not_join() -> None:
    g, x, (q, *_) = three()
    g.set_outputs(q, g.matmul(x, g.input("w", [8, 3])))
    after, report = fused(g, "shared_input")
    assert op_names(after) == ["matmul", "matmul"]
    assert reasons(report, "matmuls sharing their input") == ["a weight is not a parameter"]


def test_a_weight_used_elsewhere_is_not_kept_twice() -> None:
    g = Graph("tied")
    table = g.param("table", [10, 8])
    x = g.gather(table, g.input("ids", ["n"], "i32"))
    logits = g.matmul(x, g.transpose(table, axes=(1, 0)))
    g.set_outputs(logits, g.matmul(x, g.param("w", [8, 3])), g.matmul(x, g.param("v", [8, 3])))
    after, report = fused(g, "shared_input")
    assert op_names(after).count("matmul") == 2
    (why,) = reasons(report, "matmuls sharing their input")
    assert "kept twice" in why


def test_transposed_weights_join() -> None:
    g = Graph("hf")
    x = g.input("x", ["n", 8])
    g.set_outputs([g.matmul(x, g.transpose(g.param(n, [4, 8]), axes=(1, 0))) for n in "ab"])
    after, _ = fused(g, "shared_input")
    assert op_names(after).count("matmul") == 1
    main, _ = split_prepare(after)
    assert op_names(main) == ["matmul", "narrow", "narrow"]


def test_matmuls_stay_what_they_were_asked_to_be() -> None:
    """Activation, residual and a shared input keep `strassen`; products without it stay apart."""
    g = Graph()
    x, r = g.input("x", ("rows", 8)), g.input("r", ("rows", 4))
    first, second, third = (g.param(name, (8, 4)) for name in "uvw")
    asked = g.fused_matmul_bias_act(x, first, strassen=True)
    both = [g.fused_matmul_bias_act(x, w, strassen=s) for w, s in ((second, True), (third, False))]
    g.set_outputs(g.add(g.relu(asked), r), *both)
    after, _ = fused(g, "linear", "shared_input")
    records = [n.op for n in after.nodes if n.op.name == "fused_matmul_bias_act"]
    found = {(r.activation, r.has_residual, r.strassen) for r in records}
    assert found == {("relu", True, True), ("none", False, True), ("none", False, False)}


# -- rules that are made of the registry ------------------------------------------------------


def test_rules_of_a_fusion_can_be_added() -> None:
    def doubled(m: Match) -> Any:
        return m.g.mul(m.x, 2.0)

    with pytest.raises(OptionError, match="no such table"):
        add_rules("nothing", Rule("x + x", op("add", "x", "x"), doubled))
    add_rules("linear", Rule("test: x + x", op("add", "x", "x"), doubled))
    try:
        g = Graph("twice")
        x = g.input("x", [4])
        g.set_outputs(g.add(x, x))
        assert [n.op.name for n in fuse(g).nodes][-1] == "mul"
    finally:
        fuse_package._added.clear()
        fuse_package._joined.cache_clear()


def test_the_pattern_of_an_activation_is_its_formula() -> None:
    pattern = formula_pattern(REGISTRY["gelu_quick"]())
    assert pattern.ops == {"mul"} and pattern.swaps
    x, gate = pattern.parts
    assert isinstance(x, Capture) and isinstance(gate, OpPattern)
    assert gate.ops == {"sigmoid"}


def test_attributes_are_part_of_a_formula() -> None:
    @op_record("test_hard_tanh", is_elementwise=True, fuses_formula=True)
    class HardTanh(Op):
        """x limited to −1 … 1"""

        def infer(self, x: Shape) -> Shape:
            return x

        def reference(self, x: Any) -> Any:
            return np.clip(x, -1, 1)

        def decompose(self, g: Graph, x: Value) -> Any:
            return g.clamp(x, low=-1.0, high=1.0)

    try:
        g = Graph("limits")
        x = g.input("x", [4])
        g.set_outputs(g.clamp(x, low=-1.0, high=1.0), g.clamp(x, low=-2.0, high=2.0))
        assert op_names(fuse(g, only=["activations"])) == ["test_hard_tanh", "clamp"]
    finally:
        del REGISTRY["test_hard_tanh"]
        ACTIVATION.pop()
