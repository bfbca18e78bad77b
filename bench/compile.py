"""Compile times: cold, a new variant, a cached one, and a start from an artifact.

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
from bench.qwen3 import CONTEXT, LAYERS, component, decoder

MORE = 24  # layers

# -- in processes of their own --------------------------------------------------------------------

_COLD = """
import time
start = time.perf_counter()
from bench.qwen3 import component, decoder
from rlx import ModelCompilePipeline
pipeline = ModelCompilePipeline("cpu")
module = decoder({layers})
for seq in (512, 1):
    pipeline.get_or_compile_component(component(seq), lambda: module)
print(time.perf_counter() - start)
"""

_START = """
import sys, time
from bench.qwen3 import component, decoder
from rlx import AotCache, ModelCompilePipeline
pipeline = ModelCompilePipeline("cpu", aot=AotCache({root!r}))
for seq in (512, 1):
    pipeline.get_or_specialize_aot(component(seq), decoder)
ready = time.time()
from rlx.llvm.jit import counters as jit
from rlx.passes.report import counters
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


def variants(repeat: int) -> tuple[float, float, float]:
    """Seconds of a variant not seen before, its kernels known: for one token and for a prompt; and
    of one that is cached."""
    from rlx import ModelCompilePipeline

    pipeline = ModelCompilePipeline("cpu", capacity=8)
    module = decoder()

    def model():  # type: ignore[no-untyped-def]
        return module

    def get(asked):  # type: ignore[no-untyped-def]
        return pipeline.get_or_compile_component(asked, model)

    pasts = iter(range(1000, CONTEXT))
    lengths = iter(range(256, CONTEXT))
    token = median_time(lambda: get(component(1, next(pasts))), repeat)
    prompt = median_time(lambda: get(component(next(lengths))), repeat)
    cached = component(1)
    get(cached)
    return token, prompt, median_time(lambda: get(cached), 21, 500)


def main(argv: list[str]) -> int:
    options = arguments("compile", __doc__ or "").parse_args(argv)
    repeat = 3 if options.quick else 7
    whole, few = cold(LAYERS, repeat), cold(LAYERS - MORE, repeat)
    print(f"cold: {LAYERS} layers {whole:.2f} s, {LAYERS - MORE} layers {few:.2f} s")
    token, prompt, hit = variants(5 * repeat)
    print(f"a new variant: {token * 1e3:.1f} ms for one token, {prompt * 1e3:.1f} ms for a prompt")
    start, work = from_artifact(repeat)
    print(f"from an artifact: {work} passes and LLVM runs, llvmlite not imported")
    if work:
        raise SystemExit("bench: a start from an artifact ran passes or LLVM")
    bars = [
        Bar("cold", whole, "s", "budget", 2.0, 1.0, higher_is_better=False),
        Bar("new_variant", max(token, prompt) * 1e3, "ms", "budget", 10.0, 1.0, False),
        Bar("cache_hit", hit * 1e6, "µs", "budget", 20.0, 1.0, higher_is_better=False),
        Bar("artifact", start, "s", "budget", 0.4, 1.0, higher_is_better=False),
        Bar("more_layers", whole / few, "×", "15 % more", 1.15, 1.0, higher_is_better=False),
    ]
    return finish(bars, options.json)
