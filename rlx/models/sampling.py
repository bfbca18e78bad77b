"""Sampling settings of a generation, penalties, and what a model recommends: by its
generation_config.json, by GGUF metadata, or by the catalogue."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import FormatError, OptionError, did_you_mean
from rlx.formats.catalogue import sampling_of
from rlx.formats.gguf import GgufFile
from rlx.formats.hf import HfFolder
from rlx.models.builder import EntryPoint
from rlx.models.model_file import ModelFile
from rlx.support.records import dataclass

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (0, 1 << 31),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "max_tokens": (0, 1 << 31),
    "logprobs": (0, 1000),
}
_WHOLE = ("top_k", "max_tokens", "logprobs")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class GenerationSettings:
    """Temperature 0 is greedy; `seed` None takes a random one."""

    max_tokens: int = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    shown_special: frozenset[int] = frozenset()  # special tokens that are part of the text
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int = 0
    overflow: str = "error"  # or "shift": drop the older half of the context and continue
    keep: int | None = None  # first tokens that a shift keeps, beside BOS; -1: the prompt
    speculate: int | None = None  # speculative decoding: draft tokens per run
    adapter: str | None = None  # the name of a loaded LoRA adapter
    # structured output, one of:
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None  # GBNF or Lark

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise OptionError("not a number", where=name, got=repr(value))
            if not low <= value <= high:
                raise OptionError("out of range", where=name, got=value, expected=f"{low} … {high}")
            if name in _WHOLE and value != int(value):
                raise OptionError("not a whole number", where=name, got=value)
        drafted = self.speculate
        if drafted is not None and not (_is_whole(drafted) and 0 <= drafted <= 16):
            raise OptionError("out of range", where="speculate", got=self.speculate,
                              expected="0 … 16")  # fmt: skip
        if self.overflow not in ("error", "shift"):
            raise OptionError(
                "unknown policy", where="overflow", got=self.overflow, expected="error or shift"
            )
        given = [n for n in ("json_schema", "regex", "grammar") if getattr(self, n) is not None]
        if len(given) > 1:
            raise OptionError("one kind of structured output only", got=" and ".join(given))
        self._check_kinds()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", tuple(s for s in stop if s))
        object.__setattr__(self, "stop_tokens", frozenset(self.stop_tokens))
        object.__setattr__(self, "shown_special", frozenset(self.shown_special))
        self._check_elements()

    def _check_kinds(self) -> None:
        kinds: dict[str, tuple[Any, str]] = {
            "stop": (Iterable, "texts"),
            "stop_tokens": (Iterable, "token ids"),
            "shown_special": (Iterable, "token ids"),
            "logit_bias": (Mapping, "token ids to numbers"),
            "json_schema": (Mapping | str | None, "a schema, or its text"),
            "regex": (str | None, "a regular expression"),
            "grammar": (str | None, "a grammar in GBNF or Lark"),
        }
        for name, (kind, expected) in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise OptionError(
                    "not what is expected", where=name, got=repr(value), expected=expected
                )

    def _check_elements(self) -> None:
        wrong: list[tuple[str, object, str]] = []
        wrong += [("stop", s, "texts") for s in self.stop if not isinstance(s, str)]
        for name in ("stop_tokens", "shown_special"):
            wrong += [(name, t, "token ids") for t in getattr(self, name) if not _is_whole(t)]
        for token, bias in self.logit_bias.items():
            if not _is_whole(token) or not isinstance(bias, (int, float)) or math.isnan(bias):
                wrong.append(("logit_bias", {token: bias}, "token ids to numbers"))
        if self.seed is not None and not _is_whole(self.seed):
            wrong.append(("seed", self.seed, "a whole number or None"))
        if self.keep is not None and not (_is_whole(self.keep) and self.keep >= -1):
            wrong.append(("keep", self.keep, "a whole number from -1 on, or None"))
        if self.adapter is not None and not isinstance(self.adapter, str):
            wrong.append(("adapter", self.adapter, "a name or None"))
        for name, got, expected in wrong:
            raise OptionError("not what is expected", where=name, got=repr(got), expected=expected)

    @staticmethod
    def of(options: Mapping[str, Any]) -> GenerationSettings:
        """From keyword arguments; an unknown one is an error that lists the known."""
        known = GenerationSettings.__dataclass_fields__
        wrong = [name for name in options if name not in known]
        if wrong:
            raise OptionError(
                "unknown setting", got=", ".join(wrong), expected=", ".join(known),
                hint=did_you_mean(wrong[0], known),
            )  # fmt: skip
        return GenerationSettings(**options)

    @property
    def has_penalties(self) -> bool:
        """Whether penalties or biases change the logits, which needs inputs of their size."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
        )

    @property
    def is_structured(self) -> bool:
        """Whether a schema, expression or grammar constrains the output."""
        return not (self.json_schema is None and self.regex is None and self.grammar is None)

    def row(self) -> Any:
        """The `settings` input of the sample op."""
        return np.array([self.temperature, self.top_k, self.top_p, self.min_p], np.float32)

    def rng(self) -> Any:
        seed = secrets.randbits(63) if self.seed is None else int(self.seed) % (1 << 64)
        return np.array([seed, 0], np.uint64)


