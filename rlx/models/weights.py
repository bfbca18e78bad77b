"""Weights by one set of names, whatever file they are in.

Names are those of GGUF (`blk.0.attn_q.weight`); a Hugging Face folder's are translated, the table
of each architecture in its own page. Arrays are mapped from disk and not copied, unless a weight is
made of several tensors: then it is made when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rlx.errors import FormatError, InputError, UnsupportedError, close_names
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import DequantizedFolder, HfFolder
from rlx.formats.quant_presets import QuantPreset
from rlx.formats.tensor_file import TensorInfo
from rlx.ir.dtype import DType
from rlx.ir.op import Array
from rlx.ir.quant.scheme import QuantScheme
from rlx.runtime.params import Deferred
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Derived:
    """A weight made of tensors of the file: `make(config, *arrays)`.

    With `by_expert` each expert is made of the same entry of all tensors, when it is first used.
    `dims` are those of the tensors, in fields of the configuration.
    """

    names: tuple[str, ...]
    make: Callable[..., Array]
    scheme: QuantScheme | None = None
    by_expert: bool = False
    dims: tuple[str, ...] = ()


Source = str | Derived
# our name → the file's: {i} is the layer, {e} an expert (all of them are one weight); a tuple where
# files differ
Names = Mapping[str, Source | tuple[Source, ...]]


@dataclass(frozen=True)
class Weight:
    """One tensor, [out, in]."""

    name: str
    array: Any  # an array, or a Deferred one
    shape: tuple[int, ...]
    scheme: QuantScheme | None  # None: floats
    wanted: QuantScheme | None = None  # floats are packed to this when the model is prepared


class Weights:
    """The tensors of a model file. Float matrices of layers are cast to `element` if given, those
    that `quant` picks are packed once."""

    def __init__(
        self,
        file: GgufFile | HfFolder,
        names: Names | None = None,
        transposed: tuple[str, ...] = (),
        element: DType | None = None,
        config: Any = None,
        quant: QuantPreset | None = None,
        changes: Mapping[str, Callable[[Array], Array]] | None = None,
    ) -> None:
        """`changes` are functions of float weights by name: merged adapters."""
        self._changes = changes or {}
        self.file, self._config, self._quant = file, config, quant
        self.is_gguf = isinstance(file, GgufFile)
        self._names, self._element = names or {}, element
        self._without: frozenset[str] = frozenset() if config is None else config.without
        self._transposed = () if self.is_gguf else transposed  # stored as [in, out]
        self.used: dict[str, Weight] = {}

    def __contains__(self, name: str) -> bool:
        if self._without and (name in self._without or _pattern(name) in self._without):
            return False
        return any(self._has(s) for s in self._sources(name))

    def get(self, name: str) -> Weight:
        """The weight `name`; the error for a missing one names similar tensors."""
        found = self.used.get(name)
        if found is None:
            sources = self._sources(name)
            source = next((s for s in sources if self._has(s)), sources[0])
            if isinstance(source, Derived):
                found = self._derived(name, source)
            elif "{e}" in source:
                found = self._stacked(name, source)
            else:
                found = self._plain(name, source)
            found = self.used[name] = self._to_be_packed(self._changed(found))
        return found

    def _plain(self, name: str, stored: str) -> Weight:
        info = self._info(stored)
        scheme = info.scheme if info.packed else None
        transposed = bool(self._transposed) and name.endswith(self._transposed)
        shape = info.shape[::-1] if transposed else info.shape
        dtype = info.dtype
        if self._element is not None and scheme is None and _is_matrix_of_layer(name, shape):
            dtype = self._element

        def read() -> Array:
            array: Array = self.file.array(stored)
            array = array.T if transposed else array
            return array if dtype is info.dtype else array.astype(dtype.numpy)

        computed = isinstance(self.file, DequantizedFolder) and stored in self.file.computed
        return Weight(name, Deferred(shape, dtype, read) if computed else read(), shape, scheme)

    def _changed(self, weight: Weight) -> Weight:
        change = self._changes.get(weight.name)
        if change is None:
            return weight
        if weight.scheme is not None:
            raise UnsupportedError(
                "an adapter cannot be merged into quantised weights", where=self.file.name,
                got=f"{weight.name}: {weight.scheme}", expected="floats",
                hint="leave out merge=True: the adapter then runs beside them",
            )  # fmt: skip
        array = weight.array
        changed = Deferred(weight.shape, DType.of(array.dtype), lambda: change(array))
        return replace(weight, array=changed)

    def _to_be_packed(self, weight: Weight) -> Weight:
        """The weight, with the scheme that `quant` picks for it."""
        if self._quant is None:
            return weight
        tied, layers = "output.weight" not in self, self._config.layers
        picked = self._quant.pick(weight.name, weight.shape, layers=layers, tied=tied)
        if picked is None or picked is weight.scheme or picked.is_float:
            return weight
        if weight.scheme is None:
            return replace(weight, wanted=picked)
        raise InputError(
            "a weight is quantised already", where=self.file.name,
            got=f"{weight.name}: {weight.scheme}", expected=f"floats, to make {self._quant} of",
            hint="load it without quant=, or write another file: rlx quantize --requantize",
        )  # fmt: skip

    def _stacked(self, name: str, stored: str) -> Weight:
        """The weights of all experts as one."""
        first, count = self._info(stored.replace("{e}", "0")), 0
        while stored.replace("{e}", str(count)) in self.file.tensors:
            count += 1
        names = [stored.replace("{e}", str(e)) for e in range(count)]
        shape = (count, *first.shape)
        array = Deferred(shape, first.dtype, lambda: np.stack([self.file.array(n) for n in names]))
        return Weight(name, array, shape, None)

    def _derived(self, name: str, source: Derived) -> Weight:
        arrays = [self.file.array(self._info(n).name) for n in source.names]
        make = partial(source.make, self._config)
        array: Any = make(*(a[:1] for a in arrays)) if source.by_expert else make(*arrays)
        if source.by_expert:
            shape = (len(arrays[0]), *array.shape[1:])
            array = Deferred(shape, DType.of(array.dtype), lambda: make(*arrays))
        shape = array.shape
        if source.scheme is not None:
            shape = (*shape[:-1], source.scheme.row_elements(shape[-1]))
        return Weight(name, array, shape, source.scheme)

    def _has(self, source: Source) -> bool:
        names = source.names if isinstance(source, Derived) else (source.replace("{e}", "0"),)
        return all(n in self.file.tensors for n in names)

    def _info(self, stored: str) -> TensorInfo:
        info: TensorInfo | None = self.file.tensors.get(stored)
        if info is None:
            raise FormatError(
                "a weight is missing", where=self.file.name, expected=stored,
                hint=close_names(stored, self.file.tensors),
            )  # fmt: skip
        return info

    def find(self, name: str) -> Weight | None:
        return self.get(name) if name in self else None

    def _sources(self, name: str) -> tuple[Source, ...]:
        """What the weight may be stored as."""
        if self.is_gguf:
            return (name,)
        found = self._names.get(_pattern(name), name)
        several = found if isinstance(found, tuple) else (found,)
        layer = name.partition(".")[2].partition(".")[0]
        return tuple(of_layer(s, layer) for s in several)


def named(
    layer: str, parts: Mapping[str, str], ends: tuple[str, ...] = ("weight", "bias")
) -> dict[str, str]:
    """Names of weights of a layer, which the file calls `layer`: ours → the file's."""
    return {
        f"blk.{{i}}.{ours}.{end}": f"{layer}.{theirs}.{end}"
        for ours, theirs in parts.items()
        for end in ends
    }


def inside(part: str, names: Names) -> Names:
    """Names of a model that may be a `part` of another: `model.x` or `model.part.x`."""
    found: dict[str, tuple[Source, ...]] = {}
    for ours, sources in names.items():
        several = sources if isinstance(sources, tuple) else (sources,)
        found[ours] = (*several, *(_renamed(s, "model.", f"model.{part}.") for s in several))
    return found


def _renamed(source: Source, old: str, new: str) -> Source:
    if isinstance(source, str):
        return source.replace(old, new, 1)
    return replace(source, names=tuple(n.replace(old, new, 1) for n in source.names))


def _pattern(name: str) -> str:
    """blk.{i}.part of blk.3.part"""
    head, _, rest = name.partition(".")
    return f"blk.{{i}}.{rest.partition('.')[2]}" if head == "blk" else name


def of_layer(source: Source, layer: str) -> Source:
    """A source in a layer."""
    return _renamed(source, "{i}", layer)


def _is_matrix_of_layer(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.startswith("blk.")
