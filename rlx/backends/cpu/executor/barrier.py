"""Waiting in the executor: workers spin, then yield, then sleep until others wake them.

A sleeper counts itself before it checks its condition a last time. Whoever changes the condition
reads this count afterwards, so no wake-up is lost. On Linux workers sleep in futexes.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.executor.control_block import (
    ARRIVED,
    BARRIER_SLEEPERS,
    BARRIER_YIELD,
    FINISHED,
    GENERATION,
    SPIN,
)
from rlx.llvm.builder import Function, Module, Value, i32, i64, ptr

_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # private to the process
_EVERYONE = 0x7FFFFFFF


def void_results(*_: object) -> None:
    """Drop the results of a call or branch, in a body that must return nothing."""


def _futex(f: Function, op: int, address: Value, value: Value) -> None:
    """The system call, through libc (its first argument is the call's number)."""
    f.module.declare_text("syscall", "declare i64 @syscall(i64, ...)")
    number = 202 if f.target.is_x86 else 98
    f.effect(
        f"call i64 (i64, ...) @syscall(i64 {number}, ptr {address.name}, i64 {op}, "
        f"i64 {value.to(i64, signed=False).name}, ptr null, ptr null, i64 0)"
    )


def futex_wait(f: Function, address: Value, seen: Value) -> None:
    _futex(f, _FUTEX_WAIT, address, seen)


def futex_wake(f: Function, address: Value) -> None:
    _futex(f, _FUTEX_WAKE, address, f.i64(_EVERYONE))


def sleep_a_little(f: Function, address: Value, seen: Value) -> None:
    f.intrinsic("usleep", i32, f.i32(50))


def wake_nobody(f: Function, address: Value) -> None:
    """Sleepers of the portable barrier poll."""


def counted_sleep(f: Function, counter: Value, sleep: Callable[[], None]) -> None:
    """Count the sleeper before `sleep` checks a last time, so that no wake-up is lost."""
    f.atomic_rmw("add", counter, f.i32(1), order="seq_cst")
    sleep()
    f.atomic_rmw("sub", counter, f.i32(1), order="seq_cst")


def idle(f: Function, state: Value, start: Value, patience: int, sleep: Callable[[], None]) -> None:
    """One iteration of a wait loop: spin at first, then yield the core, then sleep.

    Yielding early matters where the awaited thread shares the core.
    """
    waited = f.clock() - start

    def yield_core() -> None:
        f.intrinsic("sched_yield", i32)

    f.if_(
        waited < f.load(state, i64, SPIN),
        f.relax,
        lambda: void_results(f.if_(waited < f.load(state, i64, patience), yield_core, sleep)),
    )


def emit_barrier(
    m: Module,
    wait: Callable[[Function, Value, Value], None],
    wake: Callable[[Function, Value], None],
) -> Function:
    """barrier(state, nth): wait until all workers of the run have arrived."""
    f = m.function("barrier", [("state", ptr), ("nth", i32)], internal=True)
    state = f["state"]
    generation, sleepers = f.gep(state, GENERATION), f.gep(state, BARRIER_SLEEPERS)
    seen = f.atomic_load(generation, i32, order="monotonic")
    before = f.atomic_rmw("add", state, f.i32(1), ARRIVED)

    def open_barrier() -> None:
        f.atomic_store(f.i32(0), state, ARRIVED, "monotonic")
        f.atomic_rmw("add", generation, f.i32(1), order="seq_cst")
        asleep = f.atomic_load(sleepers, i32, order="seq_cst")
        f.if_(asleep.ne(0), lambda: wake(f, generation))

    def wait_once(start: Value) -> list[Value]:
        idle(f, state, start, BARRIER_YIELD, sleep)
        return [start]

    def sleep() -> None:
        counted_sleep(f, sleepers, lambda: wait(f, generation, seen))

    def wait_for_all() -> None:
        f.while_([f.clock()], lambda start: f.atomic_load(generation, i32).eq(seen), wait_once)

    f.if_(before.eq(f["nth"] - 1), open_barrier, wait_for_all)
    return f


def emit_finish(m: Module, wake: Callable[[Function, Value], None]) -> Function:
    """finish(state, nth): a worker signals that it has left the run."""
    f = m.function("finish", [("state", ptr), ("nth", i32)], internal=True)
    state = f["state"]
    finished = f.gep(state, FINISHED)
    before = f.atomic_rmw("add", finished, f.i32(1), order="seq_cst")

    def last() -> None:
        asleep = f.atomic_load(state, i32, BARRIER_SLEEPERS, "seq_cst")
        f.if_(asleep.ne(0), lambda: wake(f, finished))

    f.if_(before.eq(f["nth"] - 2), last)
    return f


def emit_join(m: Module, wait: Callable[[Function, Value, Value], None]) -> Function:
    """join(state, nth): worker 0 waits until all others have left the run, so that the next one may
    change the control block."""
    f = m.function("join", [("state", ptr), ("nth", i32)], internal=True)
    state, others = f["state"], f["nth"] - 1
    finished, sleepers = f.gep(state, FINISHED), f.gep(state, BARRIER_SLEEPERS)

    def unless_done() -> None:
        now = f.atomic_load(finished, i32, order="seq_cst")
        f.if_(now.ne(others), lambda: wait(f, finished, now))

    def wait_once(start: Value) -> list[Value]:
        idle(f, state, start, BARRIER_YIELD, lambda: counted_sleep(f, sleepers, unless_done))
        return [start]

    f.while_([f.clock()], lambda start: f.atomic_load(finished, i32).ne(others), wait_once)
    return f
