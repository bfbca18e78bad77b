"""The native executor: worker threads run a program, a table of kernel launches, in lock step.

A kernel is `void kernel(ptr args, i32 tid, i32 nth)`. `args` holds its 8-byte args (pointers and
i64 scalars); worker `tid` of `nth` computes its share.

A program is a table of launches {kernel, args, flags, phase}. Before the first launch the executor
copies the dynamic args (sizes of this run, addresses of inputs and outputs) to where the patch
table says, so a run costs Python one call, however many launches there are. Flags of a launch:

- BARRIER: all workers finish this launch before any begins the next
- SOLO: worker 0 runs the kernel alone, as tid 0 of 1
- JUMP: the kernel returns an i64, the distance to the next launch; 1 is the next one, a negative
  distance jumps back. All workers must return the same
- HOST: no kernel. The run returns before the launch; the caller does it and resumes after it
- FLUSH: denormals are zeros while the kernel runs, on x86: some CPUs take a hundred cycles for an
  operation on one

All workers share the control block (see `control_block`). A run is announced by a new epoch, whose
low byte is the number of workers that take part. Worker 0 is the caller. A run ends when every
worker has left it. After `BUDGET` ticks the workers agree at a barrier to return early, so that
Python can handle a signal; the caller then resumes at the launch that was returned.

The decode loop makes many runs of one program in one call; each takes its inputs from the outputs
of the run before. Weights that stream through the caches evict Python's own data, so every return
to Python costs a hundred microseconds of cache misses; the tokens of one call share this cost. The
loop's header holds

- the size that grows by one in each run, and the dynamic args as base + slope · size
- the address of the i32 that a run emits, such as the sampled token, and the log it goes to
- stop values, of which any ends the loop
- 4-byte copies from outputs to the inputs of the next run
"""

from __future__ import annotations

from functools import cache

from rlx.backends.cpu.executor.barrier import (
    FUTEX,
    POLL,
    Sleep,
    counted,
    emit_barrier,
    emit_finish,
    emit_join,
    idle,
    native_sleep,
)
from rlx.backends.cpu.executor.control_block import (
    ARGS,
    BARRIER,
    BEGIN,
    BUDGET,
    COPY_BYTES,
    COPY_FROM,
    COPY_TO,
    CPUS,
    DYNAMIC_ARGS,
    END,
    EPOCH,
    FINISHED,
    FIRST,
    FLUSH,
    HOST,
    IDLE_YIELD,
    ITERATIONS,
    JUMP,
    LAST,
    LAUNCH_ARGS,
    LAUNCH_BYTES,
    LAUNCH_COUNT,
    LAUNCH_FLAGS,
    LAUNCH_FN,
    LAUNCHES,
    LOOP_BASE,
    LOOP_COPIES,
    LOOP_COPY_COUNT,
    LOOP_COUNT,
    LOOP_DONE,
    LOOP_DYNAMIC_COUNT,
    LOOP_EMITTED,
    LOOP_LOG,
    LOOP_RESUME_AT,
    LOOP_SIZE,
    LOOP_SLOPE,
    LOOP_STATUS,
    LOOP_STOP,
    LOOP_STOP_COUNT,
    PATCH_COUNT,
    PATCHES,
    PROFILE,
    PROGRAM,
    SHARED_CORE,
    SLEEPERS,
    SOLO,
    STAMP_BYTES,
    STOP,
    USE_WORKERS,
    WAKE,
    WORKERS,
    YIELD_AT,
)
from rlx.llvm.builder import Function, Module, Value, i32, i64, ptr, void
from rlx.llvm.jit import Kernel, Unit, compile_unit
from rlx.llvm.target import Target

_BUDGETS = 4  # budgets of a run, after which the loop returns so that Python can handle signals


