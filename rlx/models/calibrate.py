"""Importance matrices of a language model: run a text, and sum the squares of all inputs.

matrix = calibrate("model-f16.gguf", Path("text.txt").read_text())
matrix.write("model.imatrix.gguf")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np

from rlx.errors import InputError, OptionError, UnsupportedError
from rlx.formats.fetch import resolve
from rlx.formats.imatrix import ImportanceMatrix, InputSquares
from rlx.ir.op import Array
from rlx.models.builder import EntryPoint
from rlx.models.decoder_runner import CHUNK, DecoderRunner
from rlx.models.model_file import ModelFile

SQUARES = EntryPoint("squares")
_SUMS, _COUNTS = ".in_sum2", ".counts"


def calibrate(
    model: str | os.PathLike[str],
    text: str,
    *,
    chunk: int = CHUNK,
    chunks: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    dataset: str = "",
    counted: Callable[[str, int], Callable[[], object]] | None = None,
) -> ImportanceMatrix:
    """Mean squares of the inputs of every weight while the model reads `text`.

    The text is cut into chunks of `chunk` tokens, each read on its own; a short rest is left out.
    `chunks` limits how many. `dataset` is the name of the text, for the file. `counted(what,
    total)` gives a function that is called after each chunk.
    """
    for name, value in (("chunk", chunk), ("chunks", chunks)):
        if value is not None and value < 1:
            raise OptionError("not a count", where=name, got=value, expected="1 or more")
    opened = ModelFile.open(resolve(model))
    if opened.is_encoder:
        opened.file.close()
        raise UnsupportedError("an encoder is not calibrated", where=opened.file.name)
    size = min(chunk, opened.config.context_length(None))
    runner = DecoderRunner(opened, device=device, context=size, threads=threads, chunk=size)
    try:
        parts = _chunks(opened, text, size)[:chunks]
        sums: dict[str, Array] = {}
        done = None if counted is None else counted("calibrating", len(parts))
        for tokens in parts:
            for name, values in runner.outputs(SQUARES, tokens).items():
                sums[name] = sums.get(name, 0) + values.astype(np.float64)
            if done is not None:
                done()
        rows = sum(map(len, parts))
        return ImportanceMatrix(_entries(sums, rows), len(parts), size, (dataset,) * bool(dataset))
    finally:
        runner.close()


def _chunks(model: ModelFile, text: str, size: int) -> list[list[int]]:
    """The tokens in whole chunks, or in one where there are fewer; each starts as texts do."""
    tokenizer = model.tokenizer()
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise InputError(
            "no text to calibrate with", where="calibrate", got=f"{len(tokens)} tokens",
            expected=f"some chunks of {size}",
        )  # fmt: skip
    count = max(1, len(tokens) // size)
    found = [tokens[i * size : (i + 1) * size] for i in range(count)]
    if tokenizer.adds_bos:
        for part in found[1:]:
            part[0] = tokens[0]
    return found


def _entries(sums: Mapping[str, Array], rows: int) -> dict[str, InputSquares]:
    found = {}
    for name, values in sums.items():
        if name.endswith(_SUMS):
            weight = name.removesuffix(_SUMS)
            counts = sums.get(weight + _COUNTS, np.array([rows]))
            found[weight] = InputSquares(values.reshape(-1, values.shape[-1]), counts)
    return found
