"""Small kernels of loops and branches: args of the next iteration, results, flags for the host."""

from __future__ import annotations

from rlx.backends.cuda.builder import THREADS, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.llvm.builder import Value, i8, i64
from rlx.support.records import dataclass

_THREADS = 64


@dataclass(frozen=True)
class LoopHeader(BlockKernel):
    """args: counter, iterations, numbers of slices, double buffers and arg updates; then these:
    a slice {base, stride} is at base + stride · iteration;
    a double buffer {first, last, spare} is a carried value: iteration 0 reads it from `first`,
    others read it where the one before wrote it, and the last iteration writes it to `last`;
    an arg update {arg, pointer, offset} sets an arg to the address of a pointer plus an offset.
    The pointers are the slices, then for each double buffer where it is read and where written.

    The one of the first iteration begins to count.
    """

    first: bool

    @property
    def label(self) -> str:
        return "begin loop" if self.first else "next iteration"

    @property
    def threads(self) -> int:
        return _THREADS

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        f.let_next_start()
        f.wait_for_previous()
        args = f["args"]
        counter = f.arg(args, 0)
        iterations, slices, buffers, updates = (f.arg(args, i, i64) for i in range(1, 5))
        now = f.i64(0) if self.first else f.load(counter, i64) + 1
        f.barrier()  # all have read it
        f.if_(f.thread().eq(0), lambda: f.store(now, counter))
        parts = f.gep(args, 40)
        pairs = f.gep(parts, slices, 16)
        entry = f.gep(pairs, buffers, 24)
        for i in f.range(f.thread().to(i64), updates, self.threads):
            update = f.gep(entry, i, 24)
            number, offset = f.load(update, i64, 8), f.load(update, i64, 16)

            def of_slice(number: Value = number) -> Value:
                part = f.gep(parts, number, 16)
                return f.load(part, i64) + f.load(part, i64, 8) * now

            def of_buffer(number: Value = number) -> Value:
                at = number - slices
                return _buffer(f, f.gep(pairs, at >> 1, 24), (at & 1).ne(0), iterations, now)

            [there] = f.if_(number < slices, of_slice, of_buffer)
            f.store(there + offset, f.arg(update, 0))


def _buffer(f: BlockFunction, buffer: Value, writes: Value, iterations: Value, now: Value) -> Value:
    """Where a carried value is read, or written."""
    first, last, spare = (f.load(buffer, i64, 8 * i) for i in range(3))
    odd = (iterations - now & 1).ne(0)  # an odd number is left: this iteration writes to `last`
    read = f.select(now.eq(0), first, f.select(odd, spare, last))
    return f.select(writes, f.select(odd, last, spare), read)


@dataclass(frozen=True)
class CopyResults(BlockKernel):
    """Copies bytes, unless source and target are the same. args: count, then {to, from, bytes}"""

    @property
    def label(self) -> str:
        return "copy results"

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        f.let_next_start()
        f.wait_for_previous()
        for i in f.range(f.i64(0), f.arg(f["args"], 0, i64)):
            entry = f.gep(f["args"], i * 24 + 8)
            to, source, size = f.arg(entry, 0), f.arg(entry, 1), f.arg(entry, 2, i64)
            elsewhere = f.bitcast(to, i64).ne(f.bitcast(source, i64))
            self._copy(f, to, source, f.select(elsewhere, size, 0))

    def _copy(self, f: BlockFunction, to: Value, source: Value, size: Value) -> None:
        """Words where all are aligned, else bytes; all blocks share them."""
        first = f.block_number().to(i64) * THREADS + f.thread().to(i64)
        aligned = ((f.bitcast(to, i64) | f.bitcast(source, i64)) & 7).eq(0)
        words = f.select(aligned, size >> 3, 0)
        for at in f.range(first, words, COPY_BLOCKS * THREADS):
            f.store(f.load(f.gep(source, at, 8), i64, align=8), f.gep(to, at, 8), align=8)
        for at in f.range(words * 8 + first, size, COPY_BLOCKS * THREADS):
            f.store(f.load(f.gep(source, at), i8), f.gep(to, at))


COPY_BLOCKS = 64


@dataclass(frozen=True)
class TellFlag(BlockKernel):
    """args: a truth value, where the host reads it (an i64)"""

    @property
    def label(self) -> str:
        return "flag"

    @property
    def threads(self) -> int:
        return 32

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        f.let_next_start()
        f.wait_for_previous()
        flag, to = f.arg(f["args"], 0), f.arg(f["args"], 1)

        def tell() -> None:
            f.store(f.load(flag, i8).ne(0).to(i64, signed=False), to)

        f.if_(f.thread().eq(0), tell)
