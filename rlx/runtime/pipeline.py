"""The compile pipeline of a model: caches of templates (by graph and options) and of executables.

A model is built by a function. One that takes an argument gets the layer composition of the
component and builds that stack. One that takes none must agree with the composition.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from rlx.backends.base import Backend, Executable
from rlx.backends.registry import Device
from rlx.errors import OptionError, RlxError
from rlx.ir.binding import DimBinding
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.module import FusionPolicy, GraphModule, GraphStage, as_module
from rlx.ir.serial import canonical
from rlx.runtime.aot import AotCache
from rlx.runtime.artifact import Artifact, StoredVariant
from rlx.runtime.cache import CompileCache
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore, SharedStates
from rlx.runtime.session import Session
from rlx.runtime.variants import users_manifest
from rlx.specialize.manifest import BindingManifest
from rlx.specialize.options import CompilationMode, CompileOptions, LayerComposition, ModelComponent
from rlx.specialize.variant import encode, make_key
from rlx.support.pickling import Unpicklable
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.passes.pipeline import PipelineResult
    from rlx.runtime.template import Template


BuildHir = Callable[..., Graph | GraphModule]


def build_model(build_hir: BuildHir, composition_key: str = "") -> GraphModule:
    """Build the model, with the layer stack that the composition of this key describes."""
    return as_module(_built(build_hir, composition_key))


def _built(build_hir: BuildHir, composition_key: str) -> Graph | GraphModule:
    if not composition_key:
        return build_hir()
    composition = LayerComposition.of_key(composition_key)
    if composition is None:
        raise OptionError(
            "unknown layer composition", got=composition_key[:16],
            hint="use the key of a LayerComposition of this process",
        )  # fmt: skip
    if _takes_composition(build_hir):
        return build_hir(composition)
    module = build_hir()
    _require_layers(module, composition)
    return module


def _takes_composition(function: BuildHir) -> bool:
    """Whether the function has a parameter without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in plain and p.default is p.empty for p in parameters)


def _require_layers(module: Graph | GraphModule, composition: LayerComposition) -> None:
    """Blocks named `layer.0`, `layer.1`, … are the layers of a composition of that name."""
    blocks = {node.origin.block for node in _graph_of(as_module(module)).nodes}
    for layer, wanted in composition.counts().items():
        numbered = re.compile(rf"(?:^|\.){re.escape(layer)}\.(\d+)(?:\.|$)")
        found = {m[1] for b in blocks if (m := numbered.search(b))}
        if found and len(found) != wanted:
            raise OptionError(
                "the model does not match its layer composition", where=layer,
                got=f"{len(found)} layers", expected=str(composition),
            )  # fmt: skip


Options = CompileOptions | Mapping[str, Any] | None
Found = tuple[CompiledGraph, BindingManifest]
_MOST_TEMPLATES = 256


@dataclass(frozen=True)
class Specialized:
    """A variant, bound and planned: everything but machine code."""

    template: Template
    lir: Lir

    @cached_property
    def manifest(self) -> BindingManifest:
        """Shapes, sizes and arena offsets of all arguments; params are the user's."""
        return users_manifest(BindingManifest.of(self.lir), self.template)

    @property
    def kernel_params(self) -> list[str]:
        """The params that kernels read, some of them packed from the user's."""
        return BindingManifest.of(self.lir).param_names

    def artifact(self, material: bytes = b"") -> Artifact:
        """Compile the variant to an artifact; its target need not be this machine."""
        self.lir.check_phases()
        base, options = self.template, self.template.options
        binding = DimBinding(options.binding.sizes)
        for symbol, bound in base.dynamic_dims.items():
            binding.set_live(symbol, bound)
        parts = base.backend.export(self.lir, options)
        name = base.backend.name
        profile = options.profile
        return Artifact.of(name, base.signature, binding, self.lir, parts, profile, material)


