"""Compile once, specialise instantly: templates by model and options, executables by key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlx.backends.base import Executable
from rlx.backends.registry import Device
from rlx.errors import OptionError
from rlx.ir.binding import DimBinding
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.module import GraphModule
from rlx.ir.serial import canonical
from rlx.passes.pipeline import PipelineResult
from rlx.runtime.cache import CompileCache
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.runtime.session import Session
from rlx.runtime.template import Template
from rlx.specialize.component import ModelComponent
from rlx.specialize.key import make_key
from rlx.specialize.manifest import BindingManifest
from rlx.specialize.options import CompileOptions

BuildHir = Callable[[], Graph | GraphModule]
Options = CompileOptions | Mapping[str, Any] | None


@dataclass(frozen=True)
class Specialized:
    """A template bound and planned: everything but machine code."""

    template: Template
    lir: Lir

    @property
    def manifest(self) -> BindingManifest:
        return BindingManifest.of(self.lir)


class ModelCompilePipeline:
    """The three steps (template, specialisation, machine code) and a cache over them.

    All executables share one ParamStore. A hit finds an executable by its key and rebuilds nothing;
    a miss specialises a template that is there already, and only a new model or new options run the
    passes. Safe to call from several threads.
    """

    def __init__(
        self,
        device: Device | str = "cpu",
        capacity: int = 8,
        eviction: str = "fifo",
        *,
        capacity_bytes: int | None = None,
        params: ParamStore | None = None,
    ) -> None:
        self.session = Session(device)
        self.params = params if params is not None else ParamStore()
        self.cache: CompileCache[CompiledGraph] = CompileCache(capacity, eviction, capacity_bytes)
        self._templates: dict[tuple[str, str], Template] = {}
        self._built: dict[tuple[BuildHir, str], Template] = {}
        self._last: Template | None = None
        self._lock = threading.RLock()

    # -- the three steps ------------------------------------------------------------------------

    def build_template(self, build_hir: BuildHir, options: Options = None) -> Template:
        """Lowering, fusion and legalisation on symbolic HIR, once per (HIR, options)."""
        chosen = CompileOptions.of(options)
        key = chosen.template_key()
        with self._lock:
            found = self._built.get((build_hir, key))
            if found is None:
                module = build_hir()
                content = make_key("model", canonical(_graph_of(module)))
                found = self._templates.get((content, key))
                if found is None:
                    found = self.session.template(module, replace(chosen, binding=DimBinding()))
                    self._templates[content, key] = found
                self._built[build_hir, key] = found
            self._last = found
            return found

    def specialize_template(
        self, binding: DimBinding, options: Options = None, template: Template | None = None
    ) -> Specialized:
        """Bind and plan the template of these options (the last one built, unless given)."""
        chosen = CompileOptions.of(options)
        base = template or self._template_for(chosen)
        bound = replace(base, options=replace(chosen, binding=binding))
        if bound.open_symbols:
            raise OptionError(
                "a binding leaves symbols open", where=bound.source.name,
                got=str(binding), expected=f"sizes for {', '.join(sorted(bound.open_symbols))}",
            )  # fmt: skip
        return Specialized(bound, bound.plan({}))

    def compile_lir(self, specialized: Specialized, options: Options = None) -> Executable:
        """The executable of a planned template."""
        chosen = CompileOptions.of(options)
        return specialized.template.backend.compile(specialized.lir, chosen)

    # -- the cache over them --------------------------------------------------------------------

    def get_or_compile(
        self, key: str, binding: DimBinding, build_hir: BuildHir, options: Options = None
    ) -> tuple[CompiledGraph, BindingManifest]:
        """The executable of `key`; `binding`, model and options must be what the key stands for."""
        chosen = CompileOptions.of(options)
        material = {"key": key, "binding": str(binding), **_material(chosen)}
        compiled = self.cache.get_or_make(
            key,
            lambda: self._compile(binding, build_hir, chosen),
            size=lambda c: int(c.executable.arena.nbytes),
            material=material,
        )
        return compiled, compiled.manifest

    def get_or_compile_component(
        self, component: ModelComponent, build_hir: BuildHir, options: Options = None
    ) -> tuple[CompiledGraph, BindingManifest]:
        """The executable of a component; also as the very first call."""
        chosen = CompileOptions.of(options).for_component(component)
        return self.get_or_compile(
            component.cache_key(), component.dim_binding(), build_hir, chosen
        )

    def _compile(
        self, binding: DimBinding, build_hir: BuildHir, options: CompileOptions
    ) -> CompiledGraph:
        template = self.build_template(build_hir, options)
        specialized = self.specialize_template(binding, options, template)
        executable = self.compile_lir(specialized, options)
        return CompiledGraph(specialized.template, self.params, executable)

    # -- questions ------------------------------------------------------------------------------

    def contains(self, key: str | ModelComponent) -> bool:
        return (key.cache_key() if isinstance(key, ModelComponent) else key) in self.cache

    def has_template(self, options: Options = None) -> bool:
        wanted = CompileOptions.of(options).template_key()
        return any(key == wanted for _, key in self._templates)

    def template_result(self, options: Options = None) -> PipelineResult:
        """What the passes made of the model, and their reports."""
        return self._template_for(CompileOptions.of(options)).result

    def template_binding_manifest(self, binding: DimBinding) -> BindingManifest:
        """The manifest that a binding of the template would have."""
        return self.specialize_template(binding).manifest

    def binding_manifest_for_binding(
        self, binding: DimBinding, options: Options = None
    ) -> BindingManifest:
        return self.specialize_template(binding, options).manifest

    def binding_manifest_for_component(
        self, component: ModelComponent, options: Options = None
    ) -> BindingManifest:
        chosen = CompileOptions.of(options).for_component(component)
        return self.specialize_template(component.dim_binding(), chosen).manifest

    def explain(self, key: str | ModelComponent, options: Options = None) -> str:
        """Why a key hits or misses, and what differs from the nearest entry."""
        if isinstance(key, ModelComponent):
            chosen = CompileOptions.of(options).for_component(key)
            binding = str(key.dim_binding())
            material = {"key": key.cache_key(), "binding": binding, **_material(chosen)}
            return self.cache.explain(key.cache_key(), material)
        return self.cache.explain(key)

    def _template_for(self, options: CompileOptions) -> Template:
        wanted = options.template_key()
        with self._lock:
            if self._last is not None and self._last.options.template_key() == wanted:
                return self._last
            for (_, key), template in reversed(self._templates.items()):
                if key == wanted:
                    return template
        raise OptionError("no template of these options", hint="call build_template first")

    def __len__(self) -> int:
        return len(self.cache)


def _graph_of(module: Graph | GraphModule) -> Graph:
    if isinstance(module, Graph):
        return module
    held = module.as_hir() or module.as_graph()
    assert held is not None
    return held


def _material(options: CompileOptions) -> dict[str, object]:
    return {k: make_key("part", v)[:12] for k, v in options.template_material().items()}
