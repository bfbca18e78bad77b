"""The CPU's compiler: from a planned graph to a relocatable program.

Node classes are lowered to launch templates (`lowering_cache`), a program layout concatenates those
of all nodes (`program_layout`), and their distinct kernels are compiled. The result can be stored,
and `link` gives it addresses. A program from disk runs without importing this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from rlx.backends.bounds_checks import bounds_checks_of
from rlx.backends.cpu.executor import control_block
from rlx.backends.cpu.kernels import registry
from rlx.backends.cpu.kernels.spec import compile_specs
from rlx.backends.cpu.lowering import TABLE, KernelLaunch, reads_strided
from rlx.backends.cpu.lowering_cache import LoweredClass, LoweringCache
from rlx.backends.cpu.program import launch_flags
from rlx.backends.cpu.program_layout import ProgramLayout
from rlx.backends.cpu.relocatable import LaunchMetadata, RelocatableProgram
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.llvm.jit import Kernel
from rlx.llvm.target import Target
from rlx.passes.plan import PlanTemplate, Variant, require_scratch
from rlx.passes.views import insert_contiguous

_MAX_LAYOUTS = 64  # for each plan template


class CompiledProgram(NamedTuple):
    """A relocatable program, and its kernels by content key."""

    program: RelocatableProgram
    kernels: dict[str, Kernel]


class Compiler:
    """Compiles programs for one target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._lowering = LoweringCache(target)
        self._layouts: WeakKeyDictionary[PlanTemplate, dict[tuple[int, ...], ProgramLayout]] = (
            WeakKeyDictionary()
        )

    def has_native(self, node: Node) -> bool:
        return node.op.is_view or TABLE.find(node) is not None

    def rewrite_template(self, graph: Graph) -> Graph:
        for rewrite in registry.REWRITES:
            graph = rewrite(graph, self.target)
        return graph

    def rewrite_variant(self, graph: Graph) -> Graph:
        return insert_contiguous(graph, reads_strided)

    def scratch(self, node: Node, workers: int) -> int:
        return TABLE.scratch(node, self.target, workers)

    def compile_program(self, lir: Lir, workers: int) -> CompiledProgram:
        """The program of a plan for up to `workers` workers; the target may be another machine."""
        require_scratch(lir, lambda node: self.scratch(node, workers))
        variant = Variant.of(lir)
        lowered = self._lowering.lower(variant, workers)
        layout = self._layout(variant, lowered)
        launches = [t.launch for c in lowered for t in c.launches]
        hosts = [t.host for c in lowered for t in c.launches]
        code = _Code(launches, self.target, layout.first)
        args = layout.args(variant, lowered)
        barriers = np.array(layout.barriers(variant), np.int32) * np.int32(control_block.BARRIER)
        program = RelocatableProgram(
            kernels=code.keys,
            calls=code.calls[layout.row_numbers],
            starts=layout.arg_starts,
            flags=code.flags[layout.row_numbers] | barriers,
            phases=layout.phases(variant),
            bases=layout.bases,
            addends=args.addends,
            dynamic_args=args.dynamic,
            relocations=args.relocations,
            patches=args.patches,
            constants=layout.constants,
            symbols=sorted(variant.live),
            bounds_checks=bounds_checks_of(variant.class_nodes()) if variant.live else [],
            arena_size=variant.arena_size,
            workers=workers,
            error_sites=layout.error_sites(variant),
            hosts={i: call for i, row in enumerate(layout.rows) if (call := hosts[row])},
            metadata=_Metadata(launches, layout.rows, layout.nodes),
        )
        return CompiledProgram(program, code.kernels)

    def _layout(self, variant: Variant, lowered: Sequence[LoweredClass]) -> ProgramLayout:
        known = self._layouts.setdefault(variant.template, {})
        key = tuple([c.layout for c in lowered])
        found = known.get(key)
        if found is None:
            if len(known) >= _MAX_LAYOUTS:
                known.clear()
            found = known[key] = ProgramLayout(variant, lowered)
        return found


class _Code:
    """The distinct kernels of launches, compiled, in order of first use."""

    def __init__(
        self, launches: Sequence[KernelLaunch], target: Target, order: Iterable[int]
    ) -> None:
        specs = [launches[i].spec for i in order]
        compiled = compile_specs([spec for spec in specs if spec is not None], target)
        self.kernels = {kernel.key: kernel for kernel in compiled.values()}
        self.keys = list(self.kernels)
        by_key = {key: i for i, key in enumerate(self.keys)}
        index = {spec: by_key[kernel.key] for spec, kernel in compiled.items()}
        calls = [-1 if s.spec is None else index[s.spec] for s in launches]
        flags = [launch_flags(False, s.solo, s.jump, s.spec is None, s.long) for s in launches]
        self.calls, self.flags = np.array(calls, np.int32), np.array(flags, np.int32)


class _Metadata(Sequence[LaunchMetadata]):
    """Metadata of launches, built when it is read: a variant that only runs needs none."""

    def __init__(
        self, launches: Sequence[KernelLaunch], rows: Sequence[int], nodes: Sequence[int]
    ) -> None:
        self.launches, self.rows, self.nodes = launches, rows, nodes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        launch = self.launches[self.rows[index]]
        return LaunchMetadata(launch.label, self.nodes[index], launch.flops, launch.bytes)
