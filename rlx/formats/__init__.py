"""Model files: weights, configs, tokenizers, and how to fetch them. Files are untrusted input."""

from __future__ import annotations

import os
from pathlib import Path

from rlx.errors import FormatError
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer.gguf_vocabulary import tokenizer_from_gguf


def open_model(path: str | os.PathLike[str]) -> GgufFile | HfFolder:
    """A GGUF file, a Hugging Face folder, or a folder that holds one GGUF model."""
    place = Path(path)
    if (place / "modules.json").is_file() and not (place / "config.json").is_file():
        # sentence-transformers once kept the model in a folder of its own, 0_Transformer
        place = next((p.parent for p in sorted(place.glob("0_*/config.json"))), place)
    if place.is_dir() and not (place / "config.json").is_file():
        found = sorted(p for p in place.glob("*.gguf") if "-of-" not in p.name)
        found += sorted(place.glob("*-00001-of-*.gguf"))
        if not found:  # ONNX files are opened by their names
            found = sorted(place.glob("*.onnx"))
        if len(found) != 1 or found[0].suffix == ".onnx":
            raise FormatError(
                "not one model" if found else "no model in the folder",
                where=os.fspath(path),
                got=", ".join(p.name for p in found[:8]) or "neither config.json nor *.gguf",
                hint="name one of the files" if found else "",
            )
        return GgufFile(found[0])
    if place.is_dir():
        return HfFolder(place)
    if place.name.endswith((".safetensors", ".safetensors.index.json")) and place.is_file():
        return HfFolder(place.parent)
    return GgufFile(place)


def tokenizer_of(model: GgufFile | HfFolder) -> Tokenizer:
    """The tokenizer that comes with a model."""
    return tokenizer_from_gguf(model) if isinstance(model, GgufFile) else model.tokenizer()
