"""The whole list: blocks come out as fused ops, prepared once, legal for a device; reports."""

from __future__ import annotations

from time import process_time
from typing import Any

import numpy as np
import pytest
from pass_support import op_names
from sequence_cases import CASES, SIZES
from test_lower_hir import DIRECT_OP, built

from rlx.errors import OptionError, VerifyError
from rlx.ir.dim import sym
from rlx.ir.graph import Graph
from rlx.ir.hir import HirModule
from rlx.ir.interp import evaluate, run
from rlx.ir.node import Origin
from rlx.passes.pipeline import NAMES, PIPELINE, PipelineResult, run_pipeline
from rlx.passes.report import FusionReport
from rlx.passes.rewrite import Editor

VIEWS = {"reshape", "transpose", "narrow", "expand"}


def run_result(
    result: PipelineResult, given: dict[str, np.ndarray], sizes: Any
) -> list[np.ndarray]:
    """A run as a device does it: preparation first, then the graph."""
    data = dict(given)
    if result.prepare is not None:
        names = [n.name for n in result.prepare.sources("param")]
        made = evaluate(result.prepare, {k: given[k] for k in names})
        data |= dict(zip(result.prepare.output_names, made, strict=True))
    known = [n.name for n in result.graph.nodes if n.op.name in ("input", "param", "state")]
    return run(result.graph, {k: data[k] for k in known}, sizes).outputs


# -- blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["everything", "primitives"])
@pytest.mark.parametrize("policy", ["direct", "fusable"])
@pytest.mark.parametrize("name", CASES)
def test_every_block_computes_the_same_after_all_passes(
    name: str, policy: str, device: str
) -> None:
    case = CASES[name]
    module = built(case)
    sizes = {s: SIZES[s] for s in module.symbols()}
    plain = evaluate(module.lower(policy), case.arrays, sizes)
    native = (lambda n: True) if device == "everything" else _is_primitive
    result = run_pipeline(module, policy=policy, has_native=native)
    for got, want in zip(run_result(result, case.arrays, sizes), plain, strict=True):
        assert got.dtype == want.dtype
        # sums of at most 64 f32 terms in another order
        bound = 64 * 2.0**-24 * max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got, want, rtol=0, atol=bound)


def _is_primitive(node: Any) -> bool:
    return not node.op.has_decomposition() or node.op.name == "dequant_moe_weights"


# loops are not read backwards into the op they compute
NOT_RECOGNISED = {"gated_delta_net", "depthwise_conv1d_causal"}


@pytest.mark.parametrize("name", sorted(set(DIRECT_OP) - NOT_RECOGNISED))
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_primitives_come_back_as_the_ops_of_the_direct_lowering(name: str, dtype: str) -> None:
    module = built(CASES[name], None if dtype == "f32" else dtype)
    direct, fusable = (run_pipeline(module, policy=p) for p in ("direct", "fusable"))
    found, expected = (
        [n.op for n in r.graph.nodes if not n.op.is_source and n.op.name not in VIEWS]
        for r in (fusable, direct)
    )
    assert [o.name for o in found] == [o.name for o in expected]
    assert DIRECT_OP[name] in [o.name for o in found]


# -- a layer with a cache ----------------------------------------------------------------------


