"""Phases at run time: the epilogue stands last, can be left out, and can be run by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import opaque_device
import pytest

import rlx
from rlx import CompileOptions, DimBinding, Graph, Phase, Session, derive_phases
from rlx.passes.pipeline import schedule_phases

DEVICES = ["reference", "cpu", opaque_device.OpaqueBackend.name]


def chooser() -> Graph:
    """Appends rows to a state, adds up what is there, and chooses the three largest sums."""
    g = Graph("chooser")
    x = g.input("x", ["seq", 4])
    w = g.param("w", [4, 6])
    early = g.top_k(g.input("y", [8]), k=2)[0]  # a choice that stands before the last anchor
    updated = g.state_update(g.state("cache", [16, 6]), g.matmul(x, w), axis=0, start="past_seq")
    total = g.sum(g.narrow(updated, 0, 0, "past_seq + seq"), 0)
    values, where = g.top_k(total, k=3)
    g.set_outputs({"total": total, "best": values, "where": where, "early": early})
    return g


def inputs(seq: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(seq, 4)).astype(np.float32),
        "y": rng.normal(size=8).astype(np.float32),
    }


W = np.random.default_rng(9).normal(size=(4, 6)).astype(np.float32)


def compiled(device: str) -> rlx.CompiledGraph:
    options = CompileOptions(binding=DimBinding(seq=2).set_live("past_seq", 14), threads=1)
    return Session(device).compile(chooser(), options).set_param("w", W)


def test_the_epilogue_is_put_last() -> None:
    g = schedule_phases(chooser())
    rlx.verify(g)
    orders = [derive_phases(g).get(n).order for n in g.nodes if not n.op.is_source]  # type: ignore[union-attr]
    assert orders == sorted(orders)
    # both choices, and what follows the last anchor: a view and a sum
    assert orders.count(Phase.EPILOGUE.order) == 4


def test_a_read_before_a_write_stays_before_it() -> None:
    g = Graph("held")
    state = g.state("s", [4])
    old = g.top_k(state, k=1)[0]  # a choice, but of what the update below overwrites
    x = g.reshape(g.matmul(g.input("x", [1, 4]), g.param("w", [4, 4])), [4])
    new = g.state_update(state, x, axis=0, start=0)
    g.set_outputs({"old": old, "new": g.top_k(new, k=1)[0]})
    ordered = schedule_phases(g)
    rlx.verify(ordered)
    f = Session("cpu").compile(g, {"threads": 1}).set_param("w", np.eye(4, dtype=np.float32))
    row = np.array([[1, 5, 2, 3]], np.float32)
    first = f.run(x=row)
    second = f.run(x=2 * row)
    assert [float(v[0]) for v in (*first, *second)] == [0, 5, 5, 10]


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_run_the_epilogue_for_the_last_one_only(device: str) -> None:
    f = compiled(device)
    total = np.zeros(6, np.float32)
    for chunk in range(3):
        given = inputs(2, chunk)
        total += (given["x"] @ W).sum(0)
        last = chunk == 2
        got = f.run(given, sizes={"past_seq": 2 * chunk}, until=None if last else "steady_state")
        if not last:
            assert got[1] is None and got[2] is None
    np.testing.assert_allclose(got[0], total, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[2], np.argsort(-total, kind="stable")[:3])
    np.testing.assert_array_equal(got[3], np.sort(given["y"])[::-1][:2])


@pytest.mark.parametrize("device", DEVICES)
def test_one_phase_at_a_time_gives_what_a_whole_run_gives(device: str) -> None:
    given = inputs(2)
    whole = compiled(device).run(given, sizes={"past_seq": 0})
    f = compiled(device)
    found: list[np.ndarray | None] = [None] * 4
    for phase in Phase:
        part = f.run(given, sizes={"past_seq": 0}, phase=phase)
        found = [a if b is None else b for a, b in zip(found, part, strict=True)]
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(
        f.read_state("cache")[:2], compiled_state(device, given), strict=True
    )


def compiled_state(device: str, given: dict[str, np.ndarray]) -> np.ndarray:
    f = compiled(device)
    f.run(given, sizes={"past_seq": 0})
    return f.read_state("cache")[:2]


def test_a_phase_and_an_end_are_too_much() -> None:
    with pytest.raises(rlx.OptionError, match="not both"):
        compiled("reference").run(
            inputs(2), sizes={"past_seq": 0}, phase="epilogue", until="epilogue"
        )
    with pytest.raises(rlx.OptionError, match="unknown phase"):
        compiled("reference").run(inputs(2), sizes={"past_seq": 0}, until="end")


# -- one phase alone ------------------------------------------------------------------------------


def logits_and_choice() -> Graph:
    g = Graph("lm")
    logits = g.matmul(g.input("x", [1, 8]), g.param("w", [8, 16]))
    g.set_outputs({"logits": logits, "best": g.top_k(logits, k=2)[0]})
    return g


HEAD = np.random.default_rng(2).normal(size=(8, 16)).astype(np.float32)


def best(x: np.ndarray) -> np.ndarray:
    return np.sort((x @ HEAD).astype(np.float32))[:, ::-1][:, :2]


@pytest.mark.parametrize("device", DEVICES)
def test_a_phase_alone_never_answers_from_stale_memory(device: str) -> None:
    f = Session(device).compile(logits_and_choice()).set_param("w", HEAD)
    one, two = np.ones((1, 8), np.float32), np.full((1, 8), 2, np.float32)
    with pytest.raises(rlx.InputError, match="epilogue needs steady_state, which has not run"):
        f.run(phase="epilogue")
    # what is missing runs first, if its inputs are given
    np.testing.assert_allclose(f.run(x=one, phase="epilogue")[1], best(one), rtol=1e-5)
    f.run(x=one)
    np.testing.assert_allclose(f.run(x=two, phase="epilogue")[1], best(two), rtol=1e-5)
    f.run(x=one, phase="steady_state")
    np.testing.assert_allclose(f.run(x=two, phase="epilogue")[1], best(two), rtol=1e-5)
    # other parameters are other results
    f.run(x=one, phase="steady_state")
    f.set_param("w", 2 * HEAD)
    with pytest.raises(rlx.InputError, match="has not run"):
        f.run(phase="epilogue")


@pytest.mark.parametrize("device", DEVICES)
def test_a_phase_alone_needs_its_own_inputs_only(device: str) -> None:
    f = Session(device).compile(logits_and_choice()).set_param("w", HEAD)
    x = np.ones((1, 8), np.float32)
    assert f.run(x=x, until="steady_state")[1] is None
    logits, found = f.run(phase="epilogue")
    assert logits is None
    np.testing.assert_allclose(found, best(x), rtol=1e-5)
    g = compiled(device)
    given = inputs(2)
    with pytest.raises(rlx.InputError, match=r"epilogue needs the phases before it.*x, y"):
        g.run(phase="epilogue")
    g.run(x=given["x"], sizes={"past_seq": 0}, until="steady_state")  # y is the epilogue's
    with pytest.raises(rlx.InputError, match=r"missing inputs of epilogue.*expected y"):
        g.run(phase="epilogue")
    total, _, _, early = g.run(y=given["y"], phase="epilogue")
    np.testing.assert_allclose(total, (given["x"] @ W).sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(early, np.sort(given["y"])[::-1][:2])
    with pytest.raises(rlx.InputError, match="missing inputs of steady_state"):
        g.run(y=given["y"], sizes={"past_seq": 2}, until="steady_state")


def test_an_epilogue_may_draw_again_from_the_same_logits() -> None:
    g = Graph("draws")
    logits = g.matmul(g.input("x", [1, 8]), g.param("w", [8, 16]))
    g.set_outputs({"token": g.sample(logits, g.input("rng", [2], "u64"))[0], "logits": logits})
    f = Session("cpu").compile(g).set_param("w", HEAD)
    x = np.ones((1, 8), np.float32)
    f.run(x=x, phase="steady_state")
    rngs = [np.array([7, step], np.uint64) for step in range(6)]
    drawn = [int(f.run(rng=rng, phase="epilogue")[0][0]) for rng in rngs]
    whole = [int(f.run(x=x, rng=rng)[0][0]) for rng in rngs]
    assert drawn == whole and len(set(drawn)) > 1


# -- schedules that are given ---------------------------------------------------------------------


def prompted(g: rlx.GraphModule) -> dict[str, rlx.Value]:
    """Queries x attend to a prompt: keys and values depend on the prompt only."""
    prompt = g.input("prompt", [5, 8])
    h = g.tanh(g.rms_norm(prompt, g.param("gamma", [8])))
    keys, values = g.linear(h, g.param("wk", [8, 8])), g.linear(h, g.param("wv", [8, 8]))
    scores = g.softmax(g.matmul(g.input("x", ["seq", 8]), g.transpose(keys, axes=(1, 0))))
    y = g.matmul(scores, values)
    return {"y": y, "best": g.top_k(g.sum(y, 0), k=3)[0]}


NAMES = {"gamma": (8,), "wk": (8, 8), "wv": (8, 8)}


def prompted_in_numpy(
    given: dict[str, np.ndarray], prompt: np.ndarray, x: np.ndarray
) -> np.ndarray:
    p = prompt.astype(np.float64)
    h = np.tanh(p / np.sqrt((p * p).mean(-1, keepdims=True) + 1e-6) * given["gamma"])
    scores = x @ (h @ given["wk"]).T
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ (h @ given["wv"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lowered", [False, True])
def test_work_on_the_prompt_is_prologue_and_runs_once(device: str, lowered: bool) -> None:
    module = rlx.GraphModule.define("prompted", prompted)
    module = module.lower() if lowered else module
    phases = derive_phases(module, once=["prompt"])
    held = module.as_hir() or module.as_graph()
    assert held is not None
    early = {held.nodes[i].op.name.removeprefix("hir.") for i in phases.nodes_in("prologue")}
    assert {"tanh", "transpose"} <= early and "softmax" not in early
    rng = np.random.default_rng(4)
    weights = {n: rng.normal(size=d).astype(np.float32) for n, d in NAMES.items()}
    f = Session(device).compile(module, CompileOptions(phases=phases)).set_params(weights)
    prompts = rng.normal(size=(2, 5, 8)).astype(np.float32)
    for prompt in prompts:
        f.run(prompt=prompt, sizes={"seq": 3}, phase="prologue")
        for _ in range(3):  # the prologue's results outlive runs of the others
            x = rng.normal(size=(3, 8)).astype(np.float32)
            y, none = f.run(x=x, phase="steady_state")
            assert none is None
            wanted = prompted_in_numpy(weights, prompt, x)
            np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
            found = f.run(phase="epilogue")[1]
            np.testing.assert_allclose(
                found, np.sort(wanted.sum(0))[::-1][:3], rtol=1e-5, atol=1e-5
            )
        np.testing.assert_allclose(f.run(prompt=prompt, x=x)[0], wanted, rtol=1e-5, atol=1e-5)
    launches = f.executable.lir
    names = {n.op.name for n in launches.graph.nodes if launches.phases.get(n) is Phase.PROLOGUE}
    assert names & {"rms_norm", "elementwise_region", "tanh"}


def test_without_a_prologue_run_the_steady_state_says_what_is_missing() -> None:
    module = rlx.GraphModule.define("prompted", prompted)
    options = CompileOptions(phases=derive_phases(module, once=["prompt"]))
    f = Session("cpu").compile(module, options)
    f.set_params({n: np.ones(d, np.float32) for n, d in NAMES.items()})
    with pytest.raises(
        rlx.InputError, match=r"steady_state needs prologue, which has not run.*prompt too"
    ):
        f.run(x=np.ones((3, 8), np.float32), phase="steady_state")


def test_a_schedule_that_cannot_be_kept_is_refused() -> None:
    g = logits_and_choice()
    matmul, top_k = (next(n for n in g.nodes if n.op.name == name) for name in ("matmul", "top_k"))
    phases = derive_phases(g)

    def compile_with(schedule: rlx.PhaseSchedule) -> None:
        Session("reference").compile(g, CompileOptions(phases=schedule))

    compile_with(phases)
    early = phases.copy()
    early.set(matmul, "epilogue")
    early.set(top_k, "steady_state")
    with pytest.raises(rlx.OptionError, match=r"a node before one that it needs.*top_k"):
        compile_with(early)
    some = rlx.PhaseSchedule({matmul.id: Phase.STEADY_STATE})
    with pytest.raises(rlx.OptionError, match=r"a node without a phase.*top_k"):
        compile_with(some)
    beyond = phases.copy()
    beyond.set(99, "epilogue")
    with pytest.raises(rlx.OptionError, match="no such node; got %99"):
        compile_with(beyond)
    late = phases.copy()
    late.set(0, "epilogue")
    with pytest.raises(rlx.OptionError, match="a source is in a later phase"):
        compile_with(late)
    with pytest.raises(rlx.InputError, match="no such input; got 'prompt'"):
        derive_phases(g, once=["prompt"])


@pytest.mark.parametrize("device", DEVICES)
def test_states_go_through_a_given_schedule(device: str) -> None:
    g = chooser()
    phases = derive_phases(g)
    total = next(n for n in g.nodes if n.op.name == "sum")
    phases.set(total, "steady_state")  # derived: epilogue
    phases.set(total.inputs[0], "steady_state")
    options = CompileOptions(
        binding=DimBinding(seq=2).set_live("past_seq", 14), threads=1, phases=phases
    )
    f = Session(device).compile(g, options).set_param("w", W)
    wanted = np.zeros(6, np.float32)
    for chunk in range(3):
        given = inputs(2, chunk)
        wanted += (given["x"] @ W).sum(0)
        got = f.run(x=given["x"], sizes={"past_seq": 2 * chunk}, until="steady_state")
        np.testing.assert_allclose(got[0], wanted, rtol=1e-5, atol=1e-5)
    got = f.run(y=given["y"], phase="epilogue")
    np.testing.assert_array_equal(got[2], np.argsort(-wanted, kind="stable")[:3])


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_an_artifact_keeps_the_schedule_that_was_given(device: str, tmp_path: Path) -> None:
    def build() -> rlx.GraphModule:
        return rlx.GraphModule.define("prompted", prompted)

    rng = np.random.default_rng(5)
    weights = {n: rng.normal(size=d).astype(np.float32) for n, d in NAMES.items()}
    options = CompileOptions(phases=derive_phases(build(), once=["prompt"]), threads=1)
    component = rlx.ModelComponent(rlx.ModelVariant.encoder(1, 3), compilation_mode="aot")  # type: ignore[arg-type]
    prompt, x = (rng.normal(size=d).astype(np.float32) for d in ((5, 8), (3, 8)))
    wanted = prompted_in_numpy(weights, prompt, x)
    cache = rlx.AotCache(tmp_path)
    for hits in (0, 1):
        p = rlx.ModelCompilePipeline(device, params=rlx.ParamStore(weights), aot=cache)
        f, _ = p.get_or_compile_component(component, build, options)
        assert cache.counters.hits == hits
        f.run(prompt=prompt, phase="prologue")
        for _ in range(2):
            (y, _) = f.run(x=x, phase="steady_state")
            np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    # without the schedule it is another artifact
    other = rlx.ModelCompilePipeline(device, aot=cache)
    other.get_or_compile_component(component, build, CompileOptions(threads=1))
    assert cache.counters.hits == 1 and len(cache.entries()) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_phase_that_updates_states_is_not_repeated_behind_the_users_back(device: str) -> None:
    g = Graph("recurrent")
    memory = g.state("memory", [1, 8])
    h = g.matmul(g.input("x", [1, 8]), g.param("w", [8, 8]))
    g.state_update(memory, h + memory, axis=0, start=0)
    g.set_outputs({"y": g.softmax(g.exp(h))})  # unfused, the exponential is written over h
    f = Session(device).compile(g, {"profile": rlx.CompileProfile.preset("debug")})
    f.set_param("w", np.eye(8, dtype=np.float32))
    x = np.linspace(0, 1, 8, dtype=np.float32)[None]
    powers = np.exp(np.exp(x.astype(np.float64)))
    f.run(x=x, phase="steady_state")
    np.testing.assert_allclose(f.run(phase="epilogue")[0], powers / powers.sum(), rtol=1e-5)
    for given in ({}, {"x": x}):
        with pytest.raises(rlx.InputError, match="epilogue has used up what steady_state left"):
            f.run(given, phase="epilogue")
    np.testing.assert_array_equal(f.read_state("memory"), x)
    f.run(x=x, phase="steady_state")
    np.testing.assert_array_equal(f.read_state("memory"), 2 * x)
    f.run(x=2 * x, phase="epilogue")  # other inputs are another run
    np.testing.assert_array_equal(f.read_state("memory"), 4 * x)
