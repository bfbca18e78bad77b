"""Language models against llama.cpp, each in a process of its own, asked in turn.

`--model FILE.gguf` (may be given several times): decode and prefill in tokens and bytes per second,
time to the first token, what a long context costs, Python's share of a token, resident memory.
`--type NAME` (several times, or `all`): decode and prefill of a Qwen3-0.6B of random weights of
that GGUF type or preset, of `--layers` layers; the file is kept for the next run. Goals follow the
type of the weights, bars name the instruction set.

`--avx2` holds RLX to AVX2 and asks for a llama.cpp that was built for it, in a folder of its own:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON
    -DGGML_AVX512=OFF" pip install --no-cache-dir --no-deps --target DIR
    --no-binary llama-cpp-python llama-cpp-python

then `--avx2 --avx2-peer DIR`; `--peer-python` still names a Python that has its other packages. On
a CPU with more the figures say how both do there with AVX2 alone. OpenVINO follows
ONEDNN_MAX_CPU_ISA, which `--avx2` sets; ONNX Runtime GenAI is not held.

Two further peers for prefill and decode, each in a Python of its own: `--genai-python`, OpenVINO
GenAI, for the types that it reads from GGUF; `--ort-genai-python`, ONNX Runtime GenAI, for which
the model is packed anew, in as many bits, into a folder beside the file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.common import Bar, arguments, finish
from bench.instruction_set import add_avx2, hold_to_avx2, instruction_set
from bench.peers.genai import Start, openvino_genai, ort_genai
from bench.peers.pipe import Peer, PeerMissing
from bench.random_model import BLOCK_TYPES, write_random_model
from rlx.backends.cpu.peaks import read_bandwidth
from rlx.cli.peers import start_llama_cpp
from rlx.errors import InputError
from rlx.formats.gguf import GgufFile
from rlx.formats.quant_presets import NAMES
from rlx.ir.quant.scheme import GGUF_SCHEMES
from rlx.support.files import cache_root

# ratio to llama.cpp by weight type: decode, prefill; share of read bandwidth in decode, if any
GOALS: dict[str, tuple[float, float, float | None]] = {
    "Q8_0": (1.5, 2.0, 0.85),
    "F16": (1.2, 1.3, 0.85),
    "Q4_K": (1.5, 2.5, 0.80),
    "Q4_0": (1.5, 2.5, 0.80),
}
OTHERS = (1.2, 1.8, None)
TYPES = ("Q4_K_M", "F16", "BF16", *BLOCK_TYPES)  # what `--type all` is
GENAI_GOAL = 1.3
OPENVINO, ORT = "OpenVINO GenAI", "ONNX Runtime GenAI"
GENAI = {OPENVINO: "_genai", ORT: "_ort_genai"}  # how their bars end
PREFILL, STEPS, SHORT, LONG = 512, 32, 64, 4096
OVERHEAD = 50.0  # µs of Python for a token


def weight_type(path: str) -> str:
    """The scheme that most bytes of the layers have."""
    with GgufFile(path) as file:
        sizes: dict[str, int] = {}
        for name, info in file.tensors.items():
            if name.startswith("blk.") and info.scheme is not None:
                kind = info.scheme.name
                sizes[kind] = sizes.get(kind, 0) + info.nbytes
    return max(sizes, key=lambda k: sizes[k]) if sizes else "F16"


def read_bytes(path: str) -> int:
    """Bytes of weights that one decoded token reads: all but the rows of an untied embedding."""
    with GgufFile(path) as file:
        total = sum(t.nbytes for t in file.tensors.values())
        if "output.weight" in file.tensors:
            total -= file.tensors["token_embd.weight"].nbytes
    return total


class Bench:
    """One model file: processes to ask, and what is made of their answers."""

    def __init__(self, path: str, options: Any, made: bool = False) -> None:
        self.path, self.options, self.made = path, options, made
        self.kind = weight_type(path)
        self.name = f"{Path(path).stem}_{instruction_set()}"
        self.rounds = 3 if options.quick else 7
        self.context = (SHORT if options.no_long else LONG) + 2 * PREFILL
        self.others = {} if made else self.genai()

    def ours(self, context: int) -> Peer:
        server = "rlx_server.py"
        given = (self.path, self.options.threads, context)
        return Peer(sys.executable, server, *given, requirements="requirements-llm.txt")

    def theirs(self, context: int) -> Peer:
        folder, threads = self.options.avx2_peer, self.options.threads
        env = {"PYTHONPATH": str(Path(folder).resolve())} if folder else None
        peer = start_llama_cpp(self.options.peer_python, self.path, threads, context, env=env)
        features = str(peer.hello.get("instructions", ""))
        if self.options.avx2 and features == "AVX512":
            peer.close()
            raise InputError(
                "llama.cpp is to be held to AVX2", where="--avx2-peer", got=features,
                hint="the build that `python -m bench llm --help` describes",
            )  # fmt: skip
        return peer

    def measure(self) -> list[Bar]:
        """Everything of a given file; of a made one the speed alone."""
        if self.made:
            with self.ours(2 * PREFILL) as ours, self.theirs(2 * PREFILL) as theirs:
                return self.speed({"rlx": ours, "llama.cpp": theirs})
        bars = self.first_token()
        with self.ours(self.context) as ours, self.theirs(self.context) as theirs:
            with ExitStack() as stack:
                peers = {"rlx": ours, "llama.cpp": theirs}
                for name, start in self.others.items():
                    peers[name] = stack.enter_context(start())
                bars = [*self.speed(peers), *bars]
            if not self.options.no_long:
                bars.append(self.long_context(ours, theirs, bars[0]))
            bars.append(self.overhead(ours))
            sizes = [p.ask("memory")["bytes"] / 1e6 for p in (ours, theirs)]
            print(
                f"{self.name}: resident {sizes[0]:.0f} MB, llama.cpp {sizes[1]:.0f} MB, "
                f"file {Path(self.path).stat().st_size / 1e6:.0f} MB, context {self.context}"
            )
        return bars

    def genai(self) -> dict[str, Start]:
        """The further peers that were asked for, by name, ready to start."""
        found, threads = {}, self.options.threads
        if python := self.options.genai_python:
            found[OPENVINO] = openvino_genai(python, self.path, threads)
        if python := self.options.ort_genai_python:
            print(f"{self.name}: getting ready for {ORT}, minutes the first time", flush=True)
            scheme = GGUF_SCHEMES[self.kind]
            found[ORT] = ort_genai(python, self.path, threads, 2 * PREFILL, scheme)
        return found

    def speed(self, peers: dict[str, Peer]) -> list[Bar]:
        """Prefill and decode of all, in turn, so that a noisy minute hits everybody.

        Read bandwidth is taken before and after each decode of ours and compared with that one:
        it has been seen to change by half within seconds, with what others do on the machine.
        """
        rates: dict[str, dict[str, list[float]]] = {n: {} for n in peers}
        shares = []
        for _ in range(self.rounds):
            for name, peer in peers.items():
                seconds = peer.ask("prefill", tokens=PREFILL)["seconds"]
                rates[name].setdefault("prefill", []).append(PREFILL / seconds)
            before = read_bandwidth(self.options.threads)
            for name, peer in peers.items():
                seconds = peer.ask("decode", past=SHORT, steps=STEPS)["seconds"]
                rates[name].setdefault("decode", []).append(STEPS / seconds)
                if name == "rlx":
                    band = (before + read_bandwidth(self.options.threads)) / 2
                    shares.append(read_bytes(self.path) / 1e9 * STEPS / seconds / band)
        found = {
            name: {use: statistics.median(v) for use, v in kept.items()}
            for name, kept in rates.items()
        }
        return self._speed_bars(found, statistics.median(shares))

    def _speed_bars(self, found: dict[str, dict[str, float]], reached: float) -> list[Bar]:
        decode, prefill, share = GOALS.get(self.kind, OTHERS)
        size, mine = read_bytes(self.path), found.pop("rlx")
        speed = mine["decode"] * size / 1e9
        limit = speed / reached
        print(
            f"{self.name} ({self.kind}, {size / 1e9:.2f} GB): "
            f"decode {speed:.1f} GB/s of {limit:.1f} GB/s"
        )
        bars = []
        for name, theirs in found.items():
            short = GENAI.get(name, "")
            for use, goal in (("decode", decode), ("prefill", prefill)):
                wanted = GENAI_GOAL if short else goal
                bars.append(
                    Bar(f"{use}_{self.name}{short}", mine[use], "tok/s", name, theirs[use], wanted)
                )
        if share is not None:
            name = f"bandwidth_{self.name}"
            bars.append(Bar(name, speed, "GB/s", "read bandwidth", limit, share))
        return bars

    def long_context(self, ours: Peer, theirs: Peer, short: Bar) -> Bar:
        """What of the speed is left behind a long context, against what is left of llama.cpp's."""
        rates: list[list[float]] = [[], []]
        for _ in range(min(self.rounds, 5)):
            for kept, peer in zip(rates, (ours, theirs), strict=True):
                seconds = peer.ask("decode", past=LONG, steps=STEPS)["seconds"]
                kept.append(STEPS / seconds)
        mine, peer = (statistics.median(r) for r in rates)
        print(f"{self.name}: decode behind {LONG} tokens {mine:.1f} tok/s, llama.cpp {peer:.1f}")
        left, their_left = 100 * mine / short.value, 100 * peer / short.peer_value
        return Bar(f"context_{self.name}", left, "% left", "llama.cpp", their_left, 1.0)

    def first_token(self) -> list[Bar]:
        """Load, prefill and one token, in a new process each time. Ours has been run before, so
        so that its caches on disk are filled; the first start is printed beside it."""
        cold = self._first(self.ours)
        samples: list[list[float]] = [[], []]
        for _ in range(3):
            for kept, start in zip(samples, (self.ours, self.theirs), strict=True):
                kept.append(self._first(start))
        mine, peer = (statistics.median(s) for s in samples)
        print(f"{self.name}: first token {mine:.2f} s, llama.cpp {peer:.2f} s; before {cold:.2f} s")
        name = f"first_token_{self.name}"
        return [Bar(name, mine, "s", "llama.cpp", peer, 1.0, higher_is_better=False)]

    def _first(self, start: Callable[[int], Peer]) -> float:
        with start(2 * PREFILL) as process:
            seconds = float(process.hello["load"])
            seconds += process.ask("prefill", tokens=PREFILL)["seconds"]
            return seconds + float(process.ask("decode", past=PREFILL, steps=1)["seconds"])

    def overhead(self, ours: Peer) -> Bar:
        taken = 1e6 * ours.ask("overhead", steps=128)["seconds"]
        name = f"python_{self.name}"
        return Bar(name, taken, "µs", "budget", OVERHEAD, 1.0, higher_is_better=False)


