"""Products with packed weights on a GPU: settings of the one-row kernel, and few to many rows.

Figures without a peer, to choose settings by: `--parts one,rows`. Weights are random, and more than
the L2 cache holds. Every setting's result is compared with that of the kernel which decodes in
registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.common import arguments
from bench.gpu import LARGE, Device, in_turns
from bench.gpu_decode import Memory
from bench.random_model import random_blocks
from rlx.ir.quant.scheme import GGUF_SCHEMES

BANDWIDTH = 4390.0  # GB/s, the most that torch reads a tensor with (bench/GPU.md)
ROWS, QUICK_ROWS = (2, 8, 16, 64, 512), (8, 64, 512)
SHAPES = ((6144, 1024), (1024, 3072), (12288, 4096))
_REPEAT, _SAMPLE = 10, 256
_SETTINGS = (  # warps at most, rows of a slot (0: as chosen), KB of shared memory
    (0, 0, 112), (8, 0, 112), (12, 3, 112), (12, 4, 112), (16, 4, 112), (16, 0, 226), (8, 0, 226),
)  # fmt: skip


class Settings:
    """One-row kernels of a shape, in CUDA graphs over several weights."""

    def __init__(self, device: Device, memory: Memory, kind: str, n: int, k: int) -> None:
        from rlx.backends.cuda.kernels.qgemm.row_planes import split_blocks

        self.device, self.memory, self.kind, self.n, self.k = device, memory, kind, n, k
        blocks = random_blocks(memory.rng, GGUF_SCHEMES[kind], _SAMPLE, k)
        sample = split_blocks(kind, blocks)
        self.size = float(n * sample[0].nbytes)
        self.calls = max(2, min(16, int(500e6 / self.size)))
        self.weights = [memory.repeated(n, sample) for _ in range(self.calls)]
        self.x = memory.put(memory.rng.standard_normal(k).astype(np.float32))
        self.kernels: dict[str, Any] = {}
        self.outs: dict[str, Any] = {}

    def add(self) -> None:
        """The kernels that are compared."""
        from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue
        from rlx.backends.cuda.kernels.gemm.gemv import gemv_for
        from rlx.backends.cuda.kernels.qgemm.packed_rows import PackedRows
        from rlx.backends.cuda.kernels.qgemm.stream_gemv import stream_gemv_for
        from rlx.ir.dtype import f32

        plain, n, k = Epilogue(f32), self.n, self.k
        self.kernels["in registers"] = gemv_for(PackedRows(self.kind), f32, 1, k, n, plain)
        for warps, rows, room in _SETTINGS:
            made = stream_gemv_for(self.kind, k, n, plain, None, warps, rows, room << 10)
            if made is not None and made not in self.kernels.values():
                form = f"{made.warps} warps, {made.rows} rows, {made.slots} slots"
                self.kernels[f"{form}, {made.shared >> 10} KB"] = made

    def timed(self, name: str) -> Callable[[], float]:
        """A function that gives the seconds of a product."""
        from rlx.backends.cuda.driver import Event, Launch, Stream, launch

        kernel, backend = self.kernels[name], self.device.backend
        function = backend.kernels.functions([kernel])[kernel]
        out = backend.allocator.alloc((self.n,), np.float32)
        self.outs[name] = out
        at = int(out.handle) + int(out.offset)
        tables = [
            self.memory.put(np.array([self.x, self.k, w, 0, self.n, 1, at], np.int64))
            for w in self.weights
        ]
        count = getattr(kernel, "blocks", 0)
        how = Launch(count if isinstance(count, int) else count(self.n), kernel.threads,
                     kernel.shared, overlaps=True)  # fmt: skip
        stream, recorder = backend.allocator.stream, Stream(backend.gpu)
        with recorder.capture() as graph:
            for table in tables:
                launch(recorder, function, how, [table])

        def run() -> float:
            first = Event(stream).record()
            for _ in range(_REPEAT):
                graph.launch(stream)
            return Event(stream).record().seconds_since(first) / self.calls / _REPEAT

        return run

    def compare(self, rounds: int) -> None:
        self.device.backend.kernels.functions(list(self.kernels.values()))  # compiled together
        seconds = in_turns([self.timed(name) for name in self.kernels], rounds)
        want = self.outs["in registers"].copy_out().astype(np.float64)
        for name, taken in zip(self.kernels, seconds, strict=True):
            rate = self.size / taken / 1e9
            off = np.abs(self.outs[name].copy_out() - want).max() / np.abs(want).max()
            print(
                f"{self.kind} {self.n}x{self.k} {name}: {taken * 1e6:.2f} us, {rate:.0f} GB/s, "
                f"{rate / BANDWIDTH:.2f}, off {off:.1e}", flush=True,
            )  # fmt: skip


def products(device: Device, kind: str, m: int, n: int, k: int, calls: int) -> Callable[[], float]:
    """Products of m rows with packed weights, or with bf16, as graphs have them."""
    if kind == "BF16":
        return device.products(m, n, k, calls, "f32")
    scheme = GGUF_SCHEMES[kind]
    blocks = random_blocks(device.rng, scheme, _SAMPLE, k)
    weights = np.resize(blocks, (n, blocks.shape[1]))

    def build(g: Any) -> list[Any]:
        params = [g.param(f"w{i}", list(weights.shape), "u8") for i in range(calls)]
        rows = [g.input(f"x{i}", [m, k]) for i in range(calls)]
        pairs = zip(rows, params, strict=True)
        return [g.dequant_matmul(x, w, scheme=scheme) for x, w in pairs]

    given = {f"x{i}": device.floats(m, k).astype(np.float32) for i in range(calls)}
    params = {f"w{i}": weights for i in range(calls)}
    return device.timed(*device.graph(build, given, params), calls)


def compare_rows(device: Device, kinds: Sequence[str], counts: Sequence[int]) -> None:
    """bf16 and packed weights; 8 and 16 rows also as many rows, and by larger blocks."""
    from rlx.backends.cuda.kernels.qgemm import few_packed_rows, packed_gemm

    for n, k in SHAPES:
        calls = max(2, min(12, int(150e6 / (2 * n * k))))
        for m in counts:
            runs = {kind: products(device, kind, m, n, k, calls) for kind in kinds}
            if 8 <= m <= packed_gemm.FEW_ROWS:
                usual, packed_gemm.FEW_ROWS = packed_gemm.FEW_ROWS, 0
                for kind in kinds[1:]:
                    runs[f"{kind} as many"] = products(device, kind, m, n, k, calls)
                packed_gemm.FEW_ROWS = usual
                many, few_packed_rows.MANY = few_packed_rows.MANY, 60
                for kind in kinds[1:] if n >= 4096 else ():
                    runs[f"{kind} two tiles"] = products(device, kind, m, n, k, calls)
                few_packed_rows.MANY = many
            found = in_turns(list(runs.values()), 7)
            shown = ", ".join(f"{kind} {t * 1e6:.1f}" for kind, t in zip(runs, found, strict=True))
            print(f"{m} rows {n}x{k}: {shown} us", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("gpu_packed", str(__doc__).splitlines()[0])
    parser.add_argument("--types", default="Q8_0,Q4_K", help="types of weights, by commas")
    parser.add_argument("--parts", default="one,rows")
    options = parser.parse_args(argv)
    import rlx

    if "cuda" not in rlx.available_devices():
        print("bench gpu_packed: there is no GPU here")
        return 0
    device, kinds = Device(), options.types.split(",")
    if "one" in options.parts.split(","):
        for kind in kinds:
            for n, k in (*LARGE, (4096, 4096), (6144, 1024)):
                memory = Memory(device.backend)
                made = Settings(device, memory, kind, n, k)
                made.add()
                made.compare(5 if options.quick else 12)
    if "rows" in options.parts.split(","):
        compare_rows(device, ["BF16", *kinds], QUICK_ROWS if options.quick else ROWS)
    return 0
