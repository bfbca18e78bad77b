"""A model file of any kind becomes a GGUF file with packed weights."""

from __future__ import annotations

import os
from pathlib import Path

from rlx.errors import UnsupportedError
from rlx.formats import open_model
from rlx.formats.gguf import GgufFile
from rlx.formats.gguf.quantized import (
    QuantizeOptions,
    WrittenTensor,
    quantize_gguf,
    write_quantized,
)
from rlx.formats.quant_presets import QuantPreset
from rlx.formats.wheel import Progress, silent
from rlx.models.build import ModelFile
from rlx.models.encoders.build import is_encoder
from rlx.models.to_gguf import gguf_of
from rlx.support.cores import worker_count


def quantize_model(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    preset: QuantPreset | str,
    *,
    threads: int | None = None,
    requantize: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> list[WrittenTensor]:
    """Writes the model at `path` to `out`: what became of each tensor."""
    preset = QuantPreset.parse(preset) if isinstance(preset, str) else preset
    options = QuantizeOptions(preset, worker_count(threads), requantize, overwrite, progress)
    with open_model(Path(path)) as file:
        if isinstance(file, GgufFile):
            return quantize_gguf(file, out, options)
        if is_encoder(file):
            raise UnsupportedError(
                "an encoder is not written as GGUF here", where=file.name,
                hint="rlx.load(..., quant=) packs its weights",
            )  # fmt: skip
    model = ModelFile.open(file.path)
    metadata, sources = gguf_of(model)
    return write_quantized(out, metadata, sources, options, model.file.name)
