"""Regions as steps: fused groups, and every elementwise, layout, reduction or norm op by itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from rlx.backends.cpu.lowering import (
    TABLE,
    Context,
    KernelArg,
    KernelLaunch,
    NodeNumber,
    Pointer,
    Scratch,
    Status,
    lowers,
)
from rlx.codegen.region.elements import NAMES
from rlx.codegen.region.kernels import make_plan
from rlx.codegen.region.nest import Arg as NestArg
from rlx.codegen.region.nest import Quantity
from rlx.codegen.region.parts import CELL, Split, cells, last_stage
from rlx.codegen.region.rows import scratch_sizes
from rlx.codegen.region.rules import FOLDS, MOVES
from rlx.codegen.region.settle import NODE, REPORT, Address, Meaning, Settled, settle
from rlx.codegen.region.spec import Region
from rlx.codegen.region.stream import can_stream
from rlx.codegen.region.strips import WIDTH
from rlx.codegen.region.trace import Place, Source
from rlx.codegen.region.wrap import graph_of, is_decomposed
from rlx.codegen.target import Target
from rlx.ir.dim import Dim, same, upper_bound
from rlx.ir.lir import aligned, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.op import Op, on_register
from rlx.ir.ops.composite import decomposed
from rlx.ir.shape import Shape
from rlx.support.cores import usable_cores
from rlx.support.records import dataclass

Strides = tuple[Dim, ...]


@dataclass
class Made:
    """A region for operands that lie in one way: kernels, and values kept between them."""

    kernels: list[Settled]
    temporaries: list[Shape]


@lru_cache(maxsize=4096)
def make(op: Op, shapes: tuple[Shape, ...], strides: tuple[Strides, ...]) -> Made:
    graph = graph_of(op, shapes)
    inputs = [n.output for n in graph.sources("input")]
    operands = {
        v: Source(Place("operand", i), v.shape.dtype, s)
        for i, (v, s) in enumerate(zip(inputs, strides, strict=True))
    }
    plan = make_plan(graph, operands)
    return Made([settle(k) for k in plan.kernels], [v.shape for v in plan.temporaries])


def _plain(node: Node) -> Made:
    shapes = tuple(v.shape for v in node.inputs)
    return make(node.op, shapes, tuple(contiguous_strides(s) for s in shapes))


def scratch_bytes(node: Node, target: Target, threads: int) -> int:
    if _is_empty(node):
        return 0
    made, live = _plain(node), node.graph.live
    workers = max(threads, usable_cores())
    kept = max((_kept_bytes(k, live) for k in made.kernels), default=0)
    states = max((_state_bytes(k, live, workers) for k in made.kernels), default=0)
    return sum(_sizes(made, live)) + max(workers * kept, states)


def _sizes(made: Made, live: dict[str, int]) -> list[int]:
    """Bytes of each temporary."""
    return [aligned(shape.upper_bytes(live)) for shape in made.temporaries]


def _kept_bytes(settled: Settled, live: dict[str, int]) -> int:
    """Bytes that each worker needs for elements kept between passes."""
    total = 0
    for sizes, each in _kept_sizes(settled):
        total += prod(_most(settled, s, live) for s in sizes) * each
    return aligned(total)


@lru_cache(maxsize=4096)
def _kept_sizes(settled: Settled) -> list[tuple[tuple[Quantity, ...], int]]:
    return scratch_sizes(settled.nest)


def _meaning(settled: Settled, size: Quantity) -> Dim:
    found = size if isinstance(size, int) else settled.args[size.index]
    assert not isinstance(found, (str, Address))
    return found


def _most(settled: Settled, size: Quantity, live: dict[str, int]) -> int:
    return upper_bound(_meaning(settled, size), live)


def _is_empty(node: Node) -> bool:
    """Whether there is surely nothing to compute."""
    return all(0 in v.shape.dims for v in node.outputs)


_KINDS = (NAMES | MOVES | FOLDS | {"elementwise_region"}) - {"constant"}


@lowers(*sorted(_KINDS), scratch=scratch_bytes, strided=True)
def lower_region(node: Node, ctx: Context) -> list[KernelLaunch]:
    if _is_empty(node):
        return []
    shapes = tuple(v.shape for v in node.inputs)
    made = make(node.op, shapes, tuple(ctx.strides(v) for v in node.inputs))
    offsets = _offsets(made, ctx.lir.live)
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    steps = [s for settled in made.kernels for s in launches_for(node, ctx, settled, offsets)]
    for step in steps:
        step.flops, step.bytes = cost.flops // len(steps), cost.bytes // len(steps)
    return steps


def _is_region(node: Node) -> bool:
    """Whether the decomposition covers the node's attributes."""
    return decomposed(node.op, tuple([v.shape for v in node.inputs])) is not None


def _lower_decomposed(cls: type[Op]) -> None:
    """Ops that regions compute by their decomposition: those there are, and those to come."""
    if is_decomposed(cls) and cls.has_decomposition() and cls.name not in TABLE:
        when = None if cls.runs_as_region else _is_region
        lowers(cls.name, when=when, scratch=scratch_bytes, strided=True)(lower_region)


on_register(_lower_decomposed)


def launch_for(
    node: Node, ctx: Context, settled: Settled, offsets: Sequence[int] = (0,)
) -> KernelLaunch:
    """The step of a kernel; `offsets` are those of temporaries in scratch memory, and the end."""
    args = [_arg(node, meaning, offsets) for meaning in settled.args]
    if _streams(node, settled, ctx):
        return _launch(node, settled, _spec(settled, None, streams=True), args, False)
    scratch = None
    kept = 0 if settled.columns else _kept_bytes(settled, ctx.lir.live)
    if kept:
        scratch = (NestArg(len(args)), NestArg(len(args) + 1))
        args += [Scratch(node, offsets[-1]), kept]
    return _launch(node, settled, _spec(settled, scratch), args, bool(kept))


