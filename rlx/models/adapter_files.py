"""Readers of LoRA adapters: PEFT's folders (adapter_config.json, adapter_model.safetensors) and
llama.cpp's GGUF files. Hostile until checked."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import FormatError, InputError, OptionError, UnsupportedError, close_names
from rlx.formats.gguf import GgufFile
from rlx.formats.json_file import read_object
from rlx.formats.safetensors import SafetensorsFile
from rlx.ir.op import Array
from rlx.models.adapters import Adapter, LowRank
from rlx.models.config_gguf import GGUF_NAMES
from rlx.models.model_file import ModelFile
from rlx.models.rope_tables import pairs_apart, pairs_together
from rlx.models.weights import Weights

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
_PEFT = re.compile(
    rf"(?:{re.escape(PEFT_PREFIX)})?(.+)\.lora_(?:([AB])(?:\.default)?\.weight|magnitude_vector)"
)
_GGUF = re.compile(r"(.+\.weight)\.lora_([ab])")
_MOST_RANK = 1 << 12
# of which GGUF keeps the rows of q and k in another order
_PAIRED = ("granite", "llama", "mistral", "mixtral")
_TURNED = ("attn_q.weight", "attn_k.weight")
# of which it keeps heads of values in another order, in rows or in columns
_SPREAD = ("attn_qkv.weight", "attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight",
           "ssm_out.weight")  # fmt: skip

Scale = Callable[[str, int], float]  # of a tensor's name and its rank


def add_adapter(
    adapters: dict[str, Adapter],
    path: str | os.PathLike[str],
    model: ModelFile,
    name: str | None = None,
) -> str:
    """Read an adapter into `adapters`; returns its name, the file's own unless given."""
    place = Path(path).resolve()
    name = (place.stem if place.is_file() else place.name) if name is None else name
    if name in adapters:
        raise OptionError("an adapter of that name is loaded", where="name", got=name)
    made = open_adapter(path, model)
    if made.has_magnitudes:
        raise UnsupportedError(
            "an adapter with DoRA cannot run beside the weights", where=str(place),
            hint="merge=True adds it to float weights",
        )  # fmt: skip
    adapters[name] = made
    return name


def open_adapter(path: str | os.PathLike[str], model: ModelFile) -> Adapter:
    """Read an adapter; an error unless it fits the model."""
    place = Path(path)
    if place.is_dir():
        if not (place / _CONFIG).is_file():
            raise FormatError("not an adapter folder", where=str(place), expected=_CONFIG)
        config = read_object(place / _CONFIG)
        with SafetensorsFile(place / _TENSORS) as tensors:
            found = _Reader(model, place, tensors, is_gguf=False).read(
                _PEFT, hf_names(model), _peft_scale(config, str(place))
            )
        if any((p.magnitude is None) == bool(config.get("use_dora")) for p in found.parts.values()):
            raise FormatError(
                "lengths of rows that the configuration does not say", where=str(place),
                got=f"use_dora {config.get('use_dora')}", expected="magnitudes of all, or of none",
            )  # fmt: skip
        return found
    if not place.is_file():
        raise InputError("no such adapter", where=str(place), expected="a folder or a GGUF file")
    with GgufFile(place) as file:
        return _Reader(model, place, file, is_gguf=True).read(
            _GGUF, {}, _gguf_scale(file, model.config.arch)
        )