class ModelCompilePipeline(Unpicklable):
    """Three stages (template, specialisation, machine code), each cached.

    All executables share one ParamStore, and states of the same name, shape and element type. A hit
    finds an executable by its key and the contents of its model. A miss specialises a cached
    template; only a new model or new options run the passes. Thread-safe.
    """

    instead = "make one in each process: artifacts on disk are shared"

    def __init__(
        self,
        device: Device | str = "cpu",
        capacity: int = 8,
        eviction: str = "fifo",
        *,
        capacity_bytes: int | None = None,
        params: ParamStore | None = None,
        aot: AotCache | None = None,
    ) -> None:
        """`aot` is the cache of artifacts; by default it is in the user's cache directory."""
        self.session = Session(device)
        self.params = params if params is not None else ParamStore()
        self.cache: CompileCache[CompiledGraph] = CompileCache(capacity, eviction, capacity_bytes)
        self.aot = aot
        self.states = SharedStates()
        self._templates: CompileCache[Template] = CompileCache(_MOST_TEMPLATES, "lru")
        self._modules: weakref.WeakKeyDictionary[BuildHir, Any] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()
        self._last: dict[tuple[str, str], Template] = {}  # by options and composition, newest last

    # -- stages -----------------------------------------------------------------------------------

    def build_template(
        self, build_hir: BuildHir, options: Options = None, composition_key: str = ""
    ) -> Template:
        """Lower, fuse and legalise symbolic HIR, once per (HIR, options)."""
        chosen = CompileOptions.of(options)
        module, content = self._module(build_hir, composition_key)
        plain = replace(chosen, binding=DimBinding())
        make = partial(self.session.template, module, plain)
        template = self._templates.get_or_make((content, chosen.template_key()), make)
        with self._lock:
            key = (chosen.template_key(), composition_key)
            self._last.pop(key, None)
            self._last[key] = template
            if len(self._last) > _MOST_TEMPLATES:
                del self._last[next(iter(self._last))]
        return template

    def _module(self, build_hir: BuildHir, composition: str) -> tuple[GraphModule, str]:
        """The model and the key of its contents, cached by the function that builds it."""
        with contextlib.suppress(TypeError, KeyError):  # hits do not wait for a model being built
            found: tuple[GraphModule, str] = self._modules[build_hir][composition]
            return found
        with self._lock:
            known: dict[str, tuple[GraphModule, str]] = {}
            with contextlib.suppress(TypeError):  # not every callable can be referenced weakly
                known = self._modules.setdefault(build_hir, known)
            if composition not in known:
                module = build_model(build_hir, composition)
                known[composition] = module, model_key(module)
            return known[composition]

    def specialize_template(
        self, binding: DimBinding, options: Options = None, template: Template | None = None
    ) -> Specialized:
        """Bind and plan a template; by default the last one that was built with these options."""
        chosen = CompileOptions.of(options)
        if len(chosen.binding) and chosen.binding != binding:
            raise OptionError(
                "two bindings", where="options.binding", got=chosen.binding, expected=binding,
                hint="leave the one in the options out",
            )  # fmt: skip
        base = template or self._template_for(chosen)
        bound = base.with_options(replace(chosen, binding=binding))
        if bound.open_symbols:
            raise OptionError(
                "a binding leaves symbols open", where=bound.source.name,
                got=str(binding), expected=f"sizes for {', '.join(sorted(bound.open_symbols))}",
            )  # fmt: skip
        return Specialized(bound, bound.plan({}))

    def compile_lir(self, specialized: Specialized, options: Options = None) -> CompiledGraph:
        """Compile a planned variant; it shares parameters and states with all others."""
        if options is not None:
            own, chosen = specialized.template.options, CompileOptions.of(options)
            if chosen.template_key() != own.template_key():
                raise OptionError(
                    "other options than the variant was planned with", where="compile_lir",
                    hint="give them to build_template and specialize_template",
                )  # fmt: skip
            options = replace(own, threads=chosen.threads)
            template = specialized.template.with_options(options)
            specialized = Specialized(template, specialized.lir)
        return self._compiled(specialized)

    # -- executables by key -----------------------------------------------------------------------

    def get_or_compile(
        self, key: str, binding: DimBinding, build_hir: BuildHir, options: Options = None
    ) -> Found:
        """The executable of `key`; `binding`, model and options must be what the key stands for."""
        model = self._module(build_hir, "")[1]

        def make() -> CompiledGraph:
            chosen = CompileOptions.of(options)
            template = self.build_template(build_hir, chosen)
            return self._compiled(self.specialize_template(binding, chosen, template))

        def material() -> dict[str, object]:
            chosen = CompileOptions.of(options)
            return {"binding": str(binding), "model": model[:12], **_material(chosen)}

        compiled = self.cache.get_or_make(
            (key, ""), make, size=_size, token=(binding, options, model), material=material
        )
        return compiled, compiled.manifest

    def get_or_compile_component(
        self, component: ModelComponent, build_hir: BuildHir, options: Options = None
    ) -> Found:
        """The executable of a component; it needs no other call before it. The model is built once
        for each function object `build_hir`: pass the same one, and a hit costs microseconds.

        EAGER: compiled when this returns. LAZY: planned now and compiled by the first run. AOT:
        loaded from disk, or compiled and stored there; see `get_or_specialize_aot`.
        """
        if component.compilation_mode is CompilationMode.AOT:
            return self.get_or_specialize_aot(component, build_hir, options)

        def make() -> CompiledGraph:
            chosen = CompileOptions.of(options).for_component(component)
            template = self.build_template(build_hir, chosen, component.layer_composition_key)
            specialized = self.specialize_template(component.dim_binding(), chosen, template)
            lazy = component.compilation_mode is CompilationMode.LAZY
            return self._compiled(specialized, lazy)

        model = self._module(build_hir, component.layer_composition_key)[1]
        compiled = self.cache.get_or_make(
            (component.cache_key(), model), make, size=_size, token=(options,),
            material=lambda: component_material(component, options),
        )  # fmt: skip
        return compiled, compiled.manifest

    def _compiled(self, specialized: Specialized, lazy: bool = False) -> CompiledGraph:
        template, params, states = specialized.template, self.params, self.states

        def executable() -> Executable:
            specialized.lir.check_phases()
            return template.backend.compile(specialized.lir, template.options)

        if not lazy:
            return CompiledGraph(template, params, executable(), states=states)
        return CompiledGraph(template, params, executable, specialized.manifest, states)

    # -- artifacts --------------------------------------------------------------------------------

    def get_or_specialize_aot(
        self,
        component: ModelComponent,
        build_hir: BuildHir,
        options: Options = None,
        *,
        cache: AotCache | None = None,
        model_key: str | None = None,
        on_plan: Callable[[Specialized], None] | None = None,
    ) -> Found:
        """The executable of a component from disk, or compiled and stored there.

        `model_key` identifies the contents of the model, if the caller knows it before building:
        then a hit does not call `build_hir`. `on_plan` is called before a variant is compiled, to
        begin work that need not wait for its code. If the disk cache is off, or the device cannot
        export programs, the variant is cached in memory only.
        """
        can_export = self.session.device.backend.can_export
        disk = cache or self.aot or AotCache.default() if can_export else None
        composition = component.layer_composition_key
        content = model_key or self._module(build_hir, composition)[1]
        if disk is not None:
            disk.find_profile(component)

        def make() -> CompiledGraph:
            chosen = CompileOptions.of(options).for_component(component)
            backend = self.session.device.backend.for_profile(chosen.profile)
            material = encode(artifact_material(component, content, chosen, backend))
            name = f"{component.aot_disk_base()}-{make_key('artifact', material)[:16]}"
            found = self._load(disk, name, material, backend, chosen) if disk else None
            if found is not None:
                return found
            template = self.build_template(build_hir, chosen, composition)
            specialized = self.specialize_template(component.dim_binding(), chosen, template)
            if on_plan is not None:
                on_plan(specialized)
            if disk is None:
                return self._compiled(specialized)
            artifact = specialized.artifact(material)
            disk.store(name, artifact)
            return self._restored(artifact, backend, chosen)

        compiled = self.cache.get_or_make(
            (component.cache_key(), content), make, size=_size, token=(options,),
            material=lambda: component_material(component, options),
        )  # fmt: skip
        return compiled, compiled.manifest

    def _load(
        self, disk: AotCache, name: str, material: bytes, backend: Backend, options: CompileOptions
    ) -> CompiledGraph | None:
        artifact = disk.load(name, material)
        if artifact is None:
            return None
        try:
            return self._restored(artifact, backend, options)
        except RlxError as error:
            disk.reject(name, error)
            return None

    def _restored(
        self, artifact: Artifact, backend: Backend, options: CompileOptions
    ) -> CompiledGraph:
        variant = StoredVariant(artifact, backend, options)
        return CompiledGraph(variant, self.params, variant.specialize({}), states=self.states)

    # -- queries ----------------------------------------------------------------------------------

    def contains(self, key: str | ModelComponent) -> bool:
        """Whether there is an executable of this key, of any model."""
        return bool(self._cached_keys(key))

    def _cached_keys(self, key: str | ModelComponent) -> list[Hashable]:
        wanted = key.cache_key() if isinstance(key, ModelComponent) else key
        return [k for k in self.cache if isinstance(k, tuple) and k[0] == wanted]

    def pin(self, key: str | ModelComponent, pinned: bool = True) -> None:
        """Exempt an executable from eviction, or no longer."""
        for found in self._cached_keys(key) or [str(key)]:
            self.cache.pin(found, pinned)

    def has_template(self, options: Options = None) -> bool:
        wanted = CompileOptions.of(options).template_key()
        return any(t.options.template_key() == wanted for t in self._templates.values())

    def template_result(self, options: Options = None) -> PipelineResult:
        """The graph after all passes, and their reports."""
        return self._template_for(CompileOptions.of(options)).result

    def template_binding_manifest(self, binding: DimBinding | None = None) -> BindingManifest:
        """The manifest of the last template: with symbolic shapes, or with this binding."""
        if not self._last:
            raise OptionError("no template yet", hint="call build_template first")
        template = list(self._last.values())[-1]
        if binding is not None:
            return self.specialize_template(binding, template.options, template).manifest
        source, known = template.source, template.signature
        outputs = zip(source.output_names, source.outputs, strict=True)
        return BindingManifest.symbolic(
            {
                "input": known.inputs,
                "param": known.params,
                "state": known.states,
                "output": {name: value.shape for name, value in outputs},
            }
        )

    def binding_manifest_for_binding(
        self, binding: DimBinding, options: Options = None
    ) -> BindingManifest:
        return self.specialize_template(binding, options).manifest

    def binding_manifest_for_component(
        self, component: ModelComponent, options: Options = None, build_hir: BuildHir | None = None
    ) -> BindingManifest:
        """The manifest of a component, of the last template with its options and layers, or of the
        model that `build_hir` builds."""
        chosen = CompileOptions.of(options).for_component(component)
        composition = component.layer_composition_key
        if build_hir is not None:
            template = self.build_template(build_hir, chosen, composition)
        else:
            template = self._template_for(chosen, composition)
        return self.specialize_template(component.dim_binding(), chosen, template).manifest

    def explain(self, key: str | ModelComponent, options: Options = None) -> str:
        """Why a key hits or misses, and what differs from the nearest entry."""
        material, wanted = None, key
        if isinstance(key, ModelComponent):
            material, wanted = component_material(key, options), key.cache_key()
        known = [k for k in self.cache.seen() if isinstance(k, tuple) and k[0] == wanted]
        return self.cache.explain(known[0] if known else (wanted, ""), material)

    def _template_for(self, options: CompileOptions, composition: str | None = None) -> Template:
        wanted = options.template_key()
        for (key, layers), template in reversed(list(self._last.items())):
            if key == wanted and composition in (None, layers):
                return template
        raise OptionError(
            "no template of these options" + (" and layers" if composition else ""),
            hint="call build_template first",
        )

    def __len__(self) -> int:
        return len(self.cache)


