"""The loops of one pass over a long row, unrolled over several vectors.

Long f32 sums are blocked: each block is summed in f32, the block sums in f64.
"""

from __future__ import annotations

from functools import reduce
from math import prod

from rlx.backends.cpu.kernels.loops.vector_body import CarriedStates, VectorBody, flatten, unflatten
from rlx.llvm.builder import Value
from rlx.llvm.nest.instructions import IterPoint, VectorPoint
from rlx.llvm.nest.reductions import State, combine_all
from rlx.llvm.nest.registers import Element

BLOCK = 8192  # elements summed in f32 before they are added to the f64 sum

IndexRange = tuple[Value, Value]  # [first, end) of an axis


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
        self.blocked = any(a.wide for a in self.outer) and self._is_long()
        if not self.blocked:
            self.outer = vector_body.accumulators

    def _is_long(self) -> bool:
        known = [s for s in self.sizes if isinstance(s, int)]
        return len(known) < len(self.sizes) or prod(known) > 2 * BLOCK

    def run(self, point: IterPoint, bounds: IndexRange | None) -> tuple[CarriedStates, list[State]]:
        """Returns the accumulator states: one per unrolled vector, and that of the scalar tail.
        `bounds` restricts the outermost axis."""
        carried = 1 if self.blocked else self.unroll
        carry = [[a.start(self.lanes) for a in self.outer] for _ in range(carried)]
        carry.append([a.start(1) for a in self.outer])
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

        def body(index: Value, *values: Value) -> list[Value]:
            inner_point = self.body.advance(point, self.vector_body.pass_.space, position, index)
            return flatten(self._axes(inner_point, position + 1, unflatten(values, carry), inner))

        return unflatten(self.f.loop(*bounds, 1, flatten(carry), body), carry)

    def _blocks(self, point: IterPoint, carry: CarriedStates, bounds: IndexRange) -> CarriedStates:
        """Blocks of elements, each reduced in its own type and then added to the wide states."""
        narrow = self.vector_body

        def body(start: Value, *values: Value) -> list[Value]:
            fresh = [narrow.start(self.lanes) for _ in range(self.unroll)]
            stop = self.f.min(start + BLOCK, bounds[1])
            *vectors, single = self._along(point, [*fresh, narrow.start(1)], (start, stop))
            vector = reduce(lambda a, b: combine_all(narrow.accumulators, a, b), vectors)
            new = [
                [a.widened(state) for a, state in zip(self.outer, states, strict=True)]
                for states in (vector, single)
            ]
            old = unflatten(values, carry)
            return flatten([combine_all(self.outer, a, b) for a, b in zip(old, new, strict=True)])

        return unflatten(self.f.loop(*bounds, BLOCK, flatten(carry), body), carry)

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

        def body(index: Value, *values: Value) -> list[Value]:
            states = unflatten(values, carry)
            for slot, old in enumerate(states):
                at = index + slot * lanes
                mask = None if limit is None else self.f.lane_mask(limit - at, lanes)
                vpoint = VectorPoint(point, at, lanes, mask, self.row)
                states[slot] = self.vector_body.emit(vpoint, old)
            return flatten(states)

        step = lanes * len(carry)
        return unflatten(self.f.loop(*bounds, step, flatten(carry), body), carry)
