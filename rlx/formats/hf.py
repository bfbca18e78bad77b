"""Hugging Face model folders: config.json, safetensors weights, tokenizer files.

with HfFolder("folder") as model:
    model.config["hidden_size"]
    model.array("model.embed_tokens.weight")
    model.tokenizer().encode("Hello")
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError, InputError, UnsupportedError
from rlx.formats.json_file import read_object
from rlx.formats.safetensors import SafetensorsFile
from rlx.formats.tensor_file import TensorInfo, scheme_of
from rlx.formats.tokenizer import Tokenizer
from rlx.formats.tokenizer.from_json import tokenizer_from_file
from rlx.ir.dtype import BY_NAME, DType

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


Floats = npt.NDArray[np.float32]
_FLOATS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class DequantizedFolder(HfFolder):
    """The folder with quantised matrices read as floats.

    A matrix that the folder stores as integers and scales appears under its usual name
    (`model.layers.0.mlp.up_proj.weight`) and is computed when it is asked for. The tensors that it
    is made of are not listed.
    """

    def __init__(self, folder: HfFolder) -> None:
        self.path, self.config, self.weights = folder.path, folder.config, folder.weights
        self._tensors = dict(folder.tensors)
        self._makers: dict[str, Callable[[], Floats]] = {}
        self._dtype = _model_dtype(folder)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    @property
    def computed(self) -> Collection[str]:
        """The names of computed matrices."""
        return self._makers.keys()

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor: computed, or mapped from its file."""
        make = self._makers.get(name)
        return super().array(name) if make is None else make().astype(self._dtype.numpy)

    def stored(self, name: str, dtypes: str, shape: tuple[int, ...] | None = None) -> Any:
        """A tensor that a matrix is made of; FormatError if type or shape is another."""
        info = self.weights.tensors.get(name)
        if info is None:
            self.fail("a tensor of a quantised matrix is missing", expected=name)
        if info.dtype.name not in dtypes.split():
            self.fail(f"{name} has the wrong type", got=info.dtype, expected=dtypes)
        if shape is not None and info.shape != shape:
            self.fail(f"{name} has the wrong shape", got=info.shape, expected=shape)
        return self.weights.array(name)

    def replace(
        self, name: str, shape: tuple[int, ...], parts: Iterable[str], make: Callable[[], Floats]
    ) -> None:
        """List the matrix `name`, made by `make`, instead of its `parts`."""
        for part in parts:
            self._tensors.pop(part, None)
        size = math.prod(shape) * self._dtype.bytes
        self._tensors[name] = TensorInfo(name, shape, self._dtype, scheme_of(self._dtype), 0, size)
        self._makers[name] = make

    def drop(self, *endings: str) -> None:
        """Leave out tensors that say how activations or the KV cache are rounded: here they are
        not."""
        for name in [n for n in self._tensors if n.endswith(endings)]:
            del self._tensors[name]

    def fail(self, what: str, **details: Any) -> NoReturn:
        raise FormatError(what, where=self.name, **details)


def _model_dtype(folder: HfFolder) -> DType:
    """What the float weights of the model are: computed matrices get the same type."""
    text = folder.config.get("text_config")  # of a multimodal model
    places = (folder.config, text if isinstance(text, dict) else {})
    found = (p.get(key) for p in places for key in ("dtype", "torch_dtype"))
    said = next((name for name in found if name), "bfloat16")
    if said not in _FLOATS:
        raise UnsupportedError(
            "dtype of a quantised model", where=folder.name, got=repr(said)[:40],
            expected=", ".join(_FLOATS),
        )  # fmt: skip
    return BY_NAME[_FLOATS[said]]


def unpack_bits(words: npt.NDArray[Any], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """The first `count` unsigned numbers of each row of 32-bit words, packed without gaps from the
    lowest bit on."""
    rows = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return rows[..., :count]
    stream = np.unpackbits(rows, axis=-1, bitorder="little", count=count * bits)
    places = stream.reshape(*stream.shape[:-1], count, bits)
    return np.packbits(places, axis=-1, bitorder="little")[..., 0]


def unpack_fp4(codes: npt.NDArray[np.uint8]) -> Floats:
    """E2M1 numbers, two in a byte, the low one first."""
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    floats: Floats = pairs.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return floats


def spread(scales: Floats, shape: tuple[int, int], block: tuple[int, int]) -> Floats:
    """One scale for each element: `block` elements share one."""
    return scales.repeat(block[0], axis=0)[: shape[0]].repeat(block[1], axis=1)[:, : shape[1]]
