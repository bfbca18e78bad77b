"""What becomes of the vectors of the tokens: pooling, dense layers, normalisation.

Read from the files of sentence-transformers (modules.json and the folders it names), from GGUF
metadata, or taken as usual for the architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.errors import FormatError, UnsupportedError
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.formats.jsonfile import read_object
from rlx.formats.mapped import read_bounded

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
_LONGEST = 1 << 20


@dataclass(frozen=True)
class Dense:
    """act(x·Wᵀ + b) after pooling; `path` is the folder of its weights."""

    path: Path
    activation: str | None


@dataclass(frozen=True)
class SentenceConfig:
    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = False
    dense: tuple[Dense, ...] = ()
    max_tokens: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    scores: str = "sigmoid"  # what is done to the logit of a cross-encoder: sigmoid or none


def read(file: GgufFile | HfFolder) -> SentenceConfig:
    """The settings that come with a model."""
    if isinstance(file, GgufFile):
        kind = file.need("general.architecture", str)
        number = file.get(f"{kind}.pooling_type", int, 1)
        return SentenceConfig(pooling=(_GGUF_MODES.get(number, "mean"),))
    folder = file.path
    found: dict[str, Any] = {"max_tokens": _max_tokens(file), "scores": _scores(file)}
    found["lower_case"] = bool(file.json("sentence_bert_config.json").get("do_lower_case"))
    more = file.json("config_sentence_transformers.json")
    found["prompts"] = {k: v for k, v in (more.get("prompts") or {}).items() if v}
    found["default_prompt"] = more.get("default_prompt_name")
    if (folder / "modules.json").is_file():
        found |= _modules(folder)
    return SentenceConfig(**found)


def _max_tokens(file: HfFolder) -> int | None:
    stated = file.json("sentence_bert_config.json").get("max_seq_length")
    if stated is None:
        stated = file.json("tokenizer_config.json").get("model_max_length")
    usable = isinstance(stated, (int, float)) and 2 < stated < _LONGEST  # 1e30 means "any"
    return int(stated) if usable else None  # type: ignore[arg-type]


def _scores(file: HfFolder) -> str:
    """A cross-encoder with one label gives sigmoids unless its file says otherwise."""
    settings = file.config.get("sentence_transformers") or {}
    named = settings.get("activation_fn") or file.config.get("sbert_ce_default_activation_function")
    return "none" if isinstance(named, str) and named.endswith("Identity") else "sigmoid"


def _modules(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    dense: list[Dense] = []
    for kind, path in _listed(folder):
        if kind == "Pooling":
            found["pooling"] = _pooling(folder / path)
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind == "Dense":
            dense.append(_dense(folder / path))
        elif kind != "Transformer":
            raise UnsupportedError(
                "a module that is not known here", where=str(folder / "modules.json"), got=kind,
                expected="Transformer, Pooling, Dense, Normalize",
            )  # fmt: skip
    return {**found, "dense": tuple(dense)}


def _listed(folder: Path) -> list[tuple[str, str]]:
    """(last part of the type, path) of each module."""
    path = folder / "modules.json"
    try:
        modules = json.loads(read_bounded(path, _LONGEST))
        found = [(str(m["type"]).rsplit(".", 1)[-1], str(m.get("path", ""))) for m in modules]
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise FormatError(f"not a list of modules: {e}"[:120], where=str(path)) from e
    for _, inside in found:
        if Path(inside).is_absolute() or ".." in Path(inside).parts:
            raise FormatError("a module outside the folder", where=str(path), got=inside)
    return found


def _pooling(folder: Path) -> tuple[str, ...]:
    config = read_object(folder / "config.json")
    stated = config.get("pooling_mode")
    if stated is not None:
        modes = (stated,) if isinstance(stated, str) else tuple(stated)
    else:
        modes = tuple(mode for key, mode in _OLD_MODES.items() if config.get(key)) or ("mean",)
    for mode in modes:
        if mode not in MODES:
            raise UnsupportedError(
                "unknown pooling", where=str(folder), got=mode, expected=", ".join(MODES)
            )
    return modes


def _dense(folder: Path) -> Dense:
    config = read_object(folder / "config.json")
    name = str(config.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
    if name not in _ACTIVATIONS or config.get("use_residual"):
        raise UnsupportedError(
            "a dense layer that is not known here", where=str(folder),
            got="a residual" if config.get("use_residual") else name,
            expected=", ".join(_ACTIVATIONS),
        )  # fmt: skip
    return Dense(folder, _ACTIVATIONS[name])
