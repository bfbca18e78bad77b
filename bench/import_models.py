"""Imported models at batch 1 and 8 against ONNX Runtime, OpenVINO and torch.compile.

    python -m bench import --peer-python PYTHON
    python -m bench import --peer-python PYTHON --nets recurrent,quantised

resnet50, mobilenet_v3_large and vit_b_16 of torchvision with random weights, exported to ONNX; the
detector and the recogniser of rapidocr and the voice detector of silero-vad as their packages have
them. torch.compile runs torchvision's own modules. `recurrent` are LSTM and GRU of 100 steps;
`quantised` are networks of torchvision that ONNX Runtime's tools made 8-bit ones: QDQ, and products
with activations quantised at run time. Each engine is a process; they are timed in turns, and
results are compared before that. Beside the latencies: seconds from the file to the first result,
with no code cached and (RLX) with it, of the first result with another batch size, what the first
result of a third size takes more than later ones, and the peak of memory.
"""

from __future__ import annotations

import compileall
import math
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Bar, arguments, finish
from bench.peers.pipe import Peer, PeerMissing

VISION = ("resnet50", "mobilenet_v3_large", "vit_b_16")
NETS = (*VISION, "rapidocr_det", "rapidocr_rec", "silero_vad")
RECURRENT = ("lstm128", "lstm256_both", "lstm512", "gru128", "gru256", "gru512")
QUANTISED = ("resnet50_qdq", "mobilenet_v3_large_qdq", "vit_b_16_dynamic")
GROUPS = {"recurrent": RECURRENT, "quantised": QUANTISED}
ENGINES = ("rlx", "onnxruntime", "openvino", "torch")
BATCHES = (1, 8)
THIRD = 5  # a batch size that was not seen before
_REST = 0.1  # seconds between two sides: idle threads of a peer spin for a while


def engines_for(net: str) -> list[str]:
    return [e for e in ENGINES if e != "torch" or net in VISION]


def open_all(peers: dict[str, Peer], net: str, batch: int) -> dict[str, float]:
    """Seconds to the first result. A peer that cannot run the file is left out."""
    seconds: dict[str, float] = {}
    for engine, peer in list(peers.items()):
        found = peer.ask("open", net=net, batch=batch)
        if "error" in found:
            text = f"import: {net}: {engine}: {found['error']}"
            if engine in ("rlx", "onnxruntime"):
                raise SystemExit(text)
            print(text, file=sys.stderr)
            del peers[engine]
        else:
            seconds[engine] = found["seconds"]
    return seconds


def compare(peers: dict[str, Peer], net: str) -> None:
    """Sums of thousands of terms in another order differ by some 1e-5 of the largest result. Where
    tensors are rounded to 8 bits, such a difference may become a step of 1/255 of a tensor's range,
    and steps add up through the layers. A peer whose result is another is left out."""
    close = 0.1 if net in QUANTISED else 1e-3
    found = {e: np.array(p.ask("result", step=97)["result"]) for e, p in peers.items()}
    largest = float(np.abs(found["onnxruntime"]).max())
    for engine, y in found.items():
        worst = float(np.abs(y - found["onnxruntime"]).max()) / largest
        if not worst <= close:
            text = f"import: {net}: {engine} differs from ONNX Runtime by {worst:.1e}"
            if engine == "rlx":
                raise SystemExit(text)
            print(text, file=sys.stderr)
            del peers[engine]


def race(peers: dict[str, Peer], batch: int, rounds: int) -> dict[str, float]:
    """Median seconds of each engine, in turns."""
    times: dict[str, list[float]] = {e: [] for e in peers}
    repeat = 5 if batch == 1 else 3
    for _ in range(rounds):
        for engine, peer in peers.items():
            time.sleep(_REST)
            times[engine].append(peer.ask("time", repeat=repeat)["seconds"])
    return {e: statistics.median(t) for e, t in times.items()}


def measure(start: Any, net: str, rounds: int) -> list[Bar]:
    """The bars of one network; a process of its own for each engine."""
    bars = []
    with ExitStack() as stack:
        peers = {e: stack.enter_context(start(e)) for e in engines_for(net)}
        first: dict[str, list[float]] = {e: [] for e in peers}
        for batch in BATCHES:
            for engine, seconds in open_all(peers, net, batch).items():
                first[engine].append(seconds)
            compare(peers, net)
            times = race(peers, batch, rounds)
            shown = ", ".join(f"{e} {1e3 * t:.2f} ms" for e, t in times.items())
            print(f"  {net}, batch {batch}: {shown}", flush=True)
            ours = times.pop("rlx")
            best = min(times, key=lambda e: times[e])
            bars.append(Bar(f"import_{net}_{batch}", ours * 1e3, "ms", best, times[best] * 1e3,
                            1.0, False))  # fmt: skip
        memory = {e: p.ask("memory")["bytes"] / 1e6 for e, p in peers.items()}
        for engine, peer in peers.items():
            load, other = first[engine]
            again = peer.ask("open", net=net, batch=THIRD)["seconds"]
            more = again - peer.ask("time", repeat=3)["seconds"]
            print(
                f"    {engine}: first result after {load:.2f} s, with batch {BATCHES[1]} "
                f"{1e3 * other:.0f} ms, with batch {THIRD} {1e3 * more:.0f} ms more than later, "
                f"peak {memory[engine]:.0f} MB", flush=True,
            )  # fmt: skip
    with start("rlx") as again:
        cached = again.ask("open", net=net, batch=BATCHES[0])["seconds"]
        print(f"    rlx with cached code: first result after {cached:.2f} s", flush=True)
    return bars


def main(argv: list[str]) -> int:
    parser = arguments("import", __doc__ or "")
    parser.add_argument("--peer-python", default="python", help="a Python that has the peers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--nets", default=",".join(NETS), help="which networks, by name or group")
    options = parser.parse_args(argv)
    bars: list[Bar] = []
    named = options.nets.split(",")
    nets = [net for name in named for net in GROUPS.get(name, (name,))]
    for folder in ("rlx", "bench"):  # bytecode, as an installation makes it
        compileall.compile_dir(str(Path(__file__).resolve().parents[1] / folder), quiet=2)
    with tempfile.TemporaryDirectory() as work:

        def start(engine: str) -> Peer:
            python = sys.executable if engine == "rlx" else options.peer_python
            own = {"RLX_CACHE_DIR": f"{work}/cache", "PYTHONDONTWRITEBYTECODE": ""}
            return Peer(
                python, "import_server.py", engine, options.threads, work,
                requirements="requirements-import.txt", env=own,
            )  # fmt: skip

        try:
            with start("torch") as exporter:
                for net in nets:
                    exporter.ask("export", net=net)
        except PeerMissing as e:
            print(e, file=sys.stderr)
            return 2
        for net in nets:
            bars += measure(start, net, 3 if options.quick else 7)
    mean = math.exp(statistics.fmean(math.log(b.ratio) for b in bars))
    bars.append(Bar("import_mean", mean, "×", "best of three", 1.0, 1.15))
    return finish(bars, options.json)
