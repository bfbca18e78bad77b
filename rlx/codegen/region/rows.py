"""Nests whose vectors lie along the elements of a row: each row is walked once per pass.

A short row of known size is unrolled and stays in registers. A long one is walked by loops, and
what a later pass wants is kept in the row of a result, on the stack, or in scratch memory of the
worker.
"""

from __future__ import annotations

from functools import reduce
from math import prod

from rlx.codegen.emit import Function, Module, Value, i64
from rlx.codegen.region.body import Body, Frame, Spot
from rlx.codegen.region.folds import State
from rlx.codegen.region.nest import Nest, Quantity, Word
from rlx.codegen.region.registers import Element
from rlx.codegen.region.stages import Pass, Stages
from rlx.codegen.region.sweep import Slots, Sweep, flatten, shaped
from rlx.codegen.region.vectors import lanes_for, masks_tail

BLOCK = 8192  # elements summed in f32 before the sum joins one in f64
CHUNK = 16384  # elements of a long row that one worker takes at a time
STRAIGHT = 8  # vectors of a row that is kept in registers
GRAIN = 1024  # elements below which a second worker is not worth waking
STACK = 32768  # bytes of kept elements that lie on the stack

Part = tuple[Value, Value]  # the elements of a row from one index to before another


def stack_bytes(nest: Nest, stages: Stages) -> dict[int, int]:
    """Kept elements that fit on the stack, with their bytes; others need scratch memory."""
    found: dict[int, int] = {}
    for keep in stages.keeps.values():
        sizes = nest.spaces[keep.space]
        if keep.walk is None and all(isinstance(s, int) for s in sizes):
            size = keep.bytes * prod(s for s in sizes if isinstance(s, int))
            if sum(found.values()) + size <= STACK:
                found[keep.number] = size
    return found


def scratch_sizes(nest: Nest) -> list[tuple[tuple[Quantity, ...], int]]:
    """What each worker keeps in scratch memory: sizes of a space, and bytes per element."""
    stages = Stages(nest)
    fitting = stack_bytes(nest, stages)
    keeps = stages.keeps.values()
    rest = [k for k in keeps if k.walk is None and k.number not in fitting]
    return [(nest.spaces[k.space], k.bytes) for k in rest]


