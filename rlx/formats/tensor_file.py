"""What files of tensors have in common, whatever their format: named arrays in mapped memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import numpy.typing as npt

from rlx.errors import InputError
from rlx.formats.mapped import MappedFile
from rlx.formats.names import close_names
from rlx.formats.tensor import TensorInfo


class TensorFile:
    """Tensors by name, in one file or several parts. A format reads its headers into these."""

    path: Path
    tensors: dict[str, TensorInfo]
    _files: list[MappedFile]

    @property
    def name(self) -> str:
        """The file, for messages."""
        return os.fspath(self.path)

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return [f.path for f in self._files]

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor as it is stored: packed rows as u8, plain ones by their type; read-only."""
        info = self.tensors.get(name)
        if info is None:
            hint = close_names(name, self.tensors)
            raise InputError("no such tensor", where=self.name, got=repr(name), hint=hint)
        if not self._files:
            raise InputError("the file is closed", where=self.name)
        return self._files[info.part].view(info.offset, info.stored_shape, info.dtype)

    def release(self) -> None:
        """Gives memory back to the system; arrays stay valid and are read again when used."""
        for file in self._files:
            file.release()

    def close(self) -> None:
        """Lets go of the files; arrays handed out stay valid."""
        self._files = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self.tensors)} tensors)"
