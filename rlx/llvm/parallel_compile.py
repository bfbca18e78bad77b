"""Compiling many units at once.

llvmlite holds one lock around LLVM, so threads do not help: helper processes do. They take some
0.15 s to start, therefore only large batches use them; this process compiles too, from the same
queue, and finishes alone whatever a helper could not. On two cores a batch of 0.7 s takes 0.4 s.
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
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from rlx.errors import CodegenError

if TYPE_CHECKING:
    from rlx.llvm.jit import Unit

SECONDS_PER_LINE = 20e-6
"""What LLVM takes for a line of IR, as a rule of thumb."""
WORTH_STARTING, WORTH_SENDING = 0.3, 0.03
"""Estimated seconds of work from which starting helpers pays, and using those that run."""
MAX_HELPERS = 7
IDLE = 10.0
"""Seconds without work after which a helper ends."""


def compile_all(units: Sequence[Unit], helpers: int | None = None) -> list[bytes]:
    """Objects of all units, in order. `helpers` overrides the choice of how many processes."""
    if helpers is None:
        helpers = _wanted(units)
    results: list[bytes | None] = [None] * len(units)
    if helpers:
        _share(units, results, helpers)
    return [found if found is not None else units[i].compile() for i, found in enumerate(results)]


def _wanted(units: Sequence[Unit]) -> int:
    seconds = sum(unit.text.count("\n") for unit in units) * SECONDS_PER_LINE
    if len(units) < 2 or seconds < (WORTH_SENDING if _running() else WORTH_STARTING):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min((cores or 1) - 1, MAX_HELPERS, len(units) - 1, int(seconds / 0.3) or 1)


def _share(units: Sequence[Unit], results: list[bytes | None], helpers: int) -> None:
    """Take units from one queue, here and in the helpers, largest first."""
    jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in sorted(range(len(units)), key=lambda i: -len(units[i].text)):
        jobs.put(index)
    threads = [
        threading.Thread(target=_feed, args=(helper, units, results, jobs), daemon=True)
        for helper in _take(helpers)
    ]
    for thread in threads:
        thread.start()
    try:
        while (mine := _next(jobs)) is not None:
            results[mine] = units[mine].compile()
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


def _feed(
    helper: Helper,
    units: Sequence[Unit],
    results: list[bytes | None],
    jobs: queue.SimpleQueue[int],
) -> None:
    """One helper's share. A unit it fails on is left for this process, which tells the cause."""
    while helper.alive and (index := _next(jobs)) is not None:
        results[index] = helper.compile(units[index])


class Helper:
    """A Python process that compiles what it is sent."""

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


_pool: list[Helper] = []


def _running() -> list[Helper]:
    here = [h for h in _pool if h.alive and h.owner == os.getpid()]
    return [h for h in here if h.process.poll() is None]


def _take(count: int) -> list[Helper]:
    """Helpers that are running, and new ones if there are too few and the system allows it."""
    _pool[:] = _running()
    with contextlib.suppress(OSError, ValueError):
        while len(_pool) < count and sys.executable:
            _pool.append(Helper())
    return _pool[:count]


@atexit.register
def stop() -> None:
    """End the helpers."""
    for helper in _pool:
        helper.close()
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


def _serve() -> None:
    """A helper's life: compile until the pipe closes or nothing comes."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    from rlx.llvm import emit_object  # noqa: F401  (imported before the first unit arrives)

    while select.select([source], [], [], IDLE)[0]:
        try:
            unit: Unit = _receive(source)
        except EOFError:
            return
        try:
            _send(sink, unit.compile())
        except CodegenError as error:
            _send(sink, str(error))


if __name__ == "__main__":
    _serve()
