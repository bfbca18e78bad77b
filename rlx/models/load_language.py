"""The part of `rlx.load` that is about language models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.models.adapter_files import open_adapter
from rlx.models.build_graph import ModelFile
from rlx.models.bundle import Shipped
from rlx.models.decoder_runner import CHUNK, Engine
from rlx.models.kv_cache import CacheType
from rlx.models.language_model import LanguageModel


def load_language(
    path: Path,
    file: GgufFile | HfFolder,
    *,
    device: str,
    context: int | None,
    threads: int | None,
    kv: str,
    quant: str | None,
    shipped: Shipped | None,
    draft: LanguageModel | None,
    adapters: Sequence[str | os.PathLike[str]],
    merge: bool,
) -> LanguageModel:
    """The language model of an opened file; see `rlx.load`."""
    chunk = CHUNK
    if shipped is not None:
        shipped.require_kind("language")
        context, chunk = shipped.setting("context", context), shipped.setting("chunk", None)
        kv = shipped.setting("kv", None if kv == "f16" else kv)  # which nobody need have asked for
        quant = shipped.setting("quant", quant)
    model = ModelFile.of(path, file, quant)
    if merge:
        model.merged = tuple(open_adapter(adapter, model) for adapter in adapters)
    CacheType.of(kv, model.config.head_dim)  # an error now, not with the first token
    engine = Engine(
        model, device=device, context=context, kv=kv, threads=threads, chunk=chunk, shipped=shipped
    )
    made = LanguageModel(model, engine, draft)
    for adapter in () if merge else adapters:
        made.load_adapter(adapter)
    return made
