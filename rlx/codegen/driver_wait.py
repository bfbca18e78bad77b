"""How workers of the driver wait for each other: spinning, yielding, asleep."""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.driver_layout import SPIN
from rlx.codegen.emit import Function, Value, i32, i64

_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # private to the process
_EVERYONE = 0x7FFFFFFF


def void_results(*_: object) -> None:
    """Drop what a call or branch gives, in a body that must give nothing."""


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
    """Sleepers of the portable barrier look by themselves."""


def counted_sleep(f: Function, counter: Value, sleep: Callable[[], None]) -> None:
    """Say that someone sleeps before looking a last time, so that a wake-up is never missed."""
    f.atomic_rmw("add", counter, f.i32(1), order="seq_cst")
    sleep()
    f.atomic_rmw("sub", counter, f.i32(1), order="seq_cst")


def idle(f: Function, state: Value, start: Value, patience: int, sleep: Callable[[], None]) -> None:
    """One look's worth of waiting: first spin, then let other threads run, in the end sleep.

    Yielding early matters where the thread that is waited for sits on the same core.
    """
    waited = f.clock() - start

    def give_way() -> None:
        f.intrinsic("sched_yield", i32)

    f.if_(
        waited < f.load(state, i64, SPIN),
        f.relax,
        lambda: void_results(f.if_(waited < f.load(state, i64, patience), give_way, sleep)),
    )
