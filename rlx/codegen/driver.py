"""The native driver: worker threads that run a table of steps in lock step.

A kernel is `void kernel(ptr args, i32 tid, i32 nth)`; `args` holds 8-byte args (pointers and i64
scalars) as the kernel wants them, and worker `tid` of `nth` does its share.

A program is a table of steps {kernel, args, flags, phase}. Before the first step the driver copies
`live` values (sizes of this run, addresses of inputs and outputs) into the args that the patch
table names, so a run costs Python one call, whatever the number of steps. Flag BARRIER: no worker
begins the next step before all have finished this one. Flag ALONE: worker 0 runs the step by itself
(it sees tid 0 of 1). Flag JUMP: the kernel returns an i64, how many steps further the next one is
(1 is the usual, a negative number goes back); all workers must come to the same number. Flag HOST:
no kernel; the run ends before the step, which the caller does before it resumes behind it. A run
ends when every worker has left it.

The pool's state is one block of memory. A run is announced by a new epoch, whose low byte says how
many workers take part; workers wait for it spinning, then yielding, then asleep. Worker 0 is the
caller. After `BUDGET` ticks the workers agree, at a barrier, to return early, so that Python can
handle a signal; the caller then resumes at the step that the run returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

from rlx.codegen.driver_chain import emit_chain
from rlx.codegen.driver_layout import (
    ALONE,
    ARGS,
    ARRIVED,
    BARRIER,
    BARRIER_SLEEPERS,
    BARRIER_YIELD,
    BEGIN,
    BUDGET,
    CPUS,
    CROWDED,
    END,
    EPOCH,
    FINISHED,
    FIRST,
    GENERATION,
    HOST,
    IDLE_YIELD,
    JUMP,
    LAST,
    LIVE,
    PATCH_COUNT,
    PATCHES,
    PROFILE,
    PROGRAM,
    ROUNDS,
    SLEEPERS,
    STAMP_BYTES,
    STEP_ARGS,
    STEP_BYTES,
    STEP_COUNT,
    STEP_FLAGS,
    STEP_FN,
    STEPS,
    STOP,
    USE_WORKERS,
    WAKE,
    WORKERS,
    YIELD_AT,
)
from rlx.codegen.driver_wait import (
    counted_sleep,
    futex_wait,
    futex_wake,
    idle,
    sleep_a_little,
    void_results,
    wake_nobody,
)
from rlx.codegen.emit import Function, Module, Value, i32, i64, ptr, void
from rlx.codegen.jit import Kernel, Unit, compile_unit
from rlx.codegen.target import Target


def driver_unit(target: Target, futex: bool | None = None) -> Unit:
    """The driver for a target; without futex, workers sleep in Python and are woken by it."""
    if futex is None:
        futex = sys.platform == "linux"
    m = Module(target)
    wait, wake = (futex_wait, futex_wake) if futex else (sleep_a_little, wake_nobody)
    drive = _emit_drive(m, _emit_barrier(m, wait, wake), futex)
    _emit_worker(m, drive, _emit_finish(m, wake), futex)
    emit_chain(m, _emit_run(m, drive, _emit_join(m, wait), futex))
    _emit_stop(m, futex)
    now = m.function("now", [], i64)
    now.ret(now.clock())
    return Unit(m.text(), target, "none", 2)


@cache
def load_driver(target: Target, futex: bool | None = None) -> Kernel:
    return compile_unit(driver_unit(target, futex))


def _emit_barrier(
    m: Module,
    wait: Callable[[Function, Value, Value], None],
    wake: Callable[[Function, Value], None],
) -> Function:
    f = m.function("barrier", [("state", ptr), ("nth", i32)], internal=True)
    state = f["state"]
    generation, sleepers = f.gep(state, GENERATION), f.gep(state, BARRIER_SLEEPERS)
    seen = f.atomic_load(generation, i32, order="monotonic")
    before = f.atomic_rmw("add", state, f.i32(1), ARRIVED)

    def release() -> None:
        f.atomic_store(f.i32(0), state, ARRIVED, "monotonic")
        f.atomic_rmw("add", generation, f.i32(1), order="seq_cst")
        asleep = f.atomic_load(sleepers, i32, order="seq_cst")
        f.if_(asleep.ne(0), lambda: wake(f, generation))

    def linger(start: Value) -> list[Value]:
        idle(f, state, start, BARRIER_YIELD, sleep)
        return [start]

    def sleep() -> None:
        counted_sleep(f, sleepers, lambda: wait(f, generation, seen))

    def attend() -> None:
        f.while_([f.clock()], lambda start: f.atomic_load(generation, i32).eq(seen), linger)

    f.if_(before.eq(f["nth"] - 1), release, attend)
    return f


def _emit_finish(m: Module, wake: Callable[[Function, Value], None]) -> Function:
    """A worker says that it has left the run."""
    f = m.function("finish", [("state", ptr), ("nth", i32)], internal=True)
    state = f["state"]
    finished = f.gep(state, FINISHED)
    before = f.atomic_rmw("add", finished, f.i32(1), order="seq_cst")

    def last() -> None:
        asleep = f.atomic_load(state, i32, BARRIER_SLEEPERS, "seq_cst")
        f.if_(asleep.ne(0), lambda: wake(f, finished))

    f.if_(before.eq(f["nth"] - 2), last)
    return f


def _emit_join(m: Module, wait: Callable[[Function, Value, Value], None]) -> Function:
    """Worker 0 waits until all others have left the run, so that the next may change the state."""
    f = m.function("join", [("state", ptr), ("nth", i32)], internal=True)
    state, others = f["state"], f["nth"] - 1
    finished, sleepers = f.gep(state, FINISHED), f.gep(state, BARRIER_SLEEPERS)

    def unless_done() -> None:
        now = f.atomic_load(finished, i32, order="seq_cst")
        f.if_(now.ne(others), lambda: wait(f, finished, now))

    def linger(start: Value) -> list[Value]:
        idle(f, state, start, BARRIER_YIELD, lambda: counted_sleep(f, sleepers, unless_done))
        return [start]

    f.while_([f.clock()], lambda start: f.atomic_load(finished, i32).ne(others), linger)
    return f


_DRIVE = [
    ("state", ptr),
    ("program", ptr),
    ("first", i64),
    ("last", i64),
    ("tid", i32),
    ("nth", i32),
]


def _emit_drive(m: Module, barrier: Function, says_where: bool) -> Function:
    """Run steps [first, last) as worker tid of nth; gives the step to go on from. Steps of a
    program that is not profiled pay nothing for those that are: each kind has its own code."""
    plain = _emit_steps(m, barrier, says_where, timed=False)
    timed = _emit_steps(m, barrier, says_where, timed=True)
    f = m.function("drive", _DRIVE, i64, internal=True)
    given = [f[name] for name, _ in _DRIVE]
    profiled = f.load(f["program"], ptr, PROFILE).ne(f.null())
    f.ret(*f.if_(profiled, lambda: f.call(timed, *given), lambda: f.call(plain, *given)))
    return f


def _emit_steps(m: Module, barrier: Function, says_where: bool, timed: bool) -> Function:
    f = m.function("drive_timed" if timed else "drive_plain", _DRIVE, i64, internal=True)
    state, program, tid, nth = f["state"], f["program"], f["tid"], f["nth"]
    steps, profile = f.load(program, ptr, STEPS), f.load(program, ptr, PROFILE)
    place = f.gep(f.gep(state, CPUS), tid.to(i64), 4)
    budget, begin = f.load(state, i64, BUDGET), f.clock()
    row = f.gep(profile, tid.to(i64) * f.load(program, i64, STEP_COUNT), STAMP_BYTES)
    leads = tid.eq(0)

    def sync(turn: Value) -> Value:
        """A barrier; whether the run is to be left there. Its number is that of the turn and not of
        the step, because in a loop a slow worker may still look at the last round's answer."""
        late = leads & (f.clock() - begin > budget)
        f.if_(late, lambda: f.atomic_store(turn, state, YIELD_AT, "monotonic"))
        f.if_(nth > 1, lambda: void_results(f.call(barrier, state, nth)))
        return f.atomic_load(state, i64, YIELD_AT, "monotonic").eq(turn)

    def body(step: Value, limit: Value, turn: Value) -> list[Value]:
        entry = f.gep(steps, step, STEP_BYTES)
        flags = f.load(entry, i32, STEP_FLAGS)
        alone, one = (flags & ALONE).ne(0), f.i64(1)
        f.if_((flags & HOST).ne(0), lambda: f.ret(step))

        def work() -> Value:
            stamps = f.gep(row, step, STAMP_BYTES)
            if timed:
                f.prefetch(stamps)  # it comes while the kernel runs
                f.prefetch(stamps, STAMP_BYTES - 8)
            start = f.clock() if timed else None
            share = f.select(alone, f.i32(1), nth)
            call = f.load(entry, ptr, STEP_FN), f.load(entry, ptr, STEP_ARGS), tid, share

            def plain() -> Value:
                f.call_pointer(call[0], void, *call[1:])
                return one

            def jump() -> Value:
                return f.call_pointer(call[0], i64, *call[1:])

            [distance] = f.if_((flags & JUMP).ne(0), jump, plain)
            if start is not None:
                _record(f, stamps, start)
            return distance

        [distance] = f.if_(leads | ~alone, work, lambda: one)
        following = step + distance
        wanted = (flags & BARRIER).ne(0) & (following < limit)
        [leave] = f.if_(wanted, lambda: sync(turn), lambda: f.const(0, leads.type))
        return [following, f.select(leave, following, limit), turn + 1]

    carry = [f["first"], f["last"], f.i64(0)]
    at, _, _ = f.while_(carry, lambda step, limit, turn: step < limit, body)
    if says_where:
        f.store(f.intrinsic("sched_getcpu", i32), place)
    f.ret(at)
    return f


