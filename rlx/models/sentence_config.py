"""Sentence embeddings: pooling, the modules after it, normalisation, prompts.

Read from the files of sentence-transformers (modules.json and the folders it names), from GGUF
metadata, or the mean where no file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder, weights_file
from rlx.formats.json_file import read_list, read_object
from rlx.support.records import dataclass

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# how older files say it, in the order in which several are joined
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_GGUF_MODES = {0: "mean", 1: "mean", 2: "cls", 3: "lasttoken", 4: "cls"}
_ACTIVATIONS = {"Tanh": "tanh", "Identity": None, "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
_MODULES = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout")
# what sentence-transformers has called its settings, by the kind of model
_SETTINGS = [
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
]
_MORE_SETTINGS = "config_sentence_transformers.json"
_VECTOR = "sentence_embedding"
_LONGEST = 1 << 20


@dataclass(frozen=True)
class SentenceModule:
    """A module after pooling: "Dense", act(x·Wᵀ + b) (+ x); "LayerNorm"; or "Normalize", where it
    is not the last. `weights` is the file of its weights."""

    kind: str
    weights: Path | None = None
    activation: str | None = None
    residual: bool = False


@dataclass(frozen=True)
class SentenceConfig:
    pooling: tuple[str, ...] = ("mean",)
    pools_prompt: bool = True  # whether the tokens of a prompt take part in pooling
    modules: tuple[SentenceModule, ...] = ()
    normalize: bool = False  # in the end
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    scores: str = "sigmoid"  # what is done to the logit of a cross-encoder: sigmoid or none


def read_sentence_config(file: GgufFile | HfFolder, folder: Path) -> SentenceConfig:
    """The pooling of a model; `folder` has the files of sentence-transformers."""
    if isinstance(file, GgufFile):
        kind = file.need("general.architecture", str)
        number = file.get(f"{kind}.pooling_type", int, 1)
        return SentenceConfig(pooling=(_GGUF_MODES.get(number, "mean"),))
    stated: Mapping[str, Any] = next(filter(None, map(file.json, _SETTINGS)), {})
    more = folder / _MORE_SETTINGS
    settings = read_object(more) if more.is_file() else {}
    found: dict[str, Any] = {"max_tokens": _max_tokens(file, stated)}
    found["scores"] = _scores(file.config, settings)
    found["lower_case"] = bool(stated.get("do_lower_case"))
    found |= _prompts(settings, str(more))
    if (folder / "modules.json").is_file():
        found |= _modules(folder)
    return SentenceConfig(**found)


def _max_tokens(file: HfFolder, stated: Mapping[str, Any]) -> int | None:
    longest = stated.get("max_seq_length")
    if longest is None:
        longest = file.json("tokenizer_config.json").get("model_max_length")
    usable = isinstance(longest, (int, float)) and 2 < longest < _LONGEST  # 1e30 means "any"
    return int(longest) if usable else None  # type: ignore[arg-type]


def _prompts(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    texts = prompts.values() if isinstance(prompts, dict) else [prompts]
    if not isinstance(prompts, dict) or not all(isinstance(v, str | None) for v in texts):
        raise FormatError(
            "prompts are not texts by name", where=where, got=repr(prompts)[:80],
            expected='"prompts": {"query": "query: "}',
        )  # fmt: skip
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise FormatError(
            "no prompt has the name of the default", where=where, got=repr(default)[:80],
            expected=", ".join(prompts) or "none",
        )  # fmt: skip
    return {"prompts": {k: v or "" for k, v in prompts.items()}, "default_prompt": default}


def _scores(config: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """A cross-encoder with one label gives sigmoids unless its file says otherwise."""
    places = (config.get("sentence_transformers"), settings)
    stated = (place.get("activation_fn") for place in places if isinstance(place, dict))
    named = next(filter(None, stated), config.get("sbert_ce_default_activation_function"))
    return "none" if isinstance(named, str) and named.endswith("Identity") else "sigmoid"


def _modules(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    modules: list[SentenceModule] = []
    for kind, path in _listed(folder / "modules.json"):
        if kind == "Pooling":
            found |= _pooling(folder / path)
        elif kind == "Normalize":
            modules.append(SentenceModule(kind))
        elif kind == "LayerNorm":
            modules.append(SentenceModule(kind, weights_file(folder / path)))
        elif kind == "Dense":
            modules.append(_dense(folder / path))
        elif kind not in _MODULES:
            raise UnsupportedError(
                "a module that is not known here", where=str(folder / "modules.json"), got=kind,
                expected=", ".join(_MODULES),
            )  # fmt: skip
    found["normalize"] = bool(modules) and modules[-1].kind == "Normalize"
    return {**found, "modules": tuple(modules[:-1] if found["normalize"] else modules)}


def _listed(path: Path) -> list[tuple[str, str]]:
    """(class name, path) of each module."""
    found = []
    for module in read_list(path, _LONGEST):
        entry = module if isinstance(module, dict) else {}
        kind, inside = entry.get("type"), entry.get("path", "")
        if not isinstance(kind, str) or not isinstance(inside, str):
            raise FormatError(
                "not a module", where=str(path), got=repr(module)[:80],
                expected='{"type": …, "path": …}',
            )  # fmt: skip
        if Path(inside).is_absolute() or ".." in Path(inside).parts or "\0" in inside:
            raise FormatError("a module outside the folder", where=str(path), got=repr(inside)[:80])
        found.append((kind.rsplit(".", 1)[-1], inside))
    if not found:
        raise FormatError("no modules", where=str(path), expected=", ".join(_MODULES[:2]))
    return found


def _pooling(folder: Path) -> dict[str, Any]:
    config = read_object(folder / "config.json")
    stated = config.get("pooling_mode")
    if stated is not None:
        modes = tuple(stated) if isinstance(stated, list) else (stated,)
    else:
        modes = tuple(mode for key, mode in _OLD_MODES.items() if config.get(key)) or ("mean",)
    for mode in modes or (None,):
        if mode not in MODES:
            raise UnsupportedError(
                "unknown pooling", where=str(folder), got=mode, expected=", ".join(MODES)
            )
    return {"pooling": modes, "pools_prompt": config.get("include_prompt", True) is not False}


def _dense(folder: Path) -> SentenceModule:
    config = read_object(folder / "config.json")
    name = str(config.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            "a dense layer that is not known here", where=str(folder), got=name,
            expected=", ".join(_ACTIVATIONS),
        )  # fmt: skip
    for key in ("module_input_name", "module_output_name"):
        if (config.get(key) or _VECTOR) != _VECTOR:
            raise UnsupportedError(
                "a dense layer of something else than the text's vector", where=str(folder),
                got=f"{key} {config[key]!r}", expected=_VECTOR,
            )  # fmt: skip
    residual = bool(config.get("use_residual"))
    return SentenceModule("Dense", weights_file(folder), _ACTIVATIONS[name], residual)
