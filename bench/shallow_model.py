"""A GGUF model with fewer layers: the first ones of a file, and as much of its vocabulary.

The time of a token is that of layers and head. Where both are cut by the same factor, a step of the
shallow model is that factor of a step of the whole one, and a long context is filled sooner.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import InputError
from rlx.formats.gguf import GgufFile, PackedTensor, write_gguf
from rlx.formats.tensor_file import TensorInfo

_LAYER = re.compile(r"blk\.(\d+)\.")
_PER_WORD = ("token_embd.", "output.weight", "output.bias")  # tensors with a row for each word


def write_shallow_model(source: Path, target: Path, layers: int) -> None:
    """The first `layers` layers of `source`, and the part of its vocabulary that they are."""
    with GgufFile(source) as file:
        arch = file.need("general.architecture", str)
        depth = file.need(f"{arch}.block_count", int)
        if not 0 < layers <= depth:
            raise InputError(
                "no such number of layers", where=str(source), got=str(layers),
                expected=f"1 to {depth}",
            )  # fmt: skip
        words = file.tensors["token_embd.weight"].shape[0] * layers // depth
        metadata = _cut_vocabulary(dict(file.metadata), words)
        metadata |= {f"{arch}.block_count": layers, f"{arch}.vocab_size": words}
        tensors = {
            name: _rows(file, name, info, words if name.startswith(_PER_WORD) else None)
            for name, info in file.tensors.items()
            if _layer(name) < layers
        }
        write_gguf(target, metadata, tensors, types=file.types)


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else 0


def _rows(file: GgufFile, name: str, info: TensorInfo, count: int | None) -> Any:
    """A tensor as it lies in the file, or its first rows."""
    data = file.array(name)[:count]
    if info.scheme is None or not info.packed:
        return data
    return PackedTensor((len(data), *info.shape[1:]), info.scheme, data)


def _cut_vocabulary(metadata: dict[str, Any], words: int) -> dict[str, Any]:
    """The first words; those that merge into others are not needed, nor are special ones."""
    key = "tokenizer.ggml."
    for name in ("tokens", "token_type", "scores"):
        if f"{key}{name}" in metadata:
            values = metadata[f"{key}{name}"][:words]
            metadata[f"{key}{name}"] = values if isinstance(values, np.ndarray) else list(values)
    if f"{key}merges" in metadata:
        metadata[f"{key}merges"] = list(metadata[f"{key}merges"][:1])
    for name, value in metadata.items():
        if name.startswith(key) and name.endswith("_token_id") and value >= words:
            metadata[name] = words - 1
    return metadata