def _record(f: Function, stamps: Value, start: Value) -> None:
    """A step's begin is that of its first round; its end is as far behind as all rounds took."""
    spent, rounds = f.clock() - start, f.load(stamps, i64, ROUNDS)
    again = rounds.ne(0)
    f.store(f.select(again, f.load(stamps, i64, BEGIN), start), stamps, BEGIN)
    f.store(f.select(again, f.load(stamps, i64, END), start) + spent, stamps, END)
    f.store(rounds + 1, stamps, ROUNDS)


def _count_sleepers(f: Function, op: str) -> None:
    f.atomic_rmw(op, f["state"], f.i32(1), SLEEPERS, "seq_cst")


def _wait_for_epoch(f: Function, seen: Value, futex: bool) -> None:
    """In a worker: until there is another epoch than the one seen, or leave it to Python."""
    state = f["state"]

    def sleep() -> None:
        futex_wait(f, f.gep(state, EPOCH), seen)

    def leave() -> None:
        _count_sleepers(f, "add")
        missed = f.atomic_load(state, i32, EPOCH, "seq_cst").ne(seen)
        asleep = seen.to(i64, signed=False)
        f.if_(missed, lambda: _count_sleepers(f, "sub"), lambda: f.ret(asleep))

    def rest() -> None:
        if futex:
            counted_sleep(f, f.gep(state, SLEEPERS), sleep)
        else:
            leave()

    def linger(start: Value) -> list[Value]:
        idle(f, state, start, IDLE_YIELD, rest)
        return [start]

    f.while_([f.clock()], lambda start: f.atomic_load(state, i32, EPOCH).eq(seen), linger)


