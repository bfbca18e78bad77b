"""A model at each stage of the compiler, as text."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING

from rlx.errors import OptionError, StageError, did_you_mean

if TYPE_CHECKING:
    from rlx.backends.base import Backend
    from rlx.backends.inspection import KernelCode, LaunchInfo, NativeProgram
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
    """The stages of a module for a device and a binding, each computed when asked for."""

    def __init__(
        self, module: GraphModule, backend: Backend, options: CompileOptions, block: str = ""
    ) -> None:
        self.module, self.backend, self.options, self.block = module, backend, options, block
        self._snapshots: dict[str, list[tuple[str, str]]] = {}

    def text(self, stage: str, *, exact: bool = False, color: bool = False) -> str:
        """A stage as text; `exact` text can be read back."""
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
        """MIR before any pass, bound where a binding was given."""
        from rlx.ir.binding import bind_graph

        graph = self.module.into_graph()
        return bind_graph(graph, self.binding) if len(self.binding) else graph

    @cached_property
    def result(self) -> PipelineResult:
        """The result of the pipeline."""
        return self._run_passes(None)

    def _run_passes(self, on_stage: Callable[[str, Graph], None] | None) -> PipelineResult:
        from rlx.passes.pipeline import run_pipeline

        chosen = self.options
        return run_pipeline(
            self.module.into_graph(),
            on_stage=on_stage,
            has_native=self.backend.has_native,
            choose=chosen.dispatch.choose,
            lower=self.backend.rewrite_template,
            layout=self.backend.choose_layouts,
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
        """What changed between two passes: nodes removed and nodes added."""
        held: dict[str, list[str]] = {}

        def keep(name: str) -> Callable[[Graph], None]:
            return lambda graph: held.__setitem__(name, [*self._statements(graph)])

        self._watch({name: keep(name) for name in (first, second)})
        return "\n".join(_difference(held[first], held[second])) + "\n"

    def _watch(self, wanted: dict[str, Callable[[Graph], None]]) -> None:
        """Run the passes and call back after those wanted; a second `simplify` is `simplify.2`."""
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
                raise OptionError(
                    "no such pass", got=name, expected=", ".join(met), hint=did_you_mean(name, met)
                )

    def _statements(self, graph: Graph) -> Iterator[str]:
        from rlx.ir.text import node_line

        for node in graph.nodes:
            if self.wanted(node):
                place = f"  // block {node.origin.block}" if node.origin.block else ""
                yield f"{node_line(node)}{place}"

    # -- text ---------------------------------------------------------------------------------

    def wanted(self, node: Node | None) -> bool:
        """Whether a node is in the block asked for."""
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
                wanted = self.wanted(graph.nodes[int(match[1])])
            elif not line.startswith("    "):
                wanted = False
            if wanted:
                kept.append(line)
        return "\n".join(kept) + "\n"

    def _check_block(self, graph: Graph) -> None:
        if any(map(self.wanted, graph.nodes)):
            return
        blocks = sorted({n.origin.block for n in graph.nodes if n.origin.block})
        shown = ", ".join(blocks[:8]) + (f" and {len(blocks) - 8} more" if blocks[8:] else "")
        raise OptionError(
            "nothing in this block", where="--block", got=self.block, expected=shown or "no blocks",
            hint=did_you_mean(self.block, blocks),
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
        return "\n".join(t for t, n in zip(lines, nodes, strict=True) if self.wanted(n)) + "\n"

    # -- native code --------------------------------------------------------------------------

    @cached_property
    def program(self) -> NativeProgram:
        """The kernel launches; StageError where the device has no native code."""
        return self.backend.inspection().program(self.lir, self.options)

    def kernels(self) -> dict[str, tuple[KernelCode, list[LaunchInfo]]]:
        """The distinct kernels of the blocks asked for, by key, with their launches."""
        found: dict[str, tuple[KernelCode, list[LaunchInfo]]] = {}
        for kernel, launches in self.program.kernels(self.wanted).items():
            code = kernel.emit()
            found.setdefault(code.key, (code, []))[1].extend(launches)
        return found

    def _program(self) -> str:
        if not any(self.wanted(launch.node) for launch in self.program.launches):
            self._check_block(self.lir.graph)
        return self.program.table(self.wanted)

    def _code(self, exact: bool, assembly: bool) -> str:
        kernels = self.kernels()
        if not kernels:
            self._check_block(self.lir.graph)
        if exact:
            write = self.backend.inspection().write_kernel
            return "\n".join(
                write(code, _title(launches), assembly=assembly)
                for code, launches in kernels.values()
            )
        return "\n".join(
            f"; {_title(launches)}\n{code.assembly() if assembly else code.text}"
            for code, launches in kernels.values()
        )


def _title(launches: list[LaunchInfo]) -> str:
    first = launches[0]
    more = f" and {len(launches) - 1} more" if launches[1:] else ""
    return f"{first.label}: {first.about_node} {first.about_block}{more}".rstrip()


def _difference(old: list[str], new: list[str]) -> Iterator[str]:
    """Statements removed (-) and added (+); ids are ignored, every pass renumbers them."""
    before, after = ([_IDS.sub("%", line) for line in side] for side in (old, new))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            yield from (f"- {line}" for line in old[a:b])
            yield from (f"+ {line}" for line in new[c:d])
