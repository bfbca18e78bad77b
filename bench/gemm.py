"""GEMM in f32 against NumPy's OpenBLAS, GEMV with 16-bit weights against read bandwidth.

Weights are prepacked (as `prepare` does once per model); OpenBLAS packs its own with every
call. Results are checked against f64 before anything is timed.

RLX_TARGET=x86-64-v3 holds both to AVX2.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.common import Bar, arguments, finish
from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue
from rlx.backends.cpu.kernels.gemm.gemm import Gemm
from rlx.backends.cpu.kernels.spec import compile_specs
from rlx.backends.cpu.layouts.pack import PackMatMul, panel_layout
from rlx.backends.cpu.lowering import scratch_per_worker
from rlx.backends.cpu.peaks import ReadProbe
from rlx.backends.cpu.program import Launch, Program
from rlx.backends.cpu.thread_pool import get_thread_pool
from rlx.ir.dtype import DType, f32
from rlx.llvm.target import Target

SHAPES = ((128, 3072, 1024), (512, 1024, 3072), (512, 512, 512))  # rows, columns, terms
GEMV = (1, 65536, 1024)
_REST = 0.12  # seconds between two sides: OpenBLAS's threads spin for some 0.1 s after their work


class GemmProgram:
    """x·w as a program of one launch, its weight prepacked."""

    def __init__(self, m: int, n: int, k: int, dtype: str, threads: int) -> None:
        target, element = Target.host(), DType.of(dtype)
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((m, k), np.float32)
        self.w = rng.standard_normal((k, n), np.float32).astype(element.numpy)
        self.out = np.full((m, n), np.nan, np.float32)
        spec = Gemm(f32, element, Epilogue(f32), single_row=m == 1)
        layout = panel_layout(spec.tile_shape(target).nr)
        self.packed = _aligned(PackMatMul(layout).reference(self.w))
        each = scratch_per_worker(spec.scratch(target, m, n, k))
        self.scratch = _aligned(np.zeros(each * threads, np.uint8))
        given = {
            "x": self.x, "w": self.packed, "out": self.out, "scratch": self.scratch, "step": each,
            "m": m, "n": n, "k": k, "x_line": 4 * k, "x_term": 4,
        }  # fmt: skip
        args = [v.ctypes.data if isinstance(v, np.ndarray) else v for v in given.values()]
        kernel = compile_specs([spec], target)[spec]
        self.program = Program([Launch(kernel.address(), args)], keep=kernel)
        self.pool = get_thread_pool(threads)

    def run(self) -> None:
        self.pool.run(self.program)

    def check(self) -> None:
        """Against f64, within the rounding of sums of k terms."""
        self.run()
        columns = slice(0, min(self.w.shape[1], 4096))
        want = self.x.astype(np.float64) @ self.w[:, columns].astype(np.float64)
        worst = np.abs(self.out[:, columns] - want).max() / np.abs(want).max()
        if not worst < 1e-5:
            raise SystemExit(f"gemm: the result is wrong: off by {worst:.2g} of the largest")


def _aligned(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    placed = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


def _limits() -> Any:
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        sys.exit(
            "gemm: threadpoolctl sets OpenBLAS's threads and is not installed; "
            "pip install -r bench/requirements-gemm.txt"
        )
    return threadpool_limits


def _in_turn(
    ours: Callable[[], object], peer: Callable[[], object], seconds: float, rounds: int
) -> tuple[float, float]:
    """Median seconds per call of both, in turn; `seconds` is about what a call takes."""
    inner = max(1, int(0.02 / seconds))
    times: dict[Callable[[], object], list[float]] = {ours: [], peer: []}
    for _ in range(rounds):
        for run, kept in times.items():
            time.sleep(_REST)
            run()
            start = time.perf_counter()
            for _ in range(inner):
                run()
            kept.append((time.perf_counter() - start) / inner)
    return statistics.median(times[ours]), statistics.median(times[peer])


def against_openblas(shape: tuple[int, int, int], threads: int, rounds: int) -> Bar:
    m, n, k = shape
    gemm = GemmProgram(m, n, k, "f32", threads)
    gemm.check()
    out = np.empty((m, n), np.float32)
    flops = 2 * m * n * k
    with _limits()(threads, user_api="blas"):
        ours, peer = _in_turn(
            gemm.run,
            lambda: np.matmul(gemm.x, gemm.w, out=out),
            flops / threads / 1e11,
            rounds,
        )
    name = f"gemm_{m}x{n}x{k}_{threads}t"
    return Bar(name, flops / ours / 1e9, "GFLOP/s", "OpenBLAS", flops / peer / 1e9, 1.0)


def against_bandwidth(dtype: str, threads: int, rounds: int) -> Bar:
    gemm = GemmProgram(*GEMV, dtype, threads)
    gemm.check()
    probe = ReadProbe(threads)
    ours, peer = _in_turn(gemm.run, probe.run, 1.0, rounds)
    rate = gemm.packed.nbytes / ours / 1e9
    name = f"gemv_{dtype}_{threads}t"
    return Bar(name, rate, "GB/s", "read bandwidth", probe.bytes / peer / 1e9, 0.85)


def main(argv: list[str]) -> int:
    options = arguments("gemm", __doc__ or "").parse_args(argv)
    rounds = 5 if options.quick else 15
    counts = sorted({1, min(2, get_thread_pool().workers)})
    print("weights are prepacked; OpenBLAS is NumPy's")
    bars = [against_bandwidth(d, t, rounds) for d in ("f16", "bf16") for t in counts]
    bars += [against_openblas(shape, t, rounds) for shape in SHAPES for t in counts]
    return finish(bars, options.json)
