"""Makes the report of a module: compile, run, collect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.backends.base import Backend
from rlx.backends.registry import Device
from rlx.ir.graph import Graph
from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.passes.bind import bind_graph
from rlx.specialize.options import CompileOptions
from rlx.viz.arena import arena_plan
from rlx.viz.report.collect import blocks, dispatches, fusions, statements
from rlx.viz.report.measure import Compiled, compile_timed, run_timed
from rlx.viz.report.records import Arena, Report


def make_report(
    module: GraphModule,
    options: CompileOptions | Mapping[str, object] | None = None,
    *,
    device: Backend | Device | str = "cpu",
    params: Mapping[str, Array] | None = None,
    name: str = "",
    facts: Sequence[tuple[str, str]] = (),
) -> Report:
    """Compile and run the variant of the options' binding, and report on it.

    Parameters that are not given are zeros. `facts` are shown at the top, label and value.
    """
    chosen = CompileOptions.of(options)
    backend = device if isinstance(device, Backend) else Device.of(device).backend
    made = compile_timed(module, backend, chosen)
    measured = run_timed(made, params) if made.executable is not None else None
    stages = _stages(module, made)
    title = name or module.name
    return Report(
        title,
        [*facts, *_facts(made)],
        statements(stages["hir"]) if "hir" in stages else [],
        statements(stages["mir"]),
        statements(made.lir.graph, made.lir, made.seconds),
        blocks(title, stages),
        Arena(made.lir.arena_size, len(made.lir), arena_plan(made.lir)),
        measured,
        made.spent,
        fusions(made.template.result.fusion_report),
        dispatches(made.template.result.dispatch_report),
    )


def _stages(module: GraphModule, made: Compiled) -> dict[str, Graph]:
    hir = module.as_hir()
    mir = bind_graph(made.template.source, made.template.binding)
    return {**({"hir": hir} if hir is not None else {}), "mir": mir, "lir": made.lir.graph}


def _facts(made: Compiled) -> list[tuple[str, str]]:
    template = made.template
    found = [("device", template.backend.name)]
    sizes = [
        f"{s} = {n}" if isinstance(n, int) else f"{s} {n}" for s, n in template.binding.items()
    ]
    if sizes:
        found.append(("sizes", ", ".join(sizes)))
    if made.launches:
        found.append(("workers", str(template.backend.workers(template.options))))
        found.append(("program", f"{made.launches} launches of {made.kernels} kernels"))
    return found
