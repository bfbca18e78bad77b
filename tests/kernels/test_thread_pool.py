"""The thread pool and the executor: lock step, patches, signals, forks, exits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rlx.backends.cpu.executor.emit import executor_unit
from rlx.backends.cpu.program import Launch, Program
from rlx.backends.cpu.thread_pool import ThreadPool, get_thread_pool
from rlx.errors import CodegenError, OptionError
from rlx.llvm.builder import Module, i64
from rlx.llvm.elf import ALLOWED, ObjectFile
from rlx.llvm.jit import Kernel, Unit, compile_unit
from rlx.llvm.target import Target
from rlx.support import machine

ROOT = Path(__file__).resolve().parents[2]


def compiled(emit) -> Kernel:
    m = Module()
    emit(m.kernel())
    return compile_unit(Unit(m.text(), m.target))


def rotate_kernel() -> Kernel:
    """dst[tid] = src[(tid + 1) % nth] + 1: wrong unless all workers stay in step."""

    def emit(f):
        src, dst = f.arg(f["args"], 0), f.arg(f["args"], 1)
        tid, nth = f["tid"].to(i64), f["nth"].to(i64)
        neighbour = f.load(f.gep(src, (tid + 1) % nth, 8), i64)
        f.store(neighbour + 1, f.gep(dst, tid, 8))

    return compiled(emit)


def count_kernel() -> Kernel:
    """cell += 1000 * nth + by, atomically."""

    def emit(f):
        by = f.arg(f["args"], 1, i64)
        f.atomic_rmw("add", f.arg(f["args"], 0), f["nth"].to(i64) * 1000 + by)

    return compiled(emit)


def wait_kernel() -> Kernel:
    """Keep the worker busy for some ticks."""

    def emit(f):
        ticks, start = f.arg(f["args"], 0, i64), f.clock()
        f.while_([start], lambda s: f.clock() - s < ticks, lambda s: s)

    return compiled(emit)


def rotating(pool: ThreadPool, launches: int) -> tuple[Program, np.ndarray]:
    kernel = rotate_kernel()
    buffers = np.zeros((2, pool.workers), np.int64)
    places = buffers.ctypes.data, buffers[1].ctypes.data
    table = [Launch(kernel.address(), (places[i % 2], places[1 - i % 2])) for i in range(launches)]
    return Program(table, keep=(kernel, buffers)), buffers


def test_workers_stay_in_step(pool):
    program, buffers = rotating(pool, 300)
    for run in range(1, 6):
        pool.run(program)
        # 300 is even, so buffer 0 holds the result; every element has passed all launches
        assert (buffers[0] == 300 * run).all()


def test_runs_after_sleep_and_part_of_a_program(pool):
    program, buffers = rotating(pool, 10)
    for _ in range(3):
        time.sleep(0.01)  # longer than workers wait awake
        pool.run(program, 2, 8)
    assert (buffers[0] == 18).all()
    pool.run(program, 5, 5)
    assert (buffers[0] == 18).all()
    with pytest.raises(ValueError):
        pool.run(program, 5, 11)


def test_alone_patches_and_limited_workers(pool):
    kernel = count_kernel()
    cell, other = np.zeros(1, np.int64), np.zeros(1, np.int64)
    launches = [
        Launch(kernel.address(), (cell.ctypes.data, 1)),
        Launch(kernel.address(), (0, 0), solo=True, barrier=False),
    ]
    program = Program(launches, [(2, 0), (3, 1)], dynamic_args=2, keep=kernel)
    assert program.arg_number(1, 1) == 3
    for run in range(1, 4):
        program.dynamic_args[:] = other.ctypes.data, run
        pool.run(program)
    each = 1000 * pool.workers + 1
    assert cell[0] == 3 * pool.workers * each
    assert other[0] == 1001 + 1002 + 1003, "an ALONE step sees one worker, and patched args"
    few = Program([Launch(kernel.address(), (cell.ctypes.data, 0))], workers=1, keep=kernel)
    cell[0] = 0
    pool.run(few)
    pool.run(program)
    assert cell[0] == 1000 + pool.workers * each


def test_a_long_run_returns_to_python_and_resumes(pool):
    kernel, counter = wait_kernel(), count_kernel()
    cell = np.zeros(1, np.int64)
    ticks = int(pool.ticks_per_second * 0.02)
    launches = [
        Launch(kernel.address(), (ticks,)),
        Launch(counter.address(), (cell.ctypes.data, 0)),
    ] * 8
    pool.run(Program(launches, keep=(kernel, counter)))
    assert cell[0] == 8 * pool.workers * pool.workers * 1000


def test_profile_records_each_worker(pool):
    kernel = wait_kernel()
    ticks = int(pool.ticks_per_second * 1e-3)
    program = Program([Launch(kernel.address(), (ticks,)), Launch(kernel.address(), (2 * ticks,))])
    runs = program.profile(pool.workers)
    pool.run(program)
    [stamps] = runs
    spent = stamps[:, :, 1] - stamps[:, :, 0]
    assert (spent[:, 0] >= ticks).all()
    assert (spent[:, 1] >= 2 * ticks).all()
    assert stamps[:, 1, 0].min() >= stamps[:, 0, 1].max(), "the barrier separates the launches"
    program.stop_profile()
    before = stamps.copy()
    pool.run(program)
    assert (stamps == before).all()
    assert len(runs) == 1


def test_several_python_threads_share_a_pool():
    pool, errors = get_thread_pool(), []

    def work():
        program, buffers = rotating(pool, 20)
        for run in range(1, 201):
            pool.run(program)
            if not (buffers[0] == 20 * run).all():
                errors.append(run)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_closed_pool_runs_alone():
    pool = ThreadPool(2, oversubscribe=True)
    program, buffers = rotating(pool, 2)
    pool.run(program)
    pool.close()
    pool.close()
    buffers[:] = 0
    pool.run(program)
    assert list(buffers[0]) == [2, 0]


def test_collected_pool_ends_its_threads():
    pool = ThreadPool(3, oversubscribe=True)
    program, _ = rotating(pool, 2)
    pool.run(program)
    threads = pool._group.threads
    assert all(t.is_alive() for t in threads)
    del pool
    for thread in threads:
        thread.join(timeout=5)
    assert not any(t.is_alive() for t in threads)


def test_idle_workers_cost_nothing():
    pool = ThreadPool(2, oversubscribe=True)
    program, _ = rotating(pool, 2)
    pool.run(program)
    time.sleep(0.05)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.01
    pool.close()


def test_bad_patches_are_refused():
    with pytest.raises(CodegenError, match="patch out of range"):
        Program([Launch(1, (1, 2))], [(2, 0)], dynamic_args=1)
    with pytest.raises(CodegenError, match="patch out of range"):
        Program([Launch(1, (1, 2))], [(0, 1)], dynamic_args=1)


def script(body: str, **kwargs) -> subprocess.Popen:
    head = """
        import os, signal, sys, threading, time
        sys.path.insert(0, "tests/kernels")
        import numpy as np
        from test_thread_pool import rotating, wait_kernel
        from rlx.backends.cpu.program import Program, Launch
        from rlx.backends.cpu.thread_pool import ThreadPool, get_thread_pool
    """
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(head) + textwrap.dedent(body)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_fork_gives_the_child_its_own_workers():
    child = script("""
        pool = ThreadPool(2, oversubscribe=True)
        program, buffers = rotating(pool, 4)
        pool.run(program)
        pid = os.fork()
        pool.run(program)
        ok = (buffers[0] == 8).all()
        if pid == 0:
            os._exit(0 if ok else 1)
        _, status = os.waitpid(pid, 0)
        sys.exit(0 if ok and status == 0 else 1)
    """)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, out + err


def test_fork_while_another_thread_runs():
    child = script("""
        pool = ThreadPool(2, oversubscribe=True)
        program, buffers = rotating(pool, 50)
        stop = threading.Event()
        def busy():
            mine, _ = rotating(pool, 50)
            while not stop.is_set():
                pool.run(mine)
        thread = threading.Thread(target=busy)
        thread.start()
        time.sleep(0.05)
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                pool.run(program)
                os._exit(0 if (buffers[0] == 50).all() else 1)
            assert os.waitpid(pid, 0)[1] == 0
        stop.set()
        thread.join()
    """)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, out + err


def test_interrupt_during_a_long_run():
    child = script("""
        pool = ThreadPool(2, oversubscribe=True)
        kernel = wait_kernel()
        ticks = int(pool.ticks_per_second * 0.005)
        program = Program([Launch(kernel.address(), (ticks,))] * 10000, keep=kernel)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("ready", flush=True)
        start = time.perf_counter()
        try:
            pool.run(program)
        except KeyboardInterrupt:
            taken = time.perf_counter() - start
            small, buffers = rotating(pool, 2)
            pool.run(small)
            print("stopped", taken < 20, (buffers[0] == 2).all(), flush=True)
    """)
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.3)
    child.send_signal(2)
    out, err = child.communicate(timeout=30)
    assert out.strip() == "stopped True True", out + err
    assert child.returncode == 0


@pytest.mark.parametrize("ending", ["pass", "sys.exit(0)", "busy()"])
def test_interpreter_exit_is_clean(ending):
    child = script(f"""
        pool = get_thread_pool()
        program, _ = rotating(pool, 20)
        pool.run(program)
        def busy():
            def forever():
                mine, _ = rotating(pool, 2000)
                while True:
                    pool.run(mine)
            threading.Thread(target=forever, daemon=True).start()
            time.sleep(0.05)
        {ending}
    """)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    assert err == ""


def test_worker_count(monkeypatch):
    usable = machine.usable_cores()
    monkeypatch.setenv("RLX_NUM_THREADS", "1")
    assert machine.worker_count() == 1
    assert machine.worker_count(10_000) == usable
    monkeypatch.setenv("RLX_NUM_THREADS", "many")
    with pytest.raises(OptionError, match="RLX_NUM_THREADS"):
        machine.worker_count()
    with pytest.raises(OptionError, match="1 or more"):
        machine.worker_count(0)
    monkeypatch.delenv("RLX_NUM_THREADS")
    assert 1 <= machine.worker_count() <= usable <= (os.cpu_count() or 1)


def test_container_quota(tmp_path):
    group = tmp_path / "fs" / "a" / "b"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    read = machine._read_cpu_quota
    assert read(tmp_path / "cgroup", tmp_path / "fs") == machine.MAX_WORKERS
    (group / "cpu.max").write_text("max 100000\n")
    (group.parent / "cpu.max").write_text("150000 100000\n")
    assert read(tmp_path / "cgroup", tmp_path / "fs") == 2
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/x\n")
    old = tmp_path / "fs" / "cpu" / "x"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("300000")
    (old / "cpu.cfs_period_us").write_text("100000")
    assert read(tmp_path / "cgroup", tmp_path / "fs") == 3
    assert read(tmp_path / "missing", tmp_path / "fs") == machine.MAX_WORKERS


@pytest.mark.parametrize("futex", [True, False])
@pytest.mark.parametrize("name", ["x86-64", "x86-64-v4", "aarch64", "apple-m1"])
def test_executor_for_other_machines(name, futex):
    target = Target.named(name)
    obj = ObjectFile(executor_unit(target, futex).compile())
    assert obj.machine.arch == target.arch
    assert set(obj.externals()) <= ALLOWED
    _, symbols = obj.link(1 << 32, lambda symbol: 1 << 40)
    assert {"run", "chain", "worker", "stop", "now"} == set(symbols)
