"""The thread pool: worker threads that entered native code once and wait there for programs.

One pool serves all Python threads of a process. A lock makes runs exclusive: each has every worker.
After a fork the child's pool starts workers of its own. Workers are daemons and are stopped at
exit. The native code is the executor: one that came with an artifact, or one compiled here.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.cpu.executor import control_block
from rlx.llvm.code_memory import code_memory
from rlx.llvm.jit import Kernel
from rlx.llvm.target import Target
from rlx.support.machine import MAX_WORKERS, usable_cores, worker_count

if TYPE_CHECKING:
    from rlx.backends.cpu.program import Program

SPIN = 20e-6
"""Seconds of waiting before a worker yields its core."""
IDLE_YIELD, BARRIER_YIELD = 1.5e-3, 2e-3
"""Seconds after which an idle worker, and one at a barrier, sleeps. Waking takes some 0.1 ms, so
this is longer than the gap between two decode steps."""
BUDGET = 50e-3
"""Seconds after which a run returns to Python to let it handle signals."""


# -- the executor in use --------------------------------------------------------------------------

_executors: dict[bool, Kernel] = {}


def uses_futex(target: Target) -> bool:
    """Whether workers sleep in futexes, or in what the system has instead (see `barrier`)."""
    if target.system != sys.platform:
        return False
    return sys.platform != "darwin" or code_memory().address("os_sync_wait_on_address") is not None


def offer_executor(kernel: Kernel, futex: bool) -> None:
    """Use this executor, unless another is in use already; its code must run on this machine."""
    _executors.setdefault(futex, kernel)


def make_executor(target: Target, futex: bool | None = None) -> Kernel:
    """The executor for a target, from the caches or compiled."""
    # importing the emitter takes longer than loading an artifact
    from rlx.backends.cpu.executor.emit import load_executor

    return load_executor(target, uses_futex(target) if futex is None else futex)


class _Native:
    """The executor's native functions."""

    def __init__(self, futex: bool) -> None:
        if futex not in _executors:
            _executors[futex] = make_executor(Target.host(), futex)
        kernel = _executors[futex]
        p, n, i = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self.run = kernel.function("run", n, p, p, n, n)
        self.decode_loop = kernel.function("chain", n, p, p, n, p)
        self.worker = kernel.function("worker", n, p, i, i, i)
        self.stop = kernel.function("stop", None, p)
        self.now = kernel.function("now", n)
        self.rate = self._ticks_per_second()

    def _ticks_per_second(self) -> float:
        start, ticks = self._clocks()
        while time.perf_counter() - start < 5e-4:
            pass
        end, later = self._clocks()
        return (later - ticks) / (end - start)

    def _clocks(self) -> tuple[float, int]:
        """Seconds and ticks of one moment: of five tries the one that was interrupted least."""
        tries = []
        for _ in range(5):
            before, ticks, after = time.perf_counter(), int(self.now()), time.perf_counter()
            tries.append((after - before, (before + after) / 2, ticks))
        return min(tries)[1:]


_native = cache(_Native)


# -- workers --------------------------------------------------------------------------------------


