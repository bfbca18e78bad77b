"""Nests vectorised along the row: each row is traversed once per pass.

A short row of constant size is fully unrolled and stays in registers. A long one is a loop, and
values that a later pass needs are spilled to the row of a result, the stack, or per-worker scratch
memory.

Where results are far larger than the caches, full vectors use streaming stores, which save the
read of every cache line before it is written.

The loops of one pass over a long row, unrolled over several vectors.

Long f32 sums are blocked: each block is summed in f32, the block sums in f64. A long row has up to
SEGMENTS segments, which depend on its size alone: each is reduced by itself, and their results are
combined in order, by one worker or by several (`split_rows`). A worker reads STREAMS segments side
by side, because a core has more loads in flight for several streams of addresses than for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod

from rlx.backends.cpu.kernels.loops.vector_body import CarriedStates, VectorBody, flatten, unflatten
from rlx.ir.node import Value as Tensor
from rlx.llvm.builder import Carry, Function, Module, Value, i64
from rlx.llvm.nest.instructions import IterPoint, NestBody, VectorPoint
from rlx.llvm.nest.reductions import Accumulator, State, combine_all
from rlx.llvm.nest.registers import Element, lanes_for, masks_tail
from rlx.llvm.storage import is_aligned
from rlx.loops.nest import Access, Arg, Nest, Quantity
from rlx.loops.stages import Pass, Stages

BLOCK = 8192  # elements summed in f32 before they are added to the f64 sum
SEGMENTS = 64  # of a long row, at most
SEGMENT_GRAIN = 1024  # elements: segments of a row with one axis are multiples of it
STREAMS = 4
NEXT_ROW_FROM, NEXT_ROW_TO = 256, 4096  # elements: an L1 cache holds two such rows and a result

IndexRange = tuple[Value, Value]  # [first, end) of an axis


def has_segments(sizes: Sequence[Quantity]) -> bool:
    """Whether a row of these sizes is long."""
    known = [s for s in sizes if isinstance(s, int)]
    return len(known) < len(sizes) or prod(known) > 2 * BLOCK


def segment_size(f: Function, size: Value, axes: int) -> Value:
    """A segment's part of the outermost axis, by the size of that axis alone."""
    if axes > 1:
        return f.max(f.ceil_div(size, SEGMENTS), 1)
    return f.max(f.ceil_div(size, SEGMENTS * SEGMENT_GRAIN) * SEGMENT_GRAIN, BLOCK)


