"""Training beside torch (eager and `torch.compile`) and JAX: a tiny GPT and a CNN, from scratch.

A step is forward, backward, clipping by the global norm and AdamW. Every library is a process of
its own with 2 threads (`--peer-python`), begins with the same weights, and makes its steps in turns
with the others on the same batches. A row's peer is the best of them. Bars, for each model:

- rate: tokens or images a second, by the median step;
- memory: the most that the process had resident, its libraries included;
- first: seconds until the first step is done, importing left out, with empty caches.

`--losses N` makes N steps of the GPT instead, and compares the losses of all.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
from pathlib import Path

from bench.common import Bar, arguments, finish
from bench.instruction_set import instruction_set
from bench.peers import train_models as models
from bench.peers.pipe import Peer, PeerMissing

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("rlx", "torch", "torch.compile", "jax")
GOAL, FIRST, APART = 1.2, 3.0, 1e-3
COUNTED = {"gpt": "tokens", "cnn": "images"}


def start(library: str, python: str, threads: int, folder: str) -> Peer:
    """A library in a process of its own, with empty caches."""
    caches = Path(tempfile.mkdtemp(dir=folder))
    env = {"RLX_CACHE_DIR": str(caches / "rlx"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "torch")}
    if library == "rlx":
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"], python = os.pathsep.join(p for p in paths if p), sys.executable
    return Peer(
        python, "train_server.py", threads, library, requirements="requirements-arrays.txt", env=env
    )


def counted(model: str) -> int:
    """Tokens or images a step."""
    sizes = models.LARGE[model]
    return int(sizes.batch * (sizes.context if model == "gpt" else 1))


def model_bars(model: str, peers: dict[str, Peer], rounds: int, used: str) -> list[Bar]:
    first = {name: peer.ask("start", model=model) for name, peer in peers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    losses = {name: list(found["losses"]) for name, found in first.items()}
    count = 1 if model == "gpt" else 10
    for turn in range(rounds + 1):
        for name, peer in peers.items():
            found = peer.ask("steps", count=count)
            losses[name] += found["losses"]
            seconds[name] += found["seconds"] if turn else []  # the first turn warms up
    compare(model, losses)
    rates = {name: counted(model) / statistics.median(s) for name, s in seconds.items()}
    memory = {name: peer.ask("memory")["bytes"] / 1e6 for name, peer in peers.items()}
    for name in peers:
        print(
            f"{model} {name}: {rates[name]:.4g} {COUNTED[model]}/s, {memory[name]:.0f} MB, first "
            f"step {first[name]['seconds']:.2f} s", flush=True,
        )  # fmt: skip
    return bars_of(model, rates, memory, first["rlx"]["seconds"], used)


def bars_of(
    model: str, rates: dict[str, float], memory: dict[str, float], first: float, used: str
) -> list[Bar]:
    others = [name for name in rates if name != "rlx"]
    best = max(others, key=lambda name: rates[name])
    least = min(others, key=lambda name: memory[name])
    unit = f"{COUNTED[model]}/s"
    return [
        Bar(f"train_{model}, {used}", rates["rlx"], unit, best, rates[best], GOAL),
        Bar(f"train_{model}_memory", memory["rlx"], "MB", least, memory[least], 1.0, False),
        Bar(f"train_{model}_first", first, "s", "budget", FIRST, 1.0, False),
    ]


def compare(model: str, losses: dict[str, list[float]]) -> dict[str, float]:
    """The largest relative difference of our losses to those of each peer."""
    found = {}
    for name, theirs in losses.items():
        pairs = list(zip(losses["rlx"], theirs, strict=True))
        found[name] = max(abs(a - b) / abs(b) for a, b in pairs)
    shown = ", ".join(f"{name} {worst:.2g}" for name, worst in found.items() if name != "rlx")
    print(f"{model}: losses of {len(losses['rlx'])} steps apart by at most {shown}", flush=True)
    return found


def loss_bars(peers: dict[str, Peer], steps: int) -> list[Bar]:
    """The curves of all, from the same weights and batches."""
    losses = {name: p.ask("start", model="gpt")["losses"] for name, p in peers.items()}
    for name, peer in peers.items():
        losses[name] += peer.ask("steps", count=steps - 1)["losses"]
        shown = losses[name][:: max(1, steps // 10)]
        print(f"{name}: {' '.join(f'{x:.4f}' for x in shown)} {losses[name][-1]:.4f}", flush=True)
    found = compare("gpt", losses)
    return [
        Bar(f"train_gpt_losses_{steps}", worst, "relative", f"{name}, allowed", APART, 1.0, False)
        for name, worst in found.items() if name != "rlx"
    ]  # fmt: skip


def main(argv: list[str]) -> int:
    parser = arguments("train", __doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--model", action="append", default=[], choices=list(COUNTED))
    parser.add_argument("--library", action="append", default=[], choices=LIBRARIES)
    parser.add_argument("--losses", type=int, metavar="N", help="compare the losses of N steps")
    options = parser.parse_args(argv)
    used, bars = instruction_set(), []
    chosen = ["rlx", *(x for x in options.library or LIBRARIES if x != "rlx")]
    try:
        for model in ["gpt"] if options.losses else options.model or list(COUNTED):
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                peers = {
                    name: stack.enter_context(
                        start(name, options.peer_python, options.threads, folder)
                    )
                    for name in chosen
                }
                versions = (f"{name} {peer.hello['version']}" for name, peer in peers.items())
                print(", ".join(versions), flush=True)
                if options.losses:
                    bars += loss_bars(peers, options.losses)
                else:
                    bars += model_bars(model, peers, 3 if options.quick else 10, used)
    except PeerMissing as e:
        print(e, file=sys.stderr)
        return 2
    return finish(bars, options.json)
