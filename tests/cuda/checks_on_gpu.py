"""Checks of the cuda device that `run_on_gpu.py` runs, and that the stand-in passes too."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from cases import Case
from comparison import compare
from tiny import CONFIGS, PROMPT, write_folder

import rlx
from rlx.backends.base import Backend
from rlx.backends.cuda.decode_loop import RUNS
from rlx.backends.registry import Device
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.interp import evaluate
from rlx.models import generation
from rlx.models.model_file import ModelFile
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.template import make_template
from rlx.specialize.options import CompileOptions

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


@cache
def backend() -> Backend:
    return Device("cuda").backend


def compiled(graph: Graph, **options: Any) -> CompiledGraph:
    return CompiledGraph(make_template(graph, CompileOptions(**options), backend()))


# The GEMM adds one by one in f32: the roundings of 22,311 terms walk √22,311 / 2 half-ulps of the
# largest sum, as those of f64 do in the table; the CPU's kernel has several sums.
LONG_SUMS = {"conv_weight_backward-f32": 80}


def compare_case(case: Case, runs: int = 3, largest: int = 1 << 30) -> None:
    """A case of the parity table, run as launches, while captured, and as a graph; `largest` limits
    its sizes."""
    case = replace(case, ulps=max(case.ulps, LONG_SUMS.get(case.id, 0)))
    graph = case.graph()
    made = compiled(graph)
    if case.consts:
        made.set_params(case.consts)
    for n in (n for n in case.sizes if n <= largest):
        data = case.data(n)
        sizes = {"n": n} if "n" in graph.symbols() else None
        wanted = evaluate(graph, {**data, **case.consts}, sizes)
        for _ in range(runs):
            for got, want in zip(made.run(data, sizes=sizes), wanted, strict=True):
                compare(case, got, want)


def graph_of(build: Callable[[Graph], Any]) -> Graph:
    g = Graph("check")
    out = build(g)
    g.set_outputs(*(out if isinstance(out, tuple) else [out]))
    return g


def random(*dims: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=dims).astype(np.float32)


def require_error(kind: type[Exception], text: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except kind as error:
        assert text in str(error), str(error)
        return
    raise AssertionError(f"no {kind.__name__}")


@check
def buffers_are_copied_and_cleared() -> None:
    memory = backend().allocator
    x = random(1000, 1000)
    buffer = memory.put(x)
    np.testing.assert_array_equal(buffer.copy_out(), x)
    other = memory.alloc(x.shape, x.dtype)
    assert not other.copy_out().any()
    memory.copy(other, buffer)
    buffer.zero()
    np.testing.assert_array_equal(other.copy_out(), x)
    assert not buffer.copy_out().any()
    pinned = memory.staging((1000, 1000), np.float32)
    memory.copy_out(other, pinned)
    np.testing.assert_array_equal(pinned, x)


@check
def too_little_memory_is_a_typed_error() -> None:
    memory = backend().allocator
    free = memory.free_bytes()
    assert free is not None
    require_error(
        rlx.OutOfMemoryError, "bytes requested", lambda: memory.alloc((4 * free,), np.uint8)
    )
    np.testing.assert_array_equal(memory.put(np.ones(3)).copy_out(), 1)  # and it goes on


@check
def an_index_out_of_range_is_an_error_of_the_run() -> None:
    def build(g: Graph) -> Any:
        return g.gather(g.input("x", [4, 3]), g.input("i", [2], "i32"), axis=0)

    made, x = compiled(graph_of(build)), random(4, 3)
    bad, good = np.array([0, 4], np.int32), np.array([-1, 1], np.int32)
    for _ in range(3):
        require_error(rlx.InputError, "out of range", lambda: made.run(x=x, i=bad))
        np.testing.assert_array_equal(made.run(x=x, i=good)[0], x[[-1, 1]])


@check
def dynamic_sizes_run_in_one_graph() -> None:
    def build(g: Graph) -> Any:
        x = g.input("x", ["n", 40])
        return g.softmax(g.add(g.transpose(x, (1, 0)), 1.0)), g.sum(x), g.matmul(x, g.iota([40, 3]))

    graph = graph_of(build)
    made = compiled(graph, binding={"n": rlx.UpTo(512)})
    for n in (3, 512, 17, 1, 100):
        x = random(n, 40, seed=n)
        for got, want in zip(made.run(x=x), evaluate(graph, {"x": x}), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@check
def states_are_changed_in_place() -> None:
    def build(g: Graph) -> Any:
        state = g.state("s", [4, 2])
        return g.sum(g.state_update(state, g.input("x", [1, 2]), axis=0, start=2), axis=0)

    made = compiled(graph_of(build))
    for number in (1.0, 5.0, 6.0, 7.0):
        (got,) = made.run(x=np.full((1, 2), number, np.float32))
        np.testing.assert_array_equal(got, [number, number])
    np.testing.assert_array_equal(made.read_state("s")[2], [7.0, 7.0])


@check
def slots_of_a_state_are_written_in_order() -> None:
    def build(g: Graph) -> Any:
        state, x = g.state("s", [3, 8, 2]), g.input("x", [3, 4, 2])
        return g.state_update(state, x, g.input("slots", [4], "i32"), axis=1)

    made, x = compiled(graph_of(build)), random(3, 4, 2)
    wanted = np.zeros((3, 8, 2), np.float32)
    for slots in ([7, 0, 2, 0], [3, 3, 3, 1], [1, 2, 3, 4]):
        for i, slot in enumerate(slots):
            wanted[:, slot] = x[:, i]
        np.testing.assert_array_equal(made.run(x=x, slots=np.array(slots, np.int32))[0], wanted)
    bad = np.array([0, 8, 1, 2], np.int32)
    require_error(rlx.InputError, "out of range", lambda: made.run(x=x, slots=bad))


@check
def runs_are_timed_launch_by_launch() -> None:
    def build(g: Graph) -> Any:
        return g.top_k(g.softmax(g.matmul(g.input("x", [48, 48]), g.input("y", [48, 48]))), k=3)

    made, x = compiled(graph_of(build)), random(48, 48)
    made.run(x=x, y=x)
    profile = made.profile({"x": x, "y": x}, repeat=3)
    names = [row.node.split()[1] for row in profile.rows]
    assert names[0] == "matmul", names
    assert names[-1] == "top_k", names
    assert all(row.seconds > 0 for row in profile.rows)
    assert profile.rows[0].flops == 2 * 48**3
    assert profile.elapsed >= profile.rows[0].seconds


@check
def large_values_are_right() -> None:
    """More elements than threads, so that grid-stride loops go round."""

    def build(g: Graph) -> Any:
        x, w = g.input("x", [1023, 2049]), g.input("w", [2049, 257])
        return g.matmul(x, w), g.softmax(x), g.gelu(x), g.sum(x, axis=0), g.max(x), g.argmax(x)

    graph = graph_of(build)
    x, w = random(1023, 2049), random(2049, 257, seed=1)
    wanted = evaluate(graph, {"x": x, "w": w})
    made = compiled(graph)
    for _ in range(3):
        for got, want in zip(made.run(x=x, w=w), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@check
def a_layer_of_many_rows_is_rounded_where_it_is_made() -> None:
    """Norms, attention and gates write bf16: four roundings of 2⁻⁹ on the way."""

    def build(g: Graph) -> Any:
        def weight(name: str, n: int, k: int) -> Any:
            return g.transpose(g.param(name, [n, k], "bf16"), (1, 0))

        h = g.add(g.input("x", [1, "n", 64]), 1.0)
        cache = [g.cast(g.input(n, [1, "n", 64]), "f16") for n in "kv"]
        q = g.matmul(g.rms_norm(h, g.param("g0", [64]), eps=1e-5), weight("q", 128, 64))
        o = g.attention(q, *cache, num_heads=2, num_kv_heads=1, head_dim=64, mask_kind="causal")
        h = g.add(h, g.matmul(o, weight("o", 64, 128)))
        y = g.rms_norm(h, g.param("g1", [64]), eps=1e-5)
        z = g.mul(g.silu(g.matmul(y, weight("gate", 72, 64))), g.matmul(y, weight("up", 72, 64)))
        return g.add(h, g.matmul(z, weight("down", 64, 72)))

    graph = graph_of(build)
    made = compiled(graph, binding={"n": rlx.UpTo(150)})
    sizes = {"q": (128, 64), "o": (64, 128), "gate": (72, 64), "up": (72, 64), "down": (64, 72)}
    element = DType.of("bf16").numpy
    params = {n: (random(*d, seed=i) / 8).astype(element) for i, (n, d) in enumerate(sizes.items())}
    params |= {f"g{i}": random(64, seed=20 + i) for i in range(2)}
    made.set_params(params)
    for n in (150, 131):
        data = {name: random(1, n, 64, seed=n + i) for i, name in enumerate("xkv")}
        [want] = evaluate(graph, {**data, **params}, {"n": n})
        for _ in range(3):
            [got] = made.run(data)
            assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2**-8


@check
def cubins_are_kept_on_disk() -> None:
    """A second loader, as in a new process, compiles nothing."""
    from rlx.backends.cuda.backend import CudaBackend

    first = backend()
    assert isinstance(first, CudaBackend)
    graph = graph_of(lambda g: g.tanh(g.mul(g.input("x", [33, 3]), 1.2345)))
    x = random(33, 3)
    for _ in range(2):
        again = CudaBackend(first.gpu, type(first.kernels)(first.gpu))
        made = CompiledGraph(make_template(graph, CompileOptions(), again))
        np.testing.assert_allclose(made.run(x=x)[0], np.tanh(x * 1.2345), rtol=1e-5)
    assert again.compile_count == 0


@check
def a_tiny_gpt_is_trained() -> None:
    """Some steps of AdamW, forward, backward and update in one program: the losses and weights of
    the reference, and nothing of a step is done by the host."""
    from tiny_training import Gpt, batches, make_step, weights_of

    wanted: dict[str, Any] = {}
    for device in ("reference", "cuda"):
        with rlx.default_device("reference"):
            model = Gpt(vocab=11, context=8, width=24, heads=2, layers=2)
            params = weights_of(model)
        step, state = make_step(model, params, device)
        losses = []
        for ids, targets in batches(11, 8, count=8):
            params, state, loss = step(params, state, ids, targets)
            losses.append(float(loss))
        found = {**{n: np.asarray(p) for n, p in params.items()}, "losses": np.array(losses)}
        if device == "reference":
            wanted = found
            assert losses[-1] < 0.9 * losses[0], losses
    # a step of Adam is about the rate (0.01) whatever the gradient's size: where that is nearly
    # zero its rounding shows, so weights may differ by some rounding of it, 8 steps long
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-4)
    for name, want in wanted.items():
        assert np.linalg.norm(found[name] - want) <= 2e-3 * np.linalg.norm(want) + 1e-5, name
    reports = [x.compiled.template.result.dispatch_report for x in step._exact.values()]
    assert reports
    assert not [x for r in reports for x in r.rows if x.outcome == "host"], str(reports[0])


class Letters:
    """A tokenizer: token t is the character chr(256 + t)."""

    end_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 256 for c in text]

    def stream(self) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(256 + token)

    def flush(self) -> str:
        return ""


def generate(name: str) -> None:
    """A tiny model gives the tokens of the reference, greedy and sampled."""
    ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(name, Path(folder))
        models = [rlx.load(folder, device=d, context=40, kv="f32") for d in ("cuda", "reference")]
        for settings in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
            got, wanted = (
                m.generate(PROMPT, stream=False, max_tokens=6, **settings) for m in models
            )
            assert got.tokens == wanted.tokens, (got.tokens, wanted.tokens)
        for model in models:
            model.close()


def forget_what_is_behind_a_stop(name: str) -> None:
    """Several tokens are queued at once, and more while the host reads them: those behind a stop
    leave no trace, neither in the KV cache or recurrent states nor in the random numbers."""
    ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(name, Path(folder))
        models = [rlx.load(folder, device=d, context=96, kv="f32") for d in ("cuda", "reference")]
        settings: dict[str, Any] = {"stream": False, "max_tokens": 72, "seed": 5}
        before, generation.SECONDS_PER_CALL = generation.SECONDS_PER_CALL, 1e3
        whole = [m.generate(PROMPT, **settings).tokens for m in models]
        assert whole[0] == whole[1], whole
        late = max(whole[0][:64], key=whole[0].index)
        for stop in (late, whole[0][7]):
            cut = [
                m.generate(PROMPT, stop_tokens=frozenset([stop]), **settings).tokens for m in models
            ]
            assert cut[0] == cut[1] == whole[0][: whole[0].index(stop)], cut
        assert name != "llama" or whole[0].index(late) > RUNS + 1, whole[0]
        generation.SECONDS_PER_CALL = before
        again = models[0].generate(PROMPT, **settings).tokens
        assert again == whole[0], (again, whole[0])
        for model in models:
            model.close()


def serve(name: str, kv: str = "f32", count: int = 5, tokens: int = 6) -> None:
    """Requests that come and go together give the tokens of each alone on the reference; nothing
    of a run is done by the host."""
    ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
    prompts = ["".join(chr(256 + (7 * i + 3 * j) % 90) for j in range(n)) for i, n in enumerate(
        (5, 70, 1, 33, 12))]  # fmt: skip
    settings = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3, "top_k": 20}]
    settings += [{"temperature": 0.9, "seed": 5}, {"repetition_penalty": 1.3, "temperature": 0.0}]
    settings += [{"temperature": 0.7, "seed": 9, "logprobs": 2}]
    prompts, settings = prompts[-count:], settings[-count:]
    with tempfile.TemporaryDirectory() as folder:
        write_folder(name, Path(folder))
        context = {"context": 128, "kv": kv}
        with rlx.Engine(folder, requests=3, device="cuda", **context) as engine:
            for graph in engine.runner._graphs.values():
                made: Any = graph.executable
                assert all(x.kernel is not None for x in made.program.launches)
            replies = [
                engine.submit(prompt, max_tokens=tokens, **how)
                for prompt, how in zip(prompts, settings, strict=True)
            ]
            got = [reply.wait() for reply in replies]
            got.append(
                engine.submit(prompts[-2], max_tokens=tokens, **settings[-2]).wait()
            )  # alone
        with rlx.load(folder, device="reference", **context) as model:
            pairs = [*zip(prompts, settings, strict=True), (prompts[-2], settings[-2])]
            for (prompt, how), found in zip(pairs, got, strict=True):
                wanted = model.generate(prompt, stream=False, max_tokens=tokens, **how)
                assert found.tokens == wanted.tokens, (how, found.tokens, wanted.tokens)
                for row, other in zip(found.logprobs, wanted.logprobs, strict=True):
                    assert row.keys() == other.keys()
                    assert all(abs(row[t] - other[t]) < 1e-3 for t in row)


@check
def artifacts_run_in_a_process_without_a_compiler() -> None:
    """The tokens of the model as it is compiled here; and on a GPU no family of kernels is
    imported."""
    from rlx.models.compile import compile_model

    ModelFile.tokenizer = lambda self: Letters()  # type: ignore[method-assign,assignment,return-value]
    is_gpu = type(backend().kernels).__name__ == "KernelLoader"  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        write_folder("llama", Path(folder))
        out = Path(folder) / "llama.rlx"
        compile_model(folder, out, device="cuda", context=64, kv="f16", requests=2, chunk=16)
        command = [
            sys.executable,
            str(Path(__file__).parent / "load_artifact.py"),
            folder,
            str(out),
        ]
        command += [] if is_gpu else ["stand-in"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert not done.returncode, done.stderr[-2000:]
        said = json.loads(done.stdout.splitlines()[-1])
        with rlx.load(folder, device="cuda", context=64, kv="f16") as model:
            prompt = "".join(chr(256 + 3 * i) for i in range(12))
            settings: dict[str, Any] = {"max_tokens": 3, "temperature": 0.8, "seed": 4}
            wanted = model.generate(prompt, stream=False, **settings).tokens
        assert said["tokens"] == [wanted, wanted], (said, wanted)
        assert not is_gpu or not said["compiled"], said["compiled"]
        print(f"figure artifact: loaded and 3 tokens in {said['seconds']:.2f} s")


CHECKS["tokens behind a stop are forgotten"] = lambda: forget_what_is_behind_a_stop("llama")
for _name in ("mamba2", "qwen3_next"):
    CHECKS[f"a stop of {_name}"] = lambda name=_name: forget_what_is_behind_a_stop(name)  # type: ignore[misc]
for _name in ("llama", "gemma2", "gpt_oss"):
    CHECKS[f"engine {_name}"] = lambda name=_name: serve(name)  # type: ignore[misc]
CHECKS["two requests of llama"] = lambda: serve("llama", count=2, tokens=3)
CHECKS["engine qwen3 f16 cache"] = lambda: serve("qwen3", "f16")

for _name in CONFIGS:
    CHECKS[f"tiny model {_name}"] = lambda name=_name: generate(name)  # type: ignore[misc]


@check
def figures() -> None:
    """Not a test: how long some things take now."""

    def seconds(made: CompiledGraph, **inputs: np.ndarray) -> float:
        buffers = {k: backend().allocator.put(v) for k, v in inputs.items()}
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(10):
                made.run_slots(*buffers.values())
            made.synchronize()
            best = min(best, (time.perf_counter() - start) / 10)
        return best

    x = random(4096, 4096)
    for name, build in (
        ("add", lambda x: x.graph.add(x, 1.0)),
        ("softmax", lambda x: x.graph.softmax(x)),
        ("transpose", lambda x: x.graph.contiguous(x.graph.transpose(x, (1, 0)))),
    ):
        graph = graph_of(lambda g, build=build: build(g.input("x", [4096, 4096])))
        took = seconds(compiled(graph), x=x)
        print(f"figure {name}: {took * 1e6:.0f} us, {2 * x.nbytes / took / 1e9:.0f} GB/s")
    size = 1024
    graph = graph_of(lambda g: g.matmul(g.input("x", [size, size]), g.input("y", [size, size])))
    took = seconds(compiled(graph), x=random(size, size), y=random(size, size))
    print(f"figure matmul {size}: {took * 1e6:.0f} us, {2 * size**3 / took / 1e12:.2f} TFLOP/s")