class RowEmitter:
    """`scratch` is the word of an address and that of the bytes each worker has there."""

    def __init__(self, m: Module, nest: Nest, scratch: tuple[Word, Word] | None = None) -> None:
        self.f: Function = m.kernel()
        self.nest = nest
        self.body = Body(self.f, nest, columns=False)
        self.stages = Stages(nest)
        self.lanes = lanes_for(nest, m.target, columns=False)
        self.masks = masks_tail(nest, m.target, columns=False)
        self.row: dict[int, Element] = {}
        self.spots: dict[int, list[Spot]] = {}
        self.buffers = self._buffers(scratch)

    def _buffers(self, scratch: tuple[Word, Word] | None) -> dict[int, Value]:
        """Memory of this worker for elements that are kept."""
        f, body = self.f, self.body
        sizes = stack_bytes(self.nest, self.stages)
        found = {n: f.alloca(size) for n, size in sizes.items() if not self._stays(n)}
        rest = [k for k in self.stages.keeps.values() if k.walk is None and k.number not in sizes]
        if rest:
            assert scratch is not None
            step = f.word(f["words"], scratch[1].index, i64)
            base = f.gep(f.word(f["words"], scratch[0].index), f["tid"].to(i64) * step)
            for keep in rest:
                found[keep.number] = base
                base = f.gep(base, body.product(self.nest.spaces[keep.space]), keep.bytes)
        return found

    def _stays(self, number: int) -> bool:
        return self.is_straight(self.stages.keeps[number].space)

    # -- rows ---------------------------------------------------------------------------------

    def emit(self) -> None:
        f, body, nest = self.f, self.body, self.nest
        body.refuse_empty_tables()
        if not nest.rows:
            self._one_row()
            return
        total = body.product(nest.rows)
        if nest.folds or not _is_long(nest.spaces[0][-1]):
            lo, hi = f.split(total)
            for row in f.range(lo, hi):
                self._row(body.at_row(row, nest.rows), None)
            return
        size = body.number(nest.spaces[0][-1])
        chunks = f.ceil_div(size, CHUNK)
        lo, hi = f.split(total * chunks)
        for item in f.range(lo, hi):
            row = item.udiv(chunks)
            start = (item - row * chunks) * CHUNK
            self._row(body.at_row(row, nest.rows), (start, f.min(start + CHUNK, size)))

    def _one_row(self) -> None:
        """No rows to divide: elements are, unless something is folded."""
        f = self.f
        if self.nest.folds or not self.stages.passes:
            f.if_(f["tid"].eq(0), lambda: self._row(self.body.home(), None))
            return
        size = self.body.number(self.nest.spaces[0][-1])
        self._row(self.body.home(), f.split(size, GRAIN))

    def _row(self, frame: Frame, part: Part | None) -> None:
        """All passes over one row, or over a part of its elements."""
        self.row, self.spots = {}, {}
        self._after(-1, frame)
        for stage in range(self.stages.last + 1):
            for this in self.stages.passes:
                if this.stage == stage:
                    self.sweep(this, frame, part)
            self._after(stage, frame)

    def _after(self, stage: int, frame: Frame) -> None:
        """Values of the row that are known now."""
        spot = Spot(frame, self.f.i64(0), 1, None, self.row)
        for number in self.stages.row_code(stage):
            self.body.value(number, spot)
        for store in self.stages.row_stores(stage):
            self.body.store(store.walk, self.row[store.operand], spot)

    def is_straight(self, space: int) -> bool:
        """Whether rows of the space are short enough to stay in registers."""
        sizes = self.nest.spaces[space]
        if len(sizes) != 1 or not isinstance(sizes[0], int):
            return False
        vectors, rest = divmod(sizes[0], self.lanes)
        spots = vectors + (min(rest, 1) if self.masks else rest)
        heaviest = max(self.stages.weight(p) for p in self.stages.passes if p.space == space)
        return spots <= STRAIGHT and spots * heaviest <= 280

    def sweep(self, this: Pass, frame: Frame, part: Part | None) -> None:
        straight = part is None and self.is_straight(this.space)
        sweep = Sweep(self.body, self.stages, this, self.buffers, keeps=not straight)
        if straight:
            slots, single = self._straight(sweep, frame)
            accumulators = sweep.folds
        else:
            loops = _Loops(self, sweep)
            slots, single = loops.run(frame, part)
            accumulators = loops.outer
        vector = reduce(lambda a, b: _join(accumulators, a, b), slots)
        for number, a, wide, narrow in zip(this.folds, accumulators, vector, single, strict=True):
            self.row[number] = a.result(a.join(a.across(wide), narrow))

    def _straight(self, sweep: Sweep, frame: Frame) -> tuple[Slots, list[State]]:
        space = sweep.this.space
        if space not in self.spots:
            self.spots[space] = self._all_spots(frame, space)
        slots, single = [sweep.start(self.lanes)], sweep.start(1)
        for spot in self.spots[space]:
            if spot.lanes == self.lanes:
                slots.append(sweep.element(spot, sweep.start(self.lanes)))
            else:
                single = sweep.element(spot, single)
        return slots[1:] or slots, single

    def _all_spots(self, frame: Frame, space: int) -> list[Spot]:
        f, lanes, [size] = self.f, self.lanes, self.nest.spaces[space]
        assert isinstance(size, int)
        whole = size - size % lanes
        spots = [Spot(frame, f.i64(i), lanes, None, self.row) for i in range(0, whole, lanes)]
        if size - whole > 1 and self.masks:
            mask = f.lane_mask(f.i64(size - whole), lanes)
            return [*spots, Spot(frame, f.i64(whole), lanes, mask, self.row)]
        return spots + [Spot(frame, f.i64(i), 1, None, self.row) for i in range(whole, size)]


def _is_long(size: Quantity) -> bool:
    return not isinstance(size, int) or size > 2 * CHUNK


def _join(accumulators: list, a: list[State], b: list[State]) -> list[State]:  # type: ignore[type-arg]
    return [acc.join(x, y) for acc, x, y in zip(accumulators, a, b, strict=True)]


