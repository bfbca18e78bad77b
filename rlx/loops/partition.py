"""Partitioning a graph into kernels: which values one loop nest computes, and which are
materialised in memory between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from rlx.ir.dim import Dim, evaluate, same
from rlx.ir.dtype import DType, u8, u16, u32, u64
from rlx.ir.graph import Graph
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Value
from rlx.loops.index_map import Affine, SplitAxis
from rlx.loops.trace import AxisSplits, Buffer, MustMaterialize, Source, Trace, TracedInstruction
from rlx.support.records import dataclass


@dataclass(frozen=True)
class TracedStore:
    buffer: Buffer
    dtype: DType
    address: Affine
    instruction: int
    axes: frozenset[int]


@dataclass
class TracedKernel:
    """One kernel before scheduling: sizes of all axes, row axes, axes of each iteration space."""

    sizes: list[Dim]
    rows: list[int]
    spaces: list[list[int]]
    instructions: list[TracedInstruction]
    stores: list[TracedStore]


@dataclass
class KernelPlan:
    """Kernels in execution order, and the temporaries between them."""

    kernels: list[TracedKernel]
    temporaries: list[Value]


def partition(graph: Graph, operands: Mapping[Value, Source]) -> KernelPlan:
    """Kernels for all outputs of a graph; `operands` are the strided inputs."""
    materialized: dict[Value, Buffer] = {}
    while True:
        try:
            return _plan(graph, operands, materialized)
        except MustMaterialize as found:
            _materialize(graph, materialized, found.values)


def _materialize(graph: Graph, materialized: dict[Value, Buffer], values: Sequence[Value]) -> None:
    results = {v: i for i, v in reversed([*enumerate(graph.outputs)])}  # the first of equal ones
    for v in dict.fromkeys(values):
        assert v not in materialized, f"{v} is materialised already"
        if v in results:
            materialized[v] = Buffer("result", results[v])
        else:
            materialized[v] = Buffer(
                "temporary", sum(p.kind == "temporary" for p in materialized.values())
            )


def _plan(
    graph: Graph, operands: Mapping[Value, Source], materialized: Mapping[Value, Buffer]
) -> KernelPlan:
    plan = KernelPlan([], [v for v, p in materialized.items() if p.kind == "temporary"])
    sources = dict(operands)
    for v in sorted(materialized, key=lambda v: (v.node.id, v.index)):
        plan.kernels.append(_kernel(sources, v, [(v, materialized[v])])[0])
        sources[v] = _plain_source(v, materialized[v])
    results = [(v, Buffer("result", j)) for j, v in enumerate(graph.outputs)]
    waiting = [(v, buffer) for v, buffer in results if materialized.get(v) != buffer]
    while waiting:
        root = max((v for v, _ in waiting), key=lambda v: _weight(v.shape.dims))
        made, done = _kernel(sources, root, waiting)
        plan.kernels.append(made)
        waiting = [w for w in waiting if w[0] not in done]
    return plan


def _weight(dims: Sequence[Dim]) -> int:
    """An estimate of the number of elements: symbols count as 64."""
    sizes = {s: 64 for d in dims if not isinstance(d, int) for s in d.symbols}
    return prod((evaluate(d, sizes) for d in dims), start=1)


def _plain_source(v: Value, buffer: Buffer) -> Source:
    return Source(buffer, v.shape.dtype, contiguous_strides(v.shape))


def _kernel(
    sources: Mapping[Value, Source], root: Value, wanted: Sequence[tuple[Value, Buffer]]
) -> tuple[TracedKernel, set[Value]]:
    """The kernel of `root`, with all others of `wanted` that the same loops can compute."""
    splits: AxisSplits = {}
    left_out: set[Value] = set()
    while True:
        trace = Trace(sources, root, splits)
        try:
            trace.value(root, trace.index)
            stores = _stores(trace, root, [w for w in wanted if w[0] not in left_out])
        except SplitAxis as found:
            trace.split_axis(found)
            continue
        except _DoesNotFit as found:
            left_out.add(found.value)
            continue
        return _traced(trace, [s for _, s in stores]), {v for v, _ in stores}


class _DoesNotFit(Exception):
    def __init__(self, value: Value) -> None:
        self.value = value


def _stores(
    trace: Trace, root: Value, wanted: Sequence[tuple[Value, Buffer]]
) -> list[tuple[Value, TracedStore]]:
    """The stores of the kernel."""
    stores: list[tuple[Value, TracedStore]] = []
    for v, buffer in wanted:
        index = _index_of(trace, root, v)
        if index is None:
            continue
        try:
            instruction = trace.value(v, index)
        except MustMaterialize:
            raise _DoesNotFit(v) from None
        instruction = _unrounded(trace, instruction)
        target = _plain_source(v, buffer)
        address = target.address(index)
        stored = TracedStore(buffer, target.dtype, address, instruction, trace.axes_of(address))
        stores.append((v, stored))
    return stores


def _unrounded(trace: Trace, instruction: int) -> int:
    """The operand of a cast to a narrower float: the store rounds in the same way."""
    found = trace.instructions[instruction]
    if found.record is None or found.record.name != "cast" or not found.dtype.is_float:
        return instruction
    source = trace.instructions[found.args[0]].dtype
    is_single = source.is_float and source.bits <= 32
    return found.args[0] if is_single and found.dtype.bits <= 32 else instruction


def _index_of(trace: Trace, root: Value, v: Value) -> tuple[Affine, ...] | None:
    """An index that covers every element of `v` exactly once, if the loops have one."""
    if v.shape.same_dims(root.shape):
        return trace.index
    for seen, index in trace.seen:
        if seen is v and _covers(trace, v, index):
            return index
    return None


def _covers(trace: Trace, v: Value, index: tuple[Affine, ...]) -> bool:
    """Whether the index is a bijection onto the tensor: strides 1, then the product of inner
    sizes."""
    address = _plain_source(v, Buffer("result")).address(index)
    if address.constant != 0 or any(k < 0 for k in address.keys):
        return False
    step: Dim = 1
    left = dict(address.terms)
    while left:
        key = next((k for k, factor in left.items() if same(factor, step)), None)
        if key is None:
            return False
        del left[key]
        step = step * trace.sizes[key]
    return same(step, v.shape.num_elements)


def as_bits(traced: TracedKernel) -> TracedKernel:
    """Elements that are only copied become integers of their size: nothing is converted, and NaN
    payloads are preserved."""
    used = {a for instruction in traced.instructions for a in instruction.args}
    for number, instruction in enumerate(traced.instructions):
        stores = [s for s in traced.stores if s.instruction == number]
        whole = _WHOLE.get(instruction.dtype.bytes)
        if instruction.opcode != "load" or number in used or whole is None or not stores:
            continue
        if all(s.dtype is instruction.dtype for s in stores):
            traced.instructions[number] = replace(instruction, dtype=whole)
            moved = [
                replace(s, dtype=whole) if s.instruction == number else s for s in traced.stores
            ]
            traced.stores[:] = moved
    return traced


_WHOLE = {1: u8, 2: u16, 4: u32, 8: u64}


def _traced(trace: Trace, stores: list[TracedStore]) -> TracedKernel:
    if trace.rows is None:
        rows, spaces = trace.root_axes, []
    else:
        rows = [a for a in trace.root_axes if a in trace.rows]
        inner = [a for a in trace.root_axes if a not in trace.rows]
        spaces = list(trace.spaces)
        if inner and inner not in spaces:
            spaces.append(inner)
    return as_bits(TracedKernel(trace.sizes, rows, spaces, trace.instructions, stores))
