"""What fine-tuning leaves: a PEFT folder, a GGUF file with new weights, or a model folder.

Adapters get Hugging Face's names, and its order of rows, whatever file the model came from.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import UnsupportedError
from rlx.formats.gguf import GgufFile
from rlx.formats.gguf.quantized import (
    QuantizeOptions,
    SourceTensor,
    WrittenTensor,
    write_quantized,
)
from rlx.formats.hf import DequantizedFolder, HfFolder
from rlx.formats.json_file import read_list
from rlx.formats.quant_presets import QuantPreset
from rlx.formats.safetensors import write_safetensors
from rlx.ir.op import Array
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, decode
from rlx.models.adapter_files import PEFT_PREFIX, hf_modules, in_other_order
from rlx.models.adapters import LowRank
from rlx.models.finetune.trained_weights import LoraConfig
from rlx.models.model_file import Changes, ModelFile
from rlx.models.to_gguf import gguf_of
from rlx.models.weights import Derived, of_layer
from rlx.support.files import atomic_file
from rlx.support.progress import Progress, silent
from rlx.support.records import dataclass

_COPIED = (".json", ".jinja", ".md", ".model", ".txt")


# -- adapters -------------------------------------------------------------------------------------


def require_names(model: ModelFile, adapted: Mapping[str, object]) -> None:
    """UnsupportedError unless PEFT has a module for each adapted weight."""
    known = hf_modules(model)
    missing = [name for name in adapted if name not in known]
    if missing:
        raise UnsupportedError(
            "weights that are not modules of their own in Hugging Face's model",
            where=str(model.path), got=", ".join(missing[:4]),
            expected="targets that PEFT can name", hint="choose other targets",
        )  # fmt: skip


def write_adapter(folder: Path, model: ModelFile, params: Mapping[str, Any], lora: LoraConfig,
                  base: str) -> None:  # fmt: skip
    """Write adapter_config.json and adapter_model.safetensors, as PEFT does."""
    require_names(model, params)
    modules = hf_modules(model)
    tensors: dict[str, Array] = {}
    for name, part in params.items():
        module = PEFT_PREFIX + modules[name]
        tensors[f"{module}.lora_A.weight"] = np.asarray(part["a"])
        tensors[f"{module}.lora_B.weight"] = _rows(model, name, np.asarray(part["b"]))
        if lora.use_dora:
            lengths = _rows(model, name, np.asarray(part["magnitude"])[:, None])[:, 0]
            tensors[f"{module}.lora_magnitude_vector"] = lengths
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    write_safetensors(folder / "adapter_model.safetensors", tensors, {"format": "pt"}, durable=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
        "target_modules": _targets(model, params), "use_dora": lora.use_dora,
        "fan_in_fan_out": bool(getattr(model.arch, "HF_TRANSPOSED", ())), "bias": "none",
        "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None,
        "inference_mode": True, "init_lora_weights": True,
    }  # fmt: skip
    _write_json(folder / "adapter_config.json", config)


def _rows(model: ModelFile, name: str, b: Array) -> Array:
    """Rows in the order of Hugging Face's model."""
    if not isinstance(model.file, GgufFile):
        return b
    return in_other_order(model, name, b, to_gguf=False, where=str(model.path))


def _targets(model: ModelFile, adapted: Mapping[str, object]) -> list[str]:
    """Names for PEFT: those that modules of all layers share, where all of them are adapted."""
    modules = hf_modules(model)
    chosen = {modules[name] for name in adapted}
    ends = {module.rpartition(".")[2] for module in chosen}
    meant = {m for m in modules.values() if m.rpartition(".")[2] in ends}
    return sorted(ends if meant == chosen else chosen)


def _write_json(path: Path, value: Any) -> None:
    with atomic_file(path, durable=True) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


# -- new weights ----------------------------------------------------------------------------------


def weight_changes(params: Mapping[str, Any], lora: LoraConfig | None) -> Changes:
    """Functions from the stored weights to the trained ones."""
    if lora is None:
        return {name: partial(_replaced, np.asarray(x)) for name, x in params.items()}
    made = {}
    for name, part in params.items():
        b = np.asarray(part["b"]) * np.float32(lora.scale)
        lengths = np.asarray(part["magnitude"]) if lora.use_dora else None
        made[name] = partial(_adapted, LowRank(np.asarray(part["a"]), b, lengths))
    return made


def _replaced(new: Array, weight: Array) -> Array:
    return new.astype(weight.dtype)


def _adapted(part: LowRank, weight: Array) -> Array:
    return part.merged(weight.astype(np.float32)).astype(weight.dtype)


@dataclass(frozen=True)
class _AsStored(QuantPreset):
    """Each tensor in the type that the file has it in."""

    schemes: Mapping[str, QuantScheme]

    def pick(self, name: str, shape: tuple[int, ...], **_: Any) -> QuantScheme | None:
        return self.schemes.get(name)


