"""Blocks become ops: the same numbers under both policies, stamped from one template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sequence_cases import CASES, SIZES, Case

from rlx.errors import OptionError, VerifyError
from rlx.ir import hir
from rlx.ir.graph import Graph
from rlx.ir.hir import REGISTERED, Block, FusionPolicy, HirModule, block
from rlx.ir.interp import evaluate, run
from rlx.ir.module import GraphModule
from rlx.ir.node import Value
from rlx.ir.op import REGISTRY
from rlx.ir.verify import verify
from rlx.passes.pipeline import lower_hir

POLICIES = list(FusionPolicy)
# what a fusable lowering may be made of; the last line are ops that have no primitive form
PRIMITIVE_GROUPS = {"elementwise", "binary", "reduce", "layout", "matmul", "source"}
KEPT = {"conv", "dequant_matmul", "dequant_gather", "scan", "state_update"}


def built(case: Case, dtype: Any = None) -> HirModule:
    m = HirModule("case")
    values = []
    for i, (name, dims) in enumerate(case.shapes.items()):
        element = case.arrays[name].dtype if dtype is None else dtype
        values.append((m.param if i else m.input)(name, dims, element))
    results = case.build(m, *values)
    return m.set_outputs(*(results if isinstance(results, tuple) else (results,)))


def sizes_of(graph: Graph) -> dict[str, int]:
    return {s: SIZES[s] for s in graph.symbols()}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_block_computes_its_formula(name: str, policy: FusionPolicy) -> None:
    case = CASES[name]
    graph = lower_hir(built(case), policy)
    verify(graph, after="lower_hir")
    results = evaluate(graph, case.arrays, sizes_of(graph))
    wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in case.arrays.values()]
    expected = case.formula(*wide)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == np.float32 and got.shape == want.shape
        # f32 against f64: chains of at most 64 terms, each off by 2^-24 of the largest magnitude
        bound = 64 * 2.0**-24 * max(1.0, np.abs(want).max())
        assert np.abs(got - want).max() <= bound


def test_every_block_has_a_case() -> None:
    ours = {n for n, c in REGISTERED.items() if c.__module__.startswith("rlx.ir.blocks")}
    assert {name.partition("/")[0] for name in CASES} == ours - {"cache_append"}  # tested below


@pytest.mark.parametrize("name", CASES)
def test_fusable_is_made_of_primitives(name: str) -> None:
    ops = {n.op.name for n in lower_hir(built(CASES[name]), "fusable").nodes}
    foreign = {o for o in ops if REGISTRY[o].group not in PRIMITIVE_GROUPS} - KEPT
    assert foreign <= ({"fused_matmul_bias_act"} if name == "linear_fused" else set())


DIRECT_OP = {
    "linear/bias-gelu": "fused_matmul_bias_act",
    "linear_fused": "fused_matmul_bias_act",
    "swiglu_ffn": "fused_swiglu",
    "geglu_ffn": "fused_swiglu",
    "gelu_ffn": "fused_matmul_bias_act",
    "rms_norm": "rms_norm",
    "layer_norm": "layer_norm",
    "residual_rms_norm": "fused_residual_rms_norm",
    "residual_layer_norm": "fused_residual_layer_norm",
    "attention/causal": "attention",
    "rope": "rope",
    "qk_norm_rope": "fused_qk_norm_rope",
    "lora_linear": "lora_matmul",
    "gated_delta_net": "gated_delta_net",
    "depthwise_conv1d_causal": "depthwise_conv1d_causal",
}


@pytest.mark.parametrize("name", DIRECT_OP)
def test_direct_uses_the_fused_op(name: str) -> None:
    case = CASES[name]
    direct, fusable = (lower_hir(built(case), p) for p in POLICIES)
    assert DIRECT_OP[name] in {n.op.name for n in direct.nodes}
    assert len(direct) <= len(fusable)


def test_a_shared_pair_reads_x_once() -> None:
    graph = lower_hir(built(CASES["shared_linear_pair"]))
    assert [n.op.name for n in graph.nodes if n.op.name == "matmul"] == ["matmul"]


@pytest.mark.parametrize("name", ["rms_norm", "residual_layer_norm", "attention/causal", "rope"])
def test_both_policies_round_16_bit_results_once(name: str) -> None:
    case = CASES[name]
    arrays = {k: a.astype(np.float16) for k, a in case.arrays.items()}
    results = []
    for policy in POLICIES:
        graph = lower_hir(built(case, "f16"), policy)
        results.append(evaluate(graph, arrays, sizes_of(graph)))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype == np.float16
        # computed in f32, so that at most the last rounding falls to the other side: 1 ulp
        assert np.abs(a.astype(float) - b).max() <= 2.0**-10 * np.abs(a.astype(float)).max()


# -- structure --------------------------------------------------------------------------------


def layers(count: int) -> HirModule:
    m = HirModule("stack")
    x = m.input("x", ["batch", "seq", 16])
    gamma, w = m.param("gamma", [16]), m.param("w", [16, 16])
    for i in range(count):
        with m.block(f"layers.{i}"):
            x = m.linear(m.rms_norm(x, gamma), w, activation="silu", name=f"y{i}")
    return m.set_outputs(x)


def test_identical_layers_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = hir._lowered
    monkeypatch.setattr(hir, "_lowered", lambda *a: calls.append(a[0].label) or real(*a))
    monkeypatch.setattr(hir, "_templates", {})
    graph = lower_hir(layers(28), "fusable")
    # a record remembers its inference, so the templates are made here: one per block and policy
    assert len(calls) <= 4 and set(calls) <= {"rms_norm", "linear"}
    verify(graph)
    assert sum(n.op.name == "silu" for n in graph.nodes) == 28
    assert sum(n.op.name == "constant" for n in graph.nodes) == 1  # eps, shared


def test_names_origins_and_outputs_are_kept() -> None:
    m = layers(2)
    graph = lower_hir(m)
    assert graph.output_names == m.output_names == ["y1"]
    assert [n.name for n in graph.nodes if n.name] == ["x", "gamma", "w", "y0", "y1"]
    last = graph.outputs[0].node
    assert last.origin.block == "layers.1.linear"
    assert last.origin.passes == ("lower_hir",)
    assert last.origin.file == __file__
    assert graph.find("w").node.origin.passes == ()


def test_a_graph_without_blocks_comes_back_equal() -> None:
    g = Graph("plain")
    g.set_outputs(g.softmax(g.input("x", ["n", 4])) + 1.0)
    assert lower_hir(g).same_as(g)


def test_nested_graphs_are_lowered_too() -> None:
    def branch(scale: float) -> GraphModule:
        def build(g: Any) -> Any:
            return g.rms_norm(g.input("x", [3, 4]), g.input("gamma", [4])) * scale

        return GraphModule.define("branch", build)

    m = HirModule("outer")
    flag = m.input("flag", [], "bool")
    x, gamma = m.input("x", [3, 4]), m.param("gamma", [4])
    m.set_outputs(m.cond(flag, x, gamma, then=branch(1.0), otherwise=branch(-1.0)))
    graph = lower_hir(m)
    verify(graph)
    bodies = [graph.outputs[0].node.op.then.graph, graph.outputs[0].node.op.otherwise.graph]
    assert all(not n.op.is_block for b in bodies for n in b.nodes)
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = {"x": a, "gamma": np.ones(4, np.float32)}
    (up,) = evaluate(graph, {"flag": np.array(True), **given})
    (down,) = evaluate(graph, {"flag": np.array(False), **given})
    # the one branch is the other negated, exactly; x / rms is the formula
    assert np.array_equal(up, -down)
    assert np.allclose(up, a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-6), atol=1e-6)


def test_unknown_policy() -> None:
    with pytest.raises(OptionError, match=r"unknown fusion policy; got 'fast'.*direct, fusable"):
        lower_hir(Graph("g"), "fast")


def test_lowerings_that_disagree_are_found() -> None:
    @block("lopsided")
    class Lopsided(Block):
        def fusable(self, g: Graph, x: Value) -> Value:
            return g.exp(x)

        def direct(self, g: Graph, x: Value) -> Value:
            return g.sum(x)

    try:
        m = HirModule("m")
        with pytest.raises(VerifyError, match=r"\[lopsided\] the two lowerings"):
            m.lopsided(m.input("x", [3]))
    finally:
        del REGISTRY["hir.lopsided"], REGISTERED["lopsided"]


# -- states -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_carried_state_is_updated_in_place(policy: FusionPolicy) -> None:
    case = CASES["gated_delta_net_carry"]
    m = HirModule("carry")
    values = [m.input(n, d) for n, d in case.shapes.items() if n != "state"]
    state = m.state("memory", case.shapes["state"])
    o, _ = m.gated_delta_net_carry(*values, state)
    m.set_outputs(o)
    graph = lower_hir(m, policy)
    verify(graph)
    assert [n.op.name for n in graph.nodes].count("state_update") == 1
    arrays = {n: a for n, a in case.arrays.items() if n != "state"}
    first = run(graph, {**arrays, "memory": case.arrays["state"]})
    second = run(graph, {**arrays, "memory": first.states["memory"]})
    wide = [a.astype(float) for a in arrays.values()]
    o1, s1 = case.formula(*wide, case.arrays["state"].astype(float))
    o2, s2 = case.formula(*wide, s1)
    for got, want in ((first.outputs[0], o1), (second.outputs[0], o2)):
        assert np.allclose(got, want, atol=2e-5)  # f32 over two passes of 5 steps
    assert np.allclose(second.states["memory"], s2, atol=2e-5)


def test_a_carried_tensor_is_not_written() -> None:
    graph = lower_hir(built(CASES["gated_delta_net_carry"]))
    assert all(n.op.name != "state_update" for n in graph.nodes)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_cache_gives_what_is_filled(policy: FusionPolicy) -> None:
    m = HirModule("cache")
    cache = m.state("keys", ["batch", 8, 4])
    new = m.input("new", ["batch", "seq", 4])
    m.set_outputs(m.cache_append(cache, new, start="past_seq"))
    graph = lower_hir(m, policy)
    verify(graph)
    assert str(graph.outputs[0].shape) == "[batch, past_seq + seq, 4] f32"
    old = np.arange(64, dtype=np.float32).reshape(2, 8, 4)
    update = -np.ones((2, 3, 4), np.float32)
    result = run(graph, {"keys": old, "new": update}, {"past_seq": 2})
    assert np.array_equal(result.outputs[0], np.concatenate([old[:, :2], update], 1))
    assert np.array_equal(result.states["keys"][:, 2:5], update)
    assert np.array_equal(result.states["keys"][:, 5:], old[:, 5:])
