"""GEMM and GEMV with quantised weights: one row against read bandwidth, many against f32 peak.

Weights are prepacked (as `prepare` does once per model); quantising the activations is
part of what is timed, once for all GEMMs that read them. One row goes through so many copies of
the weight that no cache holds them, and is counted in bytes of the file. Results are checked
against f64 before anything is timed. `--type` (several times, or `all`) chooses types, those of the
common presets if left out. Bars name the instruction set; `--avx2` holds RLX and the peaks to AVX2.
"""

from __future__ import annotations

import time

import numpy as np

from bench.common import Bar, arguments, finish, interleaved
from bench.instruction_set import add_avx2, hold_to_avx2, instruction_set
from bench.random_model import random_blocks
from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue
from rlx.backends.cpu.kernels.qgemm.qgemm import QuantGemm, row_layout
from rlx.backends.cpu.kernels.qgemm.quantize_rows import QuantizeRows
from rlx.backends.cpu.kernels.spec import compile_specs
from rlx.backends.cpu.layouts.quant_rows import dequantized_rows, quantize_rows
from rlx.backends.cpu.layouts.quant_tiles import (
    TILED_SCHEMES,
    column_tile_layout,
    pack_column_tiles,
)
from rlx.backends.cpu.peaks import FmaProbe, ReadProbe
from rlx.backends.cpu.program import Launch, Program
from rlx.backends.cpu.thread_pool import get_thread_pool
from rlx.ir.dtype import f32
from rlx.ir.quant.scheme import QuantScheme, decode
from rlx.llvm.target import Target

SHAPES = ((3072, 1024), (1024, 3072), (151936, 1024))  # columns of the result, terms
MANY = (128, 512)  # rows
_BEYOND_CACHES = 300 << 20  # bytes that one pass reads at least
_REST = 0.3  # seconds; OpenBLAS, which the check uses, spins for some 0.1 s after its work
_GOALS = {  # name: least part of read bandwidth, and least multiple of f32 peak
    "Q8_0": (0.85, 0.9),
    "Q6_K": (0.80, 0.9),
    "Q4_K": (0.80, 1.5),
    "Q4_0": (0.80, 1.2),
}
_BY_BITS = ((0.80, 0.9), (0.50, 0.9))  # of other types: from 4 bits on, and fewer
TYPES = tuple(s.name for s in TILED_SCHEMES)


class Weight:
    """A random weight of n rows; beyond some thousand rows they repeat."""

    def __init__(self, scheme: QuantScheme, n: int, k: int) -> None:
        rng = np.random.default_rng(0)
        self.scheme, self.n, self.k = scheme, n, k
        self.rows = random_blocks(rng, scheme, min(n, 4096), k)
        column_tiles = pack_column_tiles(scheme, self.rows, None, None)
        self.column_tiles = np.resize(column_tiles, (-(-n // 16), column_tiles.shape[1]))

    def check(self, layout: object, x: np.ndarray, got: np.ndarray) -> None:
        """Against f64 on the same codes of activations: nothing but f32 rounding is left."""
        codes = quantize_rows(layout, x)  # type: ignore[arg-type]
        numbers = dequantized_rows(layout, codes, len(x), self.k)  # type: ignore[arg-type]
        want = numbers.astype(np.float64) @ decode(self.scheme, self.rows).astype(np.float64).T
        worst = np.abs(got[:, : want.shape[1]] - want).max() / np.abs(want).max()
        if not worst < 1e-6:
            raise SystemExit(f"qgemm: the result is wrong: off by {worst:.2g} of the largest")


class GemmProgram:
    """Quantise x, then multiply with each copy of the weight, none waiting for another."""

    def __init__(self, weight: Weight, m: int, threads: int) -> None:
        scheme, n, k = weight.scheme, weight.n, weight.k
        target = Target.host()
        layout = row_layout(scheme, k, target)
        self.copies = -(-_BEYOND_CACHES // weight.column_tiles.nbytes) if m == 1 else 1
        self.column_tiles = _aligned((self.copies, *weight.column_tiles.shape))
        self.column_tiles[...] = weight.column_tiles
        self.x = np.random.default_rng(1).standard_normal((m, k), np.float32)
        self.codes = _aligned((m + layout.tile - 1, layout.row_bytes(k)))
        self.out = np.full((m, n), np.nan, np.float32)
        specs = QuantizeRows(f32, layout), QuantGemm(scheme, layout, Epilogue(f32))
        kernels = compile_specs(specs, target)
        quantize, multiply = (kernels[s].address() for s in specs)
        column_tiles = column_tile_layout(scheme, k)
        assert column_tiles is not None
        sizes = [m, n, k, layout.row_bytes(k), column_tiles.tile_bytes]
        launches = [Launch(quantize, [self.x.ctypes.data, self.codes.ctypes.data, m, k])]
        for copy in self.column_tiles:
            places = [a.ctypes.data for a in (self.codes, copy, self.out)]
            launches.append(Launch(multiply, [*places, *sizes], barrier=False))
        self.program = Program(launches, workers=threads, keep=kernels)
        self.pool = get_thread_pool(threads)
        self.run()
        weight.check(layout, self.x, self.out)
        time.sleep(_REST)

    def run(self) -> None:
        self.pool.run(self.program)


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape))
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].reshape(shape)


def gemv(weight: Weight, threads: int, rounds: int, goal: float) -> Bar:
    gemm, probe = GemmProgram(weight, 1, threads), ReadProbe(threads)
    ours, peer = interleaved([gemm.run, probe.run], rounds)
    read = weight.scheme.stored_bytes(weight.n, weight.k) * gemm.copies
    name = f"qgemv_{weight.scheme}_{weight.n}x{weight.k}_{threads}t_{instruction_set()}"
    rate = probe.bytes / peer / 1e9
    return Bar(name, read / ours / 1e9, "GB/s", "read bandwidth", rate, goal)


def gemm_rows(weight: Weight, m: int, threads: int, rounds: int, goal: float) -> Bar:
    gemm, probe = GemmProgram(weight, m, threads), FmaProbe(threads)
    ours, peer = interleaved([gemm.run, probe.run], rounds, inner=4)
    work = 2 * m * weight.n * weight.k
    name = f"qgemm_{weight.scheme}_{m}x{weight.n}x{weight.k}_{threads}t_{instruction_set()}"
    return Bar(name, work / ours / 1e9, "GOP/s", "f32 peak", probe.flops / peer / 1e9, goal)


def main(argv: list[str]) -> int:
    parser = arguments("qgemm", __doc__ or "")
    parser.add_argument(
        "--type",
        action="append",
        type=str.upper,
        choices=(*TYPES, "ALL"),
        metavar="TYPE",
        help=f"all, or any of {', '.join(TYPES)}",
    )
    add_avx2(parser)
    options = parser.parse_args(argv)
    if options.avx2:
        hold_to_avx2()
    rounds = 5 if options.quick else 15
    threads = min(2, get_thread_pool().workers)
    bars = []
    kinds = options.type or _GOALS
    for name in TYPES if "ALL" in kinds else kinds:
        scheme = QuantScheme.parse(name)
        bandwidth, peak = _GOALS.get(name) or _BY_BITS[scheme.bits_per_element < 4]
        for n, k in SHAPES:
            weight = Weight(scheme, n, k)
            bars.append(gemv(weight, threads, rounds, bandwidth))
            # The head is multiplied with a row or two only; 150,000 columns show nothing new.
            if n < 100_000:
                bars += [gemm_rows(weight, m, threads, rounds, peak) for m in MANY]
    return finish(bars, options.json)
