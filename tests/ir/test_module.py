"""GraphModule: every way in, every stage, every question, every wrong stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import InputError, OptionError, StageError
from rlx.ir.graph import Graph
from rlx.ir.hir import REGISTERED, HirModule
from rlx.ir.interp import evaluate
from rlx.ir.lir import Lir
from rlx.ir.module import FusionPolicy, GraphModule, GraphStage
from rlx.passes.plan import plan


def mlp(g: Any) -> Any:
    x = g.input("x", ["batch", 6])
    return g.linear(x, g.param("w", [6, 3]), activation="relu")


def at(stage: str) -> GraphModule:
    module = GraphModule.define("mlp", mlp)
    if stage == "hir":
        return module
    if stage == "mir":
        return module.lower()
    return GraphModule.from_lir(planned())


def planned() -> Lir:
    g = Graph("mlp")
    g.set_outputs(g.matmul(g.input("x", [2, 6]), g.param("w", [6, 3])))
    return plan(g)


STAGES = ["hir", "mir", "lir"]


# -- ways in and stages -----------------------------------------------------------------------


def test_define_gives_hir_and_lower_gives_mir() -> None:
    module = GraphModule.define("mlp", mlp)
    assert module.stage is GraphStage.HIR and module.name == "mlp"
    lowered = module.lower()
    assert lowered.stage is GraphStage.MIR and len(lowered) >= 3
    assert module.stage is GraphStage.HIR  # the module itself is unchanged
    x, w = np.eye(6, dtype=np.float32)[:2], np.arange(-9, 9, dtype=np.float32).reshape(6, 3)
    (y,) = evaluate(lowered.into_graph(), {"x": x, "w": w})
    assert np.array_equal(y, np.maximum(w[:2], 0))


@pytest.mark.parametrize("entry", [Graph.define, rlx.Graph.define, rlx.GraphModule.define])
def test_entry_points_are_the_same(entry: Any) -> None:
    assert entry("mlp", mlp).lower().into_mir().same_as(at("mir").into_mir())
    assert Graph.hir("h").stage is GraphStage.HIR


@pytest.mark.parametrize("many", [tuple, list])
def test_define_takes_several_outputs(many: type) -> None:
    module = GraphModule.define("m", lambda g: many([mlp(g), g.exp(g.find("x"))]))
    assert len(module.outputs) == 2
    named = GraphModule.define("m", lambda g: {"y": mlp(g)})
    assert named.output_names == ["y"]


def test_define_uses_outputs_set_inside() -> None:
    def build(g: GraphModule) -> None:
        g.set_outputs(mlp(g), names=["y"])

    assert GraphModule.define("m", build).output_names == ["y"]
    with pytest.raises(InputError, match=r"\[define\('m'\)\] the function returned nothing"):
        GraphModule.define("m", lambda g: None)


def test_a_module_built_at_mir() -> None:
    m = GraphModule.mir("soft")
    x = m.input("x", ["rows", 4])
    assert m.set_outputs(m.softmax(x * 2.0, axis=-1)) is m
    assert m.stage is GraphStage.MIR and len(m) == 4
    assert m.lower() is m
    (y,) = evaluate(m.as_graph(), [np.zeros((2, 4), np.float32)])
    assert np.array_equal(y, np.full((2, 4), 0.25))


def test_from_hir_takes_modules_and_graphs() -> None:
    hir = HirModule("h")
    hir.set_outputs(mlp(hir))
    assert GraphModule.from_hir(hir).as_hir() is hir
    copied = GraphModule.from_hir(hir.copy())  # as read from a file: a plain graph with blocks
    assert copied.stage is GraphStage.HIR
    assert copied.rms_norm(copied.outputs[0], copied.param("g", [3])).node.op.is_block
    assert copied.lower().stage is GraphStage.MIR


@pytest.mark.parametrize("make", [GraphModule.from_graph, GraphModule.from_mir])
def test_from_graph_takes_mir_only(make: Any) -> None:
    graph = at("mir").into_mir()
    assert make(graph).as_mir() is graph
    with pytest.raises(StageError, match=r"(?s)an HIR block; got hir.linear.*from_hir") as caught:
        make(at("hir").into_hir())
    assert "test_module.py" in str(caught.value)
    with pytest.raises(InputError, match="not a graph"):
        make("graph")


def test_from_mir_takes_an_hir_module_without_blocks() -> None:
    hir = HirModule("h")
    hir.set_outputs(hir.exp(hir.input("x", [2])))
    module = GraphModule.from_mir(hir)
    assert module.stage is GraphStage.MIR and type(module.as_mir()) is Graph


def test_from_lir() -> None:
    lir = planned()
    module = GraphModule.from_lir(lir)
    assert module.stage is GraphStage.LIR and module.name == "mlp" and len(module) == 3
    assert module.lower() is module
    with pytest.raises(InputError, match="not a planned graph"):
        GraphModule.from_lir(lir.graph)


@pytest.mark.parametrize("stage", STAGES)
def test_as_answers_at_its_stage_only(stage: str) -> None:
    module = at(stage)
    found = {k: getattr(module, f"as_{k}")() is not None for k in (*STAGES, "graph")}
    assert found == {
        "hir": stage == "hir",
        "mir": stage != "hir",  # LIR has its MIR inside
        "lir": stage == "lir",
        "graph": stage != "hir",
    }


@pytest.mark.parametrize("stage", STAGES)
def test_into_lowers_where_it_can(stage: str) -> None:
    module = at(stage)
    assert (module.into_hir() is not None) == (stage == "hir")
    assert (module.into_lir() is not None) == (stage == "lir")
    for graph in (module.into_mir(), module.into_graph()):
        assert type(graph) is Graph and not any(n.op.is_block for n in graph.nodes)
    if stage == "lir":
        assert module.into_mir() is module.into_lir().graph


# -- policy -----------------------------------------------------------------------------------


def test_fusion_policy() -> None:
    module = at("hir")
    assert module.fusion_policy is FusionPolicy.DIRECT
    fusable = module.with_fusion_policy("fusable")
    assert fusable.fusion_policy is FusionPolicy.FUSABLE
    assert module.fusion_policy is FusionPolicy.DIRECT
    op_names = [[n.kind for n in m.lower().into_graph().nodes] for m in (module, fusable)]
    assert op_names == [
        ["input", "param", "fused_matmul_bias_act"],
        ["input", "param", "matmul", "relu"],
    ]
    assert fusable.lower().fusion_policy is FusionPolicy.FUSABLE
    assert GraphModule.define("m", mlp, fusion_policy="fusable").fusion_policy.value == "fusable"
    with pytest.raises(OptionError, match="unknown fusion policy"):
        module.with_fusion_policy("eager")


# -- building ---------------------------------------------------------------------------------


def test_finish_hir_and_set_outputs() -> None:
    m = GraphModule.hir("m")
    y = mlp(m)
    assert m.finish_hir(y) is m and m.outputs == [y]
    assert m.finish_hir([y, m.find("x")]).outputs == [y, m.find("x")]
    assert m.finish_hir({"out": y}).output_names == ["out"]
    assert m.set_outputs(y, names=["y"]).output_names == ["y"]
    with pytest.raises(InputError, match="not a value of this graph"):
        m.finish_hir(3)


@pytest.mark.parametrize("make", [GraphModule.hir, GraphModule.mir])
def test_named_and_block_put_nodes_in_a_block(make: Any) -> None:
    m = make("m")
    x = m.input("x", [2])
    y = m.named("layers.0", lambda inner: inner.named("act", lambda g: g.tanh(x)))
    with m.block("tail") as inside:
        assert inside is m
        z = m.exp(y)
    assert [v.node.origin.block for v in (x, y, z)] == ["", "layers.0.act", "tail"]


def test_hir_mir_is_the_way_out() -> None:
    m = GraphModule.hir("m")
    x = m.input("x", [2, 4])
    assert m.rms_norm(x, m.param("g", [4])).node.kind == "hir.rms_norm"
    assert m.hir_mir("rms_norm", [x, m.find("g")], eps=1e-3).node.op.eps == 1e-3
    assert m.hir_mir(rlx.ir.ops.reduce.Sum(axis=(1,)), x).shape.dims == (2,)
    lowered = m.finish_hir(m.exp(x)).lower()
    assert lowered.rms_norm(lowered.find("x"), lowered.find("g")).node.kind == "rms_norm"


def test_every_block_is_a_method_at_hir_and_refused_elsewhere() -> None:
    mir, lir = at("mir"), at("lir")
    for name in REGISTERED:
        assert callable(getattr(at("hir"), name))
        with pytest.raises(StageError, match=f"mlp is at stage LIR.*{name}|{name}.*stage LIR"):
            getattr(lir, name)
        if name not in rlx.ir.op.REGISTRY:
            with pytest.raises(StageError, match=rf"\[{name}\] mlp is at stage MIR"):
                getattr(mir, name)


@pytest.mark.parametrize("stage", ["mir", "lir"])
@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.linear(None, None),
        lambda m: m.hir_mir("exp", []),
        lambda m: m.finish_hir(None),
    ],
    ids=["block", "hir_mir", "finish_hir"],
)
def test_hir_builders_at_another_stage(stage: str, call: Any) -> None:
    with pytest.raises(StageError) as caught:
        call(at(stage))
    message = str(caught.value)
    assert f"mlp is at stage {stage.upper()}" in message
    assert "hint:" in message and "GraphModule" in message
    assert caught.value.got is GraphStage(stage)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.input("y", [2]),
        lambda m: m.param("y", [2]),
        lambda m: m.state("y", [2]),
        lambda m: m.constant(1.0),
        lambda m: m.matmul(1, 2),
        lambda m: m.set_outputs(),
        lambda m: m.named("b", lambda g: None),
        lambda m: m.block("b").__enter__(),
    ],
)
def test_nothing_is_built_at_lir(call: Any) -> None:
    with pytest.raises(StageError, match="mlp is at stage LIR; got LIR; expected HIR or MIR"):
        call(at("lir"))


def test_a_plain_graph_says_that_blocks_are_hir() -> None:
    with pytest.raises(StageError, match=r"(?s)linear is an HIR block.*GraphModule.hir"):
        Graph("g").linear  # noqa: B018


def test_unknown_names() -> None:
    for stage in STAGES:
        assert not hasattr(at(stage), "no_such_thing")
    with pytest.raises(OptionError, match=r"(?s)unknown op; got sotfmax.*did you mean softmax"):
        at("hir").sotfmax()


# -- to read ----------------------------------------------------------------------------------


def test_text_of_the_stages() -> None:
    hir, mir = at("hir"), at("mir")
    assert "hir.linear" in str(hir) and "hir.linear" in hir.inspect()
    assert "fused_matmul_bias_act" in str(mir) and "fused_matmul_bias_act" in mir.inspect()
    assert "test_module.py" in mir.inspect()
    lir = at("lir")
    assert str(lir) == lir.inspect()
    assert "matmul" in lir.inspect() and "steady_state" in lir.inspect()
    assert rlx.parse_graph(str(mir)).same_as(mir.into_graph())
    assert rlx.parse_graph(str(hir)).same_as(hir.into_hir())


def test_length_truth_and_repr() -> None:
    assert len(at("hir")) == len(at("mir")) == len(at("lir")) == 3
    assert GraphModule.hir("empty") and len(GraphModule.hir("empty")) == 0
    assert repr(at("mir")) == "<GraphModule mlp: MIR, 3 nodes>"
    assert str(GraphStage.HIR) == "HIR"


def test_the_module_is_verified_when_finished() -> None:
    m = GraphModule.hir("m")
    y = mlp(m)
    m.into_hir().nodes.reverse()
    with pytest.raises(rlx.VerifyError, match="finish_hir"):
        m.finish_hir(y)