def made_model(kind: str, layers: int | None) -> str:
    """The file of a type, written unless it is there."""
    folder = cache_root() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (kind.lower() + (f"-{layers}" if layers else "") + ".gguf")
    if not path.exists():
        write_random_model(path, "0.6b", kind, layers)
    return str(path)


def _parser() -> argparse.ArgumentParser:
    parser = arguments("llm", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", action="append", default=[], metavar="FILE.gguf")
    parser.add_argument(
        "--type",
        action="append",
        default=[],
        type=str.upper,
        choices=(*TYPES, *NAMES, "ALL"),
        metavar="TYPE",
        help=f"all, or any of {', '.join(TYPES)}, or a preset such as Q5_K_M",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the models of --type")
    add_avx2(parser)
    parser.add_argument(
        "--avx2-peer", metavar="DIR", help="llama-cpp-python built for AVX2 is in there"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--no-long", action="store_true", help=f"leave out {LONG} tokens of context"
    )
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--genai-python", metavar="PYTHON", help="has openvino-genai")
    parser.add_argument("--ort-genai-python", metavar="PYTHON", help="has onnxruntime-genai")
    return parser


def main(argv: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    kinds = TYPES if "ALL" in options.type else options.type
    if not options.model and not kinds:
        parser.error("give --model or --type")
    if options.avx2_peer and not options.avx2:
        parser.error("--avx2-peer goes with --avx2")
    if options.avx2:
        hold_to_avx2()
    bars: list[Bar] = []
    try:
        for path in options.model:
            bars += Bench(path, options).measure()
        for kind in kinds:
            path = made_model(kind, options.layers)
            bars += Bench(path, options, made=True).measure()
    except (InputError, PeerMissing) as e:
        print(e, file=sys.stderr)
        return 2
    return finish(bars, options.json)
