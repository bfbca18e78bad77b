"""What it costs to run nothing: launches, barriers, loop iterations, Python, idle workers."""

from __future__ import annotations

import os
import time

import numpy as np

from bench.common import Bar, arguments, finish, median_time
from rlx import Graph, Session
from rlx.backends.cpu.kernels.spec import KernelSpec, compile_specs
from rlx.backends.cpu.program import Launch, Program
from rlx.backends.cpu.thread_pool import get_thread_pool
from rlx.ir.ops.control import make_body
from rlx.llvm.builder import Module
from rlx.llvm.target import Target
from rlx.support.machine import usable_cores


class Nothing(KernelSpec):
    """args: none"""

    def emit(self, m: Module) -> None:
        m.kernel().ret()


def program_cost(launches: int, barrier: bool, workers: int) -> float:
    """Seconds of a program of empty launches."""
    spec = Nothing()
    kernel = compile_specs([spec], Target.host())[spec]
    launch = Launch(kernel.address(), (), barrier)
    program = Program([launch] * launches, keep=kernel)
    pool = get_thread_pool(workers)
    return median_time(lambda: pool.run(program), 21, 20)


def iteration_cost(workers: int) -> float:
    """Seconds of one iteration of a loop whose body returns its argument."""
    iterations = 10_000
    g = Graph("idle")
    body = make_body(lambda b, x: [x], [4])
    g.set_outputs(g.scan(g.input("x", [4]), body=body, n_carry=1, n_xs=0, length=iterations))
    f = Session("cpu").compile(g, {"threads": workers})
    x = np.ones(4, np.float32)
    return median_time(lambda: f.run(x=x), 11, 3) / iterations


def python_cost() -> float:
    """Seconds of a whole run of a one-launch graph of a known size, less its native part."""
    g = Graph("tiny")
    g.set_outputs(g.matmul(g.input("x", ["n", 4]), g.param("w", [4, 4])))
    f = Session("cpu").compile(g, {"threads": 1}).set_param("w", np.eye(4, dtype=np.float32))
    x = np.ones((1, 4), np.float32)
    whole = median_time(lambda: f.run(x=x), 21, 200)
    program = f.executable.linked.program  # type: ignore[attr-defined]
    native = median_time(lambda: f.executable.pool.run(program), 21, 200)  # type: ignore[attr-defined]
    return whole - native


def idle_share(workers: int) -> float:
    """CPU seconds per second that a waiting pool uses."""
    program_cost(1, True, workers)
    time.sleep(0.1)
    before, start = time.process_time(), time.perf_counter()
    time.sleep(1.0)
    return (time.process_time() - before) / (time.perf_counter() - start)


def main(argv: list[str]) -> int:
    options = arguments("overhead", __doc__ or "").parse_args(argv)
    workers = min(2, usable_cores())
    print(f"{workers} workers of {os.cpu_count()} cores")
    whole = program_cost(200, True, workers)
    barrier = (program_cost(400, True, workers) - program_cost(400, False, workers)) / 400
    bars = [
        Bar("program_200", whole * 1e6, "µs", "budget", 60.0, 1.0, higher_is_better=False),
        Bar("barrier", max(barrier, 1e-9) * 1e6, "µs", "budget", 2.0, 1.0, higher_is_better=False),
        Bar("loop_iteration", iteration_cost(workers) * 1e6, "µs", "budget", 1.0, 1.0, False),
        Bar("python", python_cost() * 1e6, "µs", "budget", 15.0, 1.0, higher_is_better=False),
        Bar("idle", max(idle_share(workers), 1e-6) * 100, "%", "budget", 0.1, 1.0, False),
    ]
    return finish(bars, options.json)
