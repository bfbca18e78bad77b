"""The kernels of control flow: tiny ones, which decide where a program goes on.

Every worker runs them and comes to the same result from what it alone has or all have read, so that
no barrier is needed for them. A loop's round begins with `Turn`: it counts, in a cell of the
worker's own, and rewrites the args of the body's steps that move from round to round (slices,
carried values that change places). All workers write the same numbers there.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.llvm.builder import Function, Module, Value, i8, i64, ptr, vec
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Goto(KernelSpec):
    """args: distance"""

    def emit(self, m: Module) -> None:
        f = m.kernel(result=i64)
        f.ret(f.arg(f["args"], 0, i64))


@dataclass(frozen=True)
class Choose(KernelSpec):
    """Goes on with the next step if the flag holds. args: flag, distance otherwise"""

    def emit(self, m: Module) -> None:
        f = m.kernel(result=i64)
        flag = f.load(f.arg(f["args"], 0), i8)
        f.ret(f.select(flag.ne(0), f.i64(1), f.arg(f["args"], 1, i64)))


@dataclass(frozen=True)
class Begin(KernelSpec):
    """Before the first round. args: cells, bytes of each worker's cells"""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        f.store(f.i64(0), _own_cells(f))


@dataclass(frozen=True)
class Turn(KernelSpec):
    """Before each round, and once more to leave the loop when all are done.

    args: cells, bytes of each worker's cells, rounds, distance to the end of the loop, numbers of
    slides, swaps and moves; then their args:
    a slide {base, stride} is at base + stride · round;
    a swap {first, last, spare} is a carried value that is read from `first` in round 0, later from
    where the round before has written it, and written such that the last one goes to `last`;
    a move {arg, source, offset} sets an arg to the address of a source plus an offset. Sources are
    the slides, then for each swap where it is read and where it is written.

    A worker's cells are the number of the round, then the addresses of the sources.
    """

    def emit(self, m: Module) -> None:
        f = m.kernel(result=i64)
        cells = _own_cells(f)
        rounds, end, slides, swaps, moves = (f.arg(f["args"], i, i64) for i in range(2, 7))
        now = f.load(cells, i64)
        sources, entry = f.gep(cells, 8), f.gep(f["args"], 56)
        for i in f.range(0, slides):
            slide = f.gep(entry, i, 16)
            f.store(f.load(slide, i64) + f.load(slide, i64, 8) * now, f.gep(sources, i, 8))
        entry = f.gep(entry, slides, 16)
        places = f.gep(sources, slides, 8)
        for i in f.range(0, swaps):
            _swap(f, f.gep(entry, i, 24), f.gep(places, i, 16), rounds, now)
        entry = f.gep(entry, swaps, 24)
        for i in f.range(0, moves):
            _move(f, f.gep(entry, i, 24), sources)
        f.store(now + 1, cells)
        f.ret(f.select(now < rounds, f.i64(1), end))


def _own_cells(f: Function) -> Value:
    return f.gep(f.arg(f["args"], 0), f["tid"].to(i64) * f.arg(f["args"], 1, i64))


def _swap(f: Function, swap: Value, places: Value, rounds: Value, now: Value) -> None:
    first, last, spare = (f.load(swap, i64, 8 * i) for i in range(3))
    odd = (rounds - now & 1).ne(0)  # an odd number of rounds from now on: this one writes to `last`
    f.store(f.select(now.eq(0), first, f.select(odd, spare, last)), places)
    f.store(f.select(odd, last, spare), places, 8)


def _move(f: Function, move: Value, sources: Value) -> None:
    """Set an arg, unless another worker has: a cache line that nobody writes can be shared."""
    arg, number = f.load(move, ptr), f.load(move, i64, 8)
    value = f.load(f.gep(sources, number, 8), i64) + f.load(move, i64, 16)
    old = f.atomic_load(arg, i64, order="monotonic")
    f.if_(old.ne(value), lambda: f.atomic_store(value, arg, order="monotonic"))


@dataclass(frozen=True)
class Copies(KernelSpec):
    """Copies bytes that are not where they belong yet. args: count, then {to, from, bytes} each"""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        for i in f.range(0, f.arg(f["args"], 0, i64)):
            entry = f.gep(f["args"], i * 24 + 8)
            to, source = f.load(entry, ptr), f.load(entry, ptr, 8)
            size = f.load(entry, i64, 16)
            elsewhere = to.bits(i64).ne(source.bits(i64))
            self._copy(f, to, source, f.select(elsewhere, size, 0))

    def _copy(self, f: Function, to: Value, source: Value, size: Value) -> None:
        wide = vec(f.target.vector_bits // 8, i8)
        lo, hi = f.split(size, 64)
        full = lo + (hi - lo) // wide.bytes * wide.bytes
        for at in f.range(lo, full, wide.bytes):
            f.store(f.load(source, wide, at), to, at)
        for at in f.range(full, hi):
            f.store(f.load(source, i8, at), to, at)
