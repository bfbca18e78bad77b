"""Bundles: one file to ship, with variants of a model and, if wanted, its weights.

    compile_bundle("model.rlx", build_hir, {"prefill": prefill, "decode": decode},
                   target="x86-64-v3", params=weights)
    bundle = load_bundle("model.rlx")            # needs no llvmlite, runs no pass
    (logits,) = bundle["prefill"].run(ids=ids)

All variants share the weights and the states. A bundle is code: load only what you would run.
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
from rlx.runtime.params import ParamStore
from rlx.runtime.pipeline import BuildHir, ModelCompilePipeline, Specialized
from rlx.specialize.component import ModelComponent
from rlx.specialize.options import CompileOptions
from rlx.specialize.variant import ModelVariant
from rlx.support.records import dataclass

Wanted = ModelComponent | ModelVariant | DimBinding
_VARIANT, _EXTRA, _PARAM, _PREPARED = "variant/", "extra/", "param/", "prepared/"


def write_bundle(
    path: str | os.PathLike[str],
    variants: Mapping[str, Artifact],
    *,
    params: Mapping[str, Array] | None = None,
    prepared: Mapping[str, Array] | None = None,
    extras: Mapping[str, bytes] | None = None,
) -> Path:
    """Put artifacts, weights and whatever else a model needs into one file."""
    if not variants:
        raise OptionError("a bundle holds a variant at least", where=str(path))
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
    target.chmod(0o644)  # to be given away, unlike what a cache holds
    return target


def compile_bundle(
    path: str | os.PathLike[str],
    build_hir: BuildHir,
    variants: Mapping[str, Wanted],
    *,
    target: str = "host",
    device: Device | str = "cpu",
    options: CompileOptions | Mapping[str, Any] | None = None,
    params: Mapping[str, Array] | ParamStore | None = None,
    extras: Mapping[str, bytes] | None = None,
) -> Path:
    """Compile variants of a model for a target, by name, into one file.

    With `params` the bundle holds the weights too, prepared as its programs want them.
    """
    store = params if isinstance(params, ParamStore) or params is None else ParamStore(params)
    maker = BundleMaker(target=target, device=device, options=options, params=store)
    maker.add(build_hir, variants)
    return maker.write(path, extras)


class BundleMaker:
    """Compiles variants, of one model or of several that share parameters, for one file."""

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
        self._made: dict[str, Artifact] = {}
        self._kept: dict[str, dict[str, Array]] = {_PARAM: {}, _PREPARED: {}}

    def add(self, build_hir: BuildHir, variants: Mapping[str, Wanted]) -> None:
        """Compile variants of a model, by name."""
        for name, wanted in variants.items():
            chosen, binding = _chosen(self._options, wanted)
            composition = wanted.layer_composition_key if isinstance(wanted, ModelComponent) else ""
            template = self._pipeline.build_template(build_hir, chosen, composition)
            specialized = self._pipeline.specialize_template(binding, chosen, template)
            self._made[name] = specialized.artifact()
            if self._params is not None:
                self._keep(self._params, specialized)

    def _keep(self, params: ParamStore, specialized: Specialized) -> None:
        """The parameters of a variant, prepared as its program wants them."""
        template, names = specialized.template, specialized.manifest.param_names
        params.ensure(names, template.prepare, template.backend)
        prepared = params.prepared_names
        for name in names:
            kind = _PREPARED if name in prepared else _PARAM
            self._kept[kind][name] = params.get(name)

    def write(
        self, path: str | os.PathLike[str], extras: Mapping[str, bytes] | None = None
    ) -> Path:
        """Everything that was added, in one file."""
        kept = self._kept
        return write_bundle(
            path, self._made, params=kept[_PARAM], prepared=kept[_PREPARED], extras=extras
        )


def _chosen(base: CompileOptions, wanted: Wanted) -> tuple[CompileOptions, DimBinding]:
    if isinstance(wanted, ModelComponent):
        target = base.profile.target
        chosen = base.for_component(wanted)
        profile = replace(chosen.profile, target=target)
        return replace(chosen, profile=profile), wanted.dim_binding()
    if isinstance(wanted, ModelVariant):
        return base, wanted.dim_binding()
    return base, wanted


@dataclass(eq=False)
class Bundle(Mapping[str, CompiledGraph]):
    """The variants of a file by name, compiled graphs that share parameters and states."""

    path: Path
    artifacts: dict[str, Artifact]
    params: ParamStore
    extras: dict[str, bytes]
    options: CompileOptions
    _made: dict[str, CompiledGraph] = field(default_factory=dict)

    def __getitem__(self, name: str) -> CompiledGraph:
        if name not in self._made:
            if name not in self.artifacts:
                raise InputError(
                    "no such variant", where=self.path.name, got=repr(name),
                    expected=", ".join(self.artifacts),
                )  # fmt: skip
            self._made[name] = self._compiled(self.artifacts[name])
        return self._made[name]

    def _compiled(self, artifact: Artifact) -> CompiledGraph:
        backend = Device.of(artifact.device).backend
        variant = StoredVariant(artifact, backend, self.options)
        compiled = CompiledGraph(variant, self.params, variant.specialize({}))
        for state in artifact.manifest.states:
            for other in self._made.values():
                if other.template.signature.states.get(state.name) is state.shape:
                    compiled.bind_state(state.name, other.state_buffer(state.name))
                    break
        return compiled

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
    """The bundle in a file; FormatError when it is damaged, CodegenError when its code is for
    another CPU. `check=False` leaves the weights unchecked."""
    place = Path(path)
    try:
        found = container.read(place, system=True, check=check)
    except FileNotFoundError:
        raise InputError("no such bundle", where=str(place)) from None
    except PermissionError as error:
        raise FormatError(
            "a bundle that others could have changed is not loaded", where=str(place),
            got=str(error), hint="it is code: copy it to a file of your own",
        ) from error  # fmt: skip
    variants: dict[str, dict[str, bytes]] = {}
    for key, data in found.parts.items():
        if key.startswith(_VARIANT):
            name, _, part = key.removeprefix(_VARIANT).partition("/")
            variants.setdefault(name, {})[part] = data
    if not variants:
        raise FormatError("not a bundle", where=str(place), expected="a file of compile_bundle")
    store = params if params is not None else ParamStore()
    for name, array in _under(found.tensors, _PARAM).items():
        store.set(name, array)
    store.adopt(_under(found.tensors, _PREPARED))
    artifacts = {name: Artifact.from_parts(parts) for name, parts in variants.items()}
    extras = _under(found.parts, _EXTRA)
    return Bundle(place, artifacts, store, extras, CompileOptions.of(options))


def _under(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in table.items() if k.startswith(prefix)}