def _emit_worker(m: Module, drive: Function, finish: Function, futex: bool) -> None:
    """i64 worker(state, tid, seen, slept): serve runs until told to stop, then give -1.

    Without futex it comes back after an idle time with the epoch it has seen, counted as asleep;
    the caller waits for the pool's wake-up and enters again with slept = 1.
    """
    params = [("state", ptr), ("tid", i32), ("seen", i32), ("slept", i32)]
    f = m.function("worker", params, i64)
    state, tid = f["state"], f["tid"]
    f.if_(f["slept"].ne(0), lambda: _count_sleepers(f, "sub"))

    def serve(seen: Value) -> list[Value]:
        _wait_for_epoch(f, seen, futex)
        epoch = f.atomic_load(state, i32, EPOCH)
        stopped = f.atomic_load(state, i32, STOP).ne(0)
        f.if_(stopped, lambda: f.ret(f.i64(-1)))
        nth = epoch & 0xFF

        def take_part() -> None:
            program = f.load(state, ptr, PROGRAM)
            first, last = f.load(state, i64, FIRST), f.load(state, i64, LAST)
            f.call(drive, state, program, first, last, tid, nth)
            f.call(finish, state, nth)

        f.if_(tid < nth, take_part)
        return [epoch]

    f.while_([f["seen"]], lambda seen: f.i32(0).eq(0), serve)
    f.ret(f.i64(-1))


