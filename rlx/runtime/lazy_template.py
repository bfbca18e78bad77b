"""A template that is made only when it is needed, since its first variant may be on disk.

A jitted function is often called with the same sizes in every process that uses it. So the first
variant that a process needs is kept in the cache of artifacts, by the contents of the graph: the
next process runs it without passes, and without importing the compiler. Later variants of the same
process are made from the template, in milliseconds, and are not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlx.backends.base import Backend, Executable
from rlx.errors import RlxError
from rlx.ir.binding import DimBinding
from rlx.ir.graph import Graph
from rlx.ir.serial import canonical
from rlx.runtime.aot import AotCache
from rlx.runtime.artifact import Artifact
from rlx.runtime.variants import Signature
from rlx.specialize.options import CompileOptions
from rlx.specialize.variant import encode, make_key
from rlx.support.files import cache_directory
from rlx.support.records import dataclass
from rlx.support.settings import debug_level

if TYPE_CHECKING:
    from rlx.passes.pipeline import PipelineResult
    from rlx.runtime.template import Template


_LIMIT = 64 << 20  # bytes: a thousand functions or two


def function_cache() -> AotCache | None:
    """The cache of first variants, in the user's directory; None where RLX_CACHE=0 turns it off."""
    root = cache_directory("functions")
    return None if root is None else AotCache(root, _LIMIT)


@dataclass
class LazyTemplate:
    """The provider of a compiled graph without params and states, all of whose symbols are open."""

    source: Graph
    device: Backend
    options: CompileOptions

    @cached_property
    def template(self) -> Template:
        from rlx.runtime.template import make_template  # imports all passes

        return make_template(self.source, self.options, self.device)

    @property
    def result(self) -> PipelineResult:
        return self.template.result

    @cached_property
    def signature(self) -> Signature:
        return Signature.of(self.source)

    @property
    def binding(self) -> DimBinding:
        return self.options.binding

    @property
    def dynamic_dims(self) -> dict[str, int]:
        return {}

    @cached_property
    def open_symbols(self) -> frozenset[str]:
        return frozenset(self.source.symbols())

    @property
    def backend(self) -> Backend:
        return self.device

    @property
    def prepare(self) -> Graph | None:
        """What is computed of constants alone; asked for only where it is missing."""
        return self.template.prepare

    def specialize(self, open_sizes: Mapping[str, int]) -> Executable:
        if "template" in self.__dict__ or debug_level():  # a later variant
            return self.template.specialize(open_sizes)
        disk = function_cache() if self.device.can_export else None
        if disk is None:
            return self.template.specialize(open_sizes)
        material = encode(self._material(open_sizes))
        name = make_key("function", material)[:40]
        found = self._load(disk, name, material)
        if found is None:
            artifact = self._make(open_sizes, material)
            disk.store(name, artifact)
            found = artifact.executable(self.device, self.options)
        return found

    def _material(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Everything that the code depends on, except the compiler itself."""
        return {
            "graph": canonical(self.source),
            "sizes": dict(sizes),
            "options": self.options.template_material(),
            "device": self.device.name,
            "target": self.device.target_key,
            "tuning": self.device.tuning_key,
            "workers": self.device.workers(self.options),
        }

    def _load(self, disk: AotCache, name: str, material: bytes) -> Executable | None:
        artifact = disk.load(name, material)
        if artifact is None:
            return None
        try:
            return artifact.executable(self.device, self.options)
        except RlxError as error:
            disk.reject(name, error)
            return None

    def _make(self, sizes: Mapping[str, int], material: bytes) -> Artifact:
        lir = self.template.plan(sizes)
        parts = self.device.export(lir, self.options)
        binding, profile = DimBinding(sizes), self.options.profile
        return Artifact.of(self.device.name, self.signature, binding, lir, parts, profile, material)
