"""Bundles: one file with compiled variants of a model and, optionally, its weights.

    compile_bundle("model.rlx", build_hir, {"prefill": prefill, "decode": decode},
                   target="x86-64-v3", params=weights)
    bundle = load_bundle("model.rlx")            # needs no llvmlite, runs no pass
    (logits,) = bundle["prefill"].run(ids=ids)

All variants share weights and states. A bundle is code: load only those that you trust.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from rlx.backends.registry import Device
from rlx.errors import FormatError, InputError, OptionError
from rlx.ir.binding import DimBinding
from rlx.ir.op import Array
from rlx.runtime import container
from rlx.runtime.artifact import Artifact, StoredVariant
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore, SharedStates
from rlx.runtime.pipeline import BuildHir, ModelCompilePipeline, Specialized
from rlx.specialize.options import CompileOptions, ModelComponent
from rlx.specialize.variant import ModelVariant
from rlx.support.records import dataclass

VariantSpec = ModelComponent | ModelVariant | DimBinding
_VARIANT, _EXTRA, _PARAM, _PREPARED = "variant/", "extra/", "param/", "prepared/"


def write_bundle(
    path: str | os.PathLike[str],
    variants: Mapping[str, Artifact],
    *,
    params: Mapping[str, Array] | None = None,
    prepared: Mapping[str, Array] | None = None,
    extras: Mapping[str, bytes] | None = None,
) -> Path:
    """Write artifacts, weights and other files of a model to one file."""
    if not variants:
        raise OptionError("a bundle needs at least one variant", where=str(path))
    parts: dict[str, bytes] = {}
    for name, artifact in variants.items():
        if not name or "/" in name:
            raise OptionError("not a name for a variant", got=repr(name))
        parts |= {f"{_VARIANT}{name}/{k}": v for k, v in artifact.to_parts().items()}
    parts |= {f"{_EXTRA}{name}": data for name, data in (extras or {}).items()}
    tensors = {f"{_PARAM}{name}": a for name, a in (params or {}).items()}
    tensors |= {f"{_PREPARED}{name}": a for name, a in (prepared or {}).items()}
    target = Path(path)
    container.write(target, parts, tensors)
    target.chmod(0o644)  # for others too, unlike files of a cache
    return target


def compile_bundle(
    path: str | os.PathLike[str],
    build_hir: BuildHir,
    variants: Mapping[str, VariantSpec],
    *,
    target: str = "host",
    device: Device | str = "cpu",
    options: CompileOptions | Mapping[str, Any] | None = None,
    params: Mapping[str, Array] | ParamStore | None = None,
    extras: Mapping[str, bytes] | None = None,
) -> Path:
    """Compile variants of a model for a target, by name, into one file.

    With `params` the bundle holds the weights too, prepacked for its kernels.
    """
    store = params if isinstance(params, ParamStore) or params is None else ParamStore(params)
    builder = BundleBuilder(target=target, device=device, options=options, params=store)
    builder.add(build_hir, variants)
    return builder.write(path, extras)


class BundleBuilder:
    """Compiles variants, of one model or of several that share parameters, into one file."""

    def __init__(
        self,
        *,
        target: str = "host",
        device: Device | str = "cpu",
        options: CompileOptions | Mapping[str, Any] | None = None,
        params: ParamStore | None = None,
    ) -> None:
        base = CompileOptions.of(options)
        self._options = replace(base, profile=replace(base.profile, target=target))
        self._pipeline = ModelCompilePipeline(device)
        self._params = params
        self._artifacts: dict[str, Artifact] = {}
        self._weights: dict[str, dict[str, Array]] = {_PARAM: {}, _PREPARED: {}}

    def add(self, build_hir: BuildHir, variants: Mapping[str, VariantSpec]) -> None:
        """Compile variants of a model, by name."""
        for name, spec in variants.items():
            chosen, binding = _chosen(self._options, spec)
            composition = spec.layer_composition_key if isinstance(spec, ModelComponent) else ""
            template = self._pipeline.build_template(build_hir, chosen, composition)
            specialized = self._pipeline.specialize_template(binding, chosen, template)
            self._artifacts[name] = specialized.artifact()
            if self._params is not None:
                self._add_weights(self._params, specialized)

    def _add_weights(self, params: ParamStore, specialized: Specialized) -> None:
        """Add the parameters of a variant, prepacked for its kernels."""
        template, names = specialized.template, specialized.kernel_params
        params.ensure(names, template.prepare, template.backend)
        prepared = params.prepared_names
        for name in names:
            kind = _PREPARED if name in prepared else _PARAM
            self._weights[kind][name] = params.get(name)

    def write(
        self, path: str | os.PathLike[str], extras: Mapping[str, bytes] | None = None
    ) -> Path:
        """Write everything that was added to one file."""
        params, prepared = self._weights[_PARAM], self._weights[_PREPARED]
        return write_bundle(path, self._artifacts, params=params, prepared=prepared, extras=extras)


def _chosen(base: CompileOptions, spec: VariantSpec) -> tuple[CompileOptions, DimBinding]:
    if isinstance(spec, ModelComponent):
        target = base.profile.target  # of the whole bundle
        plain = replace(base, profile=replace(base.profile, target="host"))
        chosen = plain.for_component(spec)
        profile = replace(chosen.profile, target=target)
        return replace(chosen, profile=profile), spec.dim_binding()
    if isinstance(spec, ModelVariant):
        return base, spec.dim_binding()
    return base, spec


@dataclass(eq=False)
class Bundle(Mapping[str, CompiledGraph]):
    """The variants of a bundle by name: compiled graphs that share parameters and states."""

    path: Path
    artifacts: dict[str, Artifact]
    params: ParamStore
    extras: dict[str, bytes]
    options: CompileOptions
    _graphs: dict[str, CompiledGraph] = field(default_factory=dict)
    _states: SharedStates = field(default_factory=SharedStates)

    def __getitem__(self, name: str) -> CompiledGraph:
        if name not in self._graphs:
            if name not in self.artifacts:
                raise InputError(
                    "no such variant", where=self.path.name, got=repr(name),
                    expected=", ".join(self.artifacts),
                )  # fmt: skip
            self._graphs[name] = self._compiled(self.artifacts[name])
        return self._graphs[name]

    def _compiled(self, artifact: Artifact) -> CompiledGraph:
        backend = Device.of(artifact.device).backend
        options = replace(self.options, profile=artifact.profile)
        variant = StoredVariant(artifact, backend, options)
        return CompiledGraph(variant, self.params, variant.specialize({}), states=self._states)

    def __iter__(self) -> Iterator[str]:
        return iter(self.artifacts)

    def __len__(self) -> int:
        return len(self.artifacts)


def load_bundle(
    path: str | os.PathLike[str],
    *,
    options: CompileOptions | Mapping[str, Any] | None = None,
    params: ParamStore | None = None,
    check: bool = True,
) -> Bundle:
    """Load a bundle; FormatError if it is damaged, CodegenError if its code is for another CPU.
    `check=False` skips the checksums of the weights."""
    location = Path(path)
    try:
        found = container.read(location, system=True, check=check)
    except FileNotFoundError:
        raise InputError("no such bundle", where=str(location)) from None
    except PermissionError as error:
        raise FormatError(
            "a bundle that others could have changed is not loaded", where=str(location),
            got=str(error), hint="it is code: copy it to a file of your own",
        ) from error  # fmt: skip
    variants: dict[str, dict[str, bytes]] = {}
    for key, data in found.parts.items():
        if key.startswith(_VARIANT):
            name, _, part = key.removeprefix(_VARIANT).partition("/")
            variants.setdefault(name, {})[part] = data
    if not variants:
        raise FormatError("not a bundle", where=str(location), expected="a file of compile_bundle")
    store = params if params is not None else ParamStore()
    for name, array in _with_prefix(found.tensors, _PARAM).items():
        store.set(name, array)
    store.adopt(_with_prefix(found.tensors, _PREPARED))
    artifacts = {name: Artifact.from_parts(parts) for name, parts in variants.items()}
    extras = _with_prefix(found.parts, _EXTRA)
    return Bundle(location, artifacts, store, extras, CompileOptions.of(options))


def _with_prefix(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in table.items() if k.startswith(prefix)}