@lru_cache(maxsize=4096)
def _spec(
    settled: Settled, scratch: tuple[NestArg, NestArg] | None, streams: bool = False
) -> Region:
    return Region(settled.nest, settled.columns, scratch, streams=streams)


def _streams(node: Node, settled: Settled, ctx: Context) -> bool:
    """Whether all that the kernel writes are results so large that caches are no use."""
    if settled.columns or any(_is_temporary(m) for m in settled.args):
        return False
    _, writes = _touched(node, settled)
    return all(map(ctx.outgrows_caches, writes)) and can_stream(settled.nest)


def _is_temporary(meaning: Meaning) -> bool:
    return isinstance(meaning, Address) and meaning.place.kind == "temporary"


def _launch(
    node: Node, settled: Settled, spec: Region, args: list[KernelArg], scratch: bool
) -> KernelLaunch:
    places = [m.place for m in settled.args if isinstance(m, Address)]
    reads, writes = _touched(node, settled)
    uses_scratch = scratch or any(p.kind == "temporary" for p in places)
    return KernelLaunch(spec, args, reads, writes, uses_scratch=uses_scratch)


# -- few long rows ------------------------------------------------------------------------------

_ENOUGH = 65536  # elements that are worth a second kernel


def _parts(settled: Settled, live: dict[str, int], threads: int) -> int:
    """Into how many parts rows are cut so that all workers have some; 0 where they need not be."""
    nest = settled.nest
    if not nest.folds or threads == 1:
        return 0
    rows = [_most(settled, s, live) for s in nest.rows]
    sizes = [[_most(settled, s, live) for s in space] for space in nest.spaces]
    firsts = [_meaning(settled, space[0]) for space in nest.spaces]
    if prod(rows) * max(map(prod, sizes)) < _ENOUGH or not all(same(firsts[0], f) for f in firsts):
        return 0
    if settled.columns:
        items, least = prod(rows[:-1]) * -(-rows[-1] // WIDTH), 64
    else:
        items, least = prod(rows), 1 if len(sizes[0]) > 1 else 8192
    if not 0 < items < 2 * threads:
        return 0
    count = min(-(-4 * threads // items), sizes[0][0] // least)
    return count if count > 1 else 0


def _state_bytes(settled: Settled, live: dict[str, int], threads: int) -> int:
    """Scratch memory for the states of all parts, however the operands lie: parts are at most 4 to
    a worker, or with the rows that share strips 6 strips to a worker."""
    nest = settled.nest
    rows = prod(_most(settled, s, live) for s in nest.rows)
    sizes = [prod(_most(settled, s, live) for s in space) for space in nest.spaces]
    if not nest.folds or rows * max(sizes) < _ENOUGH:
        return 0
    states = min(4 * threads * rows, 6 * threads * WIDTH)
    return aligned(states * cells(nest) * CELL)


def launches_for(
    node: Node, ctx: Context, settled: Settled, offsets: Sequence[int]
) -> list[KernelLaunch]:
    """One kernel, or one for each stage where rows are cut into parts."""
    nest = settled.nest
    parts = _parts(settled, ctx.lir.live, ctx.threads)
    if not parts:
        return [launch_for(node, ctx, settled, offsets)]
    args = [_arg(node, meaning, offsets) for meaning in settled.args]
    names = [NestArg(len(args) + k) for k in range(3)]
    size = _meaning(settled, nest.spaces[0][0])
    grain = 64 if len(nest.spaces[0]) == 1 and not settled.columns else 1
    chunk = (size + (parts * grain - 1)) // (parts * grain) * grain
    args += [Scratch(node, offsets[-1]), parts, chunk]
    stages = range(last_stage(nest) + 1)
    specs = [Region(nest, settled.columns, None, Split(stage, *names)) for stage in stages]
    return [_launch(node, settled, spec, args, True) for spec in specs]


def _offsets(made: Made, live: dict[str, int]) -> list[int]:
    """Where each temporary lies in scratch memory, and what follows them."""
    offsets = [0]
    for size in _sizes(made, live):
        offsets.append(offsets[-1] + size)
    return offsets


def _arg(node: Node, meaning: Meaning, offsets: Sequence[int]) -> KernelArg:
    if meaning == REPORT:
        return Status()
    if meaning == NODE:
        return NodeNumber(node)
    if not isinstance(meaning, Address):
        assert not isinstance(meaning, str)
        return meaning
    place = meaning.place
    if place.kind == "temporary":
        return Scratch(node, offsets[place.number], meaning.shift * meaning.bytes)
    values = node.inputs if place.kind == "operand" else node.outputs
    return Pointer(values[place.number], meaning.shift)


def _touched(node: Node, settled: Settled) -> tuple[list[Value], list[Value]]:
    """Values that a kernel reads and writes."""
    stored = {s.walk.pointer for s in settled.nest.stores}
    reads, writes = list[Value](), list[Value]()
    for number, meaning in enumerate(settled.args):
        if not isinstance(meaning, Address) or meaning.place.kind == "temporary":
            continue
        values = node.inputs if meaning.place.kind == "operand" else node.outputs
        into = writes if NestArg(number) in stored else reads
        into.append(values[meaning.place.number])
    return reads, writes