def emit_decode_loop(m: Module, run: Function) -> None:
    """i64 chain(state, program, last, header): the decode loop, under the name that artifacts know.

    Returns 0 when it is done, and 1 to be called again, after Python has checked for signals."""
    params = [("state", ptr), ("program", ptr), ("last", i64), ("header", ptr)]
    f = m.function("chain", params, i64)
    state, program, last, header = (f[name] for name, _ in params)
    count = f.load(header, i64, LOOP_COUNT)
    begin, budget = f.clock(), f.load(state, i64, BUDGET) * _BUDGETS
    loop = f.carry([f.load(header, i64, LOOP_DONE), count])
    for _ in loop.forever():
        done, limit = loop.values
        loop.break_unless(done < limit)
        _set_dynamic_args(f, f.load(program, ptr, DYNAMIC_ARGS), header, done)
        at = f.call(run, state, program, f.load(header, i64, LOOP_RESUME_AT), last)
        f.store(at, header, LOOP_RESUME_AT)
        for _ in f.when(at < last):
            f.ret(f.i64(1))
        for _ in f.when(f.load(f.load(header, ptr, LOOP_STATUS), i64).ne(0)):
            f.ret(f.i64(0))
        f.store(f.i64(0), header, LOOP_RESUME_AT)
        emitted = f.load(f.load(header, ptr, LOOP_EMITTED), i32)
        f.store(emitted, f.gep(f.load(header, ptr, LOOP_LOG), done, 4))
        f.store(done + 1, header, LOOP_DONE)
        _copy_outputs(f, header)
        end = f.select(_is_stop(f, header, emitted), done + 1, limit)
        late = (f.clock() - begin > budget) & (done + 1 < end)
        for _ in f.when(late):
            f.ret(f.i64(1))
        loop.values = [done + 1, end]
    f.ret(f.i64(0))


def _set_dynamic_args(f: Function, dynamic: Value, header: Value, done: Value) -> None:
    """Evaluate base + slope · size for every dynamic arg of the next run."""
    size = f.load(header, i64, LOOP_SIZE) + done
    base, slope = f.load(header, ptr, LOOP_BASE), f.load(header, ptr, LOOP_SLOPE)
    for i in f.range(0, f.load(header, i64, LOOP_DYNAMIC_COUNT)):
        value = f.load(f.gep(base, i, 8), i64) + f.load(f.gep(slope, i, 8), i64) * size
        f.store(value, f.gep(dynamic, i, 8))


def _is_stop(f: Function, header: Value, emitted: Value) -> Value:
    stop, count = f.load(header, ptr, LOOP_STOP), f.load(header, i64, LOOP_STOP_COUNT)
    found = f.carry([f.const(0, emitted.eq(emitted).type)])
    for i in found.range(0, count):
        found.values = [found.values[0] | f.load(f.gep(stop, i, 4), i32).eq(emitted)]
    return found.values[0]


def _copy_outputs(f: Function, header: Value) -> None:
    copies, count = f.load(header, ptr, LOOP_COPIES), f.load(header, i64, LOOP_COPY_COUNT)
    for i in f.range(0, count):
        copy = f.gep(copies, i, COPY_BYTES)
        f.store(f.load(f.load(copy, ptr, COPY_FROM), i32), f.load(copy, ptr, COPY_TO))


def executor_unit(target: Target, futex: bool = True) -> Unit:
    """The executor for a target; without futex, or what its system has instead, workers sleep in
    Python and are woken by it."""
    m = Module(target)
    sleep = native_sleep(target) if futex else POLL
    execute = _emit_execute(m, emit_barrier(m, sleep), sleep is FUTEX)
    _emit_worker(m, execute, emit_finish(m, sleep), sleep)
    emit_decode_loop(m, _emit_run(m, execute, emit_join(m, sleep), sleep))
    _emit_stop(m, sleep)
    now = m.function("now", [], i64)
    now.ret(now.clock())
    return Unit(m.text(), target, "none", 2)


@cache
def load_executor(target: Target, futex: bool) -> Kernel:
    return compile_unit(executor_unit(target, futex))


