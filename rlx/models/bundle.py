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
from typing import Any

from rlx.errors import FormatError, OptionError
from rlx.ir.module import GraphModule
from rlx.models.builder import BuiltGraph
from rlx.runtime.bundle import Bundle, BundleBuilder, load_bundle
from rlx.runtime.params import ParamStore
from rlx.runtime.pipeline import model_key
from rlx.specialize.options import CompileOptions
from rlx.specialize.variant import ModelVariant
from rlx.support.records import dataclass

_SETTINGS = "model.json"


@dataclass(frozen=True)
class EntryPointSpec:
    """What the executables of an entry point are compiled from: its graph, and named variants."""

    build: Callable[[], BuiltGraph]
    variants: Mapping[str, ModelVariant]


@dataclass(frozen=True)
class BundlePlan:
    """What a bundle holds: entry points by name, and the settings it was made for."""

    kind: str  # "language" or "encoder"
    entry_points: Mapping[str, EntryPointSpec]
    settings: Mapping[str, Any]

    @property
    def count(self) -> int:
        """The number of executables."""
        return sum(len(spec.variants) for spec in self.entry_points.values())

    @property
    def variants(self) -> dict[str, ModelVariant]:
        """Those of all entry points."""
        return {n: v for spec in self.entry_points.values() for n, v in spec.variants.items()}

    def joined(self, entry_points: Mapping[str, EntryPointSpec], **settings: Any) -> BundlePlan:
        """The plan with more entry points and settings."""
        return replace(
            self,
            entry_points={**self.entry_points, **entry_points},
            settings={**self.settings, **settings},
        )


def executable_name(entry_point: str, variant: str) -> str:
    return f"{entry_point}.{variant}"


def write_bundle(
    path: Path,
    plan: BundlePlan,
    *,
    target: str = "host",
    device: str = "cpu",
    options: CompileOptions | None = None,
    weights: bool = False,
    done: Callable[[], object] | None = None,
) -> Path:
    """Compile a plan into one file; with `weights` the packed weights go into it, and a load packs
    none. `done` is called after each executable."""
    params = ParamStore() if weights else None
    maker = BundleBuilder(target=target, device=device, options=options, params=params)
    keys: dict[str, str] = {}
    for entry_point, spec in plan.entry_points.items():
        built = spec.build()
        keys[entry_point] = model_key(built.module)
        for name, array in built.params.items() if params is not None else ():
            if params is not None and name not in params:
                params.set(name, array)
        build = partial(_same, built.module)
        for name, variant in spec.variants.items():
            maker.add(build, {executable_name(entry_point, name): variant})
            if done is not None:
                done()
    stored = {"kind": plan.kind, "models": keys, "has_weights": weights, **plan.settings}
    return maker.write(path, {_SETTINGS: json.dumps(stored, sort_keys=True).encode()})


def _same(module: GraphModule) -> GraphModule:
    return module


@dataclass(frozen=True)
class ModelBundle:
    """The settings of a bundle, read before its model is opened."""

    path: Path
    kind: str
    models: dict[str, str]  # the key of the graph of each entry point
    has_weights: bool
    settings: dict[str, Any]

    @staticmethod
    def open(path: Path) -> ModelBundle:
        bundle = load_bundle(path, check=False)
        try:
            settings = json.loads(bundle.extras[_SETTINGS])
            kind, models, weights = (settings.pop(k) for k in ("kind", "models", "has_weights"))
        except (KeyError, ValueError, AttributeError):
            raise FormatError(
                "not the executables of a model", where=str(path), expected="a file of rlx compile"
            ) from None
        return ModelBundle(path, kind, models, weights, settings)

    def require_kind(self, kind: str) -> ModelBundle:
        if self.kind != kind:
            raise FormatError(
                "executables of another kind of model", where=str(self.path), got=self.kind,
                expected=kind,
            )  # fmt: skip
        return self

    def setting(self, name: str, asked: Any) -> Any:
        """A setting that the bundle was made for; OptionError if another is asked for."""
        found = self.settings[name]
        if asked is not None and asked != found:
            raise OptionError(
                "the artifact was made for something else", where=name, got=asked, expected=found,
                hint="leave it out, or make another with `rlx compile`",
            )  # fmt: skip
        return found

    def check(self, entry_point: str, module: GraphModule) -> None:
        """FormatError unless the graph of an entry point is the one that was compiled."""
        if entry_point in self.models and self.models[entry_point] != model_key(module):
            raise FormatError(
                "made for another model, or by another version", where=str(self.path),
                hint="make it again from this model file: rlx compile MODEL --out FILE",
            )  # fmt: skip

    def load(self, options: CompileOptions, params: ParamStore) -> Bundle:
        return load_bundle(self.path, options=options, params=params)