class _Loops:
    """One pass over a long row: loops over all axes of the space, the innermost with lanes."""

    def __init__(self, rows: RowEmitter, sweep: Sweep) -> None:
        self.rows, self.sweep = rows, sweep
        self.f, self.body, self.lanes = rows.f, rows.body, rows.lanes
        self.sizes = rows.nest.spaces[sweep.this.space]
        weight = rows.stages.weight(sweep.this)
        self.unroll = 4 if weight <= 14 else 2 if weight <= 48 else 1
        self.outer = [sweep.accumulator(n, wide=True) for n in sweep.this.folds]
        self.blocked = any(a.wide for a in self.outer) and self._is_long()
        if not self.blocked:
            self.outer = sweep.folds

    def _is_long(self) -> bool:
        known = [s for s in self.sizes if isinstance(s, int)]
        return len(known) < len(self.sizes) or prod(known) > 2 * BLOCK

    def run(self, frame: Frame, part: Part | None) -> tuple[Slots, list[State]]:
        """The states of the folds: those of vectors, and that of single elements."""
        slots = 1 if self.blocked else self.unroll
        carry = [[a.start(self.lanes) for a in self.outer] for _ in range(slots)]
        carry.append([a.start(1) for a in self.outer])
        whole = (self.f.i64(0), self.body.number(self.sizes[-1]))
        carry = self._axes(frame, 0, carry, part or whole)
        return carry[:-1], carry[-1]

    def _axes(self, frame: Frame, position: int, carry: Slots, part: Part) -> Slots:
        """Loops over the axes of the space from `position` on."""
        if position == len(self.sizes) - 1:
            along = self._blocks if self.blocked else self._along
            return along(frame, carry, part)

        def body(index: Value, *values: Value) -> list[Value]:
            moved = self.body.move(frame, self.sweep.this.space, position, index)
            return flatten(self._axes(moved, position + 1, shaped(values, carry), part))

        size = self.body.number(self.sizes[position])
        return shaped(self.f.loop(0, size, 1, flatten(carry), body), carry)

    def _blocks(self, frame: Frame, carry: Slots, part: Part) -> Slots:
        """Blocks of elements, each summed as it is and then joined to the wide sums."""
        narrow = self.sweep

        def body(start: Value, *values: Value) -> list[Value]:
            fresh = [narrow.start(self.lanes) for _ in range(self.unroll)]
            stop = self.f.min(start + BLOCK, part[1])
            *vectors, single = self._along(frame, [*fresh, narrow.start(1)], (start, stop))
            vector = reduce(lambda a, b: _join(narrow.folds, a, b), vectors)
            new = [
                [a.widened(state) for a, state in zip(self.outer, states, strict=True)]
                for states in (vector, single)
            ]
            old = shaped(values, carry)
            return flatten([_join(self.outer, a, b) for a, b in zip(old, new, strict=True)])

        return shaped(self.f.loop(*part, BLOCK, flatten(carry), body), carry)

    def _along(self, frame: Frame, carry: Slots, part: Part) -> Slots:
        """The axis of lanes: several vectors at a time, then one, then what is left."""
        (lo, hi), lanes = part, self.lanes
        *vectors, single = carry
        at = self._whole(part, lanes * self.unroll)
        vectors = self._loop(frame, (lo, at), lanes, vectors, None)
        # A constant mask of one lane is avoided: LLVM stores too many bytes for it.
        rest = (hi - at).const
        if self.rows.masks and lanes > 1 and (rest is None or rest % lanes != 1):
            vectors[:1] = self._loop(frame, (at, hi), lanes, vectors[:1], hi)
            return [*vectors, single]
        end = self._whole(part, lanes)
        if self.unroll > 1:
            vectors[:1] = self._loop(frame, (at, end), lanes, vectors[:1], None)
        if lanes > 1:
            [single] = self._loop(frame, (end, hi), 1, [single], None)
        return [*vectors, single]

    def _whole(self, part: Part, step: int) -> Value:
        """Where the last whole step ends."""
        lo, hi = part
        return lo + ((hi - lo) & -step)

    def _loop(
        self, frame: Frame, part: Part, lanes: int, carry: Slots, limit: Value | None
    ) -> Slots:
        """Elements of the part, in as many vectors at a time as `carry` has slots; with a limit the
        last vector is masked."""

        def body(index: Value, *values: Value) -> list[Value]:
            states = shaped(values, carry)
            for slot, old in enumerate(states):
                at = index + slot * lanes
                mask = None if limit is None else self.f.lane_mask(limit - at, lanes)
                spot = Spot(frame, at, lanes, mask, self.rows.row)
                states[slot] = self.sweep.element(spot, old)
            return flatten(states)

        step = lanes * len(carry)
        return shaped(self.f.loop(*part, step, flatten(carry), body), carry)