_EXECUTE = [
    ("state", ptr),
    ("program", ptr),
    ("first", i64),
    ("last", i64),
    ("tid", i32),
    ("nth", i32),
]


def _emit_execute(m: Module, barrier: Function, records_cpu: bool) -> Function:
    """Run launches [first, last) as worker tid of nth. Returns the launch to resume at.

    Profiled programs have code of their own, so that others pay nothing."""
    plain = _emit_launches(m, barrier, records_cpu, timed=False)
    timed = _emit_launches(m, barrier, records_cpu, timed=True)
    f = m.function("execute", _EXECUTE, i64, internal=True)
    given = [f[name] for name, _ in _EXECUTE]
    profiled = f.load(f["program"], ptr, PROFILE).ne(f.null())
    at = f.carry()
    for is_profiled in f.either(profiled, at):
        at.values = [f.call(timed if is_profiled else plain, *given)]
    f.ret(*at.values)
    return f


def _emit_launches(m: Module, barrier: Function, records_cpu: bool, timed: bool) -> Function:
    f = m.function("execute_profiled" if timed else "execute_plain", _EXECUTE, i64, internal=True)
    state, program, tid, nth = f["state"], f["program"], f["tid"], f["nth"]
    launches, profile = f.load(program, ptr, LAUNCHES), f.load(program, ptr, PROFILE)
    cpu_slot = f.gep(f.gep(state, CPUS), tid.to(i64), 4)
    budget, begin = f.load(state, i64, BUDGET), f.clock()
    row = f.gep(profile, tid.to(i64) * f.load(program, i64, LAUNCH_COUNT), STAMP_BYTES)
    is_leader = tid.eq(0)
    modes = _float_modes(f) if m.target.is_x86 else None

    def sync(iteration: Value) -> Value:
        """A barrier; returns whether to leave the run there.

        The decision is stored with the iteration and not with the launch: where a program jumps
        back, a slow worker may still read the decision of the time before."""
        late = is_leader & (f.clock() - begin > budget)
        for _ in f.when(late):
            f.atomic_store(iteration, state, YIELD_AT, "monotonic")
        for _ in f.when(nth > 1):
            f.call(barrier, state, nth)
        return f.atomic_load(state, i64, YIELD_AT, "monotonic").eq(iteration)

    loop = f.carry([f["first"], f["last"], f.i64(0)])
    for _ in loop.forever():
        at, limit, iteration = loop.values
        loop.break_unless(at < limit)
        entry = f.gep(launches, at, LAUNCH_BYTES)
        flags = f.load(entry, i32, LAUNCH_FLAGS)
        solo, one = (flags & SOLO).ne(0), f.i64(1)
        for _ in f.when((flags & HOST).ne(0)):
            f.ret(at)
        distance, leave = f.carry(), f.carry()
        for takes_part in f.either(is_leader | ~solo, distance):
            distance.values = [one]
            if takes_part:
                stamps = f.gep(row, at, STAMP_BYTES)
                distance.values = [_launch(f, entry, flags, solo, stamps, timed, modes)]
        following = at + distance.values[0]
        for wanted in f.either((flags & BARRIER).ne(0) & (following < limit), leave):
            leave.values = [sync(iteration) if wanted else f.const(0, is_leader.type)]
        loop.values = [following, f.select(leave.values[0], following, limit), iteration + 1]
    if records_cpu:
        f.store(f.intrinsic("sched_getcpu", i32), cpu_slot)
    f.ret(loop.values[0])
    return f


_FLUSH_MODE = 0x8040  # denormal results are zeros, and so are denormal operands


def _float_modes(f: Function) -> tuple[Value, Value]:
    """Addresses of the control word of SSE and AVX as it is, and with denormals as zeros."""
    plain, flushing = f.alloca(4), f.alloca(4)
    f.intrinsic("llvm.x86.sse.stmxcsr", void, plain)
    f.store(f.load(plain, i32) | _FLUSH_MODE, flushing)
    return plain, flushing


