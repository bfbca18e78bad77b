"""Launches that jump, and host calls."""

from __future__ import annotations

import numpy as np
import pytest
from test_thread_pool import count_kernel, rotate_kernel, wait_kernel

from rlx.backends.cpu.program import Launch, Program
from rlx.backends.cpu.thread_pool import ThreadPool
from rlx.llvm.builder import Module, i32, i64, ptr
from rlx.llvm.jit import Kernel, Unit, compile_unit


def loop_kernel() -> Kernel:
    """args: counters of the workers, iterations, distance back while iterations are left."""
    m = Module()
    f = m.function("kernel", [("args", ptr), ("tid", i32), ("nth", i32)], i64)
    mine = f.gep(f.arg(f["args"], 0), f["tid"].to(i64), 8)
    done = f.load(mine, i64) + 1
    f.store(done, mine)
    again = done < f.arg(f["args"], 1, i64)
    f.ret(f.select(again, f.arg(f["args"], 2, i64), 1))
    return compile_unit(Unit(m.text(), m.target))


class Loop:
    """Two launches that rotate numbers, repeated `iterations` times, and one after the loop."""

    def __init__(self, workers: int, iterations: int, first: list[Launch] | None = None) -> None:
        rotate, loop_back, count = rotate_kernel(), loop_kernel(), count_kernel()
        self.buffers = np.zeros((2, workers), np.int64)
        self.counters, self.after = np.zeros(workers, np.int64), np.zeros(1, np.int64)
        a, b = self.buffers.ctypes.data, self.buffers[1].ctypes.data
        body = [*(first or []), Launch(rotate.address(), (a, b)), Launch(rotate.address(), (b, a))]
        back = Launch(
            loop_back.address(),
            (self.counters.ctypes.data, iterations, -len(body)),
            False,
            jump=True,
        )
        behind = Launch(count.address(), (self.after.ctypes.data, 0))
        self.program = Program([*body, back, behind], keep=(rotate, loop_back, count, self))


def test_a_loop_of_launches_in_lock_step(pool):
    loop = Loop(pool.workers, 500)
    for run in range(1, 4):
        loop.counters[:] = 0
        pool.run(loop.program)
        # two launches an iteration, each of which adds one to the number of a neighbour
        assert (loop.buffers[0] == 1000 * run).all()
        assert (loop.counters == 500).all()
        assert loop.after[0] == run * 1000 * pool.workers**2


def test_a_long_loop_returns_to_python_and_resumes(pool):
    wait = wait_kernel()
    ticks = int(pool.ticks_per_second * 0.004)
    loop = Loop(pool.workers, 40, [Launch(wait.address(), (ticks,))])
    native, runs = pool._group.native.run, []
    pool._group.native.run = lambda *args: runs.append(native(*args)) or runs[-1]
    try:
        pool.run(loop.program)
    finally:
        pool._group.native.run = native
    assert (loop.buffers[0] == 80).all()
    assert loop.after[0] == 1000 * pool.workers**2
    # 40 iterations of 4 ms come back to Python about every 50 ms
    assert len(runs) >= 3


def test_profile_adds_up_iterations():
    pool = ThreadPool(2, oversubscribe=True)
    wait = wait_kernel()
    ticks = int(pool.ticks_per_second * 2e-4)
    loop = Loop(pool.workers, 10, [Launch(wait.address(), (ticks,))])
    runs = loop.program.profile(pool.workers)
    for _ in range(2):  # the second run starts from nothing again
        loop.counters[:] = 0
        pool.run(loop.program)
        stamps = runs[-1]
        assert (stamps[:, :, 2] == [10, 10, 10, 10, 1]).all()
        assert (stamps[:, 0, 1] - stamps[:, 0, 0] >= 10 * ticks).all()
        assert (stamps[:, 0, 0] < stamps[:, 1, 0]).all()
        assert (stamps[:, 4, 0] - stamps[:, 0, 0] >= 10 * ticks).all()
    pool.close()


def test_host_calls_inside_a_loop(pool):
    asked = []
    loop = Loop(pool.workers, 5, [Launch(0, host=True)])

    def on_host(launch: int) -> None:
        asked.append((launch, loop.counters[0]))
        loop.buffers[0] += 100

    pool.run(loop.program, on_host=on_host)
    assert asked == [(0, i) for i in range(5)]
    assert (loop.buffers[0] == 5 * 102).all()
    with pytest.raises(ValueError, match="launch 0 is a host call"):
        pool.run(loop.program)
