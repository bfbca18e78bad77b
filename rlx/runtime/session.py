"""Sessions: compile graphs for a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlx.backends.registry import Device
from rlx.errors import BindingError
from rlx.ir.binding import DimBinding, UpTo
from rlx.ir.graph import Graph
from rlx.ir.module import GraphModule
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import ParamStore
from rlx.runtime.variants import PlannedVariant
from rlx.specialize.options import CompileOptions

if TYPE_CHECKING:
    from rlx.runtime.template import Template


class Session:
    """Compiles graphs for one device. Sessions are cheap; they hold no state of their own."""

    def __init__(self, device: Device | str = "cpu") -> None:
        self.device = Device.of(device)

    def __repr__(self) -> str:
        return f"<Session on {self.device.name}>"

    def compile(
        self,
        graph: Graph | GraphModule,
        options: CompileOptions | Mapping[str, Any] | None = None,
        *,
        params: ParamStore | None = None,
        binding: DimBinding | Mapping[str, int | UpTo] | None = None,
        donated: Mapping[str, str] | None = None,
    ) -> CompiledGraph:
        """Run the passes on `graph`; `params` may be shared with other compiled graphs.

        `donated` names an input for an output that may be computed in its memory: the input is then
        overwritten, where that is safe and the device can.

        Machine code is generated once all sizes are known: now, if the options or `binding` give
        them, else by the first run with new sizes. After a `binding` other sizes may still be run;
        a bound `UpTo` in it holds for all of them. A module at LIR is compiled as it is planned.
        """
        if not isinstance(binding, (DimBinding, Mapping, type(None))):
            raise BindingError(
                "not a binding", where="binding", got=repr(binding),
                expected='a DimBinding or a mapping such as {"batch": 4}',
            )  # fmt: skip
        sizes = {} if binding is None else dict(binding.items())
        chosen = CompileOptions.of(options)
        for symbol, size in sizes.items():
            if isinstance(size, UpTo):
                bound = chosen.binding.with_size(symbol, size)
                chosen = replace(chosen, binding=bound)
        lir = graph.as_lir() if isinstance(graph, GraphModule) else None
        if lir is not None:
            backend = self.device.backend.for_profile(chosen.profile)
            chosen = replace(chosen, binding=DimBinding(sizes)) if sizes else chosen
            return CompiledGraph(PlannedVariant(lir, backend, chosen), params)
        compiled = CompiledGraph(self.template(graph, chosen, donated), params)
        if binding is not None:
            compiled.warm({s: n for s, n in sizes.items() if isinstance(n, int)})
        return compiled

    def compile_kept(self, graph: Graph) -> CompiledGraph:
        """`compile` for a graph of inputs alone that is not changed any more. The first variant
        that this process needs is kept on disk, and comes from there in the next process."""
        from rlx.runtime.lazy_template import LazyTemplate  # artifacts are not for everyone

        if graph.sources("param") or graph.sources("state"):
            return self.compile(graph)
        options = CompileOptions()
        backend = self.device.backend.for_profile(options.profile)
        return CompiledGraph(LazyTemplate(graph, backend, options))

    def template(
        self,
        graph: Graph | GraphModule,
        options: CompileOptions | Mapping[str, Any] | None = None,
        donated: Mapping[str, str] | None = None,
    ) -> Template:
        """Lower, fuse and legalise `graph`; its dims stay symbolic."""
        # imports all passes: a start from an artifact does without them
        from rlx.runtime.template import make_template

        return make_template(graph, CompileOptions.of(options), self.device.backend, donated)
