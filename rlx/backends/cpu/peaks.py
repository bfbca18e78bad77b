"""Roofline limits of the machine: FLOP/s and memory bandwidth, measured with generated kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from rlx.backends.buffer import HOST
from rlx.backends.cpu.kernels.qgemm.dot import FourWay, dot_kind, make_dot
from rlx.backends.cpu.kernels.spec import KernelSpec, compile_specs
from rlx.backends.cpu.program import Launch, Program
from rlx.backends.cpu.thread_pool import ThreadPool, get_thread_pool
from rlx.ir.op import Array
from rlx.llvm.builder import Function, Module, Value, f32, i64, vec
from rlx.llvm.storage import LINE, stream
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_ACCUMULATORS = 12  # independent chains: more than latency × throughput of any known FMA unit
_STREAMS = 8  # vectors read in each iteration
_BEYOND_CACHES = 512 << 20
_IN_CACHE = 128 << 10  # bytes per worker: within the L2 cache of any known CPU
_REPEATS = 64  # reads of those in one run, so that waking the workers does not count


@dataclass(frozen=True)
class FmaPeak(KernelSpec):
    """args: out (64 bytes per worker), iterations, each of `_ACCUMULATORS` fused multiply-adds"""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        wide = vec(m.target.lanes(32), f32)
        factor, start = f.const(0.5, wide), f.const(1.0, wide)
        _accumulate(f, start, lambda x: f.fma(x, factor, start))


@dataclass(frozen=True)
class DotPeak(KernelSpec):
    """args: out (64 bytes per worker), iterations, each of `_ACCUMULATORS` four-way int8 dots"""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        dot = make_dot(f, 1)
        assert isinstance(dot, FourWay)
        ones = f.const(1, dot.bytes)
        _accumulate(f, f.const(0, dot.sums), lambda x: dot.step(x, ones, ones))


def _accumulate(f: Function, start: Value, update: Callable[[Value], Value]) -> None:
    """Update independent accumulators in a loop. Their sum is stored, so none is dead code."""
    out, count = f.arg(f["args"], 0), f.arg(f["args"], 1, i64)
    sums = [start] * _ACCUMULATORS
    _store_sum(f, out, f.loop(0, count, 1, sums, lambda _, *s: [update(x) for x in s]))


def _store_sum(f: Function, out: Value, sums: Sequence[Value]) -> None:
    total = sums[0]
    for x in sums[1:]:
        total = total + x
    f.store(f.reduce("add", total), f.gep(out, f["tid"].to(i64), 64))


@dataclass(frozen=True)
class ReadAll(KernelSpec):
    """args: data, out (64 bytes per worker), bytes. Every worker reads its share once."""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        wide = vec(m.target.lanes(32), f32)
        data, out, size = f.arg(f["args"], 0), f.arg(f["args"], 1), f.arg(f["args"], 2, i64)
        stride = _STREAMS * wide.bytes
        # Vectors of 256 bits reach the bandwidth without.
        ahead = m.target.read_ahead if m.target.avx512 else 0
        sums = f.carry([f.const(0.0, wide)] * _STREAMS)
        for i in sums.range(*f.split(size, stride), stride):
            at = f.gep(data, i)
            for line in range(0, stride if ahead else 0, LINE):
                f.prefetch(at, ahead + line)
            loads = [f.load(at, wide, k * wide.bytes) for k in range(_STREAMS)]
            sums.values = [x + y for x, y in zip(sums.values, loads, strict=True)]
        _store_sum(f, out, sums.values)


@dataclass(frozen=True)
class CopyAll(KernelSpec):
    """args: data, out, bytes (of whole iterations). Every worker streams its share."""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        wide = vec(m.target.lanes(32), f32)
        data, out, size = f.arg(f["args"], 0), f.arg(f["args"], 1), f.arg(f["args"], 2, i64)
        stride = 2 * _STREAMS * wide.bytes
        lo, hi = f.split(size, stride)
        for i in f.range(lo, hi, stride):
            spots = range(0, stride, wide.bytes)
            for at, value in [(at, f.load(f.gep(data, i), wide, at)) for at in spots]:
                stream(f, value, f.gep(f.gep(out, i), at))
        f.fence()


class Probe:
    """`run()` does a known amount of work on every worker."""

    def __init__(
        self, spec: KernelSpec, threads: int, args: list[int], out: Array, repeats: int = 1
    ) -> None:
        kernel = compile_specs([spec], Target.host())[spec]
        last = repeats - 1
        launches = [Launch(kernel.address(), args, barrier=i == last) for i in range(repeats)]
        self.pool: ThreadPool = get_thread_pool(threads)
        self.program = Program(launches, keep=(kernel, out))

    def run(self) -> None:
        self.pool.run(self.program)


class FmaProbe(Probe):
    """Multiply-adds of f32 that stay in registers."""

    def __init__(self, threads: int, iterations: int = 200_000) -> None:
        out = _results(threads)
        super().__init__(FmaPeak(), threads, [out.ctypes.data, iterations], out)
        self.flops = 2.0 * threads * iterations * _ACCUMULATORS * Target.host().lanes(32)


class DotProbe(Probe):
    """Multiply-adds of bytes that stay in registers, for a target with four-way dot products."""

    def __init__(self, threads: int, iterations: int = 200_000) -> None:
        out = _results(threads)
        super().__init__(DotPeak(), threads, [out.ctypes.data, iterations], out)
        self.flops = 8.0 * threads * iterations * _ACCUMULATORS * Target.host().lanes(32)


class ReadProbe(Probe):
    """Reads a buffer in order, divided among the workers, `repeats` times."""

    def __init__(self, threads: int, size: int = _BEYOND_CACHES, repeats: int = 1) -> None:
        self.data, out = _ones(size), _results(threads)
        args = [self.data.ctypes.data, out.ctypes.data, size]
        super().__init__(ReadAll(), threads, args, out, repeats)
        self.bytes = float(size * repeats)


class CopyProbe(Probe):
    """Copies `size` bytes, a power of two larger than every cache, with non-temporal stores."""

    def __init__(self, threads: int, size: int) -> None:
        data, out = (HOST.alloc_arena(size).array for _ in range(2))
        data[:] = 1
        self.data = data
        super().__init__(CopyAll(), threads, [data.ctypes.data, out.ctypes.data, size], out)
        self.bytes = 2.0 * size


def _results(threads: int) -> Array:
    return np.zeros(16 * threads, np.float32)


@cache
def _ones(size: int) -> Array:
    return np.ones(size // 4, np.float32)


def _best(run: Callable[[], None], seconds: float) -> float:
    """Seconds of the fastest run among those that fit in the time: a limit is no median."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def fma_peak(threads: int, seconds: float = 0.3) -> float:
    """GFLOP/s of f32 multiply-adds."""
    probe = FmaProbe(threads)
    return probe.flops / _best(probe.run, seconds) / 1e9


