"""Scheduling a traced kernel: contiguous axes are coalesced, a vector axis is chosen (and tiles,
where tensors disagree on it), and every size or address known only at run time becomes a kernel
argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType
from rlx.ir.graph import Graph
from rlx.ir.lir import aligned
from rlx.ir.shape import Shape
from rlx.loops.index_map import Affine
from rlx.loops.nest import (
    ROW,
    Access,
    Apply,
    Arg,
    BoundsCheck,
    BoundsReport,
    Instruction,
    Iota,
    Literal,
    Load,
    Nest,
    Quantity,
    Reduce,
    Store,
    Strides,
    Table,
)
from rlx.loops.partition import TracedKernel, TracedStore, partition
from rlx.loops.trace import Buffer, Source, TracedInstruction
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Address:
    """A kernel argument that is the address of an element of a tensor."""

    buffer: Buffer
    offset: Dim
    bytes: int  # per element


REPORT, NODE = "report", "node"  # arguments of the out-of-bounds report: its address, a node number
ArgSource = Address | Dim | str  # what a launch passes as an argument


@dataclass(eq=False)
class ScheduledNest:
    """A loop nest and its arguments; equal nodes share one object."""

    nest: Nest
    args: list[ArgSource]
    columns: bool  # the vector axis is the last row axis, not an axis of the spaces

    def dim(self, size: Quantity) -> Dim:
        """What is passed for a size of the nest."""
        found = size if isinstance(size, int) else self.args[size.index]
        assert not isinstance(found, (str, Address))
        return found


@dataclass
class _CoalescedAxis:
    """Axes that run as one loop; `inner` is the fastest of them."""

    axes: list[int]
    size: Dim

    @property
    def inner(self) -> int:
        return self.axes[-1]


@dataclass
class _Args:
    sources: list[ArgSource] = field(default_factory=list)
    _addresses: dict[Address, Arg] = field(default_factory=dict)

    def new(self, source: ArgSource) -> Arg:
        self.sources.append(source)
        return Arg(len(self.sources) - 1)

    def address(self, buffer: Buffer, offset: Dim, size: int) -> Arg | Table:
        if buffer.kind == "table":
            assert isinstance(offset, int)
            return Table(buffer.data, offset)
        key = Address(buffer, offset, size)
        if key not in self._addresses:
            self._addresses[key] = self.new(key)
        return self._addresses[key]


def schedule(traced: TracedKernel) -> ScheduledNest:
    return _Scheduler(traced).run()


class _Scheduler:
    def __init__(self, traced: TracedKernel) -> None:
        self.traced = traced
        self.args = _Args()
        self.index_maps = [i.address for i in traced.instructions if i.opcode in ("load", "iota")]
        self.index_maps += [s.address for s in traced.stores]
        self.report: BoundsReport | None = None
        self.columns = False
        self.tiled = False
        self.rows: list[_CoalescedAxis] = []
        self.spaces: list[list[_CoalescedAxis]] = []
        self._choose_loops()

    def _choose_loops(self) -> None:
        rows, spaces = self.traced.rows, self.traced.spaces
        self.rows = self._coalesced(rows)
        if not spaces:  # no reduction: the last axis is the vector axis
            self.spaces = [self.rows[-1:]]
            self.rows = self.rows[:-1]
            self._choose_tile()
            return
        stored = [s.axes for s in self.traced.stores]
        for axes in spaces:
            if not any(set(axes) & found for found in stored):
                axes = self._by_stride(axes)
            self.spaces.append(self._coalesced(axes))
        self.columns = self._prefers_columns()

    # -- axes ---------------------------------------------------------------------------------

    def _coalesced(self, axes: Sequence[int]) -> list[_CoalescedAxis]:
        groups: list[_CoalescedAxis] = []
        for a in axes:
            size = self.traced.sizes[a]
            if groups and self._is_contiguous(groups[-1].inner, a, size):
                groups[-1] = _CoalescedAxis([*groups[-1].axes, a], groups[-1].size * size)
            else:
                groups.append(_CoalescedAxis([a], size))
        return groups

    def _is_contiguous(self, outer: int, inner: int, size: Dim) -> bool:
        """Whether the stride of `outer` is `size` strides of `inner`, in every access."""
        for index_map in self.index_maps:
            factors = dict(index_map.terms)
            if not same(factors.get(outer, 0), factors.get(inner, 0) * size):
                return False
        return True

    def _choose_tile(self) -> None:
        """Where an access has unit stride along a row axis and not along the vector axis, that row
        axis is put last: square tiles of both axes read and write whole cache lines."""
        if not self.rows:
            return
        lanes = self.spaces[0][-1].inner
        crossing = [p for p in self.index_maps if dict(p.terms).get(lanes, 0) not in (0, 1)]
        best = max(self.rows, key=lambda g: self._unit_stride_accesses([g.inner], crossing))
        if self._unit_stride_accesses([best.inner], crossing):
            self.rows = [*(g for g in self.rows if g is not best), best]
            self.tiled = True

    def _by_stride(self, axes: Sequence[int]) -> list[int]:
        """Reduction axes that no store uses may be reordered: the smallest stride innermost."""

        def stride(a: int) -> int:
            factors = [dict(index_map.terms).get(a, 0) for index_map in self.index_maps]
            return max((abs(c) for c in factors if isinstance(c, int)), default=0)

        if all(isinstance(c, int) for index_map in self.index_maps for _, c in index_map.terms):
            return sorted(axes, key=lambda a: -stride(a))
        return list(axes)

    def _prefers_columns(self) -> bool:
        """Whether more accesses have unit stride along a row axis than along the innermost
        reduction axes; that row axis is put last. What is read or written once a row is cheap."""
        reduced = [g[-1].inner for g in self.spaces if g]
        inside = {a for groups in self.spaces for g in groups for a in g.axes}
        often = [p for p in self.index_maps if any(k in inside for k, _ in p.terms)]
        along = self._unit_stride_accesses(reduced, often)

        def across(group: _CoalescedAxis) -> int:
            return self._unit_stride_accesses([group.inner], often)

        best = max(self.rows, key=across, default=None)
        if best is None or across(best) <= along:
            return False
        self.rows = [*(g for g in self.rows if g is not best), best]
        return True

    def _unit_stride_accesses(
        self, axes: Sequence[int], index_maps: Sequence[Affine] | None = None
    ) -> int:
        """How many accesses have unit stride along one of the axes."""
        chosen = self.index_maps if index_maps is None else index_maps
        return sum(any(k in axes and c == 1 for k, c in p.terms) for p in chosen)

    # -- instructions and arguments -----------------------------------------------------------

    def run(self) -> ScheduledNest:
        levels = [self._level(instruction.axes) for instruction in self.traced.instructions]
        code = [
            self._instruction(i, n) for i, n in zip(self.traced.instructions, levels, strict=True)
        ]
        stores = [self._store(s) for s in self.traced.stores]
        rows = tuple(self.args.new(g.size) for g in self.rows)
        spaces = tuple(self._sizes(groups) for groups in self.spaces)
        nest = Nest(rows, spaces, tuple(code), tuple(stores), self.report, self.tiled)
        return ScheduledNest(nest, self.args.sources, self.columns)

    def _sizes(self, groups: Sequence[_CoalescedAxis]) -> tuple[Quantity, ...]:
        """Inner sizes are constants of the code, unless the nest is one flat elementwise loop."""
        if not groups:
            return (1,)
        alone = not self.rows and not self.traced.spaces
        return tuple(self._quantity(g.size, not alone) for g in groups)

    def _quantity(self, value: Dim, constant: bool) -> Quantity:
        if isinstance(value, int) and (constant or value == 0):
            return value
        return self.args.new(value)

    def _level(self, axes: frozenset[int]) -> int:
        outer = {a for g in self.rows for a in g.axes}
        inner = axes - outer
        if not inner:
            return ROW
        for k, groups in enumerate(self.spaces):
            if inner <= {a for g in groups for a in g.axes}:
                return k
        raise AssertionError("an element of two spaces")

    def _strides(self, index_map: Affine, level: int) -> Strides:
        """Strides along the axes; those of the vector axis are constants of the code."""
        factors = dict(index_map.terms)
        lanes = len(self.rows) - 1 if self.columns or self.tiled else -1
        rows = [
            self._quantity(factors.get(g.inner, 0), i == lanes) for i, g in enumerate(self.rows)
        ]
        inner = self.spaces[level] if level != ROW else []
        return Strides(
            tuple(rows), tuple(self._quantity(factors.get(g.inner, 0), True) for g in inner)
        )

    def _access(self, buffer: Buffer, dtype: DType, index_map: Affine, level: int) -> Access:
        pointer = self.args.address(buffer, index_map.constant, dtype.bytes)
        gathered = tuple((-1 - k, self._quantity(c, True)) for k, c in index_map.terms if k < 0)
        return Access(pointer, dtype, self._strides(index_map, level), gathered)

    def _store(self, stored: TracedStore) -> Store:
        level = self._level(stored.axes | self.traced.instructions[stored.instruction].axes)
        return Store(
            level,
            self._access(stored.buffer, stored.dtype, stored.address, level),
            stored.instruction,
        )

    def _instruction(self, i: TracedInstruction, level: int) -> Instruction:
        return _MAKE[i.opcode](self, i, level)

    def load(self, i: TracedInstruction, level: int) -> Instruction:
        assert i.buffer is not None
        return Load(i.dtype, level, self._access(i.buffer, i.dtype, i.address, level))

    def iota(self, i: TracedInstruction, level: int) -> Instruction:
        start = self._quantity(i.address.constant, True)
        return Iota(i.dtype, level, start, self._strides(i.address, level))

    def bounds_check(self, i: TracedInstruction, level: int) -> Instruction:
        if self.report is None:
            self.report = BoundsReport(self.args.new(REPORT), self.args.new(NODE))
        return BoundsCheck(i.dtype, level, i.args[0], self.args.new(i.size))

    def reduce(self, i: TracedInstruction, level: int) -> Instruction:
        position = i.args[1] if len(i.args) > 1 else None
        return Reduce(i.dtype, ROW, i.kind, i.args[0], i.space, position)

    def apply(self, i: TracedInstruction, level: int) -> Instruction:
        assert i.record is not None
        return Apply(i.dtype, level, i.record, i.args)


_MAKE: dict[str, Callable[[_Scheduler, TracedInstruction, int], Instruction]] = {
    "load": _Scheduler.load,
    "literal": lambda s, i, level: Literal(i.dtype, level, i.data),
    "iota": _Scheduler.iota,
    "bounds_check": _Scheduler.bounds_check,
    "reduce": _Scheduler.reduce,
    "apply": _Scheduler.apply,
}


# -- regions ---------------------------------------------------------------------------------------


@dataclass
class RegionKernels:
    """The kernels of a region for operands of given strides, and the temporaries between them."""

    kernels: list[ScheduledNest]
    temporaries: list[Shape]

    def offsets(self, live: Mapping[str, int]) -> list[int]:
        """Offset of each temporary in scratch memory, and the end."""
        offsets = [0]
        for shape in self.temporaries:
            offsets.append(offsets[-1] + aligned(shape.upper_bytes(live)))
        return offsets


def schedule_region(graph: Graph, strides: Sequence[tuple[Dim, ...]]) -> RegionKernels:
    """The kernels of a graph (see `decompose`) whose inputs have these strides."""
    inputs = [n.output for n in graph.sources("input")]
    operands = {
        v: Source(Buffer("operand", i), v.shape.dtype, s)
        for i, (v, s) in enumerate(zip(inputs, strides, strict=True))
    }
    plan = partition(graph, operands)
    return RegionKernels([schedule(k) for k in plan.kernels], [v.shape for v in plan.temporaries])
