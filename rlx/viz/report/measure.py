"""Compile a module step by step with a watch in hand, run it, and keep what was seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from typing import TypeVar

import numpy as np

from rlx.backends.base import Backend, Executable
from rlx.backends.cpu.backend import CpuBackend
from rlx.backends.timing import Profile, Timing
from rlx.codegen.jit import counters
from rlx.codegen.target import Target
from rlx.errors import OptionError
from rlx.ir.lir import Lir
from rlx.ir.module import GraphModule
from rlx.ir.node import Node
from rlx.ir.op import Array
from rlx.ir.shape import Shape
from rlx.records import dataclass
from rlx.runtime.compiled import CompiledGraph
from rlx.runtime.params import PREPARED, ParamStore
from rlx.runtime.template import Template, make_template
from rlx.specialize.options import CompileOptions
from rlx.viz.report.collect import patterns, spent_in_passes
from rlx.viz.report.records import KernelUse, Measured, Roof, Spent

_MOST = 512  # a live size in the runs that are measured, where its bound allows
_REPEAT = 9
_Made = TypeVar("_Made")


@dataclass
class Compiled:
    """All that compiling made, and what each part of it took."""

    template: Template
    lir: Lir
    spent: list[Spent]
    executable: Executable | None = None  # None: code for another machine
    steps: int = 0
    kernels: int = 0
    seconds: dict[int, float] = field(default_factory=dict)  # of a run, by node of the plan


def compile_watched(module: GraphModule, backend: Backend, options: CompileOptions) -> Compiled:
    """Passes, plan, code and tables, none of them taken from a cache."""
    template = make_template(module, options, backend)
    if template.open_symbols:
        raise OptionError(
            "sizes are open", got=", ".join(sorted(template.open_symbols)),
            hint="--variant decode:1 or prefill:1x128, or --bind NAME=SIZE for each",
        )  # fmt: skip
    lir, planning = _timed(lambda: module.as_lir() or template.plan({}))
    spent = [*spent_in_passes(template.result), Spent("plan", "bind sizes and plan", planning)]
    made = Compiled(template, lir, spent)
    if isinstance(backend, CpuBackend):
        _watch_kernels(made, backend, options)
    if not isinstance(backend, CpuBackend) or backend.target.runs_on(Target.host()):
        before = counters.seconds
        made.executable, listing = _timed(lambda: backend.compile(lir, options))
        listing -= counters.seconds - before  # told kernel by kernel already
        spent.append(Spent("program", "list and place the program", max(0.0, listing)))
    return made


def _watch_kernels(made: Compiled, backend: CpuBackend, options: CompileOptions) -> None:
    """Emit the IR of every distinct kernel and give it to LLVM, one after the other."""
    from rlx.backends.cpu.lowering import Context, lower_graph
    from rlx.codegen.kernel import unit_of

    context = Context(made.lir, backend.target, backend.workers(options))
    steps, choosing = _timed(lambda: lower_graph(context))
    made.spent.append(Spent("code", "choose kernels", choosing, f"{len(steps)} steps"))
    labels = {s.spec: s.label for s in steps if s.spec is not None}
    emitting = 0.0
    rows = []
    for spec, label in labels.items():
        unit, spent = _timed(partial(unit_of, spec, backend.target))
        emitting += spent
        code, spent = _timed(unit.compile)
        rows.append(Spent("llvm", label, spent, f"{unit.text.count(chr(10))} lines of IR, "
                                                f"{len(code)} bytes of object"))  # fmt: skip
    made.spent.append(Spent("code", "emit LLVM IR", emitting, f"{len(labels)} distinct kernels"))
    made.spent += sorted(rows, key=lambda r: -r.seconds)
    made.steps, made.kernels = len(steps), len(labels)


def _timed(make: Callable[[], _Made]) -> tuple[_Made, float]:
    start = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start


def run_watched(made: Compiled, params: Mapping[str, Array] | None) -> Measured:
    """Run the variant some times; `made` learns what each of its nodes took."""
    assert made.executable is not None
    template, given = made.template, params or {}
    graph = CompiledGraph(template, ParamStore(), made.executable)
    sizes = {symbol: min(bound, _MOST) for symbol, bound in template.live.items()}
    fixed, signature = template.binding.sizes, template.signature
    for name, shape in signature.params.items():
        if name.startswith(PREPARED):  # of a plan that was read from a file
            graph.params.adopt({name: _zeros(shape, fixed)})
        else:
            graph.set_param(name, given[name] if name in given else _zeros(shape, fixed))
    inputs = {name: _zeros(s, {**fixed, **sizes}) for name, s in signature.inputs.items()}
    _, first = _timed(lambda: graph.run(inputs, sizes=sizes))
    profile = graph.profile(inputs, sizes=sizes, repeat=_REPEAT)
    made.spent.append(Spent("weights", "pack weights", max(0.0, first - profile.seconds)))
    for row in profile.rows:
        number = _node_of(row)
        made.seconds[number] = made.seconds.get(number, 0.0) + row.seconds
    return Measured(
        profile.seconds + profile.waiting,
        ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items()),
        "those of the model" if given else "zeros" if signature.params else "none",
        kernel_uses(profile, made.lir),
        _roofs(made),
    )


def _zeros(shape: Shape, sizes: Mapping[str, int]) -> Array:
    bound = shape.bind(sizes)
    return np.zeros(bound.static_dims, bound.dtype.numpy)


def _node_of(row: Timing) -> int:
    """The node of the plan that a row is about; −1: none."""
    return int(row.node.partition(" ")[0].removeprefix("%")) if row.node else -1


def kernel_uses(profile: Profile, lir: Lir) -> list[KernelUse]:
    """Rows of one kernel and equal work together, the costliest first."""
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
        node is not None and _multiplies_bytes(node),
    )


def _multiplies_bytes(node: Node) -> bool:
    """Products of quantised rows with quantised weights are sums of bytes."""
    return "matmul" in node.op.name and node.inputs[0].shape.dtype.name in ("i8", "u8")


def _roofs(made: Compiled) -> list[Roof]:
    """What this machine gives as many workers as the program has."""
    if not isinstance(made.template.backend, CpuBackend):
        return []
    from rlx.backends.cpu.peaks import measure_limits

    found = measure_limits(made.template.backend.workers(made.template.options))
    roofs = [
        Roof("memory", gb=found.memory_gb),
        Roof("cache", gb=found.cache_gb),
        Roof("f32", gflops=found.gflops),
    ]
    return roofs if found.int8_gops is None else [*roofs, Roof("int8", gflops=found.int8_gops)]
