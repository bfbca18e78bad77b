"""What the machine can give: multiply-adds, bytes read and copied, by generated kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from rlx.backends.buffer import HOST
from rlx.backends.cpu.kernels.qgemm.dot import FourWay, dot_kind, make_dot
from rlx.backends.cpu.kernels.spec import KernelSpec, compile_specs
from rlx.backends.cpu.pool import Pool, get_pool
from rlx.backends.cpu.program import Launch, Program
from rlx.ir.op import Array
from rlx.llvm.builder import Function, Module, Value, f32, i64, vec
from rlx.llvm.storage import stream
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_CHAINS = 12  # independent sums: more than latency times throughput of any FMA unit we know
_STREAMS = 8  # vectors per step of the reader
_BEYOND_CACHES = 512 << 20
_IN_CACHE = 128 << 10  # bytes of each worker: within the second level of any CPU we know
_ROUNDS = 64  # of reading those, so that starting the workers does not count


@dataclass(frozen=True)
class FmaPeak(KernelSpec):
    """args: out (64 bytes per worker), steps. Each step is `_CHAINS` fused multiply-adds."""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        wide = vec(m.target.lanes(32), f32)
        factor, start = f.const(0.5, wide), f.const(1.0, wide)
        _chains(f, start, lambda x: f.fma(x, factor, start))


@dataclass(frozen=True)
class DotPeak(KernelSpec):
    """args: out (64 bytes per worker), steps. Each step is `_CHAINS` four-way dots of bytes."""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        dot = make_dot(f, 1)
        assert isinstance(dot, FourWay)
        ones = f.const(1, dot.bytes)
        _chains(f, f.const(0, dot.sums), lambda x: dot.step(x, ones, ones))


def _chains(f: Function, start: Value, step: Callable[[Value], Value]) -> None:
    """`_CHAINS` values, each stepped on in every round; their sum is kept, so none is left out."""
    out, rounds = f.arg(f["args"], 0), f.arg(f["args"], 1, i64)
    _keep(f, out, f.loop(0, rounds, 1, [start] * _CHAINS, lambda _, *s: [step(x) for x in s]))


def _keep(f: Function, out: Value, sums: Sequence[Value]) -> None:
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
        _keep(f, out, sums)


@dataclass(frozen=True)
class CopyAll(KernelSpec):
    """args: data, out, bytes (of whole steps). Every worker copies its share, past the caches."""

    def emit(self, m: Module) -> None:
        f = m.kernel()
        wide = vec(m.target.lanes(32), f32)
        data, out, size = f.arg(f["args"], 0), f.arg(f["args"], 1), f.arg(f["args"], 2, i64)
        step = 2 * _STREAMS * wide.bytes
        lo, hi = f.split(size, step)
        for i in f.range(lo, hi, step):
            spots = range(0, step, wide.bytes)
            for at, value in [(at, f.load(f.gep(data, i), wide, at)) for at in spots]:
                stream(f, value, f.gep(f.gep(out, i), at))
        f.fence()


class Probe:
    """`run()` does a known amount of work on every worker."""

    def __init__(
        self, spec: KernelSpec, threads: int, args: list[int], out: Array, rounds: int = 1
    ) -> None:
        kernel = compile_specs([spec], Target.host())[spec]
        steps = [Launch(kernel.address(), args, barrier=i == rounds - 1) for i in range(rounds)]
        self.pool: Pool = get_pool(threads)
        self.program = Program(steps, keep=(kernel, out))

    def run(self) -> None:
        self.pool.run(self.program)


class FmaProbe(Probe):
    """Multiply-adds of f32 that stay in registers."""

    def __init__(self, threads: int, steps: int = 200_000) -> None:
        out = _results(threads)
        super().__init__(FmaPeak(), threads, [out.ctypes.data, steps], out)
        self.flops = 2.0 * threads * steps * _CHAINS * Target.host().lanes(32)


class DotProbe(Probe):
    """Multiply-adds of bytes that stay in registers, for a target with four-way dot products."""

    def __init__(self, threads: int, steps: int = 200_000) -> None:
        out = _results(threads)
        super().__init__(DotPeak(), threads, [out.ctypes.data, steps], out)
        self.flops = 8.0 * threads * steps * _CHAINS * Target.host().lanes(32)


class ReadProbe(Probe):
    """Reads a buffer in order, divided among the workers: once, or `rounds` times."""

    def __init__(self, threads: int, size: int = _BEYOND_CACHES, rounds: int = 1) -> None:
        self.data, out = _ones(size), _results(threads)
        args = [self.data.ctypes.data, out.ctypes.data, size]
        super().__init__(ReadAll(), threads, args, out, rounds)
        self.bytes = float(size * rounds)


class CopyProbe(Probe):
    """Copies so many bytes, a power of two beyond every cache, by the quickest way there is."""

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
    """Seconds of the quickest of the runs that fit in the time: a limit is not a typical value."""
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
    """The same of bytes; None where the target has no instruction for four of them."""
    kind = dot_kind(Target.host())
    if kind is None or not issubclass(kind, FourWay):
        return None
    probe = DotProbe(threads)
    return probe.flops / _best(probe.run, seconds) / 1e9


def read_bandwidth(threads: int, seconds: float = 1.0) -> float:
    """GB/s of memory read in order, beyond the caches."""
    probe = ReadProbe(threads)
    return probe.bytes / _best(probe.run, seconds) / 1e9


def cache_bandwidth(threads: int, seconds: float = 0.3) -> float:
    """GB/s read from a cache of each worker's own."""
    probe = ReadProbe(threads, _IN_CACHE * threads, _ROUNDS)
    return probe.bytes / _best(probe.run, seconds) / 1e9


@dataclass(frozen=True)
class Limits:
    """The most that so many workers get out of this machine."""

    threads: int
    gflops: float  # f32 multiply-adds, two operations each
    int8_gops: float | None  # of bytes; None: done as floats
    memory_gb: float  # read per second, beyond the caches
    cache_gb: float  # within them


def measure_limits(threads: int, seconds: float = 0.2) -> Limits:
    """Measured now, each limit for some `seconds`."""
    return Limits(
        threads,
        fma_peak(threads, seconds),
        dot_peak(threads, seconds),
        read_bandwidth(threads, 2 * seconds),
        cache_bandwidth(threads, seconds),
    )