class PassLoops:
    """The loops over all axes of a pass's space; the innermost is the vector axis."""

    def __init__(
        self, vector_body: VectorBody, lanes: int, masks: bool, row: dict[int, Element]
    ) -> None:
        self.vector_body, self.lanes, self.masks, self.row = vector_body, lanes, masks, row
        self.f, self.body = vector_body.f, vector_body.body
        self.sizes = vector_body.nest.spaces[vector_body.pass_.space]
        weight = vector_body.stages.code_size(vector_body.pass_)
        self.unroll = 4 if weight <= 14 else 2 if weight <= 48 else 1
        self.outer = [vector_body.accumulator(n, wide=True) for n in vector_body.pass_.reductions]
        self.blocked = any(a.wide for a in self.outer) and has_segments(self.sizes)
        if not self.blocked:
            self.outer = vector_body.accumulators
        light = weight <= 8 and not vector_body.pass_.stores
        self.streams = STREAMS if self.blocked and len(self.sizes) == 1 and light else 1

    def run(self, point: IterPoint, bounds: IndexRange | None) -> tuple[CarriedStates, list[State]]:
        """Returns the accumulator states: one per unrolled vector, and that of the scalar tail.
        `bounds` restricts the outermost axis."""
        carried = 1 if self.blocked else self.unroll
        carry = [[a.start(self.lanes) for a in self.outer] for _ in range(carried)]
        carry.append(self.single())
        whole = (self.f.i64(0), self.body.number(self.sizes[0]))
        carry = self._axes(point, 0, carry, bounds or whole)
        return carry[:-1], carry[-1]

    def _axes(
        self, point: IterPoint, position: int, carry: CarriedStates, bounds: IndexRange
    ) -> CarriedStates:
        """Loops over the axes of the space from `position` on."""
        if position == len(self.sizes) - 1:
            along = self._blocks if self.blocked else self._along
            return along(point, carry, bounds)

        inner = (self.f.i64(0), self.body.number(self.sizes[position + 1]))

        state = self.f.carry(flatten(carry))
        for index in state.range(*bounds):
            inner_point = self.body.advance(point, self.vector_body.pass_.space, position, index)
            old = unflatten(state.values, carry)
            state.values = flatten(self._axes(inner_point, position + 1, old, inner))
        return unflatten(state.values, carry)

    def _blocks(self, point: IterPoint, carry: CarriedStates, bounds: IndexRange) -> CarriedStates:
        """Blocks of elements, each reduced in its own type and then added to the wide states."""
        narrow = self.vector_body

        state = self.f.carry(flatten(carry))
        for start in state.range(*bounds, BLOCK):
            fresh = [narrow.start(self.lanes) for _ in range(self.unroll)]
            stop = self.f.min(start + BLOCK, bounds[1])
            *vectors, single = self._along(point, [*fresh, narrow.start(1)], (start, stop))
            vector = reduce(lambda a, b: combine_all(narrow.accumulators, a, b), vectors)
            new = [
                [a.widened(state) for a, state in zip(self.outer, states, strict=True)]
                for states in (vector, single)
            ]
            old = unflatten(state.values, carry)
            joined = [combine_all(self.outer, a, b) for a, b in zip(old, new, strict=True)]
            state.values = flatten(joined)
        return unflatten(state.values, carry)

    def single(self) -> list[State]:
        """The state of a tail of no elements."""
        return [a.start(1) for a in self.outer]

    def run_streams(self, point: IterPoint, first: Value, segment: Value) -> list[CarriedStates]:
        """The states of `streams` whole segments from `first` on, each that of `run`."""
        narrow, count = self.vector_body, self.streams
        starts = [first + s * segment for s in range(count)]
        wide = [[a.start(self.lanes) for a in self.outer] for _ in range(count)]
        state = self.f.carry(flatten(wide))
        for block in state.range(0, segment, BLOCK):
            fresh = [narrow.start(self.lanes) for _ in range(count * self.unroll)]
            stop = self.f.min(block + BLOCK, segment)
            sums = self._side_by_side(point, (block, stop), starts, fresh)
            joined = []
            for s, old in enumerate(unflatten(state.values, wide)):
                own = sums[s * self.unroll : (s + 1) * self.unroll]
                new = reduce(lambda a, b: combine_all(narrow.accumulators, a, b), own)
                widened = [a.widened(v) for a, v in zip(self.outer, new, strict=True)]
                joined.append(combine_all(self.outer, old, widened))
            state.values = flatten(joined)
        return [[states] for states in unflatten(state.values, wide)]

    def _side_by_side(
        self, point: IterPoint, bounds: IndexRange, starts: Sequence[Value], carry: CarriedStates
    ) -> CarriedStates:
        """The unrolled loop over the same part of several segments."""
        loop = self.f.carry(flatten(carry))
        for index in loop.range(*bounds, self.lanes * self.unroll):
            states = unflatten(loop.values, carry)
            for slot, old in enumerate(states):
                stream, vector = divmod(slot, self.unroll)
                at = starts[stream] + index + vector * self.lanes
                vpoint = VectorPoint(point, at, self.lanes, None, self.row)
                states[slot] = self.vector_body.emit(vpoint, old)
            loop.values = flatten(states)
        return unflatten(loop.values, carry)

    def _along(self, point: IterPoint, carry: CarriedStates, bounds: IndexRange) -> CarriedStates:
        """The vector axis: the unrolled loop, single vectors, then the tail."""
        (lo, hi), lanes = bounds, self.lanes
        *vectors, single = carry
        at = self._whole(bounds, lanes * self.unroll)
        vectors = self._loop(point, (lo, at), lanes, vectors, None)
        # A constant mask of one lane is avoided: LLVM stores too many bytes for it.
        rest = (hi - at).const
        if self.masks and lanes > 1 and (rest is None or rest % lanes != 1):
            vectors[:1] = self._loop(point, (at, hi), lanes, vectors[:1], hi)
            return [*vectors, single]
        end = self._whole(bounds, lanes)
        if self.unroll > 1:
            vectors[:1] = self._loop(point, (at, end), lanes, vectors[:1], None)
        if lanes > 1:
            [single] = self._loop(point, (end, hi), 1, [single], None)
        return [*vectors, single]

    def _whole(self, bounds: IndexRange, step: int) -> Value:
        """The end of the last whole step."""
        lo, hi = bounds
        return lo + ((hi - lo) & -step)

    def _loop(
        self,
        point: IterPoint,
        bounds: IndexRange,
        lanes: int,
        carry: CarriedStates,
        limit: Value | None,
    ) -> CarriedStates:
        """One loop, unrolled as often as `carry` has states; with a limit the last vector is
        masked."""
        loop = self.f.carry(flatten(carry))
        for index in loop.range(*bounds, lanes * len(carry)):
            states = unflatten(loop.values, carry)
            for slot, old in enumerate(states):
                at = index + slot * lanes
                mask = None if limit is None else self.f.lane_mask(limit - at, lanes)
                vpoint = VectorPoint(point, at, lanes, mask, self.row)
                states[slot] = self.vector_body.emit(vpoint, old)
            loop.values = flatten(states)
        return unflatten(loop.values, carry)


