"""`rlx.load`: a model of any kind from a file, a folder, or a name."""

from __future__ import annotations

import os

from rlx.errors import OptionError
from rlx.formats import open_model
from rlx.formats.fetch import resolve
from rlx.models.encoders.build import EncoderFile, is_encoder
from rlx.models.encoders.embed import EncoderModel
from rlx.models.language import LanguageModel
from rlx.models.language import load as load_language


def load(
    path_or_name: str | os.PathLike[str] = "smollm2-135m",
    *,
    device: str = "cpu",
    context: int | None = None,
    threads: int | None = None,
    kv: str = "f16",
    dtype: str | None = None,
    quant: str | None = None,
) -> LanguageModel | EncoderModel:
    """A language model or an encoder from a GGUF file, a Hugging Face folder, or the catalogue.

    `context` limits how many tokens are read at once. `kv` is the type of a language model's cache.
    `quant` ("int8", "Q8_0", "Q4_K_M", …) packs weights that are floats in the file, `dtype`
    ("bf16", "f16") says how those of an encoder are kept otherwise.
    """
    path = resolve(path_or_name)
    file = open_model(path)
    if is_encoder(file):
        return EncoderModel(
            EncoderFile.of(path, file), device=device, context=context, threads=threads,
            dtype=dtype, quant=quant,
        )  # fmt: skip
    file.close()
    if dtype is not None:
        raise OptionError("for encoders only", where="dtype", got=dtype)
    return load_language(path, device=device, context=context, threads=threads, kv=kv, quant=quant)
