"""Phases by anchor, choice and position."""

from __future__ import annotations

import pytest

from rlx.errors import InputError, OptionError
from rlx.ir.graph import Graph
from rlx.ir.module import GraphModule
from rlx.ir.op import REGISTRY
from rlx.ir.phase import Phase, PhaseSchedule, derive_phases

PROLOGUE, STEADY, EPILOGUE = Phase.PROLOGUE, Phase.STEADY_STATE, Phase.EPILOGUE


def test_phases_are_ordered() -> None:
    assert PROLOGUE < STEADY < EPILOGUE
    assert [p.order for p in Phase] == [0, 1, 2]
    assert max(Phase) is EPILOGUE
    assert Phase.of("steady_state") is STEADY
    with pytest.raises(OptionError, match="unknown phase"):
        Phase.of("warm-up")


def test_the_anchors_are_those_of_the_specification() -> None:
    stated = """matmul, fused_matmul_bias_act, attention, fused_attention_block,
        fused_transformer_layer, dot_general, grouped_matmul, dequant_grouped_matmul,
        dequant_moe_weights, lora_matmul, dequant_matmul, gated_delta_net"""
    # a backend makes ops of its own of an anchor
    own = {n: cls for n, cls in REGISTRY.items() if cls.__module__.startswith("rlx.ir.")}
    anchors = {n for n, cls in own.items() if cls.is_anchor}
    differentiated = {"attention_with_lse", "attention_backward", "dequant_matmul_transposed"}
    assert {a.strip() for a in stated.split(",")} == anchors - differentiated  # those of training


def test_input_param_matmul_sample() -> None:
    g = Graph("lm")
    x, w = g.input("x", [1, 8]), g.param("w", [8, 32])
    logits = g.matmul(x, w)
    token, _ = g.sample(logits, g.state("rng", [2], "u64"))
    g.set_outputs(token)
    phases = derive_phases(g)
    assert [phases.get(v) for v in (x, w, logits, token)] == [PROLOGUE, PROLOGUE, STEADY, EPILOGUE]
    assert len(phases) == len(g)


def test_a_routers_top_k_is_steady_state() -> None:
    g = Graph("moe")
    x, router = g.input("x", [6, 8]), g.param("router", [8, 4])
    scores, chosen = g.top_k(g.softmax(g.matmul(x, router)), k=1)
    y = g.grouped_matmul(x, g.param("w", [4, 8, 8]), g.reshape(chosen, shape=(6,)))
    best, _ = g.top_k(y, k=2)
    g.set_outputs(y, scores, best)
    phases = derive_phases(g)
    assert phases.get(chosen) is STEADY
    assert phases.get(best) is EPILOGUE


def test_after_the_last_anchor_is_epilogue() -> None:
    g = Graph("head")
    x = g.input("x", [4, 8])
    before = g.exp(x)
    aside = g.neg(x)  # feeds no anchor, but stands before the last one
    y = g.matmul(before, g.param("w", [8, 8]))
    after = g.tanh(y)
    g.set_outputs(after, aside)
    phases = derive_phases(g)
    assert phases.get(before) is phases.get(aside) is phases.get(y) is STEADY
    assert phases.get(after) is EPILOGUE


def test_after_the_last_sample_is_epilogue_unless_an_anchor_needs_it() -> None:
    g = Graph("loop")
    logits = g.input("logits", [1, 16])
    token, rng = g.sample(logits, g.input("rng", [2], "u64"))
    row = g.gather(g.param("table", [16, 8]), token)
    y = g.matmul(row, g.param("w", [8, 8]))
    seed = g.add(rng, g.constant(1, "u64"))
    early, late = g.neg(y), g.sum(y)
    g.set_outputs(y, seed, early, late)
    phases = derive_phases(g)
    assert phases.get(token) is phases.get(row) is phases.get(y) is STEADY
    assert phases.get(seed) is phases.get(late) is EPILOGUE


def test_a_top_k_counts_as_the_last_sample() -> None:
    g = Graph("chosen")
    x = g.input("x", [8])
    values, _ = g.top_k(x, k=2)
    after, beside = g.exp(values), g.neg(x)
    g.set_outputs(after, beside)
    phases = derive_phases(g)
    assert [phases.get(v) for v in (values, after, beside)] == [EPILOGUE] * 3


def test_blocks_are_anchors_where_they_contain_one() -> None:
    m = GraphModule.define(
        "head", lambda g: g.tanh(g.linear(g.input("x", [2, 8]), g.param("w", [8, 8])))
    )
    phases = derive_phases(m)
    nodes = {n.op.name: n for n in m.as_hir().nodes}  # type: ignore[union-attr]
    assert phases.get(nodes["hir.linear"]) is STEADY
    assert phases.get(nodes["tanh"]) is EPILOGUE


def test_a_graph_without_anchors_and_choices_is_steady() -> None:
    g = Graph("plain")
    x = g.input("x", [3])
    g.set_outputs(g.exp(g.neg(x)))
    assert derive_phases(g).nodes_in(STEADY) == [1, 2]


def test_writes_to_a_state_do_not_wait_for_the_last_chunk() -> None:
    g = Graph("recurrent")
    x, memory = g.input("x", [1, 8]), g.state("memory", [1, 8])
    rng = g.state("rng", [2], "u64")
    y = g.matmul(x, g.param("w", [8, 8]))
    kept = g.state_update(memory, g.tanh(y))
    token, advanced = g.sample(y, rng)
    drawn = g.state_update(rng, advanced)
    g.set_outputs(token)
    phases = derive_phases(g)
    assert phases.get(kept) is STEADY
    assert phases.get(kept.node.inputs[1]) is STEADY
    assert phases.get(drawn) is EPILOGUE  # one draw per token, not one per chunk


def test_schedule_is_a_table_by_node_id() -> None:
    g = Graph("g")
    x = g.input("x", [2])
    y = g.exp(x)
    schedule = PhaseSchedule()
    assert len(schedule) == 0 and schedule and schedule.get(x) is None
    schedule.set(y, "epilogue")
    schedule.set(x.node, PROLOGUE)
    schedule.set(7, EPILOGUE)
    assert len(schedule) == 3
    assert list(schedule) == [(0, PROLOGUE), (1, EPILOGUE), (7, EPILOGUE)]
    assert schedule.nodes_in(EPILOGUE) == [1, 7]
    assert schedule.nodes_in("epilogue", schedule=[7, x.node, y]) == [7, 1]
    assert schedule.nodes_in(STEADY) == []
    assert schedule == PhaseSchedule({7: EPILOGUE, 1: EPILOGUE, 0: PROLOGUE})
    assert repr(schedule) == "<PhaseSchedule prologue: 1, steady_state: 0, epilogue: 2>"
    with pytest.raises(InputError, match="not a node; got 'x'"):
        schedule.get("x")