CHUNK = 16384  # elements of a long row per work item
MAX_UNROLLED_VECTORS = 8  # vectors of a row that stays in registers
MIN_ELEMENTS_PER_WORKER = 1024  # with fewer, a second worker does not pay
STACK_BYTES = 32768  # limit for spills on the stack


def stack_bytes(nest: Nest, stages: Stages) -> dict[int, int]:
    """Bytes of the spills that fit on the stack, by instruction; others need scratch memory."""
    found: dict[int, int] = {}
    for spill in stages.spills.values():
        sizes = nest.spaces[spill.space]
        if spill.access is None and all(isinstance(s, int) for s in sizes):
            size = spill.bytes * prod(s for s in sizes if isinstance(s, int))
            if sum(found.values()) + size <= STACK_BYTES:
                found[spill.number] = size
    return found


def scratch_sizes(nest: Nest) -> list[tuple[tuple[Quantity, ...], int]]:
    """What each worker spills to scratch memory: sizes of a space, and bytes per element."""
    stages = Stages(nest)
    fitting = stack_bytes(nest, stages)
    spills = stages.spills.values()
    rest = [k for k in spills if k.access is None and k.number not in fitting]
    return [(nest.spaces[k.space], k.bytes) for k in rest]


class RowEmitter:
    """`scratch`: the arguments with the scratch address and the bytes per worker."""

    def __init__(
        self,
        m: Module,
        nest: Nest,
        scratch: tuple[Arg, Arg] | None = None,
        buffers: bool = True,
        results: bool = True,
    ) -> None:
        self.f: Function = m.kernel()
        self.nest = nest
        self.body = NestBody(self.f, nest, columns=False)
        self.stages = Stages(nest, buffers, results)
        self.lanes = lanes_for(nest, m.target, columns=False)
        self.masks = masks_tail(nest, m.target, columns=False)
        self.row: dict[int, Element] = {}
        self.vpoints: dict[int, list[VectorPoint]] = {}
        self.buffers = self._buffers(scratch)

    def _buffers(self, scratch: tuple[Arg, Arg] | None) -> dict[int, Value]:
        """Spill buffers of this worker."""
        f, body = self.f, self.body
        sizes = stack_bytes(self.nest, self.stages)
        found = {n: f.alloca(size) for n, size in sizes.items() if not self._stays_in_registers(n)}
        rest = [
            k for k in self.stages.spills.values() if k.access is None and k.number not in sizes
        ]
        if rest:
            assert scratch is not None
            step = f.arg(f["args"], scratch[1].index, i64)
            base = f.gep(f.arg(f["args"], scratch[0].index), f["tid"].to(i64) * step)
            for spill in rest:
                found[spill.number] = base
                base = f.gep(base, body.product(self.nest.spaces[spill.space]), spill.bytes)
        return found

    def _stays_in_registers(self, number: int) -> bool:
        return self.is_unrolled(self.stages.spills[number].space)

    # -- rows ---------------------------------------------------------------------------------

    def emit(self) -> None:
        f, body, nest = self.f, self.body, self.nest
        body.reject_empty_gathers()
        if not nest.rows:
            self._one_row()
            return
        total = body.product(nest.rows)
        if nest.reduces or not _is_long(nest.spaces[0][-1]):
            lo, hi = f.split(total)
            for row in f.range(lo, hi):
                self.emit_row(body.at_row(row, nest.rows), None)
            return
        size = body.number(nest.spaces[0][-1])
        chunks = f.ceil_div(size, CHUNK)
        lo, hi = f.split(total * chunks)
        for item in f.range(lo, hi):
            row = item.udiv(chunks)
            start = (item - row * chunks) * CHUNK
            self.emit_row(body.at_row(row, nest.rows), (start, f.min(start + CHUNK, size)))

    def _one_row(self) -> None:
        """Without row axes, workers divide the elements, unless there is a reduction."""
        f = self.f
        if self.nest.reduces or not self.stages.passes:
            for _ in f.when(f["tid"].eq(0)):
                self.emit_row(self.body.origin(), None)
            return
        size = self.body.number(self.nest.spaces[0][-1])
        self.emit_row(self.body.origin(), f.split(size, MIN_ELEMENTS_PER_WORKER))

    def emit_row(self, point: IterPoint, bounds: IndexRange | None) -> None:
        """All passes over one row, or over a range of its elements."""
        self.row, self.vpoints = {}, {}
        for stage in range(-1, self.stages.last + 1):
            for pass_ in self.stages.passes:
                if pass_.stage == stage:
                    self.emit_pass(pass_, point, bounds)
            self.row_values(stage, point)
            self.row_stores(stage, point)

    def row_values(self, stage: int, point: IterPoint) -> None:
        """Emit the row values that are known after a stage."""
        vpoint = VectorPoint(point, self.f.i64(0), 1, None, self.row)
        for number in self.stages.row_code(stage):
            self.body.value(number, vpoint)

    def row_stores(self, stage: int, point: IterPoint) -> None:
        vpoint = VectorPoint(point, self.f.i64(0), 1, None, self.row)
        for store in self.stages.row_stores(stage):
            self.body.store(store.access, self.row[store.operand], vpoint)

    def is_unrolled(self, space: int) -> bool:
        """Whether rows of the space are unrolled and stay in registers."""
        sizes = self.nest.spaces[space]
        if len(sizes) != 1 or not isinstance(sizes[0], int):
            return False
        vectors, rest = divmod(sizes[0], self.lanes)
        vpoints = vectors + (min(rest, 1) if self.masks else rest)
        heaviest = max(self.stages.code_size(p) for p in self.stages.passes if p.space == space)
        return vpoints <= MAX_UNROLLED_VECTORS and vpoints * heaviest <= 280

    def emit_pass(self, pass_: Pass, point: IterPoint, bounds: IndexRange | None) -> None:
        self.body.ahead = self._reads_next_row(pass_)
        unrolled = bounds is None and self.is_unrolled(pass_.space)
        vector_body = VectorBody(self.body, self.stages, pass_, self.buffers, spills=not unrolled)
        if unrolled:
            carried, single = self._emit_unrolled(vector_body, point)
            accumulators = vector_body.accumulators
        else:
            loops = PassLoops(vector_body, self.lanes, self.masks, self.row)
            accumulators = loops.outer
            if bounds is None and has_segments(loops.sizes) and any(a.rounds for a in accumulators):
                self._finish(pass_, accumulators, self._each_segment(loops, point))
                return
            carried, single = loops.run(point, bounds)
        self._finish(pass_, accumulators, joined_lanes(accumulators, carried, single))

    def _reads_next_row(self, pass_: Pass) -> bool:
        """Whether a pass prefetches the row after its own. The first of several does: later ones
        read the cache alone, and hardware prefetchers stop at the end of a page."""
        passes, sizes = self.stages.passes, self.nest.spaces[pass_.space]
        known = [s for s in sizes if isinstance(s, int)]
        if len(passes) == 1 or pass_ is not passes[0] or len(known) < len(sizes):
            return False
        return NEXT_ROW_FROM <= prod(known) <= NEXT_ROW_TO

    def _each_segment(self, loops: PassLoops, point: IterPoint) -> list[State]:
        """The states of a long row: those of its segments, combined in order."""
        f, size = self.f, self.body.number(loops.sizes[0])
        segment = segment_size(f, size, len(loops.sizes))
        start = [[a.start(1) for a in loops.outer]]
        state, whole = f.carry(flatten(start)), f.i64(0)
        if loops.streams > 1:
            step = segment * loops.streams
            whole = size.udiv(step) * step
            for first in state.range(0, whole, step):
                for carried in loops.run_streams(point, first, segment):
                    self._add_segment(loops, state, carried, loops.single())
        for first in state.range(whole, size, segment):
            found = loops.run(point, (first, f.min(first + segment, size)))
            self._add_segment(loops, state, *found)
        return unflatten(state.values, start)[0]

    def _add_segment(
        self, loops: PassLoops, state: Carry, carried: CarriedStates, single: Sequence[State]
    ) -> None:
        like = [[a.start(1) for a in loops.outer]]
        new = joined_lanes(loops.outer, carried, single)
        [old] = unflatten(state.values, like)
        state.values = flatten([combine_all(loops.outer, old, new)])

    def _finish(
        self, pass_: Pass, accumulators: Sequence[Accumulator], states: Sequence[State]
    ) -> None:
        for number, a, state in zip(pass_.reductions, accumulators, states, strict=True):
            self.finish_reduction(number, a, state)

    def finish_reduction(self, number: int, accumulator: Accumulator, state: State) -> None:
        """The result of a reduction, from its final state."""
        self.row[number] = accumulator.result(state)

    def _emit_unrolled(
        self, vector_body: VectorBody, point: IterPoint
    ) -> tuple[CarriedStates, list[State]]:
        space = vector_body.pass_.space
        if space not in self.vpoints:
            self.vpoints[space] = self._all_vpoints(point, space)
        carried, single = [vector_body.start(self.lanes)], vector_body.start(1)
        for vpoint in self.vpoints[space]:
            if vpoint.lanes == self.lanes:
                carried.append(vector_body.emit(vpoint, vector_body.start(self.lanes)))
            else:
                single = vector_body.emit(vpoint, single)
        return carried[1:] or carried, single

    def _all_vpoints(self, point: IterPoint, space: int) -> list[VectorPoint]:
        f, lanes, [size] = self.f, self.lanes, self.nest.spaces[space]
        assert isinstance(size, int)
        whole = size - size % lanes
        vpoints = [
            VectorPoint(point, f.i64(i), lanes, None, self.row) for i in range(0, whole, lanes)
        ]
        if size - whole > 1 and self.masks:
            mask = f.lane_mask(f.i64(size - whole), lanes)
            return [*vpoints, VectorPoint(point, f.i64(whole), lanes, mask, self.row)]
        return vpoints + [
            VectorPoint(point, f.i64(i), 1, None, self.row) for i in range(whole, size)
        ]


