"""The decode loop: runs of one program, each fed by the results of the one before, without Python.

After the weights of a model have streamed through the caches, Python's own data is evicted, and
each call costs a hundred microseconds of cache misses; several tokens per call share this cost.

The header (see `control_block`) holds: the size that grows by one in each run, and the live values
as base + slope · size; the address of the i32 to log after each run, such as the sampled token; the
stop values, of which any ends the loop; and 4-byte moves from results to the next run's inputs.
"""

from __future__ import annotations

from rlx.backends.cpu.executor.control_block import (
    BUDGET,
    LIVE,
    LOOP_AT,
    LOOP_BASE,
    LOOP_COUNT,
    LOOP_DONE,
    LOOP_END_COUNT,
    LOOP_ENDS,
    LOOP_KEPT,
    LOOP_LIVE_COUNT,
    LOOP_LOG,
    LOOP_MOVE_COUNT,
    LOOP_MOVES,
    LOOP_SIZE,
    LOOP_SLOPE,
    LOOP_STATUS,
    MOVE_BYTES,
    MOVE_FROM,
    MOVE_TO,
)
from rlx.llvm.builder import Function, Module, Value, i32, i64, ptr

_BUDGETS = 4  # budgets of a run, after which the loop returns so that Python can handle signals


def emit_decode_loop(m: Module, run: Function) -> None:
    """i64 chain(state, program, last, header): returns 1 if it must be called again, because the
    time was up in which Python must check for signals, else 0."""
    params = [("state", ptr), ("program", ptr), ("last", i64), ("header", ptr)]
    f = m.function("chain", params, i64)
    state, program, last, header = (f[name] for name, _ in params)
    count = f.load(header, i64, LOOP_COUNT)
    begin, budget = f.clock(), f.load(state, i64, BUDGET) * _BUDGETS

    def iteration(done: Value, limit: Value) -> list[Value]:
        _set_live(f, f.load(program, ptr, LIVE), header, done)
        at = f.call(run, state, program, f.load(header, i64, LOOP_AT), last)
        f.store(at, header, LOOP_AT)
        f.if_(at < last, lambda: f.ret(f.i64(1)))
        f.if_(f.load(f.load(header, ptr, LOOP_STATUS), i64).ne(0), lambda: f.ret(f.i64(0)))
        f.store(f.i64(0), header, LOOP_AT)
        kept = f.load(f.load(header, ptr, LOOP_KEPT), i32)
        f.store(kept, f.gep(f.load(header, ptr, LOOP_LOG), done, 4))
        f.store(done + 1, header, LOOP_DONE)
        _move(f, header)
        end = f.select(_is_end(f, header, kept), done + 1, limit)
        late = (f.clock() - begin > budget) & (done + 1 < end)
        f.if_(late, lambda: f.ret(f.i64(1)))
        return [done + 1, end]

    first = f.load(header, i64, LOOP_DONE)
    f.while_([first, count], lambda done, limit: done < limit, iteration)
    f.ret(f.i64(0))


def _set_live(f: Function, live: Value, header: Value, done: Value) -> None:
    size = f.load(header, i64, LOOP_SIZE) + done
    base, slope = f.load(header, ptr, LOOP_BASE), f.load(header, ptr, LOOP_SLOPE)
    for i in f.range(0, f.load(header, i64, LOOP_LIVE_COUNT)):
        value = f.load(f.gep(base, i, 8), i64) + f.load(f.gep(slope, i, 8), i64) * size
        f.store(value, f.gep(live, i, 8))


def _is_end(f: Function, header: Value, kept: Value) -> Value:
    ends, count = f.load(header, ptr, LOOP_ENDS), f.load(header, i64, LOOP_END_COUNT)

    def look(i: Value, found: Value) -> Value:
        return found | f.load(f.gep(ends, i, 4), i32).eq(kept)

    [found] = f.loop(0, count, 1, [f.const(0, kept.eq(kept).type)], look)
    return found


def _move(f: Function, header: Value) -> None:
    moves, count = f.load(header, ptr, LOOP_MOVES), f.load(header, i64, LOOP_MOVE_COUNT)
    for i in f.range(0, count):
        move = f.gep(moves, i, MOVE_BYTES)
        f.store(f.load(f.load(move, ptr, MOVE_FROM), i32), f.load(move, ptr, MOVE_TO))
