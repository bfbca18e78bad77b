"""A graph becomes kernels: which values one kernel computes, and which must lie in memory between
two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from rlx.codegen.region import rules  # noqa: F401  (fills the table of rules)
from rlx.codegen.region.affine import Affine, CutAxis
from rlx.codegen.region.trace import Cuts, Item, NeedsMemory, Place, Source, Trace
from rlx.ir.dim import Dim, evaluate, same
from rlx.ir.dtype import DType, u8, u16, u32, u64
from rlx.ir.graph import Graph
from rlx.ir.lir import contiguous_strides
from rlx.ir.node import Value
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Stored:
    place: Place
    dtype: DType
    address: Affine
    item: int
    axes: frozenset[int]


@dataclass
class Traced:
    """One kernel: axes with their sizes, those of the rows and of each space in order, items."""

    sizes: list[Dim]
    rows: list[int]
    spaces: list[list[int]]
    items: list[Item]
    stores: list[Stored]


@dataclass
class Plan:
    """Kernels in the order in which they run, and the values kept between them."""

    kernels: list[Traced]
    temporaries: list[Value]


def make_plan(graph: Graph, operands: Mapping[Value, Source]) -> Plan:
    """Kernels for all outputs of a graph whose inputs lie as `operands` says."""
    kept: dict[Value, Place] = {}
    while True:
        try:
            return _plan(graph, operands, kept)
        except NeedsMemory as found:
            _keep(graph, kept, found.values)


def _keep(graph: Graph, kept: dict[Value, Place], values: Sequence[Value]) -> None:
    results = {v: i for i, v in reversed([*enumerate(graph.outputs)])}  # the first of equal ones
    for v in dict.fromkeys(values):
        assert v not in kept, f"{v} is in memory already"
        if v in results:
            kept[v] = Place("result", results[v])
        else:
            kept[v] = Place("temporary", sum(p.kind == "temporary" for p in kept.values()))


def _plan(graph: Graph, operands: Mapping[Value, Source], kept: Mapping[Value, Place]) -> Plan:
    plan = Plan([], [v for v, p in kept.items() if p.kind == "temporary"])
    sources = dict(operands)
    for v in sorted(kept, key=lambda v: (v.node.id, v.index)):
        plan.kernels.append(_kernel(sources, v, [(v, kept[v])])[0])
        sources[v] = _plain_source(v, kept[v])
    results = [(v, Place("result", j)) for j, v in enumerate(graph.outputs)]
    waiting = [(v, place) for v, place in results if kept.get(v) != place]
    while waiting:
        root = max((v for v, _ in waiting), key=lambda v: _weight(v.shape.dims))
        made, done = _kernel(sources, root, waiting)
        plan.kernels.append(made)
        waiting = [w for w in waiting if w[0] not in done]
    return plan


def _weight(dims: Sequence[Dim]) -> int:
    """How many elements, about: symbols count as 64."""
    sizes = {s: 64 for d in dims if not isinstance(d, int) for s in d.symbols}
    return prod((evaluate(d, sizes) for d in dims), start=1)


def _plain_source(v: Value, place: Place) -> Source:
    return Source(place, v.shape.dtype, contiguous_strides(v.shape))


def _kernel(
    sources: Mapping[Value, Source], root: Value, wanted: Sequence[tuple[Value, Place]]
) -> tuple[Traced, set[Value]]:
    """The kernel of `root`, and with it any of `wanted` that the same loops can compute."""
    cuts: Cuts = {}
    left_out: set[Value] = set()
    while True:
        trace = Trace(sources, root, cuts)
        try:
            trace.value(root, trace.index)
            stores = _stores(trace, root, [w for w in wanted if w[0] not in left_out])
        except CutAxis as found:
            trace.cut(found)
            continue
        except _DoesNotFit as found:
            left_out.add(found.value)
            continue
        return _traced(trace, [s for _, s in stores]), {v for v, _ in stores}


class _DoesNotFit(Exception):
    def __init__(self, value: Value) -> None:
        self.value = value


def _stores(
    trace: Trace, root: Value, wanted: Sequence[tuple[Value, Place]]
) -> list[tuple[Value, Stored]]:
    """What the kernel writes."""
    stores: list[tuple[Value, Stored]] = []
    for v, place in wanted:
        index = _index_of(trace, root, v)
        if index is None:
            continue
        try:
            item = trace.value(v, index)
        except NeedsMemory:
            raise _DoesNotFit(v) from None
        item = _unrounded(trace, item)
        target = _plain_source(v, place)
        address = target.address(index)
        stored = Stored(place, target.dtype, address, item, trace.axes_of(address))
        stores.append((v, stored))
    return stores


def _unrounded(trace: Trace, item: int) -> int:
    """The operand of a cast to a narrower float: storing it rounds it just so."""
    found = trace.items[item]
    if found.record is None or found.record.name != "cast" or not found.dtype.is_float:
        return item
    source = trace.items[found.args[0]].dtype
    is_single = source.is_float and source.bits <= 32
    return found.args[0] if is_single and found.dtype.bits <= 32 else item


def _index_of(trace: Trace, root: Value, v: Value) -> tuple[Affine, ...] | None:
    """An index that reaches every element of `v` once, when the loops have one."""
    if v.shape.same_dims(root.shape):
        return trace.index
    for seen, index in trace.seen:
        if seen is v and _covers(trace, v, index):
            return index
    return None


def _covers(trace: Trace, v: Value, index: tuple[Affine, ...]) -> bool:
    """Whether positions count through the tensor: the innermost axis by 1, each other by what lies
    within it."""
    address = _plain_source(v, Place("result")).address(index)
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


def as_bits(traced: Traced) -> Traced:
    """Elements that are only moved become integers of their size: nothing is converted, and every
    NaN stays as it is."""
    used = {a for item in traced.items for a in item.args}
    for number, item in enumerate(traced.items):
        stores = [s for s in traced.stores if s.item == number]
        whole = _WHOLE.get(item.dtype.bytes)
        if item.what != "read" or number in used or whole is None or not stores:
            continue
        if all(s.dtype is item.dtype for s in stores):
            traced.items[number] = replace(item, dtype=whole)
            moved = [replace(s, dtype=whole) if s.item == number else s for s in traced.stores]
            traced.stores[:] = moved
    return traced


_WHOLE = {1: u8, 2: u16, 4: u32, 8: u64}


def _traced(trace: Trace, stores: list[Stored]) -> Traced:
    if trace.rows is None:
        rows, spaces = trace.root_axes, []
    else:
        rows = [a for a in trace.root_axes if a in trace.rows]
        inner = [a for a in trace.root_axes if a not in trace.rows]
        spaces = list(trace.spaces)
        if inner and inner not in spaces:
            spaces.append(inner)
    return as_bits(Traced(trace.sizes, rows, spaces, trace.items, stores))