def joined_lanes(
    accumulators: Sequence[Accumulator], carried: CarriedStates, single: Sequence[State]
) -> list[State]:
    """One state of each accumulator, from those of vectors and that of a tail."""
    vector = reduce(lambda a, b: combine_all(accumulators, a, b), carried)
    return [
        a.combine(a.reduce_lanes(wide), narrow)
        for a, wide, narrow in zip(accumulators, vector, single, strict=True)
    ]


def _is_long(size: Quantity) -> bool:
    return not isinstance(size, int) or size > 2 * CHUNK


_CACHES = 32 << 20  # bytes: the last-level cache of most machines


def outgrows_caches(value: Tensor, bounds: Mapping[str, int]) -> bool:
    """Whether a value is too large to be cached until a later launch reads it; `bounds` are those
    of dynamic dims."""
    return value.shape.upper_bytes(bounds) >= _CACHES


def can_stream_stores(nest: Nest) -> bool:
    """Whether results are stored as full vectors, and all spills fit on the stack."""
    stages = Stages(nest, results=False)
    fits = len(stack_bytes(nest, stages)) == len(stages.spills)
    return fits and not nest.tiled and any(_is_whole(s.access) for s in nest.stores)


def _is_whole(access: Access) -> bool:
    """Whether lanes are contiguous in memory."""
    return access.strides.lane_stride(columns=False) == 1


class StreamingStoreEmitter(RowEmitter):
    def __init__(self, m: Module, nest: Nest) -> None:
        super().__init__(m, nest, results=False)

    def emit(self) -> None:
        for fits in self.f.either(self._is_aligned()):
            if fits:
                self._emit_streaming()
            else:
                super().emit()

    def _emit_streaming(self) -> None:
        self.body.streaming = True
        super().emit()
        self.body.streaming = False
        self.f.fence()  # streaming stores are weakly ordered

    def _is_aligned(self) -> Value:
        """Whether every full vector is aligned, as streaming stores require."""
        body, found = self.body, list[Value]()
        start = body.origin()
        for access in [s.access for s in self.nest.stores if _is_whole(s.access)]:
            steps = (*access.strides.rows, *access.strides.inner[:-1])
            found += [start.pointers[access], *(body.number(s) * access.dtype.bytes for s in steps)]
        return is_aligned(self.f, found)