def _set_float_mode(f: Function, flags: Value, mode: Value) -> None:
    for _ in f.when((flags & FLUSH).ne(0)):
        f.intrinsic("llvm.x86.sse.ldmxcsr", void, mode)


def _launch(
    f: Function, entry: Value, flags: Value, solo: Value, stamps: Value, timed: bool,
    modes: tuple[Value, Value] | None,
) -> Value:  # fmt: skip
    """Call the kernel of a launch as this worker. Returns the distance to the next launch."""
    if timed:
        f.prefetch(stamps)  # it arrives while the kernel runs
        f.prefetch(stamps, STAMP_BYTES - 8)
    start = f.clock() if timed else None
    nth = f.select(solo, f.i32(1), f["nth"])
    call = f.load(entry, ptr, LAUNCH_FN), f.load(entry, ptr, LAUNCH_ARGS), f["tid"], nth
    if modes is not None:
        _set_float_mode(f, flags, modes[1])
    distance = f.carry()
    for jumps in f.either((flags & JUMP).ne(0), distance):
        result = f.call_pointer(call[0], i64 if jumps else void, *call[1:])
        distance.values = [result if jumps else f.i64(1)]
    if modes is not None:
        _set_float_mode(f, flags, modes[0])
    if start is not None:
        _record(f, stamps, start)
    return distance.values[0]


def _record(f: Function, stamps: Value, start: Value) -> None:
    """Add a call to a launch's record: BEGIN of the first, END - BEGIN the total time of all."""
    spent, iterations = f.clock() - start, f.load(stamps, i64, ITERATIONS)
    again = iterations.ne(0)
    f.store(f.select(again, f.load(stamps, i64, BEGIN), start), stamps, BEGIN)
    f.store(f.select(again, f.load(stamps, i64, END), start) + spent, stamps, END)
    f.store(iterations + 1, stamps, ITERATIONS)


def _count_sleepers(f: Function, op: str) -> None:
    f.atomic_rmw(op, f["state"], f.i32(1), SLEEPERS, "seq_cst")


def _wait_for_epoch(f: Function, seen: Value, sleep: Sleep) -> None:
    """Wait in a worker for an epoch other than the one seen; where it polls return to Python."""
    state, start = f["state"], f.carry([f.clock()])
    for _ in start.forever():
        start.break_unless(f.atomic_load(state, i32, EPOCH).eq(seen))
        for _ in idle(f, state, start.values[0], IDLE_YIELD):
            if sleep is not POLL:
                for _ in counted(f, f.gep(state, SLEEPERS)):
                    sleep.wait(f, f.gep(state, EPOCH), seen)
                continue
            _count_sleepers(f, "add")
            missed = f.atomic_load(state, i32, EPOCH, "seq_cst").ne(seen)
            asleep = seen.to(i64, signed=False)
            for has_missed in f.either(missed):
                if has_missed:
                    _count_sleepers(f, "sub")
                else:
                    f.ret(asleep)


def _emit_worker(m: Module, execute: Function, finish: Function, sleep: Sleep) -> None:
    """i64 worker(state, tid, seen, slept): serve runs until the pool stops, then return -1.

    Where it polls it returns the epoch it has seen after an idle time, counted as asleep; the
    caller waits for the pool's wake-up and calls again with slept = 1.
    """
    params = [("state", ptr), ("tid", i32), ("seen", i32), ("slept", i32)]
    f = m.function("worker", params, i64)
    state, tid = f["state"], f["tid"]
    for _ in f.when(f["slept"].ne(0)):
        _count_sleepers(f, "sub")
    seen = f.carry([f["seen"]])
    for _ in seen.forever():
        seen.break_unless(f.i32(0).eq(0))
        _wait_for_epoch(f, seen.values[0], sleep)
        epoch = f.atomic_load(state, i32, EPOCH)
        stopped = f.atomic_load(state, i32, STOP).ne(0)
        for _ in f.when(stopped):
            f.ret(f.i64(-1))
        nth = epoch & 0xFF
        for _ in f.when(tid < nth):
            program = f.load(state, ptr, PROGRAM)
            first, last = f.load(state, i64, FIRST), f.load(state, i64, LAST)
            f.call(execute, state, program, first, last, tid, nth)
            f.call(finish, state, nth)
        seen.values = [epoch]
    f.ret(f.i64(-1))


