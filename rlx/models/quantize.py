"""A model file of any kind becomes a GGUF file with packed weights."""

from __future__ import annotations

import os
from pathlib import Path

from rlx.backends.cpu.cores import worker_count
from rlx.errors import UnsupportedError
from rlx.formats import open_model
from rlx.formats.gguf import GgufFile
from rlx.formats.mixture import Mixture
from rlx.formats.package import Progress, silent
from rlx.formats.quantize import Order, Written, quantize_gguf, write_quantized
from rlx.models.build_graph import ModelFile
from rlx.models.encoder_graph import is_encoder
from rlx.models.to_gguf import gguf_of


def quantize_model(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    mixture: Mixture | str,
    *,
    threads: int | None = None,
    requantize: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> list[Written]:
    """Writes the model at `path` to `out`: what became of each tensor."""
    mixture = Mixture.parse(mixture) if isinstance(mixture, str) else mixture
    order = Order(mixture, worker_count(threads), requantize, overwrite, progress)
    with open_model(Path(path)) as file:
        if isinstance(file, GgufFile):
            return quantize_gguf(file, out, order)
        if is_encoder(file):
            raise UnsupportedError(
                "an encoder is not written as GGUF here", where=file.name,
                hint="rlx.load(..., quant=) packs its weights",
            )  # fmt: skip
    model = ModelFile.open(file.path)
    metadata, sources = gguf_of(model)
    return write_quantized(out, metadata, sources, order, model.file.name)
