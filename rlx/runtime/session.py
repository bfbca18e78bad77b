"""The front door: a device, and graphs compiled for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlx.backends.registry import Device
from rlx.ir.graph import Graph
from rlx.ir.module import GraphModule
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.specialize.options import CompileOptions

if TYPE_CHECKING:
    from rlx.runtime.template import Template


class Session:
    """Compiles graphs for one device. Sessions are cheap; they hold no state of their own."""

    def __init__(self, device: Device | str = "cpu") -> None:
        self.device = Device.of(device)

    def compile(
        self,
        graph: Graph | GraphModule,
        options: CompileOptions | Mapping[str, Any] | None = None,
        *,
        params: ParamStore | None = None,
    ) -> CompiledGraph:
        """An executable form of `graph`; `params` may be shared with other compiled graphs."""
        return CompiledGraph(self.template(graph, options), params)

    def template(
        self,
        graph: Graph | GraphModule,
        options: CompileOptions | Mapping[str, Any] | None = None,
    ) -> Template:
        """Lowered, fused and legalised, sizes still open."""
        # all passes with their rules: a start from an artifact does without them
        from rlx.runtime.template import make_template

        return make_template(graph, CompileOptions.of(options), self.device.backend)
