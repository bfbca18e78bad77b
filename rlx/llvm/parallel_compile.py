"""Parallel compilation of many units, in worker processes.

llvmlite holds one lock around LLVM, so threads do not help. A worker takes some 0.15 s to start,
therefore only large batches use them; this process compiles too, from the same queue, and finishes
whatever a worker could not. On two cores a batch of 0.7 s takes 0.4 s.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import queue
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any

from rlx.errors import CodegenError

if TYPE_CHECKING:
    from rlx.llvm.jit import Unit

SECONDS_PER_LINE = 20e-6
"""A rough estimate of LLVM's time per line of IR."""
MIN_SECONDS_TO_START, MIN_SECONDS_TO_USE = 0.3, 0.03
"""Estimated seconds of work from which it pays to start workers, and to use running ones."""
MAX_WORKERS = 7
IDLE_SECONDS = 10.0
"""A worker ends after so long without work."""


def compile_all(
    units: Sequence[Unit],
    workers: int | None = None,
    on_unit: Callable[[], None] = lambda: None,
) -> list[bytes]:
    """Objects of all units, in order. `workers` overrides the number of worker processes. `on_unit`
    is called after each unit, in any thread."""
    if workers is None:
        workers = _num_workers(units)
    results: list[bytes | None] = [None] * len(units)
    if workers and _in_use.acquire(blocking=False):  # else another thread has the workers
        try:
            _compile_parallel(units, results, workers, on_unit)
        finally:
            _in_use.release()
    return [_compile(units[i], on_unit) if r is None else r for i, r in enumerate(results)]


def _compile(unit: Unit, on_unit: Callable[[], None] = lambda: None) -> bytes:
    from rlx.llvm.emit_object import make_object  # imported late: workers start meanwhile

    made = make_object(unit.text, unit.target, unit.opt, unit.level)
    on_unit()
    return made


def _num_workers(units: Sequence[Unit]) -> int:
    seconds = sum(unit.text.count("\n") for unit in units) * SECONDS_PER_LINE
    if len(units) < 2 or seconds < (MIN_SECONDS_TO_USE if _running() else MIN_SECONDS_TO_START):
        return 0
    return min(_num_cores() - 1, MAX_WORKERS, len(units) - 1, int(seconds / 0.3) or 1)


def _num_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def start_early() -> None:
    """Start a worker for a batch to come, unless one runs: at the end of the passes, which leave a
    core idle, it is ready."""
    if _num_cores() > 1 and _in_use.acquire(blocking=False):
        try:
            _take_workers(1)
        finally:
            _in_use.release()


def _compile_parallel(
    units: Sequence[Unit],
    results: list[bytes | None],
    workers: int,
    on_unit: Callable[[], None],
) -> None:
    """Compile from one queue, here and in the workers, largest units first."""
    jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in sorted(range(len(units)), key=lambda i: -len(units[i].text)):
        jobs.put(index)
    threads = [
        threading.Thread(
            target=_serve_worker, args=(worker, units, results, jobs, on_unit), daemon=True
        )
        for worker in _take_workers(workers)
    ]
    for thread in threads:
        thread.start()
    try:
        while (job := _next(jobs)) is not None:
            results[job] = _compile(units[job], on_unit)
    finally:
        while _next(jobs) is not None:
            pass
        for thread in threads:
            thread.join()


def _next(jobs: queue.SimpleQueue[int]) -> int | None:
    try:
        return jobs.get_nowait()
    except queue.Empty:
        return None


def _serve_worker(
    worker: WorkerProcess,
    units: Sequence[Unit],
    results: list[bytes | None],
    jobs: queue.SimpleQueue[int],
    on_unit: Callable[[], None],
) -> None:
    """Feed one worker. A unit it fails on is left to this process, which reports the cause."""
    while worker.alive and (index := _next(jobs)) is not None:
        results[index] = worker.compile(units[index])
        if results[index] is not None:
            on_unit()


class WorkerProcess:
    """A Python process that compiles the units it is sent."""

    def __init__(self) -> None:
        self.owner, self.alive = os.getpid(), True
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlx.llvm.parallel_compile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, which closes the pipe
        )

    def compile(self, unit: Unit) -> bytes | None:
        try:
            assert self.process.stdin and self.process.stdout
            _send(self.process.stdin, unit)
            reply = _receive(self.process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            self.close()
            return None
        return reply if isinstance(reply, bytes) else None

    def close(self) -> None:
        self.alive = False
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()
        if self.owner == os.getpid():
            self.process.terminate()
            self.process.wait()


_pool: list[WorkerProcess] = []
_in_use = threading.Lock()


def _after_fork() -> None:
    """A new lock in the child: a thread that held the old one does not exist there."""
    global _in_use
    _in_use = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _running() -> list[WorkerProcess]:
    here = [h for h in _pool if h.alive and h.owner == os.getpid()]
    return [h for h in here if h.process.poll() is None]


def _take_workers(count: int) -> list[WorkerProcess]:
    """Running workers, and new ones if there are too few and the system allows it."""
    _pool[:] = _running()
    with contextlib.suppress(OSError, ValueError):
        while len(_pool) < count and sys.executable:
            _pool.append(WorkerProcess())
    return _pool[:count]


@atexit.register
def stop() -> None:
    """End all workers."""
    for worker in _pool:
        worker.close()
    _pool.clear()


def _send(stream: IO[bytes], item: object) -> None:
    data = pickle.dumps(item)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    return pickle.loads(stream.read(size))


def _has_work(source: IO[bytes]) -> bool:
    """Wait for a unit, or for the idle time. Windows cannot wait for a pipe: the read that follows
    does, until the other side closes it."""
    return sys.platform == "win32" or bool(select.select([source], [], [], IDLE_SECONDS)[0])


def _serve() -> None:
    """The main loop of a worker: compile until the pipe closes or the idle time is over."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    from rlx.llvm import emit_object  # noqa: F401  (imported before the first unit arrives)

    while _has_work(source):
        try:
            unit: Unit = _receive(source)
        except EOFError:
            return
        try:
            _send(sink, _compile(unit))
        except CodegenError as error:
            _send(sink, str(error))


if __name__ == "__main__":
    _serve()
