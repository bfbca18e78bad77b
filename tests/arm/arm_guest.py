"""A pytest plugin for the emulated run: compile on the host, at the host's speed.

Emulated LLVM takes twenty times as long. A process that the emulated one starts is the host's own
if its program is: units go to a compiler there, which makes the same object code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from rlx.llvm import parallel_compile
from rlx.llvm.jit import Unit
from rlx.llvm.target import Target

HOST_PYTHON = os.environ["ARM_HOST_PYTHON"]
_compile_here = parallel_compile._compile
_workers: list[parallel_compile.WorkerProcess] = []


def pytest_report_header() -> str:
    target = Target.host()
    present = " ".join(f[1:] for f in target.features if f[0] == "+")
    return f"emulated CPU: {target.arch} {target.cpu}: {present}"


def compile_on_host(unit: Unit, on_unit: Callable[[], None] = lambda: None) -> bytes:
    """The object of a unit; a worker that ended for want of work is started again."""
    for _ in range(2):
        if not _workers:
            _workers.append(_start_worker())
        found = _workers[0].compile(unit)
        if found is not None:
            on_unit()
            return found
        _workers.pop().close()
    return _compile_here(unit, on_unit)  # LLVM refuses it: with its own message


def _start_worker() -> parallel_compile.WorkerProcess:
    executable, sys.executable = sys.executable, HOST_PYTHON
    kept, sys.path = sys.path, [os.environ["ARM_SOURCES"]]
    try:
        return parallel_compile.WorkerProcess()
    finally:
        sys.executable, sys.path = executable, kept


# no workers of its own: two would wait for one compiler
parallel_compile._compile = compile_on_host
parallel_compile._num_workers = lambda units: 0
sys.executable = os.environ["ARM_GUEST_PYTHON"]  # a script that starts the emulator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This process's share of the tests: every nth."""
    number, count = map(int, os.environ.get("ARM_SHARE", "0/1").split("/"))
    items[:] = items[number::count]
