"""Recordings: profiles, what each worker did when, and the trace file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.backends.timing import WAIT, KernelTime, Profile, Slice, Timing, block_pattern
from rlx.ir.ops.control import make_body
from rlx.viz.trace import trace_events, write_trace


def compiled(device: str = "cpu", threads: int = 2) -> rlx.CompiledGraph:
    """Two products, the second of the first's result: a barrier between them."""
    g = rlx.Graph("two")
    x = g.input("x", ["n", 64])
    with g.block("blk.0"):
        h = g.matmul(x, g.param("w", [64, 64]))
    with g.block("blk.1"):
        g.set_outputs(g.matmul(h, g.param("v", [64, 64])))
    f = rlx.Session(device).compile(g, {"threads": threads})
    return f.set_params({name: np.eye(64, dtype=np.float32) for name in ("w", "v")})


def record(f: rlx.CompiledGraph, runs: int, n: int = 512) -> object:
    x = np.ones((n, 64), np.float32)
    f.run(x=x)
    with f.recording() as recording:
        for _ in range(runs):
            f.run(x=x)
    f.run(x=x)  # no longer watched
    return recording


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_runs_inside_a_recording_are_timed(device: str) -> None:
    recording = record(compiled(device), 3)
    profile = recording.profile()
    assert sum(r.flops for r in profile.rows) == 2 * 2 * 512 * 64 * 64
    once = record(compiled(device), 1).profile()  # medians of several need not add up
    assert once.elapsed >= 0.99 * once.seconds > 0
    slices = recording.slices()
    assert {s.run for s in slices} == {0, 1, 2}
    for run in range(3):
        mine = [s for s in slices if s.run == run and s.worker == 0 and s.label != WAIT]
        assert [s.block for s in mine if "matmul" in s.node] == ["blk.0", "blk.1"]
        assert all(a.end <= b.begin for a, b in itertools.pairwise(mine))


def test_nobody_begins_before_the_slowest_has_ended() -> None:
    recording = record(compiled(), 4)
    workers = {s.worker for s in recording.slices()}
    assert workers == set(range(len(workers)))
    for run in range(4):
        steps = [s for s in recording.slices() if s.run == run and s.label != WAIT]
        last = {b: max(s.end for s in steps if s.block == b) for b in ("blk.0", "blk.1")}
        assert min(s.begin for s in steps if s.block == "blk.1") >= last["blk.0"]
        if len(workers) > 1:  # who was first at the barrier waited there
            waits = [s for s in recording.slices() if s.run == run and s.label == WAIT]
            assert any(s.end - s.begin > 0 for s in waits)


def test_the_rounds_of_a_loop_are_one_slice() -> None:
    g = rlx.Graph("loop")
    body = make_body(lambda b, x: [b.tanh(x)], [64])
    g.set_outputs(g.scan(g.input("x", [64]), body=body, n_carry=1, n_xs=0, length=50))
    f = rlx.Session("cpu").compile(g)
    x = np.ones(64, np.float32)
    f.run(x=x)
    with f.recording() as recording:
        f.run(x=x)
    loops = [s for s in recording.slices() if s.label == "loop"]
    assert (
        len(loops) == len({s.worker for s in loops}) == len({s.worker for s in recording.slices()})
    )
    assert max(r.calls for r in recording.profile().rows) >= 50


def test_kernels_and_the_blocks_they_serve() -> None:
    rows = [
        Timing("mul", "%1 mul", "blk.0.norm", 1.0, 4_000_000_000, 2_000_000_000),
        Timing("mul", "%2 mul", "blk.1.norm", 2.0, 2_000_000_000, 1_000_000_000, calls=3),
        Timing("add", "%3 add", "", 4.0, 0, 0),
    ]
    profile = Profile(tuple(rows), elapsed=10.0)
    add, mul = profile.by_kernel()
    assert mul == KernelTime("mul", ("blk.*.norm",), 4, 3.0, 6_000_000_000, 3_000_000_000)
    assert (mul.gb_per_second, mul.gflop_per_second) == (1.0, 2.0)
    assert (add.kernel, add.blocks, profile.waiting) == ("add", (), 3.0)
    assert "at barriers" in str(profile)
    assert block_pattern("blk.12") == "blk.*"
    assert block_pattern("encoder.3.attention.q8") == "encoder.*.attention.q8"


def test_the_trace_has_a_row_per_worker(tmp_path: Path) -> None:
    slices = [
        Slice(0, 0, "gemm", "%1 matmul", "blk.0", 10.0, 10.5),
        Slice(0, 0, WAIT, "", "", 10.5, 11.0),
        Slice(0, 1, "gemm", "%1 matmul", "blk.0", 10.25, 11.0),
        Slice(1, 0, "gemm", "%1 matmul", "blk.0", 12.0, 12.5),
    ]
    file = tmp_path / "trace.json"
    write_trace(file, {"decode": slices})
    events = json.loads(file.read_text())["traceEvents"]
    assert events == trace_events({"decode": slices})
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {0: "runs", 1: "worker 0", 2: "worker 1"}
    runs = [(e["ts"], e["dur"]) for e in events if e.get("cat") == "run"]
    assert runs == [(0.0, 1e6), (2e6, 0.5e6)]
    [wait] = [e for e in events if e.get("cat") == "wait"]
    assert (wait["tid"], wait["ts"], wait["dur"]) == (1, 0.5e6, 0.5e6)
    [second] = [e for e in events if e["tid"] == 2 and e["ph"] == "X"]
    assert second["args"] == {"node": "%1 matmul", "block": "blk.0"}
