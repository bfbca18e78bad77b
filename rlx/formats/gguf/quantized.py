"""Quantised GGUF files: tensors are read, quantised and written one by one; the write is atomic.

with GgufFile("model-f16.gguf") as file:
    quantize_gguf(file, "model-q4.gguf", QuantizeOptions(QuantPreset.parse("Q4_K_M"), threads=2))
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import InputError, NumericsError
from rlx.formats.gguf import GgufFile
from rlx.formats.gguf.header import ValueType
from rlx.formats.gguf.writer import PackedTensor, write_gguf
from rlx.formats.imatrix import ImportanceMatrix
from rlx.formats.quant_presets import QuantPreset
from rlx.ir.quant.scheme import QuantScheme, decode, encode
from rlx.support.progress import Progress, silent
from rlx.support.records import dataclass

_SLAB = 1 << 24  # weights dequantised at once
_VERSION = 2  # of the block layouts; readers refuse others


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantise a file."""

    preset: QuantPreset
    threads: int = 1
    requantize: bool = False  # also weights that are quantised already
    overwrite: bool = False
    progress: Progress = silent
    imatrix: ImportanceMatrix | None = None  # weighs errors by the inputs of each weight


@dataclass(frozen=True)
class SourceTensor:
    """A tensor to write: its shape, its scheme, and a function that reads its stored array.

    `scheme` is None for integers, which are not quantised.
    """

    shape: tuple[int, ...]
    scheme: QuantScheme | None
    array: Callable[[], npt.NDArray[Any]]

    @property
    def packed(self) -> bool:
        return self.scheme is not None and not self.scheme.is_float


@dataclass(frozen=True)
class WrittenTensor:
    """One tensor before and after."""

    name: str
    shape: tuple[int, ...]
    before: str
    after: str
    nbytes: int


def quantize_gguf(
    file: GgufFile, out: str | os.PathLike[str], options: QuantizeOptions
) -> list[WrittenTensor]:
    """Write the model to `out` with quantised weights. Returns what became of each tensor."""
    sources = {
        name: SourceTensor(info.shape, info.scheme, partial(file.array, name))
        for name, info in file.tensors.items()
    }
    # the parts of a split model become one file
    metadata = {k: v for k, v in file.metadata.items() if not k.startswith("split.")}
    return write_quantized(out, metadata, sources, options, file.name, file.types)


def write_quantized(
    out: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    sources: Mapping[str, SourceTensor],
    options: QuantizeOptions,
    where: str,
    types: Mapping[str, ValueType] | None = None,
) -> list[WrittenTensor]:
    """Write a GGUF file of these tensors, under their GGUF names; `where` is for errors."""
    check_output(Path(out), options.overwrite)
    job = _Job(sources, options, where, _layers(metadata))
    job.check_requantize()
    job.check_imatrix()
    preset = options.preset
    named = {"general.file_type": preset.file_type, "general.quantization_version": _VERSION}
    if options.imatrix is not None:
        named |= _imatrix_metadata(options.imatrix)
    write_gguf(out, {**metadata, **named}, job.tensors(), types=types)
    return job.report


