"""Hugging Face model folders: config.json, safetensors weights, tokenizer files.

with HfFolder("folder") as model:
    model.config["hidden_size"]
    model.array("model.embed_tokens.weight")
    model.tokenizer().encode("Hello")
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import numpy.typing as npt

from rlx.errors import FormatError, InputError
from rlx.formats.json_file import read_object
from rlx.formats.safetensors import SafetensorsFile
from rlx.formats.tensor_file import TensorInfo
from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer.from_json import tokenizer_from_file

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class HfFolder:
    """A model folder as `save_pretrained` writes it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise InputError("no such folder", where=self.name)
        if not (self.path / "config.json").is_file():
            raise FormatError("not a model folder", where=self.name, expected="a config.json in it")
        self.config: dict[str, Any] = read_object(self.path / "config.json")
        self.weights = SafetensorsFile(weights_file(self.path))

    @property
    def name(self) -> str:
        """The folder, for messages."""
        return os.fspath(self.path)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.weights.tensors

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor, mapped from its file; read-only."""
        return self.weights.array(name)

    def json(self, name: str) -> dict[str, Any]:
        """A settings file of the folder, such as generation_config.json; empty where absent."""
        path = self.path / name
        return read_object(path) if path.is_file() else {}

    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise FormatError(
                "no tokenizer.json in the folder",
                where=self.name,
                got=", ".join(p.name for p in sorted(self.path.glob("*token*"))) or "no tokenizer",
                hint="transformers writes one: AutoTokenizer.from_pretrained(folder)"
                ".save_pretrained(folder)",
            )
        return tokenizer_from_file(path)

    @property
    def files(self) -> list[Path]:
        """The files that hold the weights."""
        return self.weights.files

    def release(self) -> None:
        """Drop resident pages; arrays stay valid and are read again when used."""
        self.weights.release()

    def close(self) -> None:
        """Close the files; arrays handed out stay valid."""
        self.weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = self.config.get("model_type", "unknown type")
        return f"HfFolder({self.name!r}, {kind}, {len(self.tensors)} tensors)"


def weights_file(folder: Path) -> Path:
    """The file with the weights, or the index of its shards."""
    for name in (_INDEX, _WEIGHTS):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    raise FormatError(
        "no safetensors weights in the folder",
        where=os.fspath(folder),
        got=", ".join(p.name for p in (found or pickled)[:4]) or "none",
        expected=f"{_WEIGHTS} or {_INDEX}",
        hint="pickled weights can run code and are not read: save them as safetensors first"
        if pickled and not found
        else "",
    )
