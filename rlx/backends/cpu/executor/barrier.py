"""Waiting in the executor: workers spin, then yield, then sleep until others wake them.

A sleeper counts itself before it checks its condition a last time. Whoever changes the condition
reads this count afterwards, so no wake-up is lost. Workers sleep where the system offers to wait
for a change of a 4-byte word: futex on Linux, os_sync on macOS 14.4 and later, WaitOnAddress on
Windows 8 and later. Elsewhere they poll, or sleep in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rlx.backends.cpu.executor.control_block import (
    ARRIVED,
    BARRIER_SLEEPERS,
    BARRIER_YIELD,
    FINISHED,
    GENERATION,
    SPIN,
)
from rlx.llvm.builder import Function, Module, Value, i32, i64, ptr, void
from rlx.llvm.target import Target

_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # private to the process
_EVERYONE = 0x7FFFFFFF
_FOREVER = 0xFFFFFFFF  # milliseconds of WaitOnAddress


class Sleep(NamedTuple):
    """How workers sleep: `wait(f, address, seen)` returns when the i32 there is not `seen`, or at
    any time; `wake(f, address)` wakes all who wait there."""

    name: str
    wait: Callable[[Function, Value, Value], None]
    wake: Callable[[Function, Value], None]


def _futex(f: Function, op: int, address: Value, value: Value) -> None:
    """The system call, through libc (its first argument is the call's number)."""
    f.module.declare_text("syscall", "declare i64 @syscall(i64, ...)")
    number = 202 if f.target.is_x86 else 98
    f.effect(
        f"call i64 (i64, ...) @syscall(i64 {number}, ptr {address.name}, i64 {op}, "
        f"i64 {value.to(i64, signed=False).name}, ptr null, ptr null, i64 0)"
    )


def _futex_wait(f: Function, address: Value, seen: Value) -> None:
    _futex(f, _FUTEX_WAIT, address, seen)


def _futex_wake(f: Function, address: Value) -> None:
    _futex(f, _FUTEX_WAKE, address, f.i64(_EVERYONE))


def _os_sync_wait(f: Function, address: Value, seen: Value) -> None:
    value = seen.to(i64, signed=False)
    f.intrinsic("os_sync_wait_on_address", i32, address, value, f.i64(4), f.i32(0))


def _os_sync_wake(f: Function, address: Value) -> None:
    f.intrinsic("os_sync_wake_by_address_all", i32, address, f.i64(4), f.i32(0))


def _windows_wait(f: Function, address: Value, seen: Value) -> None:
    place = f.alloca(4)  # WaitOnAddress takes the address of what was seen
    f.store(seen, place)
    f.intrinsic("WaitOnAddress", i32, address, place, f.i64(4), f.i32(_FOREVER))


def _windows_wake(f: Function, address: Value) -> None:
    f.intrinsic("WakeByAddressAll", void, address)


def _sleep_a_little(f: Function, address: Value, seen: Value) -> None:
    if f.target.is_windows:
        f.intrinsic("Sleep", void, f.i32(0))
    else:
        f.intrinsic("usleep", i32, f.i32(50))


def _wake_nobody(f: Function, address: Value) -> None:
    """Sleepers of the portable barrier poll."""


FUTEX = Sleep("futex", _futex_wait, _futex_wake)
OS_SYNC = Sleep("os_sync", _os_sync_wait, _os_sync_wake)
WAIT_ON_ADDRESS = Sleep("WaitOnAddress", _windows_wait, _windows_wake)
POLL = Sleep("poll", _sleep_a_little, _wake_nobody)


_SLEEPS = {"linux": FUTEX, "darwin": OS_SYNC, "win32": WAIT_ON_ADDRESS}


def native_sleep(target: Target) -> Sleep:
    """How workers sleep in code for a target."""
    return _SLEEPS[target.system]


def yield_core(f: Function) -> None:
    """Let another thread run on this core."""
    f.intrinsic("SwitchToThread" if f.target.is_windows else "sched_yield", i32)


def counted(f: Function, counter: Value) -> Iterator[None]:
    """`for _ in counted(f, counter):` what sleeps inside is counted before it checks its condition
    a last time, so that no wake-up is lost."""
    f.atomic_rmw("add", counter, f.i32(1), order="seq_cst")
    yield
    f.atomic_rmw("sub", counter, f.i32(1), order="seq_cst")


def idle(f: Function, state: Value, start: Value, patience: int) -> Iterator[None]:
    """One iteration of a wait loop: spin at first, then yield the core, then sleep as the body of
    `for _ in idle(...):` does.

    Yielding early matters where the awaited thread shares the core.
    """
    waited = f.clock() - start
    for spins in f.either(waited < f.load(state, i64, SPIN)):
        if spins:
            f.relax()
            continue
        for yields in f.either(waited < f.load(state, i64, patience)):
            if yields:
                yield_core(f)
            else:
                yield


def emit_barrier(m: Module, sleep: Sleep) -> Function:
    """barrier(state, nth): wait until all workers of the run have arrived."""
    f = m.function("barrier", [("state", ptr), ("nth", i32)], internal=True)
    state = f["state"]
    generation, sleepers = f.gep(state, GENERATION), f.gep(state, BARRIER_SLEEPERS)
    seen = f.atomic_load(generation, i32, order="monotonic")
    before = f.atomic_rmw("add", state, f.i32(1), ARRIVED)
    for is_last in f.either(before.eq(f["nth"] - 1)):
        if is_last:
            f.atomic_store(f.i32(0), state, ARRIVED, "monotonic")
            f.atomic_rmw("add", generation, f.i32(1), order="seq_cst")
            asleep = f.atomic_load(sleepers, i32, order="seq_cst")
            for _ in f.when(asleep.ne(0)):
                sleep.wake(f, generation)
            continue
        start = f.carry([f.clock()])
        for _ in start.forever():
            start.break_unless(f.atomic_load(generation, i32).eq(seen))
            for _ in idle(f, state, start.values[0], BARRIER_YIELD):
                for _ in counted(f, sleepers):
                    sleep.wait(f, generation, seen)
    return f


def emit_finish(m: Module, sleep: Sleep) -> Function:
    """finish(state, nth): a worker signals that it has left the run."""
    f = m.function("finish", [("state", ptr), ("nth", i32)], internal=True)
    state = f["state"]
    finished = f.gep(state, FINISHED)
    before = f.atomic_rmw("add", finished, f.i32(1), order="seq_cst")
    for _ in f.when(before.eq(f["nth"] - 2)):
        asleep = f.atomic_load(state, i32, BARRIER_SLEEPERS, "seq_cst")
        for _ in f.when(asleep.ne(0)):
            sleep.wake(f, finished)
    return f


def emit_join(m: Module, sleep: Sleep) -> Function:
    """join(state, nth): worker 0 waits until all others have left the run, so that the next one may
    change the control block."""
    f = m.function("join", [("state", ptr), ("nth", i32)], internal=True)
    state, others = f["state"], f["nth"] - 1
    finished, sleepers = f.gep(state, FINISHED), f.gep(state, BARRIER_SLEEPERS)
    start = f.carry([f.clock()])
    for _ in start.forever():
        start.break_unless(f.atomic_load(finished, i32).ne(others))
        for _ in idle(f, state, start.values[0], BARRIER_YIELD):
            for _ in counted(f, sleepers):
                now = f.atomic_load(finished, i32, order="seq_cst")
                for _ in f.when(now.ne(others)):
                    sleep.wait(f, finished, now)
    return f
