"""The CPU's compiler: from a planned graph to a relocatable program.

Node classes are lowered to launch templates (`lowering_cache`). A program layout concatenates those
of all nodes: it says which kernel each launch calls, where each arg is, and what it is relative to.
Variants of one plan template share a layout if their launch templates agree. The distinct kernels
are compiled. The result can be stored, and `program.link` gives it addresses. A program from disk
runs without importing this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from rlx.backends.bounds_checks import bounds_checks_of
from rlx.backends.cpu.barriers import Accesses, data_dependencies, insert_barriers
from rlx.backends.cpu.executor import control_block
from rlx.backends.cpu.kernels import registry
from rlx.backends.cpu.kernels.spec import compile_specs
from rlx.backends.cpu.lowering import TABLE, KernelLaunch, reads_strided, runs_on_host
from rlx.backends.cpu.lowering_cache import Fixup, FixupKind, LoweredClass, LoweringCache
from rlx.backends.cpu.program import launch_flags
from rlx.backends.cpu.relocatable import (
    ABSOLUTE,
    ARENA,
    ARGS,
    CONSTANT,
    STATUS,
    DynamicArg,
    ErrorSite,
    External,
    LaunchMetadata,
    RelocatableProgram,
    Relocation,
)
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim, expand
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.ir.op import Array
from rlx.ir.phase import PhaseSchedule
from rlx.llvm.jit import Kernel
from rlx.llvm.target import Target
from rlx.passes.plan import PlanTemplate, Variant, require_scratch
from rlx.passes.views import insert_contiguous

_ATTACHED, _PER_RUN = ("param", "state"), ("input", "output")


class _Dynamic(NamedTuple):
    """A dynamic arg: what its addend is relative to."""

    arg: int
    base: int
    external: External | None
    value: int = -1  # relative to the arena offset of this value
    node: int = -1  # relative to the scratch memory of this node


class ProgramArgs(NamedTuple):
    """The args of a variant's program."""

    addends: npt.NDArray[np.int64]
    relocations: list[Relocation]
    dynamic: list[DynamicArg]
    patches: npt.NDArray[np.int32]