class Penalties:
    """Penalties and biases, for each token of the vocabulary.

    A positive logit is divided by `factor`, a negative one multiplied; then `bias` is added. The
    repetition penalty counts prompt and output, presence and frequency the output alone.
    """

    def __init__(self, settings: GenerationSettings, vocab: int, prompt: Sequence[int]) -> None:
        self.settings = settings
        self.entry_point = EntryPoint("sample", penalties=True)
        self._vocab, self._prompt = vocab, list(prompt)
        self._generated: set[int] = set()
        s = settings
        self._counts = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
        self._changes: tuple[Any, Any, Any] | None = None
        for token in settings.logit_bias:
            if not 0 <= token < vocab:
                raise OptionError(
                    "no such token", where="logit_bias", got=token, expected=f"below {vocab}"
                )

    # arrays are made when they are first needed: a request may wait for long before

    @cached_property
    def factor(self) -> Any:
        found = np.ones(self._vocab, np.float32)
        found[self._prompt] = self.settings.repetition_penalty
        return found

    @cached_property
    def bias(self) -> Any:
        found = np.zeros(self._vocab, np.float32)
        for token, value in self.settings.logit_bias.items():
            found[token] += value
        return found

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """What the graph that draws takes beside logits."""
        return {"factor": self.factor, "bias": self.bias}

    @property
    def changes(self) -> tuple[Any, Any, Any]:
        """The tokens whose logits change, with their factors and biases."""
        if self._changes is None:
            found = {*self.settings.logit_bias, *self._generated}
            if self.settings.repetition_penalty != 1.0:
                found.update(self._prompt)
            tokens = np.fromiter(found, np.int64, len(found))
            self._changes = tokens, self.factor[tokens], self.bias[tokens]
        return self._changes

    def count(self, token: int) -> None:
        """A token was generated."""
        if not self._counts:
            return
        self._changes = None
        self.factor[token] = self.settings.repetition_penalty
        if token not in self._generated:
            self._generated.add(token)
            self.bias[token] -= self.settings.presence_penalty
        self.bias[token] -= self.settings.frequency_penalty


_CONFIG = "generation_config.json"
_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF = "general.sampling."
# llama.cpp's names
_GGUF_FIELDS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def recommended_sampling(model: ModelFile) -> dict[str, Any]:
    """Generation settings that the model's files recommend, or the catalogue; maybe none."""
    path, file = Path(model.path), model.file
    if isinstance(file, HfFolder):
        found, where = _from_config(file.json(_CONFIG)), f"{file.name}/{_CONFIG}"
    else:
        found, where = _from_gguf(file), file.name
    found = {name: value for name, value in found.items() if value is not None}
    if found.get("top_k") == -1:  # all, for some libraries
        found["top_k"] = 0
    try:
        GenerationSettings(**found)
    except OptionError as error:
        raise FormatError(
            f"a recommended {error.where} that cannot be used", where=where, got=error.got,
            expected=error.expected,
        ) from error  # fmt: skip
    return found or sampling_of(path)


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("do_sample") is False:
        return {"temperature": 0.0, "repetition_penalty": config.get("repetition_penalty")}
    return {name: config.get(name) for name in _FIELDS}


def _from_gguf(file: GgufFile) -> dict[str, Any]:
    return {ours: file.metadata.get(_GGUF + theirs) for ours, theirs in _GGUF_FIELDS.items()}


def sampling_metadata(model: ModelFile) -> dict[str, Any]:
    """What a model recommends as GGUF metadata, by llama.cpp's names."""
    found = recommended_sampling(model)
    return {_GGUF + _GGUF_FIELDS[name]: value for name, value in found.items()}
