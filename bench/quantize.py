"""Quantisers against llama.cpp's on the same tensors: what they lose, and how long they take.

Random weights with normal and with heavy tails, and those of two small real models, where they can
be had. The error is the root mean square of what decoding gives back less the weights; with an
importance for each column, it is weighted by that.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Bar, arguments, finish
from bench.peers.pipe import Peer, PeerMissing
from rlx.errors import RlxError
from rlx.formats import open_model
from rlx.formats.fetch import resolve
from rlx.ir.quant.scheme import QuantScheme, decode, encode
from rlx.support.machine import worker_count

TYPES = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
CALIBRATED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")  # only with an importance
SEARCHED = ("Q4_K", "Q5_K", "Q6_K")  # worth a bar on time; the others take next to none
SLOW = (
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
    *CALIBRATED,
)  # millions of weights a second
LEAST = 1 / 1.02  # of their error to ours
REAL = {  # of tensors whose blocks can be cut from it
    "all-minilm-l6-v2": "encoder.layer.3.intermediate.dense.weight",
    "smollm2-135m": "blk.7.ffn_down.weight",
}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    found = {
        "normal": rng.standard_normal((1024, 1024)) * 0.02,
        "heavy": rng.standard_t(3, (1024, 1024)) * 0.02,
    }
    for model, name in REAL.items():
        try:
            with open_model(resolve(model)) as file:
                info, stored = file.tensors[name], file.array(name)
                values = decode(info.scheme, stored) if info.packed and info.scheme else stored
                found[model] = np.array(values).reshape(-1, 256)
        except RlxError as e:
            print(f"quantize: without {model}: {e}", file=sys.stderr)
    return {name: w.astype(np.float32) for name, w in found.items()}


class Theirs:
    def __init__(self, peer: Peer, folder: Path, threads: int) -> None:
        self.peer, self.folder, self.threads = peer, folder, threads

    def __call__(
        self, scheme: QuantScheme, w: np.ndarray, by: np.ndarray | None = None
    ) -> tuple[np.ndarray, float]:
        source, out = self.folder / "w.npy", self.folder / "q.npy"
        np.save(source, w)
        more = {}
        if by is not None:
            np.save(self.folder / "i.npy", by)
            more["importance"] = str(self.folder / "i.npy")
        answer = self.peer.ask(
            "quantize", weights=str(source), type=scheme.ggml_type, threads=self.threads,
            row_bytes=scheme.row_bytes(w.shape[1]), out=str(out), **more,
        )  # fmt: skip
        return np.load(out), float(answer["seconds"])


def importance(columns: int) -> np.ndarray:
    """Mean squares of inputs: most alike, some a hundred times as large."""
    rng = np.random.default_rng(9)
    large = np.where(rng.random(columns) < 0.02, 100, 1)
    return (np.exp2(rng.standard_normal(columns)) * large).astype(np.float32)


def lost(
    scheme: QuantScheme, packed: np.ndarray, w: np.ndarray, by: np.ndarray | None = None
) -> float:
    squares = (decode(scheme, packed).astype(np.float64) - w) ** 2
    return float(np.sqrt(np.mean(squares if by is None else squares * by)))


def error_bar(
    scheme: QuantScheme, kind: str, w: np.ndarray, theirs: Theirs, by: np.ndarray | None = None
) -> Bar:
    packed, _ = theirs(scheme, w, by)
    made = encode(scheme, w, importance=by).data
    ours, peer = lost(scheme, made, w, by), lost(scheme, packed, w, by)
    name = f"quantize_error_{scheme}_{kind}" + ("" if by is None else "_imatrix")
    return Bar(name, ours, "rmse", "llama.cpp", peer, LEAST, higher_is_better=False)


def time_bar(scheme: QuantScheme, w: np.ndarray, theirs: Theirs, rounds: int) -> Bar:
    fast, slow = [], []
    by = importance(w.shape[1]) if scheme.name in SLOW else None
    for _ in range(rounds):  # in turn, so that a noisy minute hits both
        start = time.perf_counter()
        encode(scheme, w, importance=by, threads=theirs.threads)
        fast.append(time.perf_counter() - start)
        slow.append(theirs(scheme, w, by)[1])
    rates = [w.size / float(np.median(s)) / 1e6 for s in (fast, slow)]
    name = f"quantize_rate_{scheme}_{theirs.threads}t"
    return Bar(name, rates[0], "million weights/s", "llama.cpp", rates[1], 1.0)


def measure(options: Any) -> list[Bar]:
    threads, bars = min(2, worker_count()), []
    with (
        tempfile.TemporaryDirectory() as folder,
        Peer(options.peer_python, "ggml_server.py", requirements="requirements-llm.txt") as peer,
    ):
        theirs = Theirs(peer, Path(folder), threads)
        for kind, w in tensors().items():
            found = [error_bar(QuantScheme.parse(t), kind, w, theirs) for t in TYPES]
            by = importance(w.shape[1])
            weighted = (*TYPES[1:], *CALIBRATED)
            found += [error_bar(QuantScheme.parse(t), kind, w, theirs, by) for t in weighted]
            bars += [b for b in found if b.value or b.peer_value]  # a type the tensor has already
        w = np.random.default_rng(1).standard_normal((4096, 2048), np.float32)
        rounds = 1 if options.quick else 5
        bars += [time_bar(QuantScheme.parse(t), w, theirs, rounds) for t in SEARCHED]
        part = w[: len(w) // 8]
        bars += [time_bar(QuantScheme.parse(t), part, theirs, rounds) for t in SLOW]
    return bars


def main(argv: list[str]) -> int:
    parser = arguments("quantize", __doc__ or "")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    options = parser.parse_args(argv)
    try:
        return finish(measure(options), options.json)
    except PeerMissing as e:
        print(e, file=sys.stderr)
        return 2