def artifact_material(
    component: ModelComponent, model: str, options: CompileOptions, backend: Backend
) -> dict[str, object]:
    """Everything that an artifact's code depends on, except the compiler itself."""
    return {
        "component": component,
        "model": model,
        "options": options.template_material(),
        "device": backend.name,
        "target": backend.target_key,
        "tuning": backend.tuning_key,
        "workers": backend.workers(options),
    }


def component_material(component: ModelComponent, options: Options) -> dict[str, object]:
    """What selects an executable, as readable values."""
    dispatch = component.kernel_dispatch
    return {
        "variant": str(component.variant),
        "policy": dispatch.policy.value,
        "force_common_kinds": sorted(dispatch.force_common_kinds),
        "force_native_kinds": sorted(dispatch.force_native_kinds),
        "mode": component.compilation_mode.value,
        "profile": component.profile_key[:12] or "default",
        "quant": None if component.quant is None else str(component.quant),
        "composition": component.layer_composition_key[:12] or None,
        **_material(CompileOptions.of(options).for_component(component)),
    }


def _material(options: CompileOptions) -> dict[str, object]:
    """Short hashes of the options, and the number of threads a program is made for."""
    parts = options.template_material()
    hashes = {f"options.{k}": make_key("part", v)[:12] for k, v in parts.items()}
    return hashes | {"options.threads": options.threads}


def _size(compiled: CompiledGraph) -> int:
    return compiled.manifest.arena_size


def model_key(module: Graph | GraphModule) -> str:
    """A content hash of a model, the same in every process."""
    held = as_module(module)
    policy = held.fusion_policy
    contents = canonical(_graph_of(held))
    plain = policy is FusionPolicy.DIRECT or held.stage is not GraphStage.HIR
    return make_key("model", contents if plain else (contents, policy.value))


def _graph_of(module: GraphModule) -> Graph:
    held = module.as_hir() or module.as_graph()
    assert held is not None
    return held
