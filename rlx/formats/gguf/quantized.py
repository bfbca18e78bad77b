"""Model files with smaller weights: tensors read one by one, packed, written whole or not at all.

with GgufFile("model-f16.gguf") as file:
    quantize_gguf(file, "model-q4.gguf", Order(Mixture.parse("Q4_K_M"), threads=2))
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import InputError, NumericsError
from rlx.formats.gguf import GgufFile
from rlx.formats.gguf.values import ValueType
from rlx.formats.gguf.writer import PackedTensor, write_gguf
from rlx.formats.quant_presets import Mixture
from rlx.formats.wheel import Progress, silent
from rlx.ir.quant import QuantScheme, decode, encode
from rlx.records import dataclass

_SLAB = 1 << 24  # weights that are opened at once
_VERSION = 2  # of the block layouts; readers refuse others


@dataclass(frozen=True)
class Order:
    """What is to be made, and how."""

    mixture: Mixture
    threads: int = 1
    requantize: bool = False  # also what is packed already
    overwrite: bool = False
    progress: Progress = silent


@dataclass(frozen=True)
class Source:
    """A tensor to write: its shape, how it is stored, and its stored array when it is asked for.

    `scheme` is None for numbers that are no floats; they stay as they are.
    """

    shape: tuple[int, ...]
    scheme: QuantScheme | None
    array: Callable[[], npt.NDArray[Any]]

    @property
    def packed(self) -> bool:
        return self.scheme is not None and not self.scheme.is_float


@dataclass(frozen=True)
class Written:
    """What became of one tensor."""

    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    nbytes: int


def quantize_gguf(file: GgufFile, out: str | os.PathLike[str], order: Order) -> list[Written]:
    """Writes the model to `out` with its weights packed; what became of each tensor."""
    sources = {
        name: Source(info.shape, info.scheme, partial(file.array, name))
        for name, info in file.tensors.items()
    }
    # the parts of a split model become one file
    metadata = {k: v for k, v in file.metadata.items() if not k.startswith("split.")}
    return write_quantized(out, metadata, sources, order, file.name, file.types)


def write_quantized(
    out: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    sources: Mapping[str, Source],
    order: Order,
    where: str,
    types: Mapping[str, ValueType] | None = None,
) -> list[Written]:
    """A GGUF file of these tensors, under their GGUF names; `where` is their origin, for errors."""
    _require_free(Path(out), order.overwrite)
    work = _Work(sources, order, where, _layers(metadata))
    work.require_plain()
    mixture = order.mixture
    named = {"general.file_type": mixture.file_type, "general.quantization_version": _VERSION}
    write_gguf(out, {**metadata, **named}, work.tensors(), types=types)
    return work.report


@dataclass
class _Work:
    """The tensors of one file, and how far they are."""

    sources: Mapping[str, Source]
    order: Order
    where: str
    layers: int
    report: list[Written] = field(default_factory=list)

    def scheme(self, name: str) -> QuantScheme | None:
        """The scheme that a tensor will have."""
        source, tied = self.sources[name], "output.weight" not in self.sources
        picked = self.order.mixture.pick(name, source.shape, layers=self.layers, tied=tied)
        return source.scheme if picked is None or source.scheme is None else picked

    def require_plain(self) -> None:
        """What was rounded once is not rounded again without a word."""
        changed = {n: self.scheme(n) for n, s in self.sources.items() if s.packed}
        stored = {n: self.sources[n].scheme for n, s in changed.items() if s and not s.is_float}
        again = sorted({str(s) for n, s in stored.items() if s is not changed[n]})
        if again and not self.order.requantize:
            raise InputError(
                "the weights are quantised already", where=self.where, got=", ".join(again),
                expected="F32, F16 or BF16",
                hint="start from a file of floats, or say --requantize and lose a little more",
            )  # fmt: skip
        if again:
            warnings.warn(
                f"{self.where} is quantised already ({', '.join(again)}): "
                f"{self.order.mixture} made of its floats would be better",
                stacklevel=4,
            )

    def tensors(self) -> dict[str, npt.NDArray[Any] | PackedTensor]:
        """What to write; arrays are made when their turn comes."""
        found: dict[str, npt.NDArray[Any] | PackedTensor] = {}
        for name, source in self.sources.items():
            scheme = self.scheme(name)
            if scheme is None:
                found[name] = source.array()
            else:
                found[name] = PackedTensor(source.shape, scheme, partial(self._make, name, scheme))
        self._total, self._done = sum(t.nbytes for t in found.values()), 0
        return found

    def _make(self, name: str, scheme: QuantScheme) -> npt.NDArray[Any]:
        source = self.sources[name]
        assert source.scheme is not None
        array = source.array()
        if scheme is not source.scheme:
            try:
                array = repacked(array, source.scheme, scheme, self.order.threads)
            except NumericsError as e:
                what = f"tensor {name!r}: {e.what}"
                raise NumericsError(
                    what, where=self.where, got=e.got, expected=e.expected, hint=e.hint
                ) from e
        self._done += array.nbytes
        self.order.progress("quantising", self._done, self._total)
        row = Written(name, source.shape, str(source.scheme), str(scheme), array.nbytes)
        self.report.append(row)
        return array


def repacked(
    array: npt.NDArray[Any], before: QuantScheme, after: QuantScheme, threads: int = 1
) -> npt.NDArray[np.uint8]:
    """Stored rows [..., K or row_bytes] packed anew, some at a time."""
    rows = array.reshape(-1, array.shape[-1])
    columns = rows.shape[1] if before.is_float else before.row_elements(rows.shape[1])
    out = np.empty(after.packed_shape(len(rows), columns), np.uint8)
    step = max(1, _SLAB // max(columns, 1))
    for start in range(0, len(rows), step):
        slab = rows[start : start + step]
        opened = slab if before.is_float else decode(before, slab)
        out[start : start + step] = encode(after, opened, threads=threads).data
    if after.name == "F16" and not np.isfinite(out.view(np.float16)).all():
        raise NumericsError(
            "f16 cannot hold these weights",
            where="quant",
            expected="at most 65504",
            hint="BF16 can",
        )
    return out.reshape(*array.shape[:-1], out.shape[-1])


def _layers(metadata: Mapping[str, Any]) -> int:
    count = metadata.get(f"{metadata.get('general.architecture')}.block_count", 0)
    return count if isinstance(count, int) else 0


def _require_free(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise InputError(
            "the file is there already", where=os.fspath(out), hint="--force replaces it"
        )
    if not out.absolute().parent.is_dir():
        raise InputError("no such folder", where=os.fspath(out.absolute().parent))
