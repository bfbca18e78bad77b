"""Lowering of loop nests: fused regions, and single elementwise, layout, reduction or norm ops.

The CPU kernel of a loop nest: which emitter its schedule takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import prod

from rlx.backends.cpu.kernels.loops.column_tiles import (
    ROWS_PER_STEP,
    WIDTH,
    ColumnTileEmitter,
    LaneRowEmitter,
    is_tall,
)
from rlx.backends.cpu.kernels.loops.rows import (
    BLOCK,
    SEGMENTS,
    RowEmitter,
    StreamingStoreEmitter,
    can_stream_stores,
    has_segments,
    outgrows_caches,
    scratch_sizes,
)
from rlx.backends.cpu.kernels.loops.split_rows import (
    STATE_SLOT,
    Split,
    SplitRowEmitter,
    last_stage,
    state_slots,
)
from rlx.backends.cpu.kernels.loops.transpose_tiles import TransposeEmitter
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.backends.cpu.lowering import (
    TABLE,
    Context,
    KernelArg,
    KernelLaunch,
    Scratch,
)
from rlx.backends.kernel_args import nest_arg
from rlx.ir.dim import Dim, same, upper_bound
from rlx.ir.lir import aligned, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.op import Op
from rlx.ir.shape import Shape
from rlx.llvm.builder import Module
from rlx.llvm.nest.elements import NAMES, has_vector_code
from rlx.llvm.target import Target
from rlx.loops.decompose import graph_of
from rlx.loops.nest import Arg, Nest, Quantity
from rlx.loops.nest import Arg as NestArg
from rlx.loops.schedule import (
    Address,
    ArgSource,
    RegionKernels,
    ScheduledNest,
    schedule_region,
)
from rlx.loops.trace import FOLDS, MOVES
from rlx.support.machine import usable_cores
from rlx.support.records import dataclass


@dataclass(frozen=True)
class NestKernel(KernelSpec):
    """args: those of the nest; then the scratch address and bytes per worker (`scratch`), or those
    of `split`.

    With `streaming`, results are written by streaming stores."""

    nest: Nest
    columns: bool = False
    scratch: tuple[Arg, Arg] | None = None
    split: Split | None = None
    streaming: bool = False

    def emit(self, m: Module) -> None:
        if self.columns:
            tall = self.split is not None or is_tall(self.nest)
            made = (
                ColumnTileEmitter(m, self.nest, self.split)
                if tall
                else LaneRowEmitter(m, self.nest)
            )
            made.emit()
        elif self.split is not None:
            SplitRowEmitter(m, self.nest, self.split).emit()
        elif self.nest.tiled:
            TransposeEmitter(m, self.nest).emit()
        elif self.streaming:
            StreamingStoreEmitter(m, self.nest).emit()
        else:
            RowEmitter(m, self.nest, self.scratch).emit()

    @cached_property
    def _hash(self) -> int:
        return hash((self.nest, self.columns, self.scratch, self.split, self.streaming))

    def __hash__(self) -> int:
        return self._hash

    @property
    def label(self) -> str:
        return self.nest.label


Strides = tuple[Dim, ...]


@lru_cache(maxsize=4096)
def region_kernels(
    op: Op, shapes: tuple[Shape, ...], strides: tuple[Strides, ...]
) -> RegionKernels:
    return schedule_region(graph_of(op, shapes, has_vector_code), strides)


def _plain(node: Node) -> RegionKernels:
    shapes = tuple(v.shape for v in node.inputs)
    return region_kernels(node.op, shapes, tuple(contiguous_strides(s) for s in shapes))


def scratch_bytes(node: Node, target: Target, threads: int) -> int:
    if _is_empty(node):
        return 0
    region, live = _plain(node), node.graph.live
    workers = max(threads, usable_cores())
    spill = max((_spill_bytes(k, live) for k in region.kernels), default=0)
    states = max((_split_state_bytes(k, live, workers) for k in region.kernels), default=0)
    return region.offsets(live)[-1] + max(workers * spill, states)


def _spill_bytes(scheduled: ScheduledNest, live: dict[str, int]) -> int:
    """Scratch bytes that each worker needs for spills."""
    total = 0
    for sizes, each in _spill_sizes(scheduled):
        total += prod(_upper_bound(scheduled, s, live) for s in sizes) * each
    return aligned(total)


@lru_cache(maxsize=4096)
def _spill_sizes(scheduled: ScheduledNest) -> list[tuple[tuple[Quantity, ...], int]]:
    return scratch_sizes(scheduled.nest)


def _upper_bound(scheduled: ScheduledNest, size: Quantity, live: dict[str, int]) -> int:
    return upper_bound(scheduled.dim(size), live)


def _is_empty(node: Node) -> bool:
    """Whether all results are empty."""
    return all(0 in v.shape.dims for v in node.outputs)


_KINDS = (NAMES | MOVES | FOLDS | {"elementwise_region"}) - {"constant"}


@TABLE.lowers_regions(*sorted(_KINDS), has_code=has_vector_code, scratch=scratch_bytes)
def lower_region(node: Node, ctx: Context) -> list[KernelLaunch]:
    if _is_empty(node):
        return []
    shapes = tuple(v.shape for v in node.inputs)
    region = region_kernels(node.op, shapes, tuple(ctx.strides(v) for v in node.inputs))
    offsets = region.offsets(ctx.lir.live)
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    steps = [s for scheduled in region.kernels for s in launches_for(node, ctx, scheduled, offsets)]
    for step in steps:
        step.flops, step.bytes = cost.flops // len(steps), cost.bytes // len(steps)
    return steps


def launch_for(
    node: Node, ctx: Context, scheduled: ScheduledNest, offsets: Sequence[int] = (0,)
) -> KernelLaunch:
    """The launch of a kernel; `offsets` are those of temporaries in scratch, and the end."""
    args = [nest_arg(node, source, offsets) for source in scheduled.args]
    if _streams_stores(node, scheduled, ctx):
        return _launch(node, scheduled, _spec(scheduled, None, streaming=True), args, False)
    scratch = None
    spill = 0 if scheduled.columns else _spill_bytes(scheduled, ctx.lir.live)
    if spill:
        scratch = (NestArg(len(args)), NestArg(len(args) + 1))
        args += [Scratch(node, offsets[-1]), spill]
    return _launch(node, scheduled, _spec(scheduled, scratch), args, bool(spill))


@lru_cache(maxsize=4096)
def _spec(
    scheduled: ScheduledNest, scratch: tuple[NestArg, NestArg] | None, streaming: bool = False
) -> NestKernel:
    return NestKernel(scheduled.nest, scheduled.columns, scratch, streaming=streaming)


def _streams_stores(node: Node, scheduled: ScheduledNest, ctx: Context) -> bool:
    """Whether all stores are to results that outgrow the caches."""
    if scheduled.columns or any(_is_temporary(m) for m in scheduled.args):
        return False
    _, writes = _accessed(node, scheduled)
    is_large = all(outgrows_caches(v, ctx.lir.live) for v in writes)
    return is_large and can_stream_stores(scheduled.nest)


def _is_temporary(source: ArgSource) -> bool:
    return isinstance(source, Address) and source.buffer.kind == "temporary"


def _launch(
    node: Node, scheduled: ScheduledNest, spec: NestKernel, args: Sequence[KernelArg], scratch: bool
) -> KernelLaunch:
    buffers = [m.buffer for m in scheduled.args if isinstance(m, Address)]
    reads, writes = _accessed(node, scheduled)
    uses_scratch = scratch or any(p.kind == "temporary" for p in buffers)
    return KernelLaunch(spec, args, reads, writes, uses_scratch=uses_scratch)


# -- few long rows: split over the workers -------------------------------------------------------

MIN_SPLIT_ELEMENTS = 65536  # with fewer, a second kernel does not pay


def _row_splits(scheduled: ScheduledNest, live: dict[str, int], threads: int) -> int:
    """Splits per row that keep all workers busy; 0 if rows are not split."""
    nest = scheduled.nest
    if not nest.reduces or threads == 1:
        return 0
    rows = [_upper_bound(scheduled, s, live) for s in nest.rows]
    sizes = [[_upper_bound(scheduled, s, live) for s in space] for space in nest.spaces]
    firsts = [scheduled.dim(space[0]) for space in nest.spaces]
    if prod(rows) * max(map(prod, sizes)) < MIN_SPLIT_ELEMENTS or not all(
        same(firsts[0], f) for f in firsts
    ):
        return 0
    if scheduled.columns:
        if not isinstance(firsts[0], int):
            return 0  # zeros that pad a column would change where it is cut
        items, least = prod(rows[:-1]) * -(-rows[-1] // WIDTH), 64
    else:
        if not all(map(has_segments, nest.spaces)) or len({len(s) == 1 for s in sizes}) > 1:
            return 0  # not all passes have the same segments
        items, least = prod(rows), BLOCK if len(sizes[0]) == 1 else 1
        if len(sizes[0]) == 1 and sizes[0][0] <= 2 * BLOCK:
            return 0
    if not 0 < items < 2 * threads:
        return 0
    most = -(-4 * threads // items) if scheduled.columns else SEGMENTS
    count = min(most, sizes[0][0] // least if scheduled.columns else -(-sizes[0][0] // least))
    return count if count > 1 else 0


def _split_state_bytes(scheduled: ScheduledNest, live: dict[str, int], threads: int) -> int:
    """Scratch bytes for the states of all splits, whatever the operands' strides: the segments of
    at most 2 rows per worker, or 6 column tiles per worker."""
    nest = scheduled.nest
    rows = prod(_upper_bound(scheduled, s, live) for s in nest.rows)
    sizes = [prod(_upper_bound(scheduled, s, live) for s in space) for space in nest.spaces]
    if not nest.reduces or rows * max(sizes) < MIN_SPLIT_ELEMENTS:
        return 0
    columns = min(4 * threads * rows, 6 * threads * WIDTH)
    states = max(columns, SEGMENTS * min(rows, 2 * threads))
    return aligned(states * state_slots(nest) * STATE_SLOT)


def launches_for(
    node: Node, ctx: Context, scheduled: ScheduledNest, offsets: Sequence[int]
) -> list[KernelLaunch]:
    """One launch, or one per stage where rows are split."""
    nest = scheduled.nest
    splits = _row_splits(scheduled, ctx.lir.live, ctx.threads)
    if not splits:
        return [launch_for(node, ctx, scheduled, offsets)]
    args = [nest_arg(node, source, offsets) for source in scheduled.args]
    names = [NestArg(len(args) + k) for k in range(3)]
    size = scheduled.dim(nest.spaces[0][0])
    # a column is cut between steps, a row into its segments: what is added stays
    step = ROWS_PER_STEP * splits
    chunk = (size + (step - 1)) // step * ROWS_PER_STEP
    args += [Scratch(node, offsets[-1]), splits, chunk]
    stages = range(last_stage(nest) + 1)
    specs = [NestKernel(nest, scheduled.columns, None, Split(stage, *names)) for stage in stages]
    return [_launch(node, scheduled, spec, args, True) for spec in specs]


def _accessed(node: Node, scheduled: ScheduledNest) -> tuple[list[Value], list[Value]]:
    """Values that a kernel reads and writes."""
    stored = {s.access.pointer for s in scheduled.nest.stores}
    reads, writes = list[Value](), list[Value]()
    for number, source in enumerate(scheduled.args):
        if not isinstance(source, Address) or source.buffer.kind == "temporary":
            continue
        values = node.inputs if source.buffer.kind == "operand" else node.outputs
        into = writes if NestArg(number) in stored else reads
        into.append(values[source.buffer.number])
    return reads, writes
