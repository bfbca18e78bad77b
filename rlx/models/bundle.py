"""A model's executables in one file, for machines that have the model but no compiler.

    rlx compile model.gguf --out model.rlx --cpu x86-64-v3      # here
    rlx run model.gguf --artifact model.rlx "Hello"             # there, without llvmlite

The model file goes along: it has the vocabulary, and the weights unless the bundle has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlx.errors import FormatError, OptionError
from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.records import dataclass
from rlx.runtime.bundle import Bundle, BundleMaker, load_bundle
from rlx.runtime.params import ParamStore
from rlx.runtime.pipeline import model_key
from rlx.specialize.options import CompileOptions
from rlx.specialize.variant import ModelVariant

_FACTS = "model.json"


class Described(Protocol):
    """The graph of a use of a model, and the arrays of its parameters."""

    module: GraphModule
    params: dict[str, Array]


@dataclass(frozen=True)
class Recipe:
    """What the executables of a use are made of: its graph, and variants of it by name."""

    describe: Callable[[], Described]
    variants: Mapping[str, ModelVariant]


@dataclass(frozen=True)
class Plan:
    """What a bundle holds: uses by name, and what an engine must know."""

    kind: str  # "language" or "encoder"
    uses: Mapping[str, Recipe]
    facts: Mapping[str, Any]

    @property
    def count(self) -> int:
        """Of executables."""
        return sum(len(recipe.variants) for recipe in self.uses.values())

    @property
    def variants(self) -> dict[str, ModelVariant]:
        """Those of all uses."""
        return {n: v for recipe in self.uses.values() for n, v in recipe.variants.items()}

    def joined(self, uses: Mapping[str, Recipe], **facts: Any) -> Plan:
        """The plan with more in it."""
        return replace(self, uses={**self.uses, **uses}, facts={**self.facts, **facts})


def shipped_name(use: str, variant: str) -> str:
    return f"{use}.{variant}"


def ship(
    path: Path,
    plan: Plan,
    *,
    target: str = "host",
    device: str = "cpu",
    options: CompileOptions | None = None,
    weights: bool = False,
    done: Callable[[], object] | None = None,
) -> Path:
    """Compile a plan into one file; with `weights` packed ones too, so that nothing is left to do
    where it is loaded. `done` is called after each executable."""
    params = ParamStore() if weights else None
    maker = BundleMaker(target=target, device=device, options=options, params=params)
    keys: dict[str, str] = {}
    for use, recipe in plan.uses.items():
        described = recipe.describe()
        keys[use] = model_key(described.module)
        for name, array in described.params.items() if params is not None else ():
            if params is not None and name not in params:
                params.set(name, array)
        build = partial(_same, described.module)
        for name, variant in recipe.variants.items():
            maker.add(build, {shipped_name(use, name): variant})
            if done is not None:
                done()
    facts = {"kind": plan.kind, "models": keys, "has_weights": weights, **plan.facts}
    return maker.write(path, {_FACTS: json.dumps(facts, sort_keys=True).encode()})


def _same(module: GraphModule) -> GraphModule:
    return module


@dataclass(frozen=True)
class Shipped:
    """What a bundle says about itself, before a model is opened with it."""

    path: Path
    kind: str
    models: dict[str, str]  # the key of the graph of each use
    has_weights: bool
    facts: dict[str, Any]

    @staticmethod
    def open(path: Path) -> Shipped:
        bundle = load_bundle(path, check=False)
        try:
            facts = json.loads(bundle.extras[_FACTS])
            kind, models, weights = (facts.pop(k) for k in ("kind", "models", "has_weights"))
        except (KeyError, ValueError, AttributeError):
            raise FormatError(
                "not the executables of a model", where=str(path), expected="a file of rlx compile"
            ) from None
        return Shipped(path, kind, models, weights, facts)

    def require_kind(self, kind: str) -> Shipped:
        if self.kind != kind:
            raise FormatError(
                "executables of another kind of model", where=str(self.path), got=self.kind,
                expected=kind,
            )  # fmt: skip
        return self

    def setting(self, name: str, asked: Any) -> Any:
        """A setting that was fixed when the file was made; OptionError if another is asked for."""
        found = self.facts[name]
        if asked is not None and asked != found:
            raise OptionError(
                "the artifact was made for something else", where=name, got=asked, expected=found,
                hint="leave it out, or make another with `rlx compile`",
            )  # fmt: skip
        return found

    def check(self, use: str, module: GraphModule) -> None:
        """FormatError unless the graph of a use is the one that was compiled."""
        if use in self.models and self.models[use] != model_key(module):
            raise FormatError(
                "made for another model, or by another version", where=str(self.path),
                hint="make it again from this model file: rlx compile MODEL --out FILE",
            )  # fmt: skip

    def load(self, options: CompileOptions, params: ParamStore) -> Bundle:
        return load_bundle(self.path, options=options, params=params)
