"""A program at each stage of the compiler, as text."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING

from rlx.errors import OptionError, StageError

if TYPE_CHECKING:
    from rlx.backends.base import Backend
    from rlx.backends.cpu.lowering import KernelLaunch
    from rlx.codegen.jit import Unit
    from rlx.codegen.target import Target
    from rlx.ir.binding import DimBinding
    from rlx.ir.graph import Graph
    from rlx.ir.lir import Lir
    from rlx.ir.module import GraphModule
    from rlx.ir.node import Node
    from rlx.passes.pipeline import PipelineResult
    from rlx.specialize.options import CompileOptions

STAGES = ("hir", "mir", "lir", "program", "llvm", "asm")
_NODE = re.compile(r"  %(\d+)\b")  # the line that a node begins with; nested graphs stand deeper
_IDS = re.compile(r"%\d+")


class Stages:
    """What the compiler makes of a module for a device and sizes, each stage made when asked."""

    def __init__(
        self, module: GraphModule, backend: Backend, options: CompileOptions, block: str = ""
    ) -> None:
        self.module, self.backend, self.options, self.block = module, backend, options, block
        self._snapshots: dict[str, list[tuple[str, str]]] = {}

    def text(self, stage: str, *, exact: bool = False, color: bool = False) -> str:
        """A stage; `exact` text can be read back where the stage has such a form."""
        if stage == "hir":
            hir = self.module.as_hir()
            if hir is None:
                raise StageError("no blocks to show", got=self.module.stage, expected="HIR")
            return self._graph_text(hir, exact, color)
        if stage == "mir":
            return self._graph_text(self.mir, exact, color)
        if stage in ("llvm", "asm"):
            return self._code(exact, assembly=stage == "asm")
        return self._lir(exact) if stage == "lir" else self._program()

    @property
    def binding(self) -> DimBinding:
        return self.options.binding

    @cached_property
    def mir(self) -> Graph:
        """MIR as the model says it, before any pass; with sizes, if some were asked for."""
        from rlx.passes.bind import bind_graph

        graph = self.module.into_graph()
        return bind_graph(graph, self.binding) if len(self.binding) else graph

    @cached_property
    def result(self) -> PipelineResult:
        """What the passes make of it."""
        return self._run_passes(None)

    def _run_passes(self, on_stage: Callable[[str, Graph], None] | None) -> PipelineResult:
        from rlx.passes.pipeline import run_pipeline

        chosen = self.options
        return run_pipeline(
            self.module.into_graph(),
            on_stage=on_stage,
            has_native=self.backend.has_native,
            choose=chosen.dispatch.choose,
            lower=self.backend.lower,
            passes=chosen.profile.passes,
            precision=chosen.profile.precision,
        )

    @cached_property
    def lir(self) -> Lir:
        from rlx.runtime.template import Template

        held = self.module.as_lir()
        if held is not None:
            return held
        template = Template(self.module.into_graph(), self.result, self.backend, self.options)
        if template.open_symbols:
            raise OptionError(
                "sizes are open", got=", ".join(sorted(template.open_symbols)),
                hint="--variant decode:1 or prefill:1x128, or --bind NAME=SIZE for each",
            )  # fmt: skip
        return template.plan({})

    # -- passes -------------------------------------------------------------------------------

    def after(self, name: str, *, exact: bool = False, color: bool = False) -> str:
        """MIR after the pass `name`."""
        found: list[str] = []

        def keep(graph: Graph) -> None:
            found.append(self._graph_text(graph, exact, color))

        self._watch({name: keep})
        return found[0]

    def diff(self, first: str, second: str) -> str:
        """What changed between the ends of two passes: nodes that went, and nodes that came."""
        held: dict[str, list[str]] = {}

        def keep(name: str) -> Callable[[Graph], None]:
            return lambda graph: held.__setitem__(name, [*self._statements(graph)])

        self._watch({name: keep(name) for name in (first, second)})
        return "\n".join(_difference(held[first], held[second])) + "\n"

    def _watch(self, wanted: dict[str, Callable[[Graph], None]]) -> None:
        """Run the passes and show those wanted the graph; a second `simplify` is `simplify.2`."""
        counts: Counter[str] = Counter()
        met: list[str] = []

        def on_stage(name: str, graph: Graph) -> None:
            counts[name] += 1
            met.append(name if counts[name] == 1 else f"{name}.{counts[name]}")
            if met[-1] in wanted:
                wanted[met[-1]](graph)

        self._run_passes(on_stage)
        for name in wanted:
            if name not in met:
                near = difflib.get_close_matches(name, met, 1)
                raise OptionError(
                    "no such pass", got=name, expected=", ".join(met),
                    hint=f"did you mean {near[0]}?" if near else "",
                )  # fmt: skip

    def _statements(self, graph: Graph) -> Iterator[str]:
        from rlx.ir.text import node_line

        for node in graph.nodes:
            if self._wanted(node):
                place = f"  // block {node.origin.block}" if node.origin.block else ""
                yield f"{node_line(node)}{place}"

    # -- text ---------------------------------------------------------------------------------

    def _wanted(self, node: Node | None) -> bool:
        if not self.block:
            return True
        block = "" if node is None else node.origin.block
        return block == self.block or block.startswith(self.block + ".") or (
            fnmatchcase(block, self.block)
        )  # fmt: skip

    def _graph_text(self, graph: Graph, exact: bool, color: bool) -> str:
        from rlx.ir.text import inspect_graph, print_graph

        self._check_block(graph)
        if exact and not self.block:
            return print_graph(graph)
        text = inspect_graph(graph, color=color)
        if not self.block:
            return text
        kept, wanted = [], False
        for line in text.splitlines():
            match = _NODE.match(line)
            if match is not None:
                wanted = self._wanted(graph.nodes[int(match[1])])
            elif not line.startswith("    "):
                wanted = False
            if wanted:
                kept.append(line)
        return "\n".join(kept) + "\n"

    def _check_block(self, graph: Graph) -> None:
        if any(map(self._wanted, graph.nodes)):
            return
        blocks = sorted({n.origin.block for n in graph.nodes if n.origin.block})
        near = difflib.get_close_matches(self.block, blocks, 1)
        shown = ", ".join(blocks[:8]) + (f" and {len(blocks) - 8} more" if blocks[8:] else "")
        raise OptionError(
            "nothing in this block", where="--block", got=self.block, expected=shown or "no blocks",
            hint=f"did you mean {near[0]}?" if near else "",
        )  # fmt: skip

    def _lir(self, exact: bool) -> str:
        from rlx.ir.text import inspect_lir, print_lir

        if exact and not self.block:
            return print_lir(self.lir)
        text = inspect_lir(self.lir)
        if not self.block:
            return text
        nodes = self.lir.graph.nodes
        self._check_block(self.lir.graph)
        lines = text.splitlines()[-len(nodes) :]  # a line each, after the header
        return "\n".join(t for t, n in zip(lines, nodes, strict=True) if self._wanted(n)) + "\n"

    # -- native code --------------------------------------------------------------------------

    @cached_property
    def target(self) -> Target:
        from rlx.backends.cpu.backend import CpuBackend

        if not isinstance(self.backend, CpuBackend):
            raise StageError(
                "this device makes no native code", got=self.backend.name, expected="cpu",
                hint="the stages hir, mir and lir are there for every device",
            )  # fmt: skip
        return self.backend.target

    @property
    def threads(self) -> int:
        from rlx.backends.cpu.cores import worker_count

        return worker_count(self.options.threads)

    @cached_property
    def steps(self) -> list[KernelLaunch]:
        from rlx.backends.cpu import families  # noqa: F401  fills the table of lowerings
        from rlx.backends.cpu.lowering import Context, lower_graph

        return lower_graph(Context(self.lir, self.target, self.threads))

    def kernels(self) -> dict[Unit, list[KernelLaunch]]:
        """The distinct kernels of the steps asked for, and where each is used."""
        from rlx.codegen.kernel import unit_of

        found: dict[Unit, list[KernelLaunch]] = {}
        for step in self.steps:
            if step.spec is not None and self._wanted(step.node):
                found.setdefault(unit_of(step.spec, self.target), []).append(step)
        return found

    def _program(self) -> str:
        from rlx.backends.cpu.barriers import barriers_of

        barriers = barriers_of(self.steps, self.lir)
        distinct = {s.spec for s in self.steps if s.spec is not None}
        head = (
            f"program {self.lir.name}: {len(self.steps)} steps, {len(distinct)} kernels, "
            f"{sum(barriers)} barriers, {self.threads} workers, {self.target.cpu}"
        )
        rows = [
            (f"#{i}", step.label, _node(step), _how(step, barrier), _block(step))
            for i, (step, barrier) in enumerate(zip(self.steps, barriers, strict=True))
            if self._wanted(step.node)
        ]
        if not rows:
            self._check_block(self.lir.graph)
        widths = [max((len(r[c]) for r in rows), default=0) for c in range(4)]
        lines = [
            "  " + "  ".join([*(r[c].ljust(widths[c]) for c in range(4)), r[4]]).rstrip()
            for r in rows
        ]
        return "\n".join([head, *lines]) + "\n"

    def _code(self, exact: bool, assembly: bool) -> str:
        from rlx.codegen.edited import write_kernel

        kernels = self.kernels()
        if not kernels:
            self._check_block(self.lir.graph)
        if exact:
            return "\n".join(
                write_kernel(unit, _title(used), assembly=assembly)
                for unit, used in kernels.items()
            )
        return "\n".join(
            f"; {_title(used)}\n{unit.assembly() if assembly else unit.text}"
            for unit, used in kernels.items()
        )


def _title(used: list[KernelLaunch]) -> str:
    first = used[0]
    more = f" and {len(used) - 1} more" if used[1:] else ""
    return f"{first.label}: {_node(first)} {_block(first)}{more}".rstrip()


def _node(step: KernelLaunch) -> str:
    if step.node is None:
        return ""
    shapes = ", ".join(str(v.shape) for v in step.node.outputs)
    return f"%{step.node.id} {step.node.op.name} {shapes}"


def _block(step: KernelLaunch) -> str:
    block = "" if step.node is None else step.node.origin.block
    return f"// block {block}" if block else ""


def _how(step: KernelLaunch, barrier: bool) -> str:
    words = ("one worker" * step.solo, "jump" * step.jump, "in Python" * (step.host is not None))
    return ", ".join([*filter(None, words), *(["barrier"] if barrier else [])])


def _difference(old: list[str], new: list[str]) -> Iterator[str]:
    """Statements that went (-) and came (+); ids are renumbered by every pass and do not count."""
    before, after = ([_IDS.sub("%", line) for line in side] for side in (old, new))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            yield from (f"- {line}" for line in old[a:b])
            yield from (f"+ {line}" for line in new[c:d])
