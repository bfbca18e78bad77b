"""Weights by one set of names, whatever file they are in.

Names are those of GGUF (`blk.0.attn_q.weight`); a Hugging Face folder's are translated, the table
of each architecture in its own file. Arrays are mapped from disk, never copied here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlx.errors import FormatError
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.formats.names import close_names
from rlx.formats.tensor import TensorInfo
from rlx.ir.dtype import DType
from rlx.ir.op import Array
from rlx.ir.quant import QuantScheme

Names = Mapping[str, str]  # our name → the file's, with {i} for the layer


@dataclass(frozen=True)
class Weight:
    """One tensor: rows of out features, last axis the in features."""

    name: str
    array: Array
    shape: tuple[int, ...]
    scheme: QuantScheme | None  # None: plain elements

    @property
    def packed(self) -> bool:
        return self.scheme is not None


class Weights:
    """The tensors of a model file; plain matrices of layers are cast to `element` if given."""

    def __init__(
        self,
        file: GgufFile | HfFolder,
        names: Names | None = None,
        transposed: tuple[str, ...] = (),
        element: DType | None = None,
    ) -> None:
        self.file = file
        self.is_gguf = isinstance(file, GgufFile)
        self._names, self._element = names or {}, element
        self._transposed = () if self.is_gguf else transposed  # kept as [in, out] in the file
        self.used: dict[str, Weight] = {}

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self.file.tensors

    def get(self, name: str) -> Weight:
        """The weight `name`; an error names what the file has instead."""
        found = self.used.get(name)
        if found is None:
            stored = self._stored(name)
            info: TensorInfo | None = self.file.tensors.get(stored)
            if info is None:
                raise FormatError(
                    "a weight is missing", where=self.file.name, expected=stored,
                    hint=close_names(stored, self.file.tensors),
                )  # fmt: skip
            scheme = info.scheme if info.packed else None
            array, shape = self.file.array(stored), info.shape
            if self._transposed and name.endswith(self._transposed):
                array, shape = array.T, shape[::-1]
            if self._element is not None and scheme is None and _is_matrix_of_layer(name, shape):
                array = array.astype(self._element.numpy)
            found = Weight(name, array, shape, scheme)
            self.used[name] = found
        return found

    def find(self, name: str) -> Weight | None:
        return self.get(name) if name in self else None

    def _stored(self, name: str) -> str:
        if self.is_gguf:
            return name
        head, _, rest = name.partition(".")
        if head != "blk":
            return self._names.get(name, name)
        layer, _, part = rest.partition(".")
        pattern = self._names.get(f"blk.{{i}}.{part}")
        return pattern.replace("{i}", layer) if pattern else name


def _is_matrix_of_layer(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.startswith("blk.")
