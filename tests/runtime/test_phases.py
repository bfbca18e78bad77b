"""Phases at run time: the epilogue stands last, can be left out, and can be run by itself."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import CompileOptions, DimBinding, Graph, Phase, Session, derive_phases
from rlx.passes.pipeline import schedule_phases

DEVICES = ["reference", "cpu"]


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