class ProgramLayout:
    """What the programs of variants share. It holds no reference to the plan template."""

    def __init__(self, variant: Variant, lowered: Sequence[LoweredClass]) -> None:
        template = variant.template
        self._graph, self._of_value = template.graph, template.classes.of_value
        self._values, self._numbers = template.values, template.numbers
        self._slot_kinds, self._roots = variant.slot_kinds, variant.roots
        self._externals: dict[int, External] = {
            n: (role, name) for role, name, n in template.arguments
        }
        self.rows: list[int] = []  # for each launch, its index among the launches of all classes
        self.nodes: list[int] = []  # for each launch, the id of its node
        self.accesses: list[Accesses] = []
        self.starts = [0]
        self.constants: list[Array] = []
        self._args: list[int] = []  # for each arg, its index among the args of all classes
        self._bases: list[int] = []
        self._exact: list[tuple[int, int]] = []
        self._arena: list[tuple[int, int]] = []
        self._scratch: list[tuple[int, int]] = []
        self._relocations: list[tuple[int, External]] = []
        self._dynamic: list[_Dynamic] = []
        self._constants: dict[int, int] = {}
        self._own_sites: dict[int, None] = {}
        self._nested_sites: dict[ErrorSite, int] = {}
        first_launch = [0, *accumulate(len(c.launches) for c in lowered)]
        first_arg = [0, *accumulate(len(c.args) for c in lowered)]
        for node, c in zip(template.graph.nodes, template.classes.of_node, strict=True):
            self._add(node, lowered[c], first_launch[c], first_arg[c])
        self._close()
        self._template_phases = template.phases
        self._phases = self._ascending(template.phases)

    def _add(self, node: Node, lowered: LoweredClass, row: int, number: int) -> None:
        values = [self._roots[self._numbers[v]] for v in (*node.inputs, *node.outputs)]
        values += [self._roots[v] for v in lowered.neighbours]
        first = self.starts[-1]
        for i, template in enumerate(lowered.launches):
            start, count = self.starts[-1], len(template.args)
            if template.launch.copies_first and values[0] == values[len(node.inputs)]:
                number += count
                continue
            self.rows.append(row + i)
            self.nodes.append(node.id)
            self.starts.append(start + count)
            self._args += range(number, number + count)
            self._bases += [ABSOLUTE] * count
            number += count
            for fixup in template.fixups:
                self._fix(node, fixup, start + fixup.arg, values, first)
            launch = template.launch
            scratch = node.id if launch.uses_scratch else -1
            reads, writes = (
                [values[n] for n in template.reads],
                [values[n] for n in template.writes],
            )
            self.accesses.append(Accesses(reads, writes, scratch, launch.solo, launch.fence))

    def _fix(self, node: Node, fixup: Fixup, arg: int, values: list[int], first: int) -> None:
        kind, dynamic = fixup.kind, fixup.dynamic
        if kind is FixupKind.VALUE:
            self._fix_value(arg, values[fixup.number], dynamic)
        elif kind is FixupKind.CONSTANT:
            assert fixup.data is not None
            self._fix_constant(arg, fixup.data, dynamic)
        elif kind is FixupKind.SCRATCH and dynamic:
            self._dynamic.append(_Dynamic(arg, ARENA, None, node=node.id))
        elif kind is FixupKind.SCRATCH:
            self._bases[arg] = ARENA
            self._scratch.append((arg, node.id))
        elif kind is FixupKind.STATUS:
            self._bases[arg] = STATUS
        elif kind is FixupKind.DIM:
            self._dynamic.append(_Dynamic(arg, ABSOLUTE, None))
        elif kind is FixupKind.NODE:
            self._exact.append((arg, self._error_number(node, fixup.site)))
        else:
            self._bases[arg] = ARGS
            self._exact.append((arg, 8 * (first + fixup.number)))

    def _fix_value(self, arg: int, root: int, dynamic: bool) -> None:
        kind, external = self._slot_kinds[root], self._externals.get(root)
        if kind in _PER_RUN or (kind in _ATTACHED and dynamic):
            self._dynamic.append(_Dynamic(arg, ABSOLUTE, external))
        elif kind in _ATTACHED:
            assert external is not None
            self._relocations.append((arg, external))
        elif kind == "constant":
            op: Any = self._values[root].node.op
            self._fix_constant(arg, op.data, dynamic)
        elif dynamic:
            self._dynamic.append(_Dynamic(arg, ARENA, None, value=root))
        else:
            self._bases[arg] = ARENA
            self._arena.append((arg, root))

    def _fix_constant(self, arg: int, data: Data, dynamic: bool) -> None:
        number = self._constants.setdefault(id(data), len(self.constants))
        if number == len(self.constants):
            self.constants.append(data.array)
        if dynamic:
            self._dynamic.append(_Dynamic(arg, CONSTANT + number, None))
        else:
            self._bases[arg] = CONSTANT + number

    def _error_number(self, node: Node, site: ErrorSite | None) -> int:
        """The number that a kernel stores in the status word; those of subgraphs come last."""
        if site is None:
            self._own_sites[node.id] = None
            return node.id + 1
        return self._nested_sites.setdefault(
            site, len(self._graph.nodes) + 1 + len(self._nested_sites)
        )

    def _close(self) -> None:
        """Turn lists into arrays, and compute what depends on the order of launches."""
        self.arg_starts = np.array(self.starts, np.int64)
        self.bases = np.array(self._bases, np.int32)
        self._sources = np.array(self._args, np.int64)
        later = [arg for arg, *_ in (*self._dynamic, *self._relocations)]
        self._zero = np.array(later, np.int64)
        self._exact_at = _columns(self._exact)
        self._arena_at, self._scratch_at = _columns(self._arena), _columns(self._scratch)
        self._relocated = [self._args[arg] for arg, _ in self._relocations]
        self._relocations_known: tuple[list[Any], list[Relocation]] = [], []
        first = {row: i for i, row in reversed(list(enumerate(self.rows)))}
        self.first = sorted(first, key=first.__getitem__)  # launches of classes by first use
        self.row_numbers = np.array(self.rows, np.int64)
        self._dependencies = data_dependencies(self.accesses)

    def phases(self, variant: Variant) -> npt.NDArray[np.int32]:
        """The phase of each launch; those of a variant may have been edited."""
        same = variant.phases == self._template_phases
        return self._phases if same else self._ascending(variant.phases)

    def _ascending(self, phases: PhaseSchedule) -> npt.NDArray[np.int32]:
        return ascending([0 if p is None else p.order for p in map(phases.get, self.nodes)])

    # -- the args of a variant --------------------------------------------------------------------

    def args(self, variant: Variant, lowered: Sequence[LoweredClass]) -> ProgramArgs:
        numbers = [arg for c in lowered for arg in c.args]
        exact = np.array([n if type(n) is int else 0 for n in numbers], np.int64)
        addends = exact[self._sources]
        addends[self._zero] = 0
        args, values = self._arena_at
        addends[args] += np.array([o or 0 for o in variant.offsets], np.int64)[values]
        args, nodes = self._scratch_at
        addends[args] += np.array([variant.scratch[n][0] for n in nodes.tolist()], np.int64)
        args, known = self._exact_at
        addends[args] = known
        relocations, dynamic = self._relocate(numbers), self._dynamic_args(variant, numbers)
        return ProgramArgs(addends, relocations, *dynamic)

    def _relocate(self, numbers: Sequence[Any]) -> list[Relocation]:
        """Relocations of params and states; shared with the last variant where they are equal."""
        addends = [numbers[i] for i in self._relocated]
        known, relocations = self._relocations_known
        if addends != known:
            rows = zip(self._relocations, addends, strict=True)
            relocations = [Relocation(arg, external, addend) for (arg, external), addend in rows]
            self._relocations_known = addends, relocations
        return relocations

    def _dynamic_args(
        self, variant: Variant, numbers: Sequence[Dim]
    ) -> tuple[list[DynamicArg], npt.NDArray[np.int32]]:
        """The distinct dynamic args, and the patches (arg, dynamic arg) of the executor. Layers
        share them, so each is computed once."""
        distinct: dict[DynamicArg, int] = {}
        known: dict[tuple[Any, ...], int] = {}
        pairs = []
        for arg, base, external, value, node in self._dynamic:
            offset = 0
            if value >= 0:
                offset = variant.offsets[value] or 0
            elif node >= 0:
                offset = variant.scratch[node][0]
            key = (self._args[arg], base, external, offset)
            number = known.get(key)
            if number is None:
                new = DynamicArg(base, external, expand(numbers[key[0]] + offset))
                number = known[key] = distinct.setdefault(new, len(distinct))
            pairs.append((arg, number))
        return list(distinct), np.array(pairs, np.int32).reshape(-1, 2)

    def error_sites(self, variant: Variant) -> dict[int, ErrorSite]:
        """The nodes whose kernels may meet bad data, by error number."""
        found = {}
        shapes = variant.bound.shapes
        for number in self._own_sites:
            node = self._graph.nodes[number]
            operands = [f"{v.name} {shapes[self._of_value[self._numbers[v]]]}" for v in node.inputs]
            found[number + 1] = ErrorSite(node.op.name, ", ".join(operands), str(node.origin))
        return found | {number: site for site, number in self._nested_sites.items()}

    def barriers(self, variant: Variant) -> list[bool]:
        # empty values share no memory, not even with themselves
        return insert_barriers(
            self.accesses, variant, self._dependencies if all(variant.sizes) else None
        )


