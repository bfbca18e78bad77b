"""From a model to something that runs: cold, a new variant, a known one, and from an artifact.

The model has the shape of Qwen3-0.6B, built as `rlx.load` builds it from a file; weights are left
out, so that nothing is measured but the compiler. No peer does the same work: each figure stands
against the budget that was set for it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.common import Bar, arguments, finish, median_time

LAYERS, MORE = 28, 24
CONTEXT, VOCAB = 4096, 151936
HIDDEN, HEADS, KV, HEAD, FFN = 1024, 16, 8, 128, 3072


def decoder(layers: int = LAYERS):  # type: ignore[no-untyped-def]
    """Qwen3-0.6B: token ids and a cache in, the logits of the last token out."""
    from rlx import GraphModule

    def layer(g: GraphModule, x: object, i: int) -> object:
        def w(part: str, *dims: int) -> object:
            return g.param(f"blk.{i}.{part}", list(dims))

        def cached(value: object, name: str) -> object:
            state = g.state(f"{name}.{i}", [1, CONTEXT, KV * HEAD], "f16")
            return g.cache_append(state, value, start="past_seq", axis=1)

        cos, sin = g.as_hir().find("cos"), g.as_hir().find("sin")
        rope = {"head_dim": HEAD, "offset": "past_seq"}
        h = g.rms_norm(x, w("norm1", HIDDEN))
        q = g.linear(h, w("q", HEADS * HEAD, HIDDEN), transposed=True)
        k = g.linear(h, w("k", KV * HEAD, HIDDEN), transposed=True)
        v = g.linear(h, w("v", KV * HEAD, HIDDEN), transposed=True)
        q = g.qk_norm_rope(q, w("q_norm", HEAD), cos, sin, **rope)
        k = g.qk_norm_rope(k, w("k_norm", HEAD), cos, sin, **rope)
        h = g.attention(
            q, cached(k, "k"), cached(v, "v"), num_heads=HEADS, num_kv_heads=KV, head_dim=HEAD,
            mask_kind="causal",
        )  # fmt: skip
        x = x + g.linear(h, w("o", HIDDEN, HEADS * HEAD), transposed=True)
        h = g.rms_norm(x, w("norm2", HIDDEN))
        gate = g.linear(h, w("gate", FFN, HIDDEN), transposed=True, activation="silu")
        up = g.linear(h, w("up", FFN, HIDDEN), transposed=True)
        return x + g.linear(gate * up, w("down", HIDDEN, FFN), transposed=True)

    def build(g: GraphModule) -> object:
        table = g.param("embed", [VOCAB, HIDDEN])
        x = g.embedding(g.input("ids", [1, "seq"], "i32"), table)
        g.param("cos", [CONTEXT, HEAD // 2])
        g.param("sin", [CONTEXT, HEAD // 2])
        for i in range(layers):
            x = g.named(f"blk.{i}", lambda b, x=x, i=i: layer(b, x, i))
        x = g.rms_norm(x, g.param("norm", [HIDDEN]))
        last = g.hir_mir("narrow", [x], axis=1, start=x.shape.dims[1] - 1, length=1)
        return {"logits": g.linear(last, table, transposed=True)}

    return GraphModule.define("qwen3", build)


def component(seq: int, past: int = CONTEXT - 1):  # type: ignore[no-untyped-def]
    from rlx import KernelDispatchConfig, ModelComponent, ModelVariant, UpTo

    size = seq if seq == 1 else UpTo(seq)
    return ModelComponent(ModelVariant.decode(1, UpTo(past), size), KernelDispatchConfig())


# -- in processes of their own --------------------------------------------------------------------

_COLD = """
import time
start = time.perf_counter()
from bench.compile import component, decoder
from rlx import ModelCompilePipeline
pipeline = ModelCompilePipeline("cpu")
module = decoder({layers})
for seq in (512, 1):
    pipeline.get_or_compile_component(component(seq), lambda: module)
print(time.perf_counter() - start)
"""

_START = """
import sys, time
from bench.compile import component, decoder
from rlx import AotCache, ModelCompilePipeline
pipeline = ModelCompilePipeline("cpu", aot=AotCache({root!r}))
for seq in (512, 1):
    pipeline.get_or_specialize_aot(component(seq), decoder)
ready = time.time()
from rlx.codegen.jit import counters as jit
from rlx.passes.count import counters
print(ready - float(sys.argv[1]), counters.passes, jit.compilations, "llvmlite" in sys.modules)
"""


def child(code: str, **environment: str) -> list[str]:
    """What a new process prints."""
    command = [sys.executable, "-c", code, str(time.time())]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | environment
    )
    return done.stdout.split()


def cold(layers: int, repeat: int) -> float:
    """Seconds from imports to both variants compiled, with nothing cached."""
    code = _COLD.format(layers=layers)
    return statistics.median(float(child(code, RLX_CACHE="0")[0]) for _ in range(repeat))


def from_artifact(repeat: int) -> tuple[float, int]:
    """Seconds from the start of a process to both variants ready; passes and LLVM runs in it."""
    with tempfile.TemporaryDirectory() as folder:
        code = _START.format(root=str(Path(folder) / "artifacts"))
        child(code, RLX_CACHE_DIR=folder)
        runs = [child(code, RLX_CACHE_DIR=folder) for _ in range(repeat)]
    work = max(int(passes) + int(llvm) for _, passes, llvm, _ in runs)
    if any(imported == "True" for *_, imported in runs):
        raise SystemExit("bench: a start from an artifact imported llvmlite")
    return statistics.median(float(seconds) for seconds, *_ in runs), work


# -- in this one ----------------------------------------------------------------------------------


def variants(repeat: int) -> tuple[float, float]:
    """Seconds of a variant not seen before, its kernels known, and of one that is cached."""
    from rlx import ModelCompilePipeline

    pipeline = ModelCompilePipeline("cpu", capacity=8)
    module = decoder()

    def model():  # type: ignore[no-untyped-def]
        return module

    pasts = iter(range(1000, CONTEXT))

    def new() -> None:
        pipeline.get_or_compile_component(component(1, next(pasts)), model)

    fresh = median_time(new, repeat)
    kept = component(1)
    pipeline.get_or_compile_component(kept, model)
    return fresh, median_time(lambda: pipeline.get_or_compile_component(kept, model), 21, 500)


def main(argv: list[str]) -> int:
    options = arguments("compile", __doc__ or "").parse_args(argv)
    repeat = 3 if options.quick else 7
    whole, few = cold(LAYERS, repeat), cold(LAYERS - MORE, repeat)
    print(f"cold: {LAYERS} layers {whole:.2f} s, {LAYERS - MORE} layers {few:.2f} s")
    fresh, hit = variants(5 * repeat)
    start, work = from_artifact(repeat)
    print(f"from an artifact: {work} passes and LLVM runs, llvmlite not imported")
    if work:
        raise SystemExit("bench: a start from an artifact ran passes or LLVM")
    bars = [
        Bar("cold", whole, "s", "budget", 2.0, 1.0, higher_is_better=False),
        Bar("variant", fresh * 1e3, "ms", "budget", 10.0, 1.0, higher_is_better=False),
        Bar("hit", hit * 1e6, "µs", "budget", 20.0, 1.0, higher_is_better=False),
        Bar("artifact", start, "s", "budget", 0.4, 1.0, higher_is_better=False),
        Bar("more_layers", whole / few, "×", "15 % more", 1.15, 1.0, higher_is_better=False),
    ]
    return finish(bars, options.json)