def _emit_run(m: Module, execute: Function, join: Function, sleep: Sleep) -> Function:
    """i64 run(state, program, first, last): run as worker 0. Returns the launch to resume at."""
    params = [("state", ptr), ("program", ptr), ("first", i64), ("last", i64)]
    f = m.function("run", params, i64)
    state, program, first, last = (f[name] for name, _ in params)
    _emit_patches(f, program)
    wanted = f.load(program, i64, USE_WORKERS).to(i32)
    have = f.load(state, i32, WORKERS)
    nth = f.min(f.select(wanted > 0, wanted, have), have)
    f.atomic_store(f.i64(-1), state, YIELD_AT, "monotonic")
    for _ in f.when(nth > 1):
        f.atomic_store(f.i32(0), state, FINISHED, "monotonic")
        f.store(program, state, PROGRAM)
        f.store(first, state, FIRST)
        f.store(last, state, LAST)
        _new_epoch(f, nth, sleep)
    at = f.call(execute, state, program, first, last, f.i32(0), nth)
    for _ in f.when(nth > 1):
        f.call(join, state, nth)
    if sleep is FUTEX:
        _emit_shared_core(f, nth)
    f.ret(at)
    return f


def _emit_shared_core(f: Function, nth: Value) -> None:
    """Set SHARED_CORE if workers ended on one core. Cores 64 apart alias; Python checks again."""
    state, one = f["state"], f.i64(1)
    cores = f.carry([f.i64(0)])
    for tid in cores.range(0, nth.to(i64)):
        core = f.load(f.gep(f.gep(state, CPUS), tid, 4), i32).to(i64)
        cores.values = [cores.values[0] | one << (core & 63)]
    count = f.intrinsic("llvm.ctpop.i64", i64, cores.values[0])
    f.store((count < nth.to(i64)).to(i32, signed=False), state, SHARED_CORE)


def _emit_patches(f: Function, program: Value) -> None:
    """Copy the dynamic args of this run to where launches read them."""
    pairs, count = f.load(program, ptr, PATCHES), f.load(program, i64, PATCH_COUNT)
    args, dynamic = f.load(program, ptr, ARGS), f.load(program, ptr, DYNAMIC_ARGS)
    for i in f.range(0, count):
        pair = f.gep(pairs, i, 8)
        arg, source = f.load(pair, i32).to(i64), f.load(pair, i32, 4).to(i64)
        f.store(f.load(f.gep(dynamic, source, 8), i64), f.gep(args, arg, 8))


def _new_epoch(f: Function, nth: Value, sleep: Sleep) -> None:
    """Announce a run to all workers. Only the holder of the pool writes the epoch: no race."""
    state = f["state"]
    old = f.atomic_load(state, i32, EPOCH, "monotonic")
    fresh = (old & -256) + 256 | nth
    f.atomic_rmw("xchg", state, fresh, EPOCH, "seq_cst")
    asleep = f.atomic_load(state, i32, SLEEPERS, "seq_cst").ne(0)
    for _ in f.when(asleep):
        if sleep is not POLL:
            sleep.wake(f, f.gep(state, EPOCH))
        else:
            f.call_pointer(f.load(state, ptr, WAKE), void)


def _emit_stop(m: Module, sleep: Sleep) -> None:
    """stop(state): every worker returns after its current run."""
    f = m.function("stop", [("state", ptr)])
    f.atomic_store(f.i32(1), f["state"], STOP, "seq_cst")
    _new_epoch(f, f.i32(0), sleep)
