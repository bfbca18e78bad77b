"""The decode loop gives what single runs give, on both devices."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import rlx
from rlx import CompileOptions, DimBinding, Session
from rlx.backends.cpu.executable import CpuDecodeLoop
from rlx.backends.cpu.executor import control_block
from rlx.backends.decode_loop import LoopSpec
from rlx.errors import BindingError, InputError, OptionError

KEPT = 16
TABLE = np.random.default_rng(3).permutation(11).astype(np.int32)
SPEC = LoopSpec({"ids": "token", "pair": "pair_next"}, "token", "past_seq")


def walk(start: str = "past_seq") -> rlx.Graph:
    """Follows a table from id to id, remembers where it was, and counts in another input."""
    g = rlx.Graph("walk")
    ids, add = g.input("ids", [1], "i32"), g.input("add", [1], "i32")
    pair = g.input("pair", [2], "u64")
    token = g.add(g.gather(g.param("table", [len(TABLE)], "i32"), ids, axis=0), add)
    updated = g.state_update(g.state("seen", [KEPT], "i32"), token, axis=0, start=start)
    total = g.sum(g.narrow(updated, 0, 0, f"{start} + 1"), 0, keepdims=True)
    g.set_outputs({"token": token, "pair_next": g.add(pair, pair), "total": total})
    return g


def compiled(device: str, graph: rlx.Graph | None = None) -> rlx.CompiledGraph:
    options = CompileOptions(binding=DimBinding().set_live("past_seq", KEPT - 1))
    f = Session(device).compile(graph or walk(), options)
    return f.set_params({"table": TABLE})


def begin(f: rlx.CompiledGraph, first: int, add: int = 0) -> None:
    f.slot("ids")[:], f.slot("add")[:], f.slot("pair")[:] = first, add, [1, 3]


def followed(first: int, count: int) -> list[int]:
    found = [first]
    for _ in range(count):
        found.append(int(TABLE[found[-1]]))
    return found[1:]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_loop_gives_what_single_runs_give(device: str) -> None:
    f = compiled(device)
    begin(f, 4)
    got = f.run_loop(f.decode_loop(SPEC), {"past_seq": 2}, 9, ())
    assert got == followed(4, 9)
    assert f.read_state("seen")[2:11].tolist() == got
    assert f.read_state("seen")[11:].tolist() == [0] * 5
    assert f.slot("total").tolist() == [sum(got)]
    assert f.slot("pair").tolist() == [1 << 9, 3 << 9]  # ready for the next run


def test_it_is_native_and_may_be_used_again() -> None:
    f = compiled("cpu")
    loop = f.decode_loop(SPEC)
    assert isinstance(loop, CpuDecodeLoop)
    runs: list[int] = []
    plain = f.executable.pool.run_loop  # type: ignore[attr-defined]
    f.executable.pool.run_loop = lambda *a: (runs.append(1), plain(*a))  # type: ignore[attr-defined]
    try:
        for past, count in ((0, 3), (3, 1), (4, 12)):
            begin(f, 4)
            assert f.run_loop(loop, {"past_seq": past}, count, ()) == followed(4, count)
    finally:
        del f.executable.pool.run_loop  # type: ignore[attr-defined]
    assert len(runs) == 3


def test_it_comes_back_for_signals_and_goes_on() -> None:
    f = compiled("cpu")
    native = f.executable.pool.native  # type: ignore[attr-defined]
    plain, entered = native.decode_loop, []
    state = f.executable.pool._group.state  # type: ignore[attr-defined]
    budget = ctypes.c_int64.from_address(state + control_block.BUDGET)
    before, budget.value = budget.value, 0
    native.decode_loop = lambda *a: (entered.append(1), plain(*a))[1]
    try:
        begin(f, 4)
        assert f.run_loop(f.decode_loop(SPEC), {"past_seq": 0}, 9, ()) == followed(4, 9)
    finally:
        native.decode_loop, budget.value = plain, before
    assert len(entered) >= 9


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_it_ends_with_a_value_asked_for(device: str) -> None:
    f = compiled(device)
    loop, path = f.decode_loop(SPEC), followed(4, 6)
    for ends, count in (({path[2], 99}, 3), ({path[0]}, 1), ((), 6)):
        begin(f, 4)
        assert f.run_loop(loop, {"past_seq": 0}, 6, ends) == path[:count]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_inputs_that_are_not_fed_stay(device: str) -> None:
    f = compiled(device)
    f.set_params({"table": np.zeros(len(TABLE), np.int32)})
    begin(f, 0, add=7)
    assert f.run_loop(f.decode_loop(SPEC), {"past_seq": 0}, 4, ()) == [7] * 4


def test_sizes_that_do_not_fit_are_refused_before_anything_runs() -> None:
    f = compiled("cpu")
    begin(f, 4)
    with pytest.raises(BindingError, match="past its end"):
        f.run_loop(f.decode_loop(SPEC), {"past_seq": KEPT - 2}, 3, ())
    assert not f.read_state("seen").any()


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_bad_data_midway_is_an_error_and_the_loop_stays_usable(device: str) -> None:
    f = compiled(device)
    f.set_params({"table": np.array([1, 2, 40, *TABLE[3:]], np.int32)})
    loop = f.decode_loop(SPEC)
    begin(f, 0)
    with pytest.raises(InputError, match="out of range"):
        f.run_loop(loop, {"past_seq": 0}, 6, ())
    begin(f, 0)
    assert f.run_loop(loop, {"past_seq": 0}, 3, ()) == [1, 2, 40]


def test_sizes_that_do_not_grow_evenly_are_run_one_by_one() -> None:
    f = compiled("cpu", walk("past_seq // 2"))
    begin(f, 4)
    assert f.run_loop(f.decode_loop(SPEC), {"past_seq": 0}, 6, ()) == followed(4, 6)
    assert f.read_state("seen")[:3].tolist() == followed(4, 6)[1::2]


def test_watched_runs_are_single_ones() -> None:
    f = compiled("cpu")
    loop = f.decode_loop(SPEC)
    begin(f, 4)
    f.run_loop(loop, {"past_seq": 0}, 1, ())
    with f.recording() as recording:
        begin(f, 4)
        assert f.run_loop(loop, {"past_seq": 0}, 5, ()) == followed(4, 5)
    assert len({piece.run for piece in recording.slices()}) == 5


@pytest.mark.parametrize(
    "spec, match",
    [
        (LoopSpec({"ids": "pair_next"}, "token", "past_seq"), "does not match its input"),
        (LoopSpec({"ids": "token"}, "pair_next", "past_seq"), "not one i32"),
    ],
)
def test_specs_that_do_not_fit(spec: LoopSpec, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        compiled("cpu").decode_loop(spec)