@dataclass
class _Job:
    """The tensors of one file, and the progress."""

    sources: Mapping[str, SourceTensor]
    options: QuantizeOptions
    where: str
    layers: int
    report: list[WrittenTensor] = field(default_factory=list)

    def scheme(self, name: str) -> QuantScheme | None:
        """The scheme that a tensor will have."""
        source, tied = self.sources[name], "output.weight" not in self.sources
        picked = self.options.preset.pick(name, source.shape, layers=self.layers, tied=tied)
        return source.scheme if picked is None or source.scheme is None else picked

    def check_requantize(self) -> None:
        """Refuse to quantise quantised weights again, unless asked to; then warn."""
        changed = {n: self.scheme(n) for n, s in self.sources.items() if s.packed}
        stored = {n: self.sources[n].scheme for n, s in changed.items() if s and not s.is_float}
        again = sorted({str(s) for n, s in stored.items() if s is not changed[n]})
        if again and not self.options.requantize:
            raise InputError(
                "the weights are quantised already", where=self.where, got=", ".join(again),
                expected="F32, F16 or BF16",
                hint="start from a float file, or give --requantize and lose some precision",
            )  # fmt: skip
        if again:
            warnings.warn(
                f"{self.where} is quantised already ({', '.join(again)}): "
                f"{self.options.preset} from the float weights would be better",
                stacklevel=4,
            )

    def importance(self, name: str) -> npt.NDArray[Any] | None:
        """The mean squares of the inputs of a weight; None where they are not known."""
        matrix = self.options.imatrix
        return None if matrix is None else matrix.importance(name, self.sources[name].shape)

    def check_imatrix(self) -> None:
        """Check that the importance matrix is one of this model, and there where it is needed."""
        matrix, lacking = self.options.imatrix, list[str]()
        schemes = {n: self.scheme(n) for n in self.sources}
        packed = {n: s for n, s in schemes.items() if s is not None and not s.is_float}
        packed = {n: s for n, s in packed.items() if s is not self.sources[n].scheme}
        lacking = [n for n in packed if self.importance(n) is None]
        needed = [n for n in lacking if packed[n].needs_importance]
        if needed:
            raise InputError(
                f"{packed[needed[0]]} needs an importance matrix", where=self.where,
                got=f"none for {_shown(needed)}",
                hint="--calibrate TEXT makes one, --imatrix FILE takes one",
            )  # fmt: skip
        if matrix is None:
            return
        unknown = [n for n in matrix.entries if n not in self.sources]
        if len(unknown) == len(matrix.entries):
            raise InputError(
                "the importance matrix is one of another model", where=matrix.where,
                got=_shown(unknown), expected=_shown([*self.sources]),
            )  # fmt: skip
        lacking = [n for n in lacking if n.startswith("blk.")]
        for what, names in (("no entry for", lacking), ("no weight named", unknown)):
            if names:
                warnings.warn(f"{matrix.where}: {what} {_shown(names)}", stacklevel=4)

    def tensors(self) -> dict[str, npt.NDArray[Any] | PackedTensor]:
        """What to write; each array is made when it is written."""
        found: dict[str, npt.NDArray[Any] | PackedTensor] = {}
        for name, source in self.sources.items():
            scheme = self.scheme(name)
            if scheme is None:
                found[name] = source.array()
            else:
                found[name] = PackedTensor(
                    source.shape, scheme, partial(self._quantize, name, scheme)
                )
        self._total, self._done = sum(t.nbytes for t in found.values()), 0
        return found

    def _quantize(self, name: str, scheme: QuantScheme) -> npt.NDArray[Any]:
        source = self.sources[name]
        assert source.scheme is not None
        array = source.array()
        if scheme is not source.scheme:
            try:
                array = requantize(
                    array, source.scheme, scheme, self.options.threads, self.importance(name)
                )
            except NumericsError as e:
                what = f"tensor {name!r}: {e.what}"
                raise NumericsError(
                    what, where=self.where, got=e.got, expected=e.expected, hint=e.hint
                ) from e
        self._done += array.nbytes
        self.options.progress("quantising", self._done, self._total)
        row = WrittenTensor(name, source.shape, str(source.scheme), str(scheme), array.nbytes)
        self.report.append(row)
        return array


def requantize(
    array: npt.NDArray[Any],
    before: QuantScheme,
    after: QuantScheme,
    threads: int = 1,
    importance: npt.NDArray[Any] | None = None,
) -> npt.NDArray[np.uint8]:
    """Stored rows [..., K or row_bytes] in another scheme, a slab at a time.

    `importance` [K], or [experts, K], weighs errors.
    """
    if importance is not None and importance.ndim > 1:
        parts = [
            requantize(part, before, after, threads, weights)
            for part, weights in zip(array, importance, strict=True)
        ]
        return np.stack(parts)
    rows = array.reshape(-1, array.shape[-1])
    columns = rows.shape[1] if before.is_float else before.row_elements(rows.shape[1])
    out = np.empty(after.packed_shape(len(rows), columns), np.uint8)
    step = max(1, _SLAB // max(columns, 1))
    for start in range(0, len(rows), step):
        slab = rows[start : start + step]
        dequantised = slab if before.is_float else decode(before, slab)
        made = encode(after, dequantised, importance=importance, threads=threads)
        out[start : start + step] = made.data
    if after.name == "F16" and not np.isfinite(out.view(np.float16)).all():
        raise NumericsError(
            "f16 cannot hold these weights",
            where="quant",
            expected="at most 65504",
            hint="BF16 can",
        )
    return out.reshape(*array.shape[:-1], out.shape[-1])


def _imatrix_metadata(matrix: ImportanceMatrix) -> dict[str, Any]:
    """What llama.cpp's quantiser says about it."""
    return {
        "quantize.imatrix.file": Path(matrix.where).name,
        "quantize.imatrix.dataset": Path(matrix.datasets[0]).name if matrix.datasets else "",
        "quantize.imatrix.entries_count": len(matrix.entries),
        "quantize.imatrix.chunks_count": matrix.chunks,
    }


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if names[3:] else ""
    return ", ".join(names[:3]) + more


def _layers(metadata: Mapping[str, Any]) -> int:
    count = metadata.get(f"{metadata.get('general.architecture')}.block_count", 0)
    return count if isinstance(count, int) else 0


def check_output(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise InputError(
            "the file is there already", where=os.fspath(out), hint="--force replaces it"
        )
    if not out.absolute().parent.is_dir():
        raise InputError("no such folder", where=os.fspath(out.absolute().parent))
