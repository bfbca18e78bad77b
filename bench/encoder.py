"""The default encoder against ONNX Runtime, OpenVINO and sentence-transformers in the same run.

Shapes are batch x tokens, f32 against the best f32 peer (also with `strassen=True`, whose vectors
depend on the texts beside them in the last digits) and int8 against ONNX Runtime's int8; then
cold starts, new shapes, and texts of mixed lengths end to end.

RLX_TARGET=x86-64-v3 holds all of them to AVX2, but for OpenVINO's own kernels (its copy of MLAS,
MVN), which have no switch: the figure of OpenVINO is an upper bound then. So is that of ONNX
Runtime's int8 on a CPU with AVX-VNNI: RLX_TARGET=alderlake is what compares there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Bar, arguments, finish
from bench.peers.pipe import Peer, PeerMissing
from rlx.formats.fetch import resolve
from rlx.models.builder import EntryPoint
from rlx.models.encoder_model import EncoderModel
from rlx.models.model_file import ModelFile

SHAPES = ((1, 16), (1, 128), (8, 128), (32, 128))
F32_PEERS, INT8_PEERS = ("onnxruntime", "openvino"), ("onnxruntime-int8",)
_PARTS = 5  # of the texts of mixed lengths
_REST = 0.1  # seconds between two sides: idle threads of a peer spin for a while
_COLD = (
    "import sys, rlx; m = rlx.load(sys.argv[1], threads=int(sys.argv[2]));"
    "m.embed('a text of some sixteen tokens or so, to have a vector of')"
)


class Shape:
    """One shape of one model: ids, and the executable that takes them."""

    def __init__(self, model: EncoderModel, batch: int, seq: int) -> None:
        self.batch, self.seq = batch, seq
        ids = np.random.default_rng(1).integers(1000, 20000, (batch, seq))  # as the server draws
        self.ids = ids.astype(np.int32)
        self.graph = model.runner.graph(EntryPoint("embedding"), seq)

    def run(self) -> Any:
        return self.graph.run(ids=self.ids)[0]

    def check(self, peer: Peer, engine: str, least: float) -> None:
        """Cosines with the peer's vectors."""
        given = {"batch": self.batch, "seq": self.seq, "seed": 1}
        theirs = np.array(peer.ask("vectors", engine_name=engine, **given)["vectors"])
        ours = self.run()
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        worst = float(((ours * theirs).sum(1) / norms).min())
        if not worst >= least:
            raise SystemExit(f"encoder: another vector than {engine}'s: cosine {worst:.6f}")

    def race(self, peer: Peer, engines: tuple[str, ...], rounds: int) -> list[float]:
        """Median seconds of ours and of each engine, in turn."""
        inner = max(1, int(0.04 / (self.batch * self.seq * 2e-4)))
        times: list[list[float]] = [[] for _ in range(1 + len(engines))]
        for _ in range(rounds):
            time.sleep(_REST)
            times[0].append(_median(self.run, inner))
            for kept, engine in zip(times[1:], engines, strict=True):
                time.sleep(_REST)
                given = {"batch": self.batch, "seq": self.seq, "seed": 1, "repeat": inner}
                kept.append(peer.ask("time", engine_name=engine, **given)["seconds"])
        return [statistics.median(t) for t in times]


def _median(run: Callable[[], object], inner: int) -> float:
    run()
    times = []
    for _ in range(inner):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def shapes(
    peer: Peer, folder: Path, options: Any, quant: str | None, engines: tuple[str, ...],
    strassen: bool = False,
) -> list[Bar]:  # fmt: skip
    goal, least = (1.2, 0.99999) if quant is None else (1.3, 0.99)
    bars = []
    threads = options.threads
    with _model(folder, threads, quant, strassen) as model, _model(folder, threads) as exact:
        for batch, seq in SHAPES:
            shape = Shape(model, batch, seq)
            shape.check(peer, F32_PEERS[0], least)
            _accuracy(shape, Shape(exact, batch, seq))
            ours, *theirs = shape.race(peer, engines, 5 if options.quick else 9)
            best = min(theirs)
            print(
                f"  {batch}x{seq}: "
                + ", ".join(f"{e} {t * 1e3:.2f} ms" for e, t in zip(engines, theirs, strict=True))
            )
            kind = "strassen" if strassen else quant or "f32"
            name = f"encoder_{kind}_{batch}x{seq}"
            winner = engines[theirs.index(best)]
            bars.append(Bar(name, ours * 1e3, "ms", winner, best * 1e3, goal, False))
    return bars


def _accuracy(shape: Shape, exact: Shape) -> None:
    """Vectors of fewer bits stay within 0.995 of those in f32."""
    a, b = shape.run(), exact.run()
    worst = float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())
    if not worst >= 0.995:
        raise SystemExit(f"encoder: vectors differ from those in f32: cosine {worst:.6f}")


def _model(
    folder: Path, threads: int, quant: str | None = None, strassen: bool = False
) -> EncoderModel:
    return EncoderModel(ModelFile.open(folder), threads=threads, quant=quant, strassen=strassen)


