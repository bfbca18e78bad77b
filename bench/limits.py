"""What the machine can give: f32 multiply-adds and bytes read, measured by generated kernels."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import numpy as np

from rlx.backends.cpu.pool import Pool, get_pool
from rlx.codegen.emit import Module, f32, i64, vec
from rlx.codegen.kernel import KernelSpec, compile_specs
from rlx.codegen.program import Program, Step
from rlx.codegen.target import Target

_CHAINS = 12  # independent sums: more than latency times throughput of any FMA unit we know
_STREAMS = 8  # vectors per step of the reader
_READ_BYTES = 512 << 20  # beyond every cache


@dataclass(frozen=True)
class FmaPeak(KernelSpec):
    """words: out (64 bytes per worker), steps. Each step is `_CHAINS` fused multiply-adds."""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        lanes = m.target.lanes(32)
        wide = vec(lanes, f32)
        out, steps = f.word(f["words"], 0), f.word(f["words"], 1, i64)
        factor, start = f.const(0.5, wide), f.const(1.0, wide)
        sums = f.loop(
            0, steps, 1, [start] * _CHAINS, lambda _, *s: [f.fma(x, factor, start) for x in s]
        )
        total = sums[0]
        for x in sums[1:]:
            total = total + x
        f.store(f.reduce("add", total), f.gep(out, f["tid"].to(i64), 64))


@dataclass(frozen=True)
class ReadAll(KernelSpec):
    """words: data, out (64 bytes per worker), bytes. Every worker reads its share once."""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        lanes = m.target.lanes(32)
        wide = vec(lanes, f32)
        data, out, size = f.word(f["words"], 0), f.word(f["words"], 1), f.word(f["words"], 2, i64)
        step = _STREAMS * wide.bytes
        lo, hi = f.split(size, step)
        sums = f.loop(
            lo,
            hi,
            step,
            [f.const(0.0, wide)] * _STREAMS,
            lambda i, *s: [
                x + f.load(f.gep(data, i), wide, k * wide.bytes) for k, x in enumerate(s)
            ],
        )
        total = sums[0]
        for x in sums[1:]:
            total = total + x
        f.store(f.reduce("add", total), f.gep(out, f["tid"].to(i64), 64))


def program_of(spec: KernelSpec, words: list[int], keep: object) -> Program:
    """One step that runs a kernel on its words."""
    kernel = compile_specs([spec], Target.host())[spec]
    return Program([Step(kernel.address(), words)], keep=(kernel, keep))


class FmaProbe:
    """`run()` does a fixed number of multiply-adds on every worker."""

    def __init__(self, threads: int, steps: int = 200_000) -> None:
        out = np.zeros(16 * threads, np.float32)
        self.pool: Pool = get_pool(threads)
        self.program = program_of(FmaPeak(), [out.ctypes.data, steps], out)
        self.flops = 2.0 * threads * steps * _CHAINS * Target.host().lanes(32)

    def run(self) -> None:
        self.pool.run(self.program)


@cache
def _big() -> np.ndarray:
    return np.ones(_READ_BYTES // 4, np.float32)


class ReadProbe:
    """`run()` reads a buffer beyond every cache once, divided among the workers."""

    def __init__(self, threads: int) -> None:
        data, out = _big(), np.zeros(16 * threads, np.float32)
        self.pool: Pool = get_pool(threads)
        words = [data.ctypes.data, out.ctypes.data, data.nbytes]
        self.program = program_of(ReadAll(), words, (data, out))
        self.bytes = float(data.nbytes)

    def run(self) -> None:
        self.pool.run(self.program)


def _best(run: object, seconds: float) -> float:
    """Seconds of the quickest of the runs that fit in the time: a limit is not a typical value."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()  # type: ignore[operator]
        best = min(best, time.perf_counter() - start)
    return best


def fma_peak(threads: int, seconds: float = 0.3) -> float:
    """GFLOP/s of f32 multiply-adds that stay in registers."""
    probe = FmaProbe(threads)
    return probe.flops / _best(probe.run, seconds) / 1e9


def read_bandwidth(threads: int, seconds: float = 1.0) -> float:
    """GB/s of memory read in order, beyond the caches."""
    probe = ReadProbe(threads)
    return probe.bytes / _best(probe.run, seconds) / 1e9


def main() -> None:
    for threads in sorted({1, get_pool().workers}):
        print(f"{threads} threads: {fma_peak(threads):.1f} GFLOP/s, ", end="")
        print(f"{read_bandwidth(threads):.1f} GB/s")


if __name__ == "__main__":
    main()
