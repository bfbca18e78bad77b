"""What an importance matrix gains: divergence from the model with the weights as they are.

All matrices of SmolLM2's layers are rounded to one type, without and with a matrix made of Python's
documentation, and read a licence text. Rows that are no whole superblocks are padded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import rlx
from bench.common import Bar, arguments, finish
from rlx.formats.fetch import resolve
from rlx.formats.gguf import GgufFile, write_gguf
from rlx.formats.imatrix import ImportanceMatrix
from rlx.ir.quant.scheme import QuantScheme, decode, encode
from rlx.models.calibrate import calibrate
from rlx.support.machine import worker_count

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
CHUNK = 512
Divergence = tuple[float, float]  # KL in nats, and perplexity


def rounded(scheme: QuantScheme, w: np.ndarray, by: np.ndarray | None) -> np.ndarray:
    """The weights as the type stores them."""
    columns = w.shape[-1]
    padding = [(0, 0), (0, -columns % scheme.block_size)]
    if by is not None:  # the zeros that are added count for nothing
        by = np.pad(by, padding[1:], constant_values=float(by.min()))
    packed = encode(scheme, np.pad(w, padding), importance=by, threads=worker_count())
    return np.asarray(decode(scheme, packed.data))[:, :columns]


def write_rounded(
    path: Path, source: GgufFile, scheme: QuantScheme, matrix: ImportanceMatrix | None, layers: int
) -> None:
    """The model in f16, with matrices of its first layers rounded."""
    tensors: dict[str, np.ndarray] = {}
    for name, info in source.tensors.items():
        stored = source.array(name)
        values = decode(info.scheme, stored) if info.packed and info.scheme else stored
        w = np.asarray(values, np.float32).reshape(info.shape)
        if name.startswith("blk.") and w.ndim == 2 and int(name.split(".")[1]) < layers:
            by = None if matrix is None else matrix.importance(name, w.shape)
            w = rounded(scheme, w, by)
        tensors[name] = w.astype(np.float16) if w.ndim == 2 else w
    write_gguf(path, source.metadata, tensors, types=source.types)


def log_probabilities(model: Any, tokens: list[int]) -> Iterator[np.ndarray]:
    """Of every next token, a chunk of the text at a time."""
    for start in range(0, len(tokens), CHUNK):
        logits = np.asarray(model.logits(tokens[start : start + CHUNK]), np.float64)
        logits -= logits.max(-1, keepdims=True)
        yield logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def divergence(plain: Any, other: Any, tokens: list[int]) -> Divergence:
    """Mean KL of `other` from `plain`, and the perplexity of `other`."""
    sums, losses = [], []
    parts = zip(log_probabilities(plain, tokens), log_probabilities(other, tokens), strict=True)
    for number, (p, q) in enumerate(parts):
        sums += (np.exp(p) * (p - q)).sum(-1).tolist()
        following = tokens[number * CHUNK + 1 : (number + 1) * CHUNK]
        losses += (-q[np.arange(len(following)), following]).tolist()
    return float(np.mean(sums)), float(np.exp(np.mean(losses)))


def measure(kind: str, quick: bool) -> list[Bar]:
    scheme, path = QuantScheme.parse(kind), resolve("smollm2-135m")
    text = "\n".join(topics[name] for name in sorted(topics))
    matrix = calibrate(path, text, chunk=CHUNK, chunks=4 if quick else 20)
    found: list[Divergence] = []
    with tempfile.TemporaryDirectory() as folder, rlx.load(path, context=CHUNK) as plain:
        count = CHUNK if quick else 3 * CHUNK
        tokens = plain.tokenize(TEXT.read_text("utf-8"))[:count]
        assert len(tokens) == count, f"{TEXT} is too short"
        print(f"as it is: perplexity {divergence(plain, plain, tokens)[1]:.1f}")
        for by in (None, matrix):
            file = Path(folder) / f"{len(found)}.gguf"
            with GgufFile(path) as source:
                write_rounded(file, source, scheme, by, 4 if quick else 1 << 30)
            with rlx.load(file, context=CHUNK) as other:
                found.append(divergence(plain, other, tokens))
            file.unlink()
            how = "without a matrix" if by is None else "with a matrix"
            print(f"{kind} {how}: KL {found[-1][0]:.3f}, perplexity {found[-1][1]:.1f}")
    (without, _), (calibrated, _) = found
    name = f"imatrix_kl_{kind}"
    return [Bar(name, calibrated, "nats", "no matrix", without, 1.0, higher_is_better=False)]


def main(argv: list[str]) -> int:
    parser = arguments("imatrix", __doc__ or "")
    parser.add_argument("--type", default="IQ3_XXS", help="the type of GGUF (IQ3_XXS)")
    options = parser.parse_args(argv)
    if QuantScheme.parse(options.type).needs_importance:
        parser.error(f"{options.type} cannot be made without a matrix")
    return finish(measure(options.type, options.quick), options.json)