def new_shapes(folder: Path, options: Any) -> list[Bar]:
    """What the first run of a shape takes beyond later ones, in a model that has run others."""
    extra = []
    with _model(folder, options.threads) as model:
        model.embed(["warm", "up, with another length"])
        model.embed("warm up")
        for batch, seq in ((3, 21), (2, 77), (5, 50), (1, 130), (7, 33)):
            ids = np.full((batch, seq), 2000, np.int32)
            start = time.perf_counter()
            graph = model.runner.graph(EntryPoint("embedding"), seq)
            graph.run(ids=ids)
            first = time.perf_counter() - start
            extra.append(first - _median(lambda: graph.run(ids=ids), 7))  # noqa: B023
    worst = max(max(extra), 1e-6) * 1e3
    return [Bar("encoder_new_shape", worst, "ms", "limit", 10.0, 1.0, False)]


def cold(peer: Peer, folder: Path, options: Any) -> list[Bar]:
    """A whole process: import, load, compile, one text; with nothing cached and with artifacts."""
    rounds = 3 if options.quick else 5
    empty, filled = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            empty.append(_process(folder, options.threads, cache))
            filled.append(_process(folder, options.threads, cache))
    for engine in F32_PEERS:
        print(f"  cold {engine}: {peer.ask('cold', engine_name=engine)['seconds']:.2f} s")
    return [
        Bar("encoder_cold", statistics.median(empty), "s", "limit", 1.5, 1.0, False),
        Bar("encoder_cold_artifact", statistics.median(filled), "s", "limit", 0.5, 1.0, False),
    ]


def _process(folder: Path, threads: int, cache: str) -> float:
    environment = {**os.environ, "RLX_CACHE_DIR": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as installed packages have it
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", _COLD, str(folder), str(threads)], check=True,
                   env=environment)  # fmt: skip
    return time.perf_counter() - start


def texts(peer: Peer, folder: Path, options: Any) -> list[Bar]:
    """Texts of mixed lengths from end to end, tokenising included; a part of them at a time, in
    turn, so that both sides see the machine in every mood it has."""
    count = 1000 if options.quick else 10_000
    parts = [mixed_texts(count)[i::_PARTS] for i in range(_PARTS)]
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as work, _model(folder, options.threads) as model:
        model.embed(parts[0][:32], overlong="cut")
        before = _resident()
        for i, part in enumerate(parts):
            path = Path(work) / f"{i}.json"
            path.write_text(json.dumps(part), encoding="utf-8")
            time.sleep(_REST)
            start = time.perf_counter()
            vectors = model.embed(part, overlong="cut")
            ours.append(time.perf_counter() - start)
            time.sleep(_REST)
            answer = peer.ask("texts", path=str(path), batch=32)
            theirs.append(answer["seconds"])
            worst = float((vectors[:64] * np.array(answer["vectors"])).sum(1).min())
            if not worst >= 0.99999:
                raise SystemExit(f"encoder: other vectors than sentence-transformers': {worst:.6f}")
        grown = _resident() - before
    print(f"  {count} texts: memory grew by {grown / 1e6:.0f} MB")
    rate, peer_rate = (count / _PARTS / statistics.median(t) for t in (ours, theirs))
    return [Bar("encoder_texts", rate, "texts/s", "sentence-transformers", peer_rate, 1.5)]


def mixed_texts(count: int) -> list[str]:
    """Lengths as texts have them: most short, a few very long."""
    rng = np.random.default_rng(0)
    words = ["the", "a", "compiler", "vector", "text", "small", "fast", "exact", "memory", "kernel"]
    lengths = np.clip(rng.lognormal(3.2, 0.8, count), 1, 400).astype(int)
    return [" ".join(rng.choice(words, n)) for n in lengths]


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


PARTS = ("f32", "int8", "strassen", "new_shape", "cold", "texts")


def main(argv: list[str]) -> int:
    parser = arguments("encoder", __doc__ or "")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--model", default="all-minilm-l6-v2", help="a folder or a name")
    parser.add_argument("--only", choices=PARTS, action="append", help="these parts alone")
    options = parser.parse_args(argv)
    wanted = options.only or PARTS
    folder = resolve(options.model)
    bars: list[Bar] = []
    try:
        with tempfile.TemporaryDirectory() as work, Peer(
            options.peer_python, "encoder_server.py", folder, options.threads, work,
            requirements="requirements-encoder.txt",
        ) as peer:  # fmt: skip
            print("peers:", ", ".join(f"{k} {v}" for k, v in peer.hello["versions"].items()))
            if "f32" in wanted:
                bars += shapes(peer, folder, options, None, F32_PEERS)
            if "int8" in wanted:
                bars += shapes(peer, folder, options, "int8", INT8_PEERS)
            if "strassen" in wanted:
                bars += shapes(peer, folder, options, None, F32_PEERS, strassen=True)
            if "new_shape" in wanted:
                bars += new_shapes(folder, options)
            if "cold" in wanted:
                bars += cold(peer, folder, options)
            if "texts" in wanted:
                bars += texts(peer, folder, options)
    except PeerMissing as e:
        print(e, file=sys.stderr)
        return 2
    return finish(bars, options.json)