class _Reader:
    def __init__(
        self, model: ModelFile, place: Path, file: GgufFile | SafetensorsFile, is_gguf: bool
    ) -> None:
        self.model, self.place, self.file, self.is_gguf = model, place, file, is_gguf
        self.weights: Weights = model.weights()

    def read(self, pattern: re.Pattern[str], ours: Mapping[str, str], scale: Scale) -> Adapter:
        """The adapter in a file; `pattern` splits names of tensors, `ours` translates those of
        weights."""
        pairs: dict[str, dict[str, str]] = {}
        for tensor in self.file.tensors:
            found = pattern.fullmatch(tensor)
            if found is None:
                raise UnsupportedError(
                    "a tensor that is not half of a low-rank pair", where=str(self.place),
                    got=tensor, expected="lora_A and lora_B of matrices",
                )  # fmt: skip
            half = found[2].lower() if found[2] else "magnitude"
            pairs.setdefault(found[1], {})[half] = tensor
        if not pairs:
            raise FormatError("an adapter without tensors", where=str(self.place))
        parts = {}
        for theirs, pair in pairs.items():
            name = self._name(theirs, ours)
            if not pair.keys() >= {"a", "b"}:
                raise FormatError(
                    "half of a low-rank pair is missing", where=str(self.place),
                    got=", ".join(pair.values()),
                )  # fmt: skip
            parts[name] = self._part(theirs, name, pair, scale)
        return Adapter(self.place, parts)

    def _name(self, theirs: str, ours: Mapping[str, str]) -> str:
        """Our name of an adapted weight."""
        name = theirs if self.is_gguf else ours.get(f"{theirs}.weight", "")
        known = (n.removesuffix(".weight") for n in ours)
        if name not in self.weights:
            raise FormatError(
                "an adapter of a weight that the model has not", where=str(self.place), got=theirs,
                hint=close_names(theirs, known),
            )  # fmt: skip
        if len(self.weights.get(name).shape) != 2 or not name.startswith(("blk.", "output.")):
            raise UnsupportedError(
                "only matrices of layers and the head are adapted",
                where=str(self.place),
                got=theirs,
            )
        return name

    def _part(self, theirs: str, name: str, pair: Mapping[str, str], scale: Scale) -> LowRank:
        a, b = self._matrix(pair["a"]), self._matrix(pair["b"])
        rank, (out, inner) = len(a), self.weights.get(name).shape
        if a.shape != (rank, inner) or b.shape != (out, rank) or not 0 < rank <= _MOST_RANK:
            raise FormatError(
                "an adapter does not fit its weight", where=f"{self.place}: {theirs}",
                got=f"{list(a.shape)} and {list(b.shape)}",
                expected=f"[rank, {inner}] and [{out}, rank]",
            )  # fmt: skip
        b = b.astype(np.float32) * np.float32(scale(theirs, rank))
        magnitude = pair.get("magnitude")
        lengths = None if magnitude is None else self._lengths(name, magnitude, out)
        return LowRank(a.astype(np.float32), self._rows(name, b), lengths)

    def _lengths(self, name: str, tensor: str, out: int) -> Array:
        found = self._floats(tensor, rank=1).astype(np.float32)
        if len(found) != out:
            raise FormatError(
                "an adapter does not fit its weight", where=f"{self.place}: {tensor}",
                got=len(found), expected=out,
            )  # fmt: skip
        rows: Array = self._rows(name, found[:, None])[:, 0]
        return rows

    def _matrix(self, tensor: str) -> Array:
        return self._floats(tensor, rank=2)

    def _floats(self, tensor: str, rank: int) -> Array:
        info = self.file.tensors[tensor]
        if info.packed or not info.dtype.is_float or len(info.shape) != rank:
            raise UnsupportedError(
                f"an adapter's tensor is a {'matrix' if rank == 2 else 'vector'} of floats",
                where=str(self.place), got=f"{tensor}: {info.dtype} {list(info.shape)}",
            )  # fmt: skip
        return self.file.array(tensor)

    def _rows(self, name: str, b: Array) -> Array:
        """Rows in the order of the model's file."""
        if self.is_gguf == self.weights.is_gguf:
            return b
        return in_other_order(self.model, name, b, to_gguf=not self.is_gguf, where=str(self.place))


