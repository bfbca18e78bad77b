"""Start-up from the artifact cache, and resident memory of a language model, in new processes.

`--model FILE.gguf` (may be given several times). The first process of each finds an empty cache; it
compiles, packs and fills it. Those after it must run no pass and no LLVM. Bars:

- start: from the start of the process until a token can run, against a budget of 0.4 s. Building
  the vocabulary, which comes first as in `rlx.load`, is reported apart: it is the work of the
  tokenizer library.
- memory: what is resident after a prompt of 512 random tokens and 64 more, in a process that did
  not load the compiler, against file + KV cache + 150 MB.
- first_memory: the same in the process that compiled and packed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.common import Bar, arguments, finish

CONTEXT, PROMPT, STEPS = 1024, 512, 64
BUDGET, ALLOWED = 0.4, 150e6

_CHILD = """
import json, sys, time
from pathlib import Path
from rlx.models.builder import SAMPLE
from rlx.models.model_file import ModelFile
from rlx.models.decoder_runner import DecoderRunner
engine = DecoderRunner(ModelFile.open(Path(sys.argv[1])), context={context}, threads={threads})
start = time.perf_counter()
tokenizer = engine.model.tokenizer()
report = {{"tokenizer": time.perf_counter() - start}}
engine.executables(SAMPLE)
report["ready"] = time.time() - float(sys.argv[2]) - report["tokenizer"]
report["llvmlite"] = "llvmlite" in sys.modules
import numpy as np
from rlx.llvm.jit import counters as jit
from rlx.passes.report import counters
report |= {{"passes": counters.passes, "compilations": jit.compilations, "kv": engine.cache_bytes}}
ids = np.random.default_rng(0).integers(0, engine.model.config.vocab, {prompt} + {steps}).tolist()
rng, settings = np.array([1, 0], np.uint64), np.array([0, 0, 1, 0], np.float32)
for part in [ids[: {prompt}], *([i] for i in ids[{prompt} :])] if {run} else []:
    engine.step(part, rng, settings)
for line in Path("/proc/self/status").read_text().splitlines():
    name, _, value = line.partition(":")
    if name in ("VmRSS", "VmHWM"):
        report[name] = int(value.split()[0]) * 1024
print(json.dumps(report))
"""


def child(path: str, threads: int, *, run: bool, **environment: str) -> dict[str, Any]:
    """What a new process tells about itself."""
    code = _CHILD.format(context=CONTEXT, threads=threads, prompt=PROMPT, steps=STEPS, run=run)
    # an installed package has byte code; here it is kept out of the tree, not left out
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | environment
    command = [sys.executable, "-c", code, path, str(time.time())]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(path: str, threads: int, repeat: int) -> list[Bar]:
    name, size = Path(path).stem, os.path.getsize(path)
    with tempfile.TemporaryDirectory() as folder:
        env = {"RLX_CACHE_DIR": folder, "PYTHONPYCACHEPREFIX": str(Path(folder) / "pyc")}
        first = child(path, threads, run=True, **env)
        second = child(path, threads, run=True, **env)
        later = [child(path, threads, run=False, **env) for _ in range(repeat)]
    for report in (second, *later):
        if report["llvmlite"] or report["passes"] or report["compilations"]:
            raise SystemExit(f"bench: a second start of {name} compiled something: {report}")
    ready, vocabulary = (statistics.median(t[k] for t in later) for k in ("ready", "tokenizer"))
    limit = size + first["kv"] + ALLOWED
    print(
        f"{name} ({size / 1e6:.0f} MB): ready in {first['ready']:.2f} s, then in {ready:.2f} s and "
        f"{vocabulary:.2f} s for the vocabulary; resident {first['VmRSS'] / 1e6:.0f} MB (peak "
        f"{first['VmHWM'] / 1e6:.0f}), then {second['VmRSS'] / 1e6:.0f} (peak "
        f"{second['VmHWM'] / 1e6:.0f}), {limit / 1e6:.0f} allowed"
    )
    return [
        Bar(f"start_{name}", ready, "s", "budget", BUDGET, 1.0, higher_is_better=False),
        _resident(f"memory_{name}", second, limit),
        _resident(f"first_memory_{name}", first, limit),
    ]


def _resident(name: str, report: dict[str, Any], limit: float) -> Bar:
    peer = "file + cache + 150 MB"
    return Bar(name, report["VmRSS"] / 1e6, "MB", peer, limit / 1e6, 1.0, higher_is_better=False)


def main(argv: list[str]) -> int:
    parser = arguments("memory", __doc__ or "")
    parser.add_argument("--model", action="append", required=True, metavar="FILE.gguf")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    bars: list[Bar] = []
    for path in options.model:
        bars += measure(path, options.threads, 3 if options.quick else 7)
    return finish(bars, options.json)
