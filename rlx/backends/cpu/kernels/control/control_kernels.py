"""Kernels of control flow: tiny ones that decide which launch of a program is next.

Every worker runs them and computes the same result, from its own memory or from memory that nobody
writes at that time, so they need no barriers. An iteration of a loop begins with `LoopHeader`. It
counts iterations in a cell of the worker's own and updates those args of the body's launches that
change in every iteration: addresses of slices, and of carried values, which are double-buffered.
All workers write the same numbers there.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.llvm.builder import Function, Module, Value, i8, i64, ptr, vec
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Branch(KernelSpec):
    """Jumps always. args: distance"""

    def emit(self, m: Module) -> None:
        f = m.kernel(result=i64)
        f.ret(f.arg(f["args"], 0, i64))


@dataclass(frozen=True)
class BranchIfFalse(KernelSpec):
    """Jumps if the flag is false, else goes to the next launch. args: flag, distance"""

    def emit(self, m: Module) -> None:
        f = m.kernel(result=i64)
        flag = f.load(f.arg(f["args"], 0), i8)
        f.ret(f.select(flag.ne(0), f.i64(1), f.arg(f["args"], 1, i64)))


@dataclass(frozen=True)
class LoopPreheader(KernelSpec):
    """Resets the iteration counter before a loop. args: cells, bytes of each worker's cells"""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        f.store(f.i64(0), _own_cells(f))


@dataclass(frozen=True)
class LoopHeader(KernelSpec):
    """Begins an iteration, or leaves the loop after the last one.

    args: cells, bytes of each worker's cells, iterations, distance to the end of the loop, numbers
    of slices, double buffers and arg updates; then these:
    a slice {base, stride} is at base + stride · iteration;
    a double buffer {first, last, spare} is a carried value: iteration 0 reads it from `first`,
    others read it where the one before wrote it, and the last iteration writes it to `last`;
    an arg update {arg, pointer, offset} sets an arg to the address of a pointer plus an offset.
    The pointers are the slices, then for each double buffer where it is read and where written.

    A worker's cells are the iteration counter, then the addresses of the pointers.
    """

    def emit(self, m: Module) -> None:
        f = m.kernel(result=i64)
        cells = _own_cells(f)
        iterations, end, slices, buffers, updates = (f.arg(f["args"], i, i64) for i in range(2, 7))
        now = f.load(cells, i64)
        pointers, entry = f.gep(cells, 8), f.gep(f["args"], 56)
        for i in f.range(0, slices):
            part = f.gep(entry, i, 16)
            f.store(f.load(part, i64) + f.load(part, i64, 8) * now, f.gep(pointers, i, 8))
        entry = f.gep(entry, slices, 16)
        pairs = f.gep(pointers, slices, 8)
        for i in f.range(0, buffers):
            _swap_buffers(f, f.gep(entry, i, 24), f.gep(pairs, i, 16), iterations, now)
        entry = f.gep(entry, buffers, 24)
        for i in f.range(0, updates):
            _update_arg(f, f.gep(entry, i, 24), pointers)
        f.store(now + 1, cells)
        f.ret(f.select(now < iterations, f.i64(1), end))


def _own_cells(f: Function) -> Value:
    return f.gep(f.arg(f["args"], 0), f["tid"].to(i64) * f.arg(f["args"], 1, i64))


def _swap_buffers(f: Function, buffer: Value, pair: Value, iterations: Value, now: Value) -> None:
    first, last, spare = (f.load(buffer, i64, 8 * i) for i in range(3))
    odd = (iterations - now & 1).ne(0)  # an odd number is left: this iteration writes to `last`
    f.store(f.select(now.eq(0), first, f.select(odd, spare, last)), pair)
    f.store(f.select(odd, last, spare), pair, 8)


def _update_arg(f: Function, update: Value, pointers: Value) -> None:
    """Set an arg, unless another worker has: a cache line that nobody writes can be shared."""
    arg, number = f.load(update, ptr), f.load(update, i64, 8)
    value = f.load(f.gep(pointers, number, 8), i64) + f.load(update, i64, 16)
    old = f.atomic_load(arg, i64, order="monotonic")
    f.if_(old.ne(value), lambda: f.atomic_store(value, arg, order="monotonic"))


@dataclass(frozen=True)
class CopyResults(KernelSpec):
    """Copies bytes, unless source and target are the same. args: count, then {to, from, bytes}"""

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