def in_other_order(model: ModelFile, name: str, b: Array, *, to_gguf: bool, where: str) -> Array:
    """The rows of a weight's update in the order of GGUF, or from it in that of folders."""
    c = model.config
    if c.arch.startswith("qwen3_5") and name.endswith(_SPREAD):
        raise UnsupportedError(
            "GGUF keeps the heads of this weight in another order", where=where,
            got=name, hint="take model and adapter both from GGUF, or both from folders",
        )  # fmt: skip
    if c.arch not in _PAIRED or not name.endswith(_TURNED):
        return b
    heads = c.heads if "attn_q" in name else c.kv_heads
    return pairs_together(b, heads) if to_gguf else pairs_apart(b, heads)


def hf_modules(model: ModelFile) -> dict[str, str]:
    """Our names of weights → Hugging Face's names of the modules that have them, as they are in the
    model's folder; what a weight is made of otherwise is left out."""
    found: dict[str, str] = {}
    is_gguf = isinstance(model.file, GgufFile)
    for theirs, ours in _translated(model):
        if ours not in found and (is_gguf or theirs in model.file.tensors):
            found[ours] = theirs.removesuffix(".weight")
    return found


def hf_names(model: ModelFile) -> dict[str, str]:
    """Hugging Face's names of weights → ours, of those that are stored as they are used."""
    return dict(_translated(model))


def _translated(model: ModelFile) -> Iterator[tuple[str, str]]:
    for ours, sources in model.arch.HF_NAMES.items():
        layers = range(model.config.layers) if "{i}" in ours else (0,)
        for theirs in sources if isinstance(sources, tuple) else (sources,):
            if isinstance(theirs, str) and "{e}" not in theirs:
                for i in map(str, layers):
                    yield theirs.replace("{i}", i), ours.replace("{i}", i)


def _peft_scale(config: Mapping[str, Any], where: str) -> Scale:
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(
            "not a LoRA adapter", where=where, got=config.get("peft_type"), expected="LORA"
        )
    for key in ("modules_to_save", "layer_replication", "alora_invocation_tokens"):
        if config.get(key):
            raise UnsupportedError(f"{key} of adapters", where=where, got=config[key])
    if config.get("bias", "none") != "none":
        raise UnsupportedError("biases of adapters", where=where, got=config["bias"])
    ranks, alphas = (_pattern(config, f"{key}_pattern", where) for key in ("rank", "alpha"))

    def scale(module: str, rank: int) -> float:
        stated = _number(_of_module(ranks, module, config.get("r")), "r", where)
        if rank != stated:
            raise FormatError(
                "the rank is not what the configuration says", where=f"{where}: {module}",
                got=rank, expected=stated,
            )  # fmt: skip
        alpha = _number(_of_module(alphas, module, config.get("lora_alpha")), "lora_alpha", where)
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return scale


def _pattern(config: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """Values by the ends of module names; regular expressions are refused."""
    found = config.get(key) or {}
    plain = isinstance(found, dict) and all(re.fullmatch(r"[\w.]+", name) for name in found)
    if not plain:
        raise UnsupportedError(f"a {key} that is no list of names", where=where, got=found)
    return found


def _of_module(values: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    ends = (n for n in values if module == n or module.endswith(f".{n}"))
    return values.get(next(ends, ""), otherwise)


def _number(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise FormatError("not a number", where=f"{where}: {name}", got=value)
    return value


def _gguf_scale(file: GgufFile, arch: str) -> Scale:
    kinds = file.need("general.type", str), file.need("adapter.type", str)
    if kinds != ("adapter", "lora"):
        raise UnsupportedError(
            "not a LoRA adapter", where=file.name, got=" ".join(kinds), expected="adapter lora"
        )
    stored = file.need("general.architecture", str)
    if GGUF_NAMES.get(stored, stored) != arch and not (stored == "llama" and arch in _PAIRED[1:]):
        raise FormatError(
            "an adapter for another architecture", where=file.name, got=stored, expected=arch
        )
    alpha = _number(file.need("adapter.lora.alpha", float), "adapter.lora.alpha", file.name)
    return lambda tensor, rank: alpha / rank if alpha else 1.0
