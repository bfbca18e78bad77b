"""The sampling that a model recommends: generation_config.json, GGUF metadata, the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlx.errors import FormatError, OptionError
from rlx.formats.catalogue import sampling_of
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.models.model_file import ModelFile
from rlx.models.sampling import GenerationSettings

_CONFIG = "generation_config.json"
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF = "general.sampling."
# llama.cpp's names
_GGUF_FIELDS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def recommended_sampling(model: ModelFile) -> dict[str, Any]:
    """Generation settings that the model's files recommend, or the catalogue; maybe none."""
    path, file = Path(model.path), model.file
    if isinstance(file, HfFolder):
        found, where = _from_config(file.json(_CONFIG)), f"{file.name}/{_CONFIG}"
    else:
        found, where = _from_gguf(file), file.name
    found = {name: value for name, value in found.items() if value is not None}
    if found.get("top_k") == -1:  # all, for some libraries
        found["top_k"] = 0
    try:
        GenerationSettings(**found)
    except OptionError as error:
        raise FormatError(
            f"a recommended {error.where} that cannot be used", where=where, got=error.got,
            expected=error.expected,
        ) from error  # fmt: skip
    return found or sampling_of(path)


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("do_sample") is False:
        return {"temperature": 0.0, "repetition_penalty": config.get("repetition_penalty")}
    return {name: config.get(name) for name in _FIELDS}


def _from_gguf(file: GgufFile) -> dict[str, Any]:
    return {ours: file.metadata.get(_GGUF + theirs) for ours, theirs in _GGUF_FIELDS.items()}


def sampling_metadata(model: ModelFile) -> dict[str, Any]:
    """What a model recommends as GGUF metadata, by llama.cpp's names."""
    found = recommended_sampling(model)
    return {_GGUF + _GGUF_FIELDS[name]: value for name, value in found.items()}
