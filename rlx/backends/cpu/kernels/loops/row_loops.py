"""One pass over a long row: loops whose bodies take several vectors at a time.

Long sums of f32 are made in blocks, whose sums join in f64.
"""

from __future__ import annotations

from functools import reduce
from math import prod

from rlx.backends.cpu.kernels.loops.instructions import Frame, Spot
from rlx.backends.cpu.kernels.loops.reductions import State, join_all
from rlx.backends.cpu.kernels.loops.registers import Element
from rlx.backends.cpu.kernels.loops.vector_body import Slots, Sweep, flatten, shaped
from rlx.llvm.builder import Value

BLOCK = 8192  # elements summed in f32 before the sum joins one in f64

Part = tuple[Value, Value]  # from one index of an axis to before another


class Loops:
    """Loops over all axes of the space of a pass, the innermost with lanes."""

    def __init__(self, sweep: Sweep, lanes: int, masks: bool, row: dict[int, Element]) -> None:
        self.sweep, self.lanes, self.masks, self.row = sweep, lanes, masks, row
        self.f, self.body = sweep.f, sweep.body
        self.sizes = sweep.nest.spaces[sweep.this.space]
        weight = sweep.stages.weight(sweep.this)
        self.unroll = 4 if weight <= 14 else 2 if weight <= 48 else 1
        self.outer = [sweep.accumulator(n, wide=True) for n in sweep.this.folds]
        self.blocked = any(a.wide for a in self.outer) and self._is_long()
        if not self.blocked:
            self.outer = sweep.folds

    def _is_long(self) -> bool:
        known = [s for s in self.sizes if isinstance(s, int)]
        return len(known) < len(self.sizes) or prod(known) > 2 * BLOCK

    def run(self, frame: Frame, part: Part | None) -> tuple[Slots, list[State]]:
        """The states of the folds: those of vectors, and that of single elements. A part is one of
        the outermost axis."""
        slots = 1 if self.blocked else self.unroll
        carry = [[a.start(self.lanes) for a in self.outer] for _ in range(slots)]
        carry.append([a.start(1) for a in self.outer])
        whole = (self.f.i64(0), self.body.number(self.sizes[0]))
        carry = self._axes(frame, 0, carry, part or whole)
        return carry[:-1], carry[-1]

    def _axes(self, frame: Frame, position: int, carry: Slots, part: Part) -> Slots:
        """Loops over the axes of the space from `position` on."""
        if position == len(self.sizes) - 1:
            along = self._blocks if self.blocked else self._along
            return along(frame, carry, part)

        inner = (self.f.i64(0), self.body.number(self.sizes[position + 1]))

        def body(index: Value, *values: Value) -> list[Value]:
            moved = self.body.move(frame, self.sweep.this.space, position, index)
            return flatten(self._axes(moved, position + 1, shaped(values, carry), inner))

        return shaped(self.f.loop(*part, 1, flatten(carry), body), carry)

    def _blocks(self, frame: Frame, carry: Slots, part: Part) -> Slots:
        """Blocks of elements, each summed as it is and then joined to the wide sums."""
        narrow = self.sweep

        def body(start: Value, *values: Value) -> list[Value]:
            fresh = [narrow.start(self.lanes) for _ in range(self.unroll)]
            stop = self.f.min(start + BLOCK, part[1])
            *vectors, single = self._along(frame, [*fresh, narrow.start(1)], (start, stop))
            vector = reduce(lambda a, b: join_all(narrow.folds, a, b), vectors)
            new = [
                [a.widened(state) for a, state in zip(self.outer, states, strict=True)]
                for states in (vector, single)
            ]
            old = shaped(values, carry)
            return flatten([join_all(self.outer, a, b) for a, b in zip(old, new, strict=True)])

        return shaped(self.f.loop(*part, BLOCK, flatten(carry), body), carry)

    def _along(self, frame: Frame, carry: Slots, part: Part) -> Slots:
        """The axis of lanes: several vectors at a time, then one, then what is left."""
        (lo, hi), lanes = part, self.lanes
        *vectors, single = carry
        at = self._whole(part, lanes * self.unroll)
        vectors = self._loop(frame, (lo, at), lanes, vectors, None)
        # A constant mask of one lane is avoided: LLVM stores too many bytes for it.
        rest = (hi - at).const
        if self.masks and lanes > 1 and (rest is None or rest % lanes != 1):
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
                spot = Spot(frame, at, lanes, mask, self.row)
                states[slot] = self.sweep.element(spot, old)
            return flatten(states)

        step = lanes * len(carry)
        return shaped(self.f.loop(*part, step, flatten(carry), body), carry)