def ascending(phases: Sequence[int]) -> npt.NDArray[np.int32]:
    """Monotonic phases of launches: one before a launch of an earlier phase belongs to that."""
    return np.minimum.accumulate(np.array(phases[::-1], np.int32))[::-1]


def _columns(pairs: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    return np.array(pairs, np.int64).reshape(-1, 2).T


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

    def runs_on_host(self, node: Node) -> bool:
        return runs_on_host(node)

    def choose_layouts(self, graph: Graph) -> Graph:
        return rewritten(graph, registry.LAYOUTS, self.target)

    def rewrite_template(self, graph: Graph) -> Graph:
        return rewritten(graph, registry.REWRITES, self.target)

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
        key = (*sorted(variant.in_place), -1, *[c.layout for c in lowered])
        found = known.get(key)
        if found is None:
            if len(known) >= _MAX_LAYOUTS:
                known.clear()
            found = known[key] = ProgramLayout(variant, lowered)
        return found


def rewritten(graph: Graph, rewrites: Sequence[registry.Rewrite], target: Target) -> Graph:
    """The graph after the rewrites for which it has an op."""
    for ops, rewrite in rewrites:
        if any(node.op.name in ops for node in graph.nodes):
            graph = rewrite(graph, target)
    return graph


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
        # a launch that no program has is not compiled
        calls = [-1 if s.spec is None else index.get(s.spec, -1) for s in launches]
        flags = [
            launch_flags(
                False, s.solo, s.jump, s.spec is None, s.long,
                flush=s.spec is not None and s.spec.flushes_denormals,
            )
            for s in launches
        ]  # fmt: skip
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