def dot_peak(threads: int, seconds: float = 0.3) -> float | None:
    """GOP/s of int8 multiply-adds; None if the target has no four-way dot instruction."""
    kind = dot_kind(Target.host())
    if kind is None or not issubclass(kind, FourWay):
        return None
    probe = DotProbe(threads)
    return probe.flops / _best(probe.run, seconds) / 1e9


def read_bandwidth(threads: int, seconds: float = 1.0) -> float:
    """GB/s of memory read in order, larger than the caches."""
    probe = ReadProbe(threads)
    return probe.bytes / _best(probe.run, seconds) / 1e9


def cache_bandwidth(threads: int, seconds: float = 0.3) -> float:
    """GB/s read from each worker's own cache."""
    probe = ReadProbe(threads, _IN_CACHE * threads, _REPEATS)
    return probe.bytes / _best(probe.run, seconds) / 1e9


@dataclass(frozen=True)
class Limits:
    """Roofline limits of so many workers."""

    threads: int
    gflops: float  # f32 multiply-adds, two operations each
    int8_gops: float | None  # None: no instruction for them
    memory_gb: float  # read per second from memory
    cache_gb: float  # read per second from caches


def measure_limits(threads: int, seconds: float = 0.2) -> Limits:
    """Measure every limit, each for some `seconds`."""
    return Limits(
        threads,
        fma_peak(threads, seconds),
        dot_peak(threads, seconds),
        read_bandwidth(threads, 2 * seconds),
        cache_bandwidth(threads, seconds),
    )