def decoder(layers: int = 2) -> HirModule:
    """A small decoder with grouped heads, qk-norm, rope and a cache."""
    m = HirModule("decoder")
    width, heads, kv, head, hidden, most = 16, 4, 2, 4, 24, 12
    x = m.input("x", ["batch", "seq", width])
    tables = [m.param(n, [most, head // 2]) for n in ("cos", "sin")]
    h, stream = m.rms_norm(x, m.param("first", [width])), x
    for i in range(layers):
        with m.block(f"layers.{i}"):

            def param(name: str, *dims: int, i: int = i) -> Any:
                return m.param(f"{i}.{name}", list(dims))

            q, k, v = (
                m.linear(h, param(n, width, s * head))
                for n, s in (("q", heads), ("k", kv), ("v", kv))
            )
            turn = {"head_dim": head, "offset": sym.PAST_SEQ}
            q = m.qk_norm_rope(q, param("qn", head), *tables, **turn)
            k = m.qk_norm_rope(k, param("kn", head), *tables, **turn)
            k, v = (
                m.cache_append(
                    m.state(f"{i}.{n}", ["batch", most, kv * head]), t, start=sym.PAST_SEQ
                )
                for n, t in (("keys", k), ("values", v))
            )
            sizes = {"num_heads": heads, "num_kv_heads": kv, "head_dim": head}
            a = m.attention(q, k, v, mask_kind="causal", **sizes)
            o = m.linear(a, param("o", heads * head, width))
            h, stream = m.residual_rms_norm(o, stream, param("n1", width))
            f = m.swiglu_ffn(
                h,
                param("up", width, hidden),
                param("gate", width, hidden),
                param("down", hidden, width),
            )
            h, stream = m.residual_rms_norm(f, stream, param("n2", width))
    m.set_outputs(m.linear(h, m.param("head", [width, 10])))
    return m


def arguments(graph: Graph, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    made = {}
    for node in graph.nodes:
        if node.op.name in ("input", "param", "state"):
            dims = node.output.shape.bind(sizes).static_dims
            made[node.name] = rng.normal(size=dims).astype(np.float32)
    return made


@pytest.mark.parametrize("policy", ["direct", "fusable"])
def test_a_decoder_with_a_cache(policy: str) -> None:
    module = decoder()
    sizes = {"batch": 2, "seq": 3, "past_seq": 4}
    plain = module.lower(policy)
    data = arguments(plain, sizes)
    before = run(plain, data, sizes)
    result = run_pipeline(module, policy=policy, has_native=lambda n: True)
    np.testing.assert_allclose(
        run_result(result, data, sizes)[0], before.outputs[0], rtol=1e-4, atol=1e-4
    )
    found = [k for k in op_names(result.graph) if k not in VIEWS]
    layer = [
        "matmul", "fused_qk_norm_rope", "fused_qk_norm_rope", "state_update", "state_update",
        "attention", "matmul", "fused_residual_rms_norm", "fused_swiglu", "matmul",
        "fused_residual_rms_norm",
    ]  # fmt: skip
    assert sorted(found) == sorted(["rms_norm", *layer * 2, "matmul"])
    assert result.fusion_report.count("matmuls sharing their input") == 2
    assert result.prepare is not None
    assert op_names(result.prepare) == ["concat"] * 2


def test_states_hold_the_same_after_a_run() -> None:
    module = decoder(1)
    sizes = {"batch": 1, "seq": 2, "past_seq": 1}
    plain = module.lower("fusable")
    fused = run_pipeline(module, policy="fusable", passes=["simplify", "fuse", "dce"]).graph
    data = arguments(plain, sizes)
    a, b = (run(g, data, sizes) for g in (plain, fused))
    assert a.states.keys() == b.states.keys() == {"0.keys", "0.values"}
    for name in a.states:
        np.testing.assert_allclose(a.states[name], b.states[name], rtol=1e-5, atol=1e-5)


# -- the list itself ---------------------------------------------------------------------------


def small() -> Graph:
    g = Graph("small")
    x = g.input("x", ["n", 4])
    with g.block("layer"):
        y = g.relu(g.matmul(x, g.param("w", [4, 4])) + g.param("b", [4]))
        y = g.tanh(y * 1.0) * 2.0 + 0.5
    return g.set_outputs(y)


def test_the_graph_given_stays_as_it_was() -> None:
    g = small()
    before = g.copy()
    run_pipeline(g)
    assert g.same_as(before)


def test_every_stage_is_shown_and_timed() -> None:
    stages: list[tuple[str, int]] = []
    result = run_pipeline(small(), on_stage=lambda name, graph: stages.append((name, len(graph))))
    assert [s[0] for s in stages] == [p.name for p in PIPELINE]
    assert [(s.name, s.nodes) for s in result.trace] == stages
    assert all(s.seconds > 0 for s in result.trace)
    assert result.seconds < 1
    assert "fuse.linear" in result.explain()


def test_a_transformer_of_three_thousand_nodes_takes_half_a_second_at_most() -> None:
    graph = decoder(28).lower("fusable")
    assert len(graph) >= 2900

    def once() -> float:
        start = process_time()  # other work on the machine does not count
        run_pipeline(graph, has_native=lambda n: True)
        return process_time() - start

    assert min(once() for _ in range(3)) <= 0.5  # measured: 0.1 to 0.15


def test_passes_can_be_chosen_by_name() -> None:
    named = run_pipeline(small(), passes=["simplify"])
    assert [s.name for s in named.trace if s.name == "simplify"] == ["simplify", "simplify"]
    assert not any(s.name.startswith("fuse") for s in named.trace)
    assert op_names(named.graph) == ["matmul", "add", "relu", "tanh", "mul", "add"]
    every = run_pipeline(small(), passes=["fuse"])
    assert op_names(every.graph) == ["fused_matmul_bias_act", "elementwise_region"]
    one = run_pipeline(small(), passes=["fuse.linear"])
    assert op_names(one.graph) == ["fused_matmul_bias_act", "mul", "tanh", "mul", "add"]


def test_an_unknown_pass_is_an_error_that_lists_them() -> None:
    with pytest.raises(OptionError, match="unknown pass") as caught:
        run_pipeline(small(), passes=["simplfy"])
    assert caught.value.got == "'simplfy'"
    assert all(name in str(caught.value) for name in NAMES)
    assert "did you mean simplify?" in str(caught.value)


def test_a_fault_names_the_pass_that_made_it() -> None:
    def broken(graph: Graph) -> Graph:
        graph.nodes.reverse()
        return graph

    with pytest.raises(VerifyError, match="after lower"):
        run_pipeline(small(), lower=broken)


def test_the_device_rewrites_before_parameters_are_split_off() -> None:
    def lower(graph: Graph) -> Graph:
        editor = Editor(graph, "device")
        node = next(n for n in graph.nodes if n.op.name == "fused_matmul_bias_act")
        w = node.inputs[1]
        with editor.building(node):
            new = graph.append(node.op, [node.inputs[0], graph.neg(graph.neg(w)), node.inputs[2]])
        editor.replace(node.output, new)
        return editor.finish()

    result = run_pipeline(small(), lower=lower)
    assert result.prepare is not None
    assert op_names(result.prepare) == ["neg", "neg"]


def test_rules_that_fire_are_printed() -> None:
    fired: list[tuple[str, str]] = []
    run_pipeline(small(), on_fire=lambda p, rule, node, new: fired.append((p, rule.name)))
    assert ("simplify", "x * 1") in fired
    assert ("fuse", "matmul + bias") in fired


@pytest.mark.parametrize("precision", ["f16", "bf16"])
def test_precision_runs_matmuls_in_16_bits(precision: str) -> None:
    g = small()
    result = run_pipeline(g, precision=precision)
    products = [n for n in result.graph.nodes if "matmul" in n.op.name]
    assert all(v.shape.dtype.name == precision for n in products for v in n.inputs)
    assert result.graph.outputs[0].shape is g.outputs[0].shape
    assert result.prepare is not None
    assert set(op_names(result.prepare)) == {"cast"}  # weights are cast once
    data = arguments(g, {"n": 3})
    exact = evaluate(g, data)[0]
    # 8 or 11 bits of mantissa in sums of four products and a bias of size about 1
    np.testing.assert_allclose(
        run_result(result, data, {"n": 3})[0], exact, atol=0.1 if precision == "bf16" else 0.01
    )
    with pytest.raises(OptionError, match="not a precision"):
        run_pipeline(g, precision="i8")


def test_casts_between_matmuls_cancel() -> None:
    g = Graph("two")
    x = g.input("x", ["n", 4])
    h = g.matmul(x, g.param("a", [4, 4]))
    g.set_outputs(g.matmul(h, g.param("b", [4, 4])))
    result = run_pipeline(g, precision="f16")
    assert op_names(result.graph) == ["cast", "matmul", "matmul", "cast"]


def test_regions_that_a_device_does_not_run_are_taken_apart() -> None:
    result = run_pipeline(small(), has_native=lambda n: n.op.name != "elementwise_region")
    assert "elementwise_region" not in op_names(result.graph)
    assert result.dispatch_report.outcome("elementwise_region") == {"rewritten"}


# -- the fusion report -------------------------------------------------------------------------


def test_the_fusion_report_reads_like_a_report() -> None:
    report = FusionReport()
    for i in range(5):
        report.add("matmul + bias", Origin(f"layers.{i}.mlp"))
    report.miss("matmul + bias", "the matmul inside has another user", Origin("layers.5.mlp"))
    report.miss("residual + norm", "the sum broadcasts", Origin("", "net.py", 7))
    assert str(report).splitlines() == [
        "fused:",
        "  matmul + bias: 5 × in layers.0.mlp, layers.1.mlp, layers.2.mlp, … (5 blocks)",
        "nearly fused:",
        "  matmul + bias: the matmul inside has another user; 1 × in layers.5.mlp",
        "  residual + norm: the sum broadcasts; 1 × in net.py:7",
    ]
    assert str(FusionReport()) == "fused: nothing"


def test_misses_of_nodes_that_fused_otherwise_are_not_reported() -> None:
    g = Graph("later")
    x = g.input("x", ["n", 4])
    y = g.matmul(x, g.param("w", [4, 4]))
    z = g.matmul(x, g.param("v", [4, 4]))
    g.set_outputs(y + z, g.exp(z))  # z cannot be fused into the sum, y can
    report = run_pipeline(g).fusion_report
    assert report.count("matmul + residual") == 1
    assert not [m for m in report.missed if m.rule == "matmul + residual"]
