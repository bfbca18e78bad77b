"""The `cuda` device: products, attention, decode and prefill of Qwen3 shapes with random weights.

Peers are torch's kernels (cuBLAS, its attention) in CUDA graphs and `torch.compile` of the same
network, in the same process and in turns; without torch only our own figures are shown. Weights are
made here: `--shape 0.6b` or `8b`, `--types BF16,Q8_0,Q4_K`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from math import exp, log
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bench import gpu_f32
from bench.common import Bar, arguments, finish
from bench.gpu_batches import (
    batch_bars,
    constrained_rates,
    invariant_rates,
    starts,
    torch_batch,
)
from bench.peers import torch_gpu
from bench.random_model import SHAPES, random_blocks, write_random_model
from rlx.ir.quant.scheme import GGUF_SCHEMES

GEMV = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024), (28672, 4096))
LARGE = ((151936, 1024), (28672, 4096), (4096, 14336))  # where a launch is little of the time
SHARES = {"BF16": 0.9, "Q8_0": 0.85, "Q4_K": 0.85}  # of the bandwidth measured, one row
_WEIGHTS = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (28672, 4096))
GEMM = (
    *((512, n, k) for n, k in _WEIGHTS),
    *((4096, n, k) for n, k in _WEIGHTS),
    (1000, 4104, 1032),
    (77, 3080, 1096),
    (300, 4096, 4096),
    (2050, 6150, 1024),
)
ATTENTION = (2048, 16, 8, 128)  # length, heads, key heads, numbers of a head
_REPEAT = 10
POSITION, TOKENS, PREFILL = 512, 256, 512


class Letters:
    """A tokenizer: token t is the character chr(256 + t)."""

    end_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 256 for c in text]

    def stream(self) -> Letters:
        return self

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Device:
    """Graphs on the GPU, timed by events."""

    def __init__(self) -> None:
        from rlx.backends.registry import Device as Named

        self.backend: Any = Named("cuda").backend
        self.rng = np.random.default_rng(0)

    def floats(self, *dims: int) -> Any:
        pool = (self.rng.random(1 << 20, np.float32) - 0.5).astype(ml_dtypes.bfloat16)
        return np.resize(pool, int(np.prod(dims))).reshape(dims)

    def graph(self, build: Callable[[Any], Any], inputs: dict[str, Any], params: Any) -> Any:
        """A compiled graph and its inputs on the device."""
        from rlx import Graph
        from rlx.runtime.compiled import CompiledGraph
        from rlx.runtime.template import make_template
        from rlx.specialize.options import CompileOptions

        g = Graph("bench")
        g.set_outputs(*build(g))
        made = CompiledGraph(make_template(g, CompileOptions(), self.backend))
        made.set_params(params)
        return made, [self.backend.allocator.put(a) for a in inputs.values()]

    def timed(self, made: Any, buffers: Sequence[Any], calls: int) -> Callable[[], float]:
        """A function that runs a graph some times and gives the seconds of one of its `calls`
        parts. As with the peer, the host queues one CUDA graph, so that its own time is hidden."""
        from rlx.backends.cuda.driver import Event, Stream

        stream = self.backend.allocator.stream
        made.run_slots(*buffers)
        executable = made._current_variant()[0]
        recorder = Stream(self.backend.gpu)
        with recorder.capture() as graph:
            executable.launch_all(recorder)

        def run(held: Any = (made, buffers)) -> float:  # the graph's memory is theirs
            first = Event(stream).record()
            for _ in range(_REPEAT):
                graph.launch(stream)
            return Event(stream).record().seconds_since(first) / calls / _REPEAT

        return run

    def products(self, m: int, n: int, k: int, calls: int, element: str) -> Callable[[], float]:
        def build(g: Any) -> list[Any]:
            """Each has its own x: products of one x are joined, and their results copied."""
            rows = [g.input(f"x{i}", [m, k], element) for i in range(calls)]
            weights = [g.param(f"w{i}", [n, k], "bf16") for i in range(calls)]
            return [g.matmul(x, g.transpose(w, (1, 0))) for x, w in zip(rows, weights, strict=True)]

        x = self.floats(m, k)
        given = {f"x{i}": x if element == "bf16" else x.astype(np.float32) for i in range(calls)}
        params = {f"w{i}": self.floats(n, k) for i in range(calls)}
        return self.timed(*self.graph(build, given, params), calls)

    def packed_products(self, n: int, k: int, calls: int, name: str) -> Callable[[], float]:
        """One row times packed weights."""
        scheme = GGUF_SCHEMES[name]
        blocks = random_blocks(self.rng, scheme, 1024, k)
        weights = np.resize(blocks, (n, blocks.shape[1]))

        def build(g: Any) -> list[Any]:
            params = [g.param(f"w{i}", list(weights.shape), "u8") for i in range(calls)]
            rows = [g.input(f"x{i}", [1, k]) for i in range(calls)]
            pairs = zip(rows, params, strict=True)
            return [g.dequant_matmul(x, w, scheme=scheme) for x, w in pairs]

        given = {f"x{i}": self.floats(1, k).astype(np.float32) for i in range(calls)}
        params = {f"w{i}": weights for i in range(calls)}
        return self.timed(*self.graph(build, given, params), calls)

    def attention(self, calls: int) -> Callable[[], float]:
        length, heads, kv, dim = ATTENTION

        def build(g: Any) -> list[Any]:
            q, k, v = (
                g.input(name, [1, length, h, dim], "bf16")
                for name, h in (("q", heads), ("k", kv), ("v", kv))
            )
            options = {"num_heads": heads, "num_kv_heads": kv, "head_dim": dim}
            return [
                g.attention(q, k, v, **options, mask_kind="causal", scale=0.088 + 0.001 * i)
                for i in range(calls)
            ]

        given = {n: self.floats(1, length, h, dim) for n, h in (("q", heads), ("k", kv), ("v", kv))}
        return self.timed(*self.graph(build, given, {}), calls)


def in_turns(runs: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """Median seconds of each, taken in turns."""
    samples: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for i in range(rounds):
        for j in range(len(runs)):
            at = (i + j) % len(runs)
            samples[at].append(runs[at]())
    return [statistics.median(s) for s in samples]


class Bench:
    def __init__(self, options: Any) -> None:
        self.options, self.rounds = options, 5 if options.quick else 12
        self.device, self.torch = Device(), None if options.alone else torch_gpu.load()
        self.bars: list[Bar] = []
        if self.torch is None:
            print("torch is not here: no peers")

    def run(self) -> int:
        parts = self.options.parts.split(",")
        for name, part in (
            ("gemv", self._gemv),
            ("bandwidth", self._bandwidth),
            ("gemm", self._gemm),
            ("attention", self._attention),
            ("f32", self._f32),
            ("conv", self._conv),
        ):
            if name in parts:
                part()
        for kind in self.options.types.split(","):
            for name, model in (
                ("model", self._model), ("long", self._long), ("batches", self._batches),
                ("start", self._start), ("invariant", self._invariant),
                ("constrained", self._constrained),
            ):  # fmt: skip
                if name in parts:
                    model(kind)
        return finish(self.bars, self.options.json)

    @contextmanager
    def _file(self, kind: str) -> Iterator[Path]:
        from rlx.models.model_file import ModelFile

        ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_random_model(path, self.options.shape, kind, self.options.layers)
            yield path

    def _batches(self, kind: str) -> None:
        peer, shape = None, self.options.shape
        if self.torch is not None and kind == "BF16" and self.options.layers is None:
            peer = torch_batch(self.torch, shape, POSITION + 2 * TOKENS, POSITION)
        with self._file(kind) as path:
            self.bars += batch_bars(self.torch, path, shape, kind, POSITION, peer)

    def _invariant(self, kind: str) -> None:
        """What batch invariance costs."""
        with self._file(kind) as path:
            invariant_rates(path, self.options.shape, kind, POSITION)

    def _constrained(self, kind: str) -> None:
        """Penalties, biases and log probabilities."""
        with self._file(kind) as path:
            constrained_rates(path, self.options.shape, kind, POSITION)

    def _long(self, kind: str) -> None:
        """Prefill of a long prompt."""
        import rlx

        length, peers = 4096, []
        if self.torch is not None and kind == "BF16" and self.options.layers is None:
            peers = [torch_gpu.Qwen3(self.torch, self.options.shape, length).timed_step(length, 0)]
        with self._file(kind) as path:
            model: Any = rlx.load(path, device="cuda", context=2 * length)
            found = in_turns([lambda: prefill(model, length), *peers], 5)
            model.close()
        rates = [length / t for t in found]
        print(f"{self.options.shape} {kind}: prefill of {length} {rates[0]:.0f} tokens/s")
        if peers:
            name = f"gpu_{self.options.shape}_{kind.lower()}_prefill_{length}"
            self.bars.append(Bar(name, rates[0], "tokens/s", "torch.compile", rates[1], 1.0))

    def _start(self, kind: str) -> None:
        """New processes: with nothing cached, with cubins on disk, and from an artifact."""
        from rlx.models.compile import compile_model

        with self._file(kind) as path, tempfile.TemporaryDirectory() as cache:
            before = os.environ.get("RLX_CACHE_DIR")
            os.environ["RLX_CACHE_DIR"] = cache
            artifact = path.with_suffix(".rlx")
            shown = {"cold": starts(path, None), "again": starts(path, None)}
            compile_model(path, artifact, device="cuda", context=4096)
            shown["artifact"] = starts(path, artifact)
            if before is None:
                del os.environ["RLX_CACHE_DIR"]
            else:
                os.environ["RLX_CACHE_DIR"] = before
        for name, (imports, load, first) in shown.items():
            of = f"{self.options.shape} {kind} {name}"
            print(f"start {of}: imports {imports:.2f}, load {load:.2f}, first tokens {first:.2f} s")

    def _compared(self, ours: Callable[[], float], peer: Callable[[], float] | None) -> list[float]:
        return in_turns([ours] if peer is None else [ours, peer], self.rounds)

    def _gemv(self) -> None:
        torch = self.torch
        for n, k in GEMV:
            calls = max(2, min(48, int(500e6 / (2 * n * k))))
            peer = None
            if torch is not None:
                weights = [
                    torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(calls)
                ]
                x, turn = torch.randn(k, device="cuda", dtype=torch.bfloat16), iter(range(1 << 30))
                peer = torch_gpu.graph_of(
                    torch, lambda w=weights, x=x, t=turn: torch.mv(w[next(t) % len(w)], x), calls
                )
            found = self._compared(self.device.products(1, n, k, calls, "f32"), peer)
            rates = [2 * n * k / t / 1e9 for t in found]
            print(f"gemv {n}x{k}: {found[0] * 1e6:.2f} us, {rates[0]:.0f} GB/s")
            if peer is not None:
                name = f"gpu_gemv_{n}x{k}"
                self.bars.append(Bar(name, rates[0], "GB/s", "torch.mv", rates[1], 1.0))

    def _bandwidth(self) -> None:
        """Products of one row with large weights, as shares of the bandwidth that torch reaches."""
        most = 0.0 if self.torch is None else torch_gpu.bandwidth(self.torch)
        for kind, goal in SHARES.items():
            for n, k in LARGE:
                size = n * k * 2.0
                if kind != "BF16":
                    size = float(n * GGUF_SCHEMES[kind].row_bytes(k))
                calls = max(2, min(16, int(500e6 / size)))
                if kind == "BF16":
                    run = self.device.products(1, n, k, calls, "f32")
                else:
                    run = self.device.packed_products(n, k, calls, kind)
                [seconds] = in_turns([run], self.rounds)
                rate = size / seconds / 1e9
                print(f"gemv {n}x{k} {kind}: {seconds * 1e6:.2f} us, {rate:.0f} GB/s")
                if most:
                    name = f"gpu_gemv_{n}x{k}_{kind.lower()}_of_bandwidth"
                    self.bars.append(Bar(name, rate, "GB/s", "bandwidth", most, goal))

    def _gemm(self) -> None:
        torch, ratios = self.torch, []
        for m, n, k in GEMM:
            calls = 2 if n * k > 2e7 else 4
            peer = None
            if torch is not None:
                x, w = (
                    [torch.randn(d, k, device="cuda", dtype=torch.bfloat16) for _ in range(calls)]
                    for d in (m, n)
                )
                pairs = cycle(zip(x, w, strict=True))

                def multiply(pairs: Any = pairs) -> Any:
                    a, b = next(pairs)
                    return torch.mm(a, b.t())

                peer = torch_gpu.graph_of(torch, multiply, calls)
            found = self._compared(self.device.products(m, n, k, calls, "bf16"), peer)
            rates = [2 * m * n * k / t / 1e12 for t in found]
            shown = "" if peer is None else f", cuBLAS {rates[1]:.0f}: {rates[0] / rates[1]:.2f}"
            print(f"gemm {m}x{n}x{k}: {found[0] * 1e6:.1f} us, {rates[0]:.0f} TFLOP/s{shown}")
            if peer is not None:
                ratios.append(rates[0] / rates[1])
        if ratios:
            mean = exp(sum(map(log, ratios)) / len(ratios))
            self.bars.append(Bar("gpu_gemm_geomean", mean, "of cuBLAS", "cuBLAS", 1.0, 0.95))

    def _attention(self) -> None:
        torch, calls = self.torch, 4
        length, heads, kv, dim = ATTENTION
        peer = None
        if torch is not None:
            q, k, v = (
                torch.randn(1, h, length, dim, device="cuda", dtype=torch.bfloat16)
                for h in (heads, kv, kv)
            )
            attend = torch.nn.functional.scaled_dot_product_attention
            peer = torch_gpu.graph_of(
                torch, lambda: attend(q, k, v, is_causal=True, enable_gqa=True), calls
            )
        found = self._compared(self.device.attention(calls), peer)
        flops = 2.0 * heads * dim * length * (length + 1)
        rates = [flops / t / 1e12 for t in found]
        print(f"attention {length}: {found[0] * 1e6:.1f} us, {rates[0]:.0f} TFLOP/s")
        if peer is not None:
            name = "gpu_attention_prefill"
            self.bars.append(Bar(name, rates[0], "TFLOP/s", "torch SDPA", rates[1], 0.8))
            for kind, timed in torch_gpu.attention_kinds(torch, q, k, v, calls):
                rate = flops / in_turns([timed], self.rounds)[0] / 1e12
                print(f"attention {length} by torch's {kind}: {rate:.0f} TFLOP/s")

    def _f32(self) -> None:
        gpu_f32.products(self.device, self.torch, in_turns, self.rounds)
        found = gpu_f32.encoder(self.device, self.torch, in_turns, self.rounds)
        rates = [gpu_f32.BATCH / t for t in found]
        print(f"f32 encoder, 32x128: {found[0] * 1e3:.2f} ms, {rates[0]:.0f} rows/s")
        if self.torch is not None:
            bar = Bar("gpu_encoder_f32_32x128", rates[0], "rows/s", "torch.compile", rates[1], 1.5)
            self.bars.append(bar)

    def _conv(self) -> None:
        for dtype in ("f32", "bf16"):
            gpu_f32.convolutions(self.device, self.torch, in_turns, self.rounds, dtype)

    def _model(self, kind: str) -> None:
        """Decode and prefill through `model.generate`."""
        import rlx
        from rlx.models.model_file import ModelFile

        ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
        shape, layers = self.options.shape, self.options.layers
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_random_model(path, shape, kind, layers)
            start = time.perf_counter()
            model: Any = rlx.load(path, device="cuda", context=4096)
            model.generate(prompt(POSITION, 1), stream=False, max_tokens=2, seed=0)
            print(f"{shape} {kind}: first token after {time.perf_counter() - start:.2f} s")
            runs = [lambda: decode(model), lambda: prefill(model)]
            if self.torch is not None and kind == "BF16" and layers is None:
                peer = torch_gpu.Qwen3(self.torch, shape, POSITION + 2 * TOKENS)
                runs += [peer.timed_step(1, POSITION), peer.timed_step(PREFILL, 0)]
            found = in_turns(runs, 5)
            model.close()
        speeds = [1 / found[0], PREFILL / found[1]]
        print(f"{shape} {kind}: decode {speeds[0]:.0f}, prefill {speeds[1]:.0f} tokens/s")
        if len(found) > 2:
            name, peer_name = f"gpu_{shape}_{kind.lower()}", "torch.compile"
            others = 1 / found[2], PREFILL / found[3]
            goal = 3.0 if shape == "0.6b" else 1.2
            self.bars.append(
                Bar(f"{name}_decode", speeds[0], "tokens/s", peer_name, others[0], goal)
            )
            self.bars.append(
                Bar(f"{name}_prefill", speeds[1], "tokens/s", peer_name, others[1], 1.0)
            )


def prompt(tokens: int, seed: int) -> str:
    drawn = np.random.default_rng(seed).integers(0, 1000, tokens)
    return "".join(chr(256 + int(t)) for t in drawn)


def decode(model: Any) -> float:
    """Seconds of a token, sampled, from `POSITION` on."""
    made = model.generate(prompt(POSITION, 1), stream=False, max_tokens=TOKENS, seed=1)
    return 1 / float(made.tokens_per_second)


_seeds = iter(range(2, 1 << 30))


def prefill(model: Any, length: int = PREFILL) -> float:
    """Seconds until the first token of a new prompt."""
    made = model.generate(prompt(length, next(_seeds)), stream=False, max_tokens=1, seed=1)
    return float(made.prefill_seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("gpu", str(__doc__).splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--types", default="BF16,Q8_0,Q4_K", help="types of weights, by commas")
    parser.add_argument(
        "--parts",
        default="gemv,bandwidth,gemm,attention,f32,conv,model,long,batches,start,invariant,"
        "constrained",
    )
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the shape has")
    options = parser.parse_args(argv)
    import rlx

    if "cuda" not in rlx.available_devices():
        print("bench gpu: there is no GPU here")
        return 0
    return Bench(options).run()
