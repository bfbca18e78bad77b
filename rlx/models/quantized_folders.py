"""Hugging Face folders with quantised weights: what `quantization_config` says of them.

A method is a function that gives the folder with its weights as the architecture's page names them.
One that is not here is refused: its scales would be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.hf import HfFolder

Method = Callable[[HfFolder, Mapping[str, Any]], HfFolder]


def _mxfp4(folder: HfFolder, settings: Mapping[str, Any]) -> HfFolder:
    """The experts of gpt-oss: its page reads their blocks and scales."""
    kind = folder.config.get("model_type")
    if kind != "gpt_oss":
        raise UnsupportedError(
            "quantization_config: mxfp4 of another architecture", where=folder.name, got=kind,
            expected="gpt_oss",
        )  # fmt: skip
    return folder


# quant_method → its reader
METHODS: dict[str, Method] = {"mxfp4": _mxfp4}


def unquantized(folder: HfFolder) -> HfFolder:
    """The folder with weights that the page of its architecture can name."""
    text = folder.config.get("text_config")  # of a multimodal model
    places = (folder.config, text if isinstance(text, Mapping) else {})
    settings = next(
        (p["quantization_config"] for p in places if p.get("quantization_config")), None
    )
    if settings is None:
        return folder
    if not isinstance(settings, Mapping):
        raise FormatError(
            "quantization_config is no object", where=folder.name, got=repr(settings)[:40]
        )
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedError(
            "quantization_config has a method that is not supported", where=folder.name,
            got=repr(method)[:40], expected=", ".join(METHODS),
            hint="load the float weights, with quant= if they should be packed",
        )  # fmt: skip
    return METHODS[method](folder, settings)
