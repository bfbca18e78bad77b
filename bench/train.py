"""Training beside torch (eager and `torch.compile`) and JAX: a tiny GPT and a CNN from scratch, and
LoRA on SmolLM2 beside transformers and PEFT, whose base weights are the catalogue's, dequantised.

A step is forward, backward, clipping by the global norm and AdamW. Every library is a process of
its own with 2 threads (`--peer-python`), begins with the same weights, and makes its steps in turns
with the others on the same batches. A row's peer is the best of them. Bars, for each model:

- rate: tokens or images a second, by the median step;
- memory: the most that the process had resident, its libraries included;
- first: seconds until the first step is done, importing left out, with empty caches; begin: the
  same less a usual step, which is what tracing, compiling and the first touch of memory take. Our
  sources have bytecode, as those of installed packages have.

`--losses N` makes N steps of each model instead, and compares the losses of all; a CNN with batch
norms magnifies rounding, and is left out. `--batch` and `--context` say other sizes. `--library
torch.f64` is torch in double precision: how far every f32 is from it shows what rounding alone does
to a curve, such as that of LoRA on `--random-tokens`.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import Bar, arguments, finish
from bench.instruction_set import instruction_set
from bench.lora_model import write_lora_model
from bench.peers import train_models as models
from bench.peers.pipe import Peer, PeerMissing

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("rlx", "torch", "torch.compile", "jax")
EXACT = "torch.f64"
GOAL, FIRST, APART = 1.2, 3.0, 1e-3
COUNTED = {"gpt": "tokens", "cnn": "images", "lora": "tokens"}
WITHOUT = {"lora": ("jax",)}  # PEFT is torch's
CURVES = ("gpt", "lora")


class Run(NamedTuple):
    """What is trained: a model, sizes that differ from the usual, steps a turn."""

    model: str
    sizes: dict[str, Any]
    steps: int

    def counted(self) -> int:
        """Tokens or images a step."""
        sizes = models.LARGE[self.model]._replace(**self.sizes)
        return int(sizes.batch * (1 if self.model == "cnn" else sizes.context))


def start(library: str, model: str, python: str, threads: int, folder: str) -> Peer:
    """A library in a process of its own, with empty caches."""
    caches = Path(tempfile.mkdtemp(dir=folder))
    env = {"RLX_CACHE_DIR": str(caches / "rlx"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "torch")}
    if library == "rlx":
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"], python = os.pathsep.join(p for p in paths if p), sys.executable
        compileall.compile_dir(ROOT / "rlx", quiet=1)
    arguments = [threads, library] + ["lora"] * (model == "lora")
    return Peer(
        python, "train_server.py", *arguments, requirements="requirements-train.txt", env=env
    )


def model_bars(run: Run, peers: dict[str, Peer], rounds: int, used: str) -> list[Bar]:
    model = run.model
    first = {name: p.ask("start", model=model, sizes=run.sizes) for name, p in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    losses = {name: list(found["losses"]) for name, found in first.items()}
    for turn in range(rounds + 1):
        for name, peer in peers.items():
            found = peer.ask("steps", count=run.steps)
            losses[name] += found["losses"]
            seconds[name] += found["seconds"] if turn else []  # the first turn warms up
    compare(model, losses)
    rates = {name: run.counted() / statistics.median(s) for name, s in seconds.items()}
    memory = {name: peer.ask("memory")["bytes"] / 1e6 for name, peer in peers.items()}
    for name in peers:
        print(
            f"{model} {name}: {rates[name]:.4g} {COUNTED[model]}/s, {memory[name]:.0f} MB, first "
            f"step {first[name]['seconds']:.2f} s", flush=True,
        )  # fmt: skip
    done = first["rlx"]["seconds"]
    return bars_of(model, rates, memory, done, done - statistics.median(seconds["rlx"]), used)


def bars_of(
    model: str, rates: dict[str, float], memory: dict[str, float], first: float, begin: float,
    used: str,
) -> list[Bar]:  # fmt: skip
    others = [name for name in rates if name != "rlx"]
    best = max(others, key=lambda name: rates[name])
    least = min(others, key=lambda name: memory[name])
    unit = f"{COUNTED[model]}/s"
    return [
        Bar(f"train_{model}, {used}", rates["rlx"], unit, best, rates[best], GOAL),
        Bar(f"train_{model}_memory", memory["rlx"], "MB", least, memory[least], 1.0, False),
        Bar(f"train_{model}_first", first, "s", "budget", FIRST, 1.0, False),
        Bar(f"train_{model}_begin", begin, "s", "budget", FIRST, 1.0, False),
    ]


def compare(model: str, losses: dict[str, list[float]]) -> dict[str, float]:
    """The largest relative difference of our losses to those of each peer."""
    found = {name: apart(losses["rlx"], theirs) for name, theirs in losses.items()}
    shown = ", ".join(f"{name} {worst:.2g}" for name, worst in found.items() if name != "rlx")
    print(f"{model}: losses of {len(losses['rlx'])} steps apart by at most {shown}", flush=True)
    if EXACT in losses:
        others = [name for name in losses if name != EXACT]
        shown = ", ".join(f"{name} {apart(losses[name], losses[EXACT]):.2g}" for name in others)
        print(f"{model}: from those in f64 by at most {shown}", flush=True)
    return found


def apart(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def loss_bars(run: Run, peers: dict[str, Peer], steps: int) -> list[Bar]:
    """The curves of all, from the same weights and batches."""
    losses = {}
    for name, peer in peers.items():
        losses[name] = peer.ask("start", model=run.model, sizes=run.sizes)["losses"]
        losses[name] += peer.ask("steps", count=steps - 1)["losses"]
        shown = losses[name][:: max(1, steps // 10)]
        print(f"{name}: {' '.join(f'{x:.4f}' for x in shown)} {losses[name][-1]:.4f}", flush=True)
    found = compare(run.model, losses)
    called = f"train_{run.model}_losses_{steps}"
    return [
        Bar(called, worst, "relative", f"{name}, allowed", APART, 1.0, False)
        for name, worst in found.items() if name not in ("rlx", EXACT)
    ]  # fmt: skip


def measured(model: str, options: argparse.Namespace) -> list[Bar]:
    """The bars of a model; its peers end with it."""
    wanted = [x for x in options.library or LIBRARIES if x != "rlx"]
    chosen = ["rlx", *(x for x in wanted if x not in WITHOUT.get(model, ()))]
    given = {"batch": options.batch, "context": options.context}
    sizes: dict[str, Any] = {k: x for k, x in given.items() if x is not None}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if model == "lora":
            write_lora_model(Path(folder))
            sizes |= {"folder": folder, "random": options.random_tokens}
        started = {
            name: start(name, model, options.peer_python, options.threads, folder)
            for name in chosen
        }
        peers = {name: stack.enter_context(peer) for name, peer in started.items()}
        print(", ".join(f"{name} {p.hello['version']}" for name, p in peers.items()), flush=True)
        run = Run(model, sizes, 10 if model == "cnn" else 1)
        if options.losses:
            return loss_bars(run, peers, options.losses)
        return model_bars(run, peers, 3 if options.quick else 10, instruction_set())


def main(argv: list[str]) -> int:
    parser = arguments("train", __doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--model", action="append", default=[], choices=list(COUNTED))
    parser.add_argument("--library", action="append", default=[], choices=[*LIBRARIES, EXACT])
    parser.add_argument("--losses", type=int, metavar="N", help="compare the losses of N steps")
    parser.add_argument("--batch", type=int, help="sequences or images a step")
    parser.add_argument("--context", type=int, help="tokens of a sequence")
    parser.add_argument("--random-tokens", action="store_true", help="LoRA on no text at all")
    options = parser.parse_args(argv)
    bars = []
    try:
        for model in options.model or (CURVES if options.losses else COUNTED):
            bars += measured(model, options)
    except PeerMissing as e:
        print(e, file=sys.stderr)
        return 2
    return finish(bars, options.json)
