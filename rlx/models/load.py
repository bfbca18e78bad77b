"""`rlx.load`: a model of any kind from a file, a folder, or a name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.errors import OptionError
from rlx.formats import open_model
from rlx.formats.fetch import resolve
from rlx.models.bundle import Shipped
from rlx.models.encoder_graph import EncoderFile, is_encoder
from rlx.models.encoder_model import EncoderModel

if TYPE_CHECKING:
    from rlx.models.language_model import LanguageModel


def load(
    path_or_name: str | os.PathLike[str] = "smollm2-135m",
    *,
    device: str = "cpu",
    context: int | None = None,
    threads: int | None = None,
    kv: str = "f16",
    dtype: str | None = None,
    quant: str | None = None,
    artifact: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    adapters: Sequence[str | os.PathLike[str]] = (),
    merge: bool = False,
) -> LanguageModel | EncoderModel:
    """A language model or an encoder from a GGUF file, a Hugging Face folder, or the catalogue.

    `context` limits how many tokens are read at once. `kv` is the type of a language model's cache.
    `quant` ("int8", "Q8_0", "Q4_K_M", …) packs weights that are floats in the file, `dtype`
    ("bf16", "f16") says how those of an encoder are kept otherwise. `artifact` is a file that
    `rlx compile` made of this model: then nothing is compiled here. It is code. `draft` is a
    smaller model of the same vocabulary, which guesses tokens that this one checks. `adapters` are
    loaded, to be asked for by name (`load_adapter`), or with `merge` added to the weights for good.
    """
    path = resolve(path_or_name)
    file = open_model(path)
    shipped = None if artifact is None else Shipped.open(Path(artifact))
    if is_encoder(file):
        other_kv = None if kv == "f16" else kv
        asked = {"kv": other_kv, "draft": draft, "adapters": adapters, "merge": merge}
        for name, given in asked.items():
            if given:
                raise OptionError("for language models only", where=name, got=given)
        return _encoder(EncoderFile.of(path, file), device, context, threads, dtype, quant, shipped)
    if merge and shipped is not None:
        raise OptionError("an artifact has weights of its own", where="merge", got=merge)
    if dtype is not None:
        raise OptionError("for encoders only", where="dtype", got=dtype)
    smaller = None if draft is None else _draft(draft, device, context, threads, kv)
    # late: an encoder starts without all of this
    from rlx.models.load_language import load_language

    return load_language(
        path, file, device=device, context=context, threads=threads, kv=kv, quant=quant,
        shipped=shipped, draft=smaller, adapters=adapters, merge=merge,
    )  # fmt: skip


def _draft(
    path: str | os.PathLike[str], device: str, context: int | None, threads: int | None, kv: str
) -> LanguageModel:
    found = load(path, device=device, context=context, threads=threads, kv=kv)
    if isinstance(found, EncoderModel):
        raise OptionError("not a language model", where="draft", got=str(path))
    return found


def _encoder(
    model: EncoderFile, device: str, context: int | None, threads: int | None, dtype: str | None,
    quant: str | None, shipped: Shipped | None,
) -> EncoderModel:  # fmt: skip
    if shipped is not None:
        shipped.require_kind("encoder")
        context = shipped.setting("context", context)
        dtype, quant = shipped.setting("dtype", dtype), shipped.setting("quant", quant)
    return EncoderModel(
        model, device=device, context=context, threads=threads, dtype=dtype, quant=quant,
        shipped=shipped,
    )  # fmt: skip