class _WorkerGroup:
    """Control block and threads of a pool. It does not refer to the pool, which can be freed."""

    def __init__(self, workers: int, futex: bool) -> None:
        self.workers, self.futex, self.native = workers, futex, _native(futex)
        self.lock = threading.RLock()
        self.threads: list[threading.Thread] = []
        self.abandoned = False  # whether nobody waits for the current run any more
        self.wake_ups = threading.Semaphore(0)
        self._memory = np.zeros(control_block.STATE_BYTES + 64, np.uint8)
        self.state: int = -(-self._memory.ctypes.data // 64) * 64
        self._wake = ctypes.CFUNCTYPE(None)(self._release)
        self.shared_core = ctypes.c_int32.from_address(self.state + control_block.SHARED_CORE)
        self.cpus = (ctypes.c_int32 * workers).from_address(self.state + control_block.CPUS)
        rate = self.native.rate
        oversubscribed = workers > usable_cores()
        self._set(ctypes.c_int32, control_block.WORKERS, workers)
        self._set(ctypes.c_int64, control_block.SPIN, int(rate * (0 if oversubscribed else SPIN)))
        self._set(ctypes.c_int64, control_block.IDLE_YIELD, int(rate * IDLE_YIELD))
        self._set(ctypes.c_int64, control_block.BARRIER_YIELD, int(rate * BARRIER_YIELD))
        self._set(ctypes.c_int64, control_block.BUDGET, int(rate * BUDGET))
        address = ctypes.cast(self._wake, ctypes.c_void_p).value
        self._set(ctypes.c_void_p, control_block.WAKE, address)

    def _set(self, kind: Any, offset: int, value: int | None) -> None:
        kind.from_address(self.state + offset).value = value

    def _release(self) -> None:
        """Called by the executor when workers sleep in Python."""
        self.wake_ups.release(self.workers)

    def start(self) -> None:
        for tid in range(1, self.workers):
            thread = threading.Thread(
                target=self._serve, args=(tid,), name=f"rlx-worker-{tid}", daemon=True
            )
            self.threads.append(thread)
            thread.start()

    def rebalance(self) -> None:
        """Migrate workers that shared a core in the last run to free cores.

        The scheduler may wake a worker on the caller's core and leave it there; then every barrier
        waits for a time slice. The worker is pinned to a free core and unpinned at once: it stays
        there until the scheduler has a reason to move it.
        """
        cpus = self.cpus[:]
        if len(set(cpus)) == len(cpus):
            return
        allowed = os.sched_getaffinity(0)
        free = allowed - set(cpus)
        for tid, thread in enumerate(self.threads, 1):
            if free and cpus[tid] in cpus[:tid] and thread.native_id is not None:
                try:
                    os.sched_setaffinity(thread.native_id, {free.pop()})
                    os.sched_setaffinity(thread.native_id, allowed)
                except OSError:
                    return  # the thread is gone, or the system does not let us

    def _serve(self, tid: int) -> None:
        seen, slept = 0, 0
        while seen >= 0:
            seen = self.native.worker(self.state, tid, seen, slept)
            if seen >= 0:
                self.wake_ups.acquire()
                slept = 1

    def stop(self) -> None:
        """End the workers; later runs use the caller's thread alone. A run that hangs is left."""
        if not self.lock.acquire(timeout=0.05 if self.abandoned else 2.0):
            return
        try:
            if self.threads:
                self.native.stop(self.state)
                for thread in self.threads:
                    thread.join(timeout=2.0)
            self._set(ctypes.c_int32, control_block.WORKERS, 1)
        finally:
            self.lock.release()


class ThreadPool:
    """Workers that run programs. `ThreadPool()` has RLX_NUM_THREADS workers, else one per
    physical core.

    `oversubscribe` allows more workers than cores (slow; for tests). `futex=False` makes idle
    workers sleep in Python, as on systems without futexes or the like.
    """

    def __init__(
        self, workers: int | None = None, *, oversubscribe: bool = False, futex: bool | None = None
    ) -> None:
        if oversubscribe and workers is not None:
            self.workers = max(1, min(workers, MAX_WORKERS))
        else:
            self.workers = worker_count(workers)
        self._futex = uses_futex(Target.host()) if futex is None else futex
        records_cores = self._futex and sys.platform == "linux"
        self._rebalances = records_cores and 1 < self.workers <= usable_cores()
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._group = _WorkerGroup(self.workers, self._futex)
        self._started = False
        self._finalizer = weakref.finalize(self, self._group.stop)

    def after_fork(self) -> None:
        """In a child process: the workers are gone, and the lock may never be released."""
        self._finalizer.detach()
        self._reset()

    def run(
        self,
        program: Program,
        first: int = 0,
        last: int | None = None,
        on_host: Callable[[int], None] | None = None,
    ) -> None:
        """Run launches [first, last). Ctrl-C stops a long run at a barrier; the pool stays usable.

        `on_host` does the host calls; meanwhile other threads may use the workers.
        """
        end = len(program) if last is None else last
        if not 0 <= first <= end <= len(program):
            raise ValueError(f"launches {first} to {end} of {len(program)}")
        program.begin_run()
        at = first
        while at < end and not program.cancelled:
            with self._group.lock:
                self._start()
                at = self._group.native.run(self._group.state, program.address, at, end)
                if self._rebalances and self._group.shared_core.value:
                    self._group.rebalance()
            if at < end and program.is_host(at):
                if on_host is None:
                    raise ValueError(f"launch {at} is a host call, and on_host was not given")
                begin = self._group.native.now()
                on_host(at)
                program.record(at, begin, self._group.native.now())
                at += 1

    def run_all(self, program: Program) -> None:
        """Run a program without host calls that is not profiled."""
        end, group = program.count, self._group
        with group.lock:
            if not self._started:
                self._start()
            at = group.native.run(group.state, program.address, 0, end)
            if self._rebalances and group.shared_core.value:
                group.rebalance()
        if at < end:
            self.run(program, at)

    def run_loop(self, program: Program, header: int) -> None:
        """Run a decode loop over a program without host calls; Ctrl-C stops it like a run."""
        program.begin_run()
        again = 1
        while again:
            with self._group.lock:
                self._start()
                state, end = self._group.state, len(program)
                again = self._group.native.decode_loop(state, program.address, end, header)
                if self._rebalances and self._group.shared_core.value:
                    self._group.rebalance()

    def abandon(self, program: Program, abandoned: bool) -> None:
        """Let a run that nobody waits for end at the next barrier; False: it has ended."""
        program.cancelled = self._group.abandoned = abandoned

    def _start(self) -> None:
        if not self._started:
            self._group.start()
            self._started = True

    @property
    def native(self) -> Any:
        """The native functions of the executor, to time their calls."""
        return self._group.native

    @property
    def ticks_per_second(self) -> float:
        """Rate of the time stamps in a program's profile."""
        return self._group.native.rate

    def close(self) -> None:
        """Stop the workers. Later runs use the caller's thread alone."""
        self._finalizer()
        self._started = True


_pools: weakref.WeakSet[ThreadPool] = weakref.WeakSet()
_shared: dict[int, ThreadPool] = {}
_shared_lock = threading.Lock()


def get_thread_pool(workers: int | None = None) -> ThreadPool:
    """The process's thread pool of that size, created on first use."""
    count = worker_count(workers)
    with _shared_lock:
        if count not in _shared:
            _shared[count] = ThreadPool(count)
        return _shared[count]


def _after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    for pool in list(_pools):
        pool.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
