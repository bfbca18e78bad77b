"""The driver's `chain`: runs of one program, each fed by the one before, without Python between.

After native code has streamed the weights of a model, all that Python needs is out of the caches,
and a token costs it a hundred microseconds of waiting for memory; several in one call share them.

The header (see `driver_layout`) says how the live values follow from the size that grows by one in
each run (base + slope · size), where to find what is kept of each run (an i32, such as the token
drawn), which values of it end the chain, and moves of 4 bytes, which put results where the next run
reads its inputs.
"""

from __future__ import annotations

from rlx.backends.cpu.executor.control_block import (
    BUDGET,
    CHAIN_AT,
    CHAIN_BASE,
    CHAIN_COUNT,
    CHAIN_DONE,
    CHAIN_END_COUNT,
    CHAIN_ENDS,
    CHAIN_KEPT,
    CHAIN_LIVE_COUNT,
    CHAIN_LOG,
    CHAIN_MOVE_COUNT,
    CHAIN_MOVES,
    CHAIN_SIZE,
    CHAIN_SLOPE,
    CHAIN_STATUS,
    LIVE,
    MOVE_BYTES,
    MOVE_FROM,
    MOVE_TO,
)
from rlx.llvm.builder import Function, Module, Value, i32, i64, ptr

_BUDGETS = 4  # of one run, after which Python may look for signals: short runs never take one


def emit_chain(m: Module, run: Function) -> None:
    """i64 chain(state, program, last, header): whether it is to be entered again, because the time
    was up that Python may go without looking for signals."""
    params = [("state", ptr), ("program", ptr), ("last", i64), ("header", ptr)]
    f = m.function("chain", params, i64)
    state, program, last, header = (f[name] for name, _ in params)
    count = f.load(header, i64, CHAIN_COUNT)
    begin, budget = f.clock(), f.load(state, i64, BUDGET) * _BUDGETS

    def one(done: Value, limit: Value) -> list[Value]:
        _set_live(f, f.load(program, ptr, LIVE), header, done)
        at = f.call(run, state, program, f.load(header, i64, CHAIN_AT), last)
        f.store(at, header, CHAIN_AT)
        f.if_(at < last, lambda: f.ret(f.i64(1)))
        f.if_(f.load(f.load(header, ptr, CHAIN_STATUS), i64).ne(0), lambda: f.ret(f.i64(0)))
        f.store(f.i64(0), header, CHAIN_AT)
        kept = f.load(f.load(header, ptr, CHAIN_KEPT), i32)
        f.store(kept, f.gep(f.load(header, ptr, CHAIN_LOG), done, 4))
        f.store(done + 1, header, CHAIN_DONE)
        _move(f, header)
        end = f.select(_is_end(f, header, kept), done + 1, limit)
        late = (f.clock() - begin > budget) & (done + 1 < end)
        f.if_(late, lambda: f.ret(f.i64(1)))
        return [done + 1, end]

    first = f.load(header, i64, CHAIN_DONE)
    f.while_([first, count], lambda done, limit: done < limit, one)
    f.ret(f.i64(0))


def _set_live(f: Function, live: Value, header: Value, done: Value) -> None:
    size = f.load(header, i64, CHAIN_SIZE) + done
    base, slope = f.load(header, ptr, CHAIN_BASE), f.load(header, ptr, CHAIN_SLOPE)
    for i in f.range(0, f.load(header, i64, CHAIN_LIVE_COUNT)):
        value = f.load(f.gep(base, i, 8), i64) + f.load(f.gep(slope, i, 8), i64) * size
        f.store(value, f.gep(live, i, 8))


def _is_end(f: Function, header: Value, kept: Value) -> Value:
    ends, count = f.load(header, ptr, CHAIN_ENDS), f.load(header, i64, CHAIN_END_COUNT)

    def look(i: Value, found: Value) -> Value:
        return found | f.load(f.gep(ends, i, 4), i32).eq(kept)

    [found] = f.loop(0, count, 1, [f.const(0, kept.eq(kept).type)], look)
    return found


def _move(f: Function, header: Value) -> None:
    moves, count = f.load(header, ptr, CHAIN_MOVES), f.load(header, i64, CHAIN_MOVE_COUNT)
    for i in f.range(0, count):
        move = f.gep(moves, i, MOVE_BYTES)
        f.store(f.load(f.load(move, ptr, MOVE_FROM), i32), f.load(move, ptr, MOVE_TO))