def write_gguf_model(
    out: Path, model: ModelFile, changes: Changes, type: str | None, *, is_full: bool = False,
    progress: Progress = silent, threads: int = 1,
) -> list[WrittenTensor]:  # fmt: skip
    """Write the model with changed weights as GGUF: of one type, or each tensor in that of the
    model's file. Packed ones that were trained whole become F16. Those with an adapter become Q8_0
    where they had fewer bits: a change below half a step of 4 bits would be rounded away."""
    metadata: Mapping[str, Any]
    if isinstance(model.file, GgufFile):
        file = model.file
        metadata = {k: v for k, v in file.metadata.items() if not k.startswith("split.")}
        sources = {name: _source(file, name, changes) for name in file.tensors}
        schemes = {n: i.scheme for n, i in file.tensors.items() if i.scheme is not None}
        packed = {n for n in changes if n in schemes and not schemes[n].is_float}
        if is_full:
            schemes |= dict.fromkeys(packed, GGUF_SCHEMES["F16"])
        else:
            eight = GGUF_SCHEMES["Q8_0"]
            coarse = {n for n in packed if schemes[n].bits_per_element < eight.bits_per_element}
            schemes |= dict.fromkeys(coarse, eight)
        types = file.types
    else:
        metadata, sources = gguf_of(model, changes)
        schemes = {n: s.scheme for n, s in sources.items() if s.scheme is not None}
        types = None
    if type is None:
        number = metadata.get("general.file_type", 1)
        preset: QuantPreset = _AsStored("as stored", GGUF_SCHEMES["F32"], number, schemes)
    else:
        preset = QuantPreset.parse(type)
    options = QuantizeOptions(preset, threads, requantize=True, overwrite=True, progress=progress)
    return write_quantized(out, metadata, sources, options, model.file.name, types)


def _source(file: GgufFile, name: str, changes: Changes) -> SourceTensor:
    info = file.tensors[name]
    if name not in changes:
        return SourceTensor(info.shape, info.scheme, partial(file.array, name))

    def read() -> Array:
        stored = file.array(name)
        if info.scheme is not None and info.packed:
            stored = decode(info.scheme, np.ascontiguousarray(stored))
        return np.ascontiguousarray(changes[name](stored.astype(np.float32)))

    return SourceTensor(info.shape, GGUF_SCHEMES["F32"], read)


# -- folders --------------------------------------------------------------------------------------


def require_folder(model: ModelFile, names: Mapping[str, object]) -> None:
    """UnsupportedError unless a folder with these weights changed can be written."""
    if isinstance(model.file, DequantizedFolder):
        raise UnsupportedError(
            "a folder with quantised weights is not written", where=str(model.path),
            hint="merge= writes GGUF; or begin with float weights",
        )  # fmt: skip
    assert isinstance(model.file, HfFolder)
    for name in names:
        _stored_as(model, name)


def write_folder(folder: Path, model: ModelFile, changes: Changes) -> None:
    """Write the model's folder again with changed weights, each in the type that it had."""
    require_folder(model, changes)
    assert isinstance(model.file, HfFolder)
    source = model.file.path
    for path in sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json")
        if path.is_file() and path.suffix in _COPIED and not is_index:
            shutil.copyfile(path, folder / path.name)
    for name in _module_folders(source):
        shutil.copytree(source / name, folder / name, dirs_exist_ok=True)
    tensors = {name: model.file.array(name) for name in model.file.tensors}
    for name, change in changes.items():
        for stored, array in _changed_tensors(model, name, change):
            tensors[stored] = array
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"}, durable=True)


def _module_folders(source: Path) -> Iterator[str]:
    """Folders of the modules of sentence-transformers, which were checked when they were read."""
    listed = source / "modules.json"
    for module in read_list(listed, 1 << 20) if listed.is_file() else ():
        inside = module.get("path", "")
        if inside and (source / inside).is_dir():
            yield os.fspath(inside)


def _stored_as(model: ModelFile, name: str) -> str:
    """The name of the tensor that a weight is stored as; {e} stands for experts."""
    layer = name.partition(".")[2].partition(".")[0]
    pattern = name.replace(f"blk.{layer}.", "blk.{i}.", 1) if name.startswith("blk.") else name
    found = model.names().get(pattern, name)
    for source in found if isinstance(found, tuple) else (found,):
        stored = source if isinstance(source, Derived) else of_layer(source, layer)
        if isinstance(stored, str) and stored.replace("{e}", "0") in model.file.tensors:
            return stored
    raise UnsupportedError(
        "a weight that the folder has in other parts", where=str(model.path), got=name,
        hint="merge= writes GGUF; or train adapters, without full",
    )  # fmt: skip


def _changed_tensors(
    model: ModelFile, name: str, change: Callable[[Array], Array]
) -> Iterator[tuple[str, Array]]:
    stored = _stored_as(model, name)
    file = model.file
    if "{e}" in stored:
        names = list[str]()
        while stored.replace("{e}", str(len(names))) in file.tensors:
            names.append(stored.replace("{e}", str(len(names))))
        yield from zip(names, change(np.stack([file.array(n) for n in names])), strict=True)
        return
    transposed = name.endswith(tuple(getattr(model.arch, "HF_TRANSPOSED", ())) or "\0")
    array = file.array(stored)
    changed = change(array.T if transposed else array)
    yield stored, changed.T if transposed else changed
