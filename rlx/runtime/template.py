"""A template: lowered, fused and legalised once with symbolic sizes, specialised many times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rlx.backends.base import Backend, Executable
from rlx.ir.binding import DimBinding
from rlx.ir.dim import DERIVED
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.text import inspect_lir
from rlx.ir.verify import verify
from rlx.passes.bind import bind_graph
from rlx.passes.pipeline import PipelineResult
from rlx.passes.plan import plan
from rlx.runtime.variants import Signature
from rlx.settings import debug, debug_level
from rlx.specialize.options import CompileOptions


@dataclass
class Template:
    source: Graph  # MIR as the user described it: names, shapes and types of all arguments
    result: PipelineResult  # what the passes made of it
    backend: Backend
    options: CompileOptions

    @property
    def binding(self) -> DimBinding:
        return self.options.binding

    @property
    def live(self) -> dict[str, int]:
        """Live symbols that the graph uses, and their bounds."""
        return {s: b for s, b in self.binding.live.items() if s in self._symbols}

    @cached_property
    def _symbols(self) -> frozenset[str]:
        found: set[str] = set()
        for s in self.source.symbols():
            found |= DERIVED[s].symbols if s in DERIVED else {s}
        return frozenset(found)

    @cached_property
    def open_symbols(self) -> frozenset[str]:
        """Symbols whose sizes the options leave to the inputs."""
        return frozenset(s for s in self._symbols if s not in self.binding)

    @property
    def prepare(self) -> Graph | None:
        return self.result.prepare

    @cached_property
    def signature(self) -> Signature:
        return Signature.of(self.source)

    def plan(self, open_sizes: Mapping[str, int]) -> Lir:
        """Bind and plan: a variant without machine code."""
        binding = DimBinding(dict(self.binding.items()))
        for symbol, size in open_sizes.items():
            binding.set(symbol, size)
        bound = self.backend.lower_bound(bind_graph(self.result.graph, binding))
        lir = plan(bound, prepare=self.prepare, scratch=self.backend.scratch)
        verify(lir.graph, after="plan")
        if debug_level() >= 4:
            debug(4, inspect_lir(lir))
        return lir

    def specialize(self, open_sizes: Mapping[str, int]) -> Executable:
        return self.backend.compile(self.plan(open_sizes), self.options)
