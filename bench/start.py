"""Starts: how long until a tokenizer is ready, and until the first token of a short prompt.

Five models with vocabularies of different sizes and kinds: SmolLM2-135M, which is fetched, and
random weights in the shapes of others with made-up vocabularies (bench/vocabularies.py). Every
figure is of a new process: `tokenizer` from a call with the model's file to a short conversation in
tokens, with the index of the vocabulary cached; `second` and `first` from the start of Python to
the text of the first token, with everything cached and with nothing. A process ends as a user's
does, so that what it stores behind the token is there for the next start; that is not counted.
Bytecode is cached in all, and the model's file is in the page cache. llama.cpp starts in turn with
us (`--peer-python`); the goals are seconds.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.common import Bar, arguments, finish
from bench.start_models import MODELS

PROMPT = "The capital of France is"
TOKENIZER, SECOND, FIRST = 0.1, 0.4, 1.5  # seconds

_TOKENIZER = """
import sys, time
import numpy, rlx
from rlx.formats import open_model, tokenizer_of
start = time.perf_counter()
tokenizer = tokenizer_of(open_model(sys.argv[1]))
ids = tokenizer.encode_chat([{"role": "user", "content": sys.argv[2]}])
assert ids
print(time.perf_counter() - start)
"""

_TOKEN = """
import sys
import rlx
model = rlx.load(sys.argv[1], threads=int(sys.argv[3]), context=1024)
print(len(next(model.generate(sys.argv[2], max_tokens=1, temperature=0.0), "")))
import time
at = time.time()
model.close()  # what is stored for the next start, in a thread behind the token, is there then
print(at)
"""

_LLAMA = """
import os, sys, time
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=1024, n_threads=int(sys.argv[3]), verbose=False)
print(len(model(sys.argv[2], max_tokens=1, temperature=0.0)["choices"][0]["text"]))
sys.stdout.flush()
print(time.time())
sys.stdout.flush()
os._exit(0)
"""


class Starts:
    """Starts of one model in new processes."""

    def __init__(self, path: Path, folder: Path, threads: int, peer: str | None) -> None:
        self.path, self.threads, self.peer = path, str(threads), peer
        self._bytecode, self._cache = folder / "bytecode", folder / path.stem
        path.read_bytes()  # into the page cache

    def tokenizer(self) -> float:
        return float(self._run(sys.executable, _TOKENIZER).split()[-1])

    def second(self) -> float:
        return self._until_token(sys.executable, _TOKEN)

    def first(self) -> float:
        shutil.rmtree(self._cache, ignore_errors=True)
        return self._until_token(sys.executable, _TOKEN)

    def llama_cpp(self) -> float:
        assert self.peer is not None
        return self._until_token(self.peer, _LLAMA)

    def _until_token(self, python: str, code: str) -> float:
        start = time.time()
        return float(self._run(python, code).split()[-1]) - start

    def _run(self, python: str, code: str) -> str:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = str(self._bytecode)
        env["RLX_CACHE_DIR"] = str(self._cache)
        command = [python, "-c", code, str(self.path), PROMPT, self.threads]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
        if done.returncode:
            raise SystemExit(f"bench: a start failed:\n{done.stderr[-2000:]}")
        return done.stdout


def measure(starts: Starts, rounds: int) -> list[Bar]:
    name = starts.path.stem
    starts.first()  # for the bytecode
    samples: dict[str, list[float]] = {"first": [], "second": [], "tokenizer": []}
    theirs: list[float] = []
    for turn in range(rounds):
        if turn < 3:
            samples["first"].append(starts.first())
        samples["second"].append(starts.second())
        samples["tokenizer"].append(starts.tokenizer())
        if starts.peer is not None:
            theirs.append(starts.llama_cpp())
    found = {what: statistics.median(seconds) for what, seconds in samples.items()}
    beside = f", llama.cpp {statistics.median(theirs):.3f}" if theirs else ""
    print(
        f"{name}: tokenizer {found['tokenizer']:.3f} s; first token {found['first']:.3f} s with "
        f"nothing cached, {found['second']:.3f} s then{beside}", flush=True,
    )  # fmt: skip
    goals = {"tokenizer": TOKENIZER, "second": SECOND, "first": FIRST}
    bars = [
        Bar(f"{name}_{what}", found[what], "s", "budget", goal, 1.0, higher_is_better=False)
        for what, goal in goals.items()
    ]
    if theirs:
        peer = statistics.median(theirs)
        bars.append(Bar(f"{name}_beside", found["second"], "s", "llama.cpp", peer, 1.0, False))
    return bars


def models(folder: Path, chosen: list[str]) -> list[Path]:
    """The files of the models, written where they are not there yet."""
    from rlx.formats.fetch import resolve

    found = []
    smol = "smollm2-135m"
    if smol in chosen or not chosen:
        fetched = resolve(smol)
        found.append(next(fetched.glob("*.gguf")) if fetched.is_dir() else fetched)
    for model in MODELS:
        if model.name in chosen or not chosen:
            path = folder / f"{model.name}.gguf"
            if not path.exists():
                print(f"writing {path.name}", flush=True)
                model.write(path)
            found.append(path)
    return found


def main(argv: list[str]) -> int:
    parser = arguments("start", __doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", metavar="PYTHON", help="has llama-cpp-python")
    parser.add_argument("--no-peer", action="store_true", help="measure without llama.cpp")
    parser.add_argument("--folder", metavar="DIR", help="keep the models there; else they go")
    parser.add_argument("--model", action="append", default=[], metavar="NAME", help="only these")
    options = parser.parse_args(argv)
    peer = None if options.no_peer else options.peer_python
    if peer is None and not options.no_peer:
        raise SystemExit(
            "bench: llama.cpp is the peer: pip install -r bench/requirements-llm.txt in an "
            "environment, and name its Python with --peer-python"
        )
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for path in models(folder, options.model):
            starts = Starts(path, Path(temporary), options.threads, peer)
            bars += measure(starts, 3 if options.quick else 5)
    return finish(bars, options.json)
