"""Program layout: the launch templates of all nodes concatenated to one program.

It says which kernel each launch calls, where each arg is, and what it is relative to. Variants of
one plan template share a layout if the launch templates of their node classes have the same one. A
new variant then costs a few array operations, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlx.backends.cpu.barriers import Accesses, data_dependencies, insert_barriers
from rlx.backends.cpu.lowering_cache import Fixup, FixupKind, LoweredClass
from rlx.backends.cpu.relocatable import (
    ABSOLUTE,
    ARENA,
    ARGS,
    CONSTANT,
    STATUS,
    DynamicArg,
    ErrorSite,
    External,
    Relocation,
)
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim, expand
from rlx.ir.node import Node
from rlx.ir.op import Array
from rlx.ir.phase import PhaseSchedule
from rlx.passes.plan import Variant

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
