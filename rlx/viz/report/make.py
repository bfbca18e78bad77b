"""Makes the report of a module: compile, run, collect.

Compiles a module stage by stage, runs it, and measures both.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TypeVar

import numpy as np

from rlx.backends.base import Backend, Executable
from rlx.backends.inspection import Inspection
from rlx.backends.registry import Device
from rlx.backends.timing import Profile, Timing, block_pattern
from rlx.errors import OptionError
from rlx.ir.attrs import Body
from rlx.ir.binding import bind_graph
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.module import GraphModule
from rlx.ir.node import Node, Value
from rlx.ir.op import Array
from rlx.ir.shape import Shape
from rlx.ir.text.printer import write_call
from rlx.passes.pipeline import PipelineResult
from rlx.passes.report import DispatchReport, FusionReport
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import PREPARED, ParamStore
from rlx.runtime.template import Template, make_template
from rlx.specialize.options import CompileOptions
from rlx.support.records import dataclass
from rlx.viz.report.records import (
    Arena,
    Block,
    Dispatch,
    Fused,
    KernelUse,
    Measured,
    Place,
    Report,
    Result,
    Spent,
    Statement,
    arena_plan,
)

_SEGMENT = re.compile(r"\.(?!\d+(?:\.|$))")  # `blk.0.rope` is rope in blk.0


def statements(
    graph: Graph, lir: Lir | None = None, seconds: Mapping[int, float] | None = None
) -> list[Statement]:
    """The nodes of a graph; with its plan, also the slots of results."""
    return [_statement(node, lir, (seconds or {}).get(node.id, 0.0)) for node in graph.nodes]


def _statement(node: Node, lir: Lir | None, seconds: float) -> Statement:
    text = write_call(node, _nested)
    phase = lir.phases.get(node.id) if lir is not None else None
    origin = node.origin
    return Statement(
        node.id,
        node.op.name,
        text.removeprefix(node.op.name),
        [_result(v, lir) for v in node.outputs],
        node.name,
        node.op.is_source,
        f"{os.path.basename(origin.file)}:{origin.line}" if origin.file else "",
        origin.passes,
        phase.value if phase is not None else "",
        seconds,
    )


def _nested(body: Body) -> str:
    """The ops of a nested graph, in order."""
    return f"{{{', '.join(n.op.name for n in body.graph.nodes if not n.op.is_source)}}}"


def _result(value: Value, lir: Lir | None) -> Result:
    dims = f"[{', '.join(map(str, value.shape.dims))}]"
    place = None
    if lir is not None:
        slot = lir.slots[value]
        root = "" if slot.root is None else str(slot.root)
        place = Place(slot.kind, slot.size, slot.first, slot.last, slot.offset, root)
    return Result(dims, str(value.shape.dtype), place)


def blocks(name: str, stages: Mapping[str, Graph]) -> list[Block]:
    """The blocks of all stages as one tree."""
    found = [Block(name, "", -1)]
    known = {"": 0}
    for stage, graph in stages.items():
        for node in graph.nodes:
            block = found[_block(node.origin.block, found, known)]
            getattr(block, stage).append(node.id)
    return found


def _block(path: str, found: list[Block], known: dict[str, int]) -> int:
    if path not in known:
        *outer, name = _SEGMENT.split(path)
        parent = _block(".".join(outer), found, known)
        known[path] = len(found)
        found.append(Block(name, path, parent))
    return known[path]


def spent_in_passes(result: PipelineResult) -> list[Spent]:
    """Time and change in the number of nodes, pass by pass."""
    found, before = [], None
    for stage in result.trace:
        change = "" if before in (None, stage.nodes) else f" ({stage.nodes - before:+d})"
        found.append(Spent("passes", stage.name, stage.seconds, f"{stage.nodes} nodes{change}"))
        before = stage.nodes
    return found


def fusions(report: FusionReport) -> list[Fused]:
    """Fusions, the most frequent first, then near misses."""
    done = [
        Fused(rule, len(origins), patterns(report.blocks(rule)))
        for rule, origins in report.fused.items()
    ]
    missed: dict[tuple[str, str], list[str]] = {}
    for m in report.missed:
        missed.setdefault((m.rule, m.reason), []).append(m.origin.block or str(m.origin))
    nearly = [
        Fused(rule, len(places), patterns(places), reason)
        for (rule, reason), places in missed.items()
    ]
    return [*sorted(done, key=_by_count), *sorted(nearly, key=_by_count)]


def _by_count(fused: Fused) -> int:
    return -fused.count


def patterns(blocks: Iterable[str]) -> list[str]:
    """Each block pattern once; layer numbers become `*`."""
    return [b for b in dict.fromkeys(map(block_pattern, blocks)) if b]


def dispatches(report: DispatchReport) -> list[Dispatch]:
    return [Dispatch(r.kind, r.outcome, r.nodes, r.why) for r in report.rows]


_MOST = 512  # size of a dynamic dim in the measured runs, where its bound allows
_REPEAT = 9
_Made = TypeVar("_Made")


@dataclass
class Compiled:
    """A compiled variant, and the time that each stage took."""

    template: Template
    lir: Lir
    spent: list[Spent]
    executable: Executable | None = None  # None: code for another machine
    launches: int = 0
    kernels: int = 0
    seconds: dict[int, float] = field(default_factory=dict)  # of a run, by node of the plan


def compile_timed(module: GraphModule, backend: Backend, options: CompileOptions) -> Compiled:
    """Passes, plan, kernels and program, none of them from a cache."""
    template = make_template(module, options, backend)
    if template.open_symbols:
        raise OptionError(
            "sizes are open", got=", ".join(sorted(template.open_symbols)),
            hint="--variant decode:1 or prefill:1x128, or --bind NAME=SIZE for each",
        )  # fmt: skip
    lir, planning = _timed(lambda: module.as_lir() or template.plan({}))
    spent = [*spent_in_passes(template.result), Spent("plan", "bind sizes and plan", planning)]
    made = Compiled(template, lir, spent)
    inspection = backend.inspection()
    if inspection.has_native_code:
        _time_kernels(made, inspection, options)
    if inspection.runs_here:
        before = inspection.compile_seconds()
        made.executable, linking = _timed(lambda: backend.compile(lir, options))
        linking -= inspection.compile_seconds() - before  # the rows of the kernels have it
        spent.append(Spent("program", "lower and link the program", max(0.0, linking)))
    return made


def _time_kernels(made: Compiled, inspection: Inspection, options: CompileOptions) -> None:
    """Emit the IR of every distinct kernel and compile it, one after the other."""
    program, choosing = _timed(lambda: inspection.program(made.lir, options))
    count = len(program.launches)
    made.spent.append(Spent("code", "choose kernels", choosing, f"{count} launches"))
    labels = {x.kernel: x.label for x in program.launches if x.kernel is not None}
    emitting = 0.0
    rows = []
    for kernel, label in labels.items():
        unit, spent = _timed(kernel.emit)
        emitting += spent
        code, spent = _timed(unit.compile)
        rows.append(Spent("llvm", label, spent, f"{unit.text.count(chr(10))} lines of IR, "
                                                f"{len(code)} bytes of object"))  # fmt: skip
    made.spent.append(Spent("code", "emit LLVM IR", emitting, f"{len(labels)} distinct kernels"))
    made.spent += sorted(rows, key=lambda r: -r.seconds)
    made.launches, made.kernels = count, len(labels)


def _timed(make: Callable[[], _Made]) -> tuple[_Made, float]:
    start = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start


def run_timed(made: Compiled, params: Mapping[str, Array] | None) -> Measured:
    """Run the variant several times; fills in `made.seconds`."""
    assert made.executable is not None
    template, given = made.template, params or {}
    graph = CompiledGraph(template, ParamStore(), made.executable)
    sizes = {symbol: min(bound, _MOST) for symbol, bound in template.dynamic_dims.items()}
    fixed, signature = template.binding.sizes, template.signature
    for name, shape in signature.params.items():
        if name.startswith(PREPARED):  # of a plan read from a file
            graph.params.adopt({name: _zeros(shape, fixed)})
        else:
            graph.set_param(name, given[name] if name in given else _zeros(shape, fixed))
    inputs = {name: _zeros(s, {**fixed, **sizes}) for name, s in signature.inputs.items()}
    _, first = _timed(lambda: graph.run(inputs, sizes=sizes))
    profile = graph.profile(inputs, sizes=sizes, repeat=_REPEAT)
    made.spent.append(Spent("weights", "prepack weights", max(0.0, first - profile.seconds)))
    for row in profile.rows:
        number = _node_of(row)
        made.seconds[number] = made.seconds.get(number, 0.0) + row.seconds
    return Measured(
        profile.seconds + profile.waiting,
        ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items()),
        "those of the model" if given else "zeros" if signature.params else "none",
        kernel_uses(profile, made.lir),
        template.backend.inspection().roofline(template.backend.workers(template.options)),
    )


def _zeros(shape: Shape, sizes: Mapping[str, int]) -> Array:
    bound = shape.bind(sizes)
    return np.zeros(bound.static_dims, bound.dtype.numpy)


def _node_of(row: Timing) -> int:
    """The node id of a row; −1: none."""
    return int(row.node.partition(" ")[0].removeprefix("%")) if row.node else -1


def kernel_uses(profile: Profile, lir: Lir) -> list[KernelUse]:
    """Rows grouped by kernel and amount of work, the most expensive first."""
    groups: dict[tuple[str, int, int], list[Timing]] = {}
    for row in profile.rows:
        if row.calls:
            groups.setdefault((row.label, row.flops, row.bytes), []).append(row)
    uses = [_use(rows, lir) for rows in groups.values()]
    return sorted(uses, key=lambda use: -use.seconds)


def _use(rows: list[Timing], lir: Lir) -> KernelUse:
    first, number = rows[0], _node_of(rows[0])
    node = lir.graph.nodes[number] if number >= 0 else None
    return KernelUse(
        first.label,
        node.op.name if node is not None else "",
        str(node.outputs[0].shape) if node is not None and node.outputs else "",
        patterns(r.block for r in rows),
        sum(r.calls for r in rows),
        sum(r.seconds for r in rows),
        sum(r.flops for r in rows),
        sum(r.bytes for r in rows),
        node is not None and _is_int8(node),
    )


def _is_int8(node: Node) -> bool:
    """Whether a node is an int8 GEMM."""
    return "matmul" in node.op.name and node.inputs[0].shape.dtype.name in ("i8", "u8")


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