def _emit_run(m: Module, drive: Function, join: Function, futex: bool) -> Function:
    """i64 run(state, program, first, last): as worker 0, with the others; gives the next step."""
    params = [("state", ptr), ("program", ptr), ("first", i64), ("last", i64)]
    f = m.function("run", params, i64)
    state, program, first, last = (f[name] for name, _ in params)
    _emit_patches(f, program)
    wanted = f.load(program, i64, USE_WORKERS).to(i32)
    have = f.load(state, i32, WORKERS)
    nth = f.min(f.select(wanted > 0, wanted, have), have)
    f.atomic_store(f.i64(-1), state, YIELD_AT, "monotonic")

    def announce() -> None:
        f.atomic_store(f.i32(0), state, FINISHED, "monotonic")
        f.store(program, state, PROGRAM)
        f.store(first, state, FIRST)
        f.store(last, state, LAST)
        _new_epoch(f, nth, futex)

    f.if_(nth > 1, announce)
    at = f.call(drive, state, program, first, last, f.i32(0), nth)
    f.if_(nth > 1, lambda: void_results(f.call(join, state, nth)))
    if futex:
        _emit_crowded(f, nth)
    f.ret(at)
    return f


def _emit_crowded(f: Function, nth: Value) -> None:
    """Whether workers ended on fewer cores than they are; cores 64 apart are taken for one, and
    Python looks again."""
    state, one = f["state"], f.i64(1)

    def add(tid: Value, cores: Value) -> Value:
        core = f.load(f.gep(f.gep(state, CPUS), tid, 4), i32).to(i64)
        return cores | one << (core & 63)

    [cores] = f.loop(0, nth.to(i64), 1, [f.i64(0)], add)
    count = f.intrinsic("llvm.ctpop.i64", i64, cores)
    f.store((count < nth.to(i64)).to(i32, signed=False), state, CROWDED)


def _emit_patches(f: Function, program: Value) -> None:
    pairs, count = f.load(program, ptr, PATCHES), f.load(program, i64, PATCH_COUNT)
    args, live = f.load(program, ptr, ARGS), f.load(program, ptr, LIVE)
    for i in f.range(0, count):
        pair = f.gep(pairs, i, 8)
        arg, source = f.load(pair, i32).to(i64), f.load(pair, i32, 4).to(i64)
        f.store(f.load(f.gep(live, source, 8), i64), f.gep(args, arg, 8))


def _new_epoch(f: Function, nth: Value, futex: bool) -> None:
    """Tell all workers. Only the holder of the pool writes the epoch, so no race is possible."""
    state = f["state"]
    old = f.atomic_load(state, i32, EPOCH, "monotonic")
    fresh = (old & -256) + 256 | nth
    f.atomic_rmw("xchg", state, fresh, EPOCH, "seq_cst")
    asleep = f.atomic_load(state, i32, SLEEPERS, "seq_cst").ne(0)
    if futex:
        f.if_(asleep, lambda: futex_wake(f, f.gep(state, EPOCH)))
    else:
        f.if_(asleep, lambda: void_results(f.call_pointer(f.load(state, ptr, WAKE), void)))


def _emit_stop(m: Module, futex: bool) -> None:
    """stop(state): every worker leaves when it has finished what it does."""
    f = m.function("stop", [("state", ptr)])
    f.atomic_store(f.i32(1), f["state"], STOP, "seq_cst")
    _new_epoch(f, f.i32(0), futex)
