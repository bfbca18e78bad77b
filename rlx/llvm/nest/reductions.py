"""Accumulators of reductions: identity, update, combination and result.

A state is a list of values, all of the same number of lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.ir.dtype import DType, bool_
from rlx.llvm.builder import Function, Type, Value, f32, f64, i32, vec
from rlx.llvm.nest import arithmetic
from rlx.llvm.nest.registers import Complex, Element, joined, parts, register_type

NO_POSITION = 0x7FFFFFFF  # argmax of no element

State = list[Value]


class Accumulator:
    """One reduction of elements of `dtype`. `wide`: f32 sums accumulate in f64. `skips_nan`: a
    maximum or minimum may ignore NaN."""

    def __init__(
        self, f: Function, kind: str, dtype: DType, wide: bool = False, skips_nan: bool = False
    ) -> None:
        self.f, self.kind, self.dtype, self.skips_nan = f, kind, dtype, skips_nan
        self.positions = kind in ("argmax", "argmin")
        self.largest = kind in ("max", "argmax")
        self.wide = wide and self.widens

    @property
    def widens(self) -> bool:
        """Whether a wider accumulator makes long sums more precise."""
        return self.kind == "sum" and accumulator_type(self.dtype) is f32

    @property
    def rounds(self) -> bool:
        """Whether results depend on the order of elements."""
        return self.kind in ("sum", "prod") and (self.dtype.is_float or self.dtype.is_complex)

    def types(self, lanes: int) -> list[Type]:
        if self.kind in ("any", "all"):
            return [vec(lanes, i32)]
        element = vec(lanes, f64 if self.wide else accumulator_type(self.dtype))
        if self.positions:
            return [element, vec(lanes, i32)]
        return [element] * (2 if self.dtype.is_complex else 1)

    def start(self, lanes: int) -> State:
        """The initial state: the identity of the reduction."""
        types = self.types(lanes)
        if self.kind in ("any", "all"):
            return [self.f.const(int(self.kind == "all"), types[0])]
        if self.kind == "sum":
            return [self.f.const(0, t) for t in types]
        if self.kind == "prod":
            return [self.f.const(1 - i, t) for i, t in enumerate(types)]
        state = [self.f.const(self._identity(), types[0])]
        return [*state, self.f.const(NO_POSITION, types[1])] if self.positions else state

    def _identity(self) -> int | float:
        """The identity of max or min."""
        if self.dtype.is_float:
            return -math.inf if self.largest else math.inf
        least, most = 0, (1 << self.dtype.bits) - 1
        if self.dtype.kind == "int":
            least, most = -(1 << self.dtype.bits - 1), (1 << self.dtype.bits - 1) - 1
        return least if self.largest else most

    def update(self, state: State, x: Element, position: Value | None, mask: Value | None) -> State:
        """The state after one more element in each (unmasked) lane."""
        new = [v.to(i32, signed=False) for v in parts(x)] if self._is_flag else parts(x)
        if self.wide:
            new = [v.to(f64) for v in new]
        if position is not None:
            new = [*new, position]
        if mask is not None:
            start = self.start(mask.type.lanes)
            new = [self.f.select(mask, v, s) for v, s in zip(new, start, strict=True)]
        return self.combine(state, new)

    @property
    def _is_flag(self) -> bool:
        return self.kind in ("any", "all")

    def combine(self, a: State, b: State) -> State:
        """Combine two states; elements of `a` come before those of `b`."""
        f = self.f
        if self.positions:
            return self._combine_positions(a, b)
        if self.kind == "prod" and self.dtype.is_complex:
            return list(arithmetic.mul(f, Complex(*a), Complex(*b)))
        return [self._combine_values(x, y) for x, y in zip(a, b, strict=True)]

    def _combine_values(self, a: Value, b: Value) -> Value:
        f = self.f
        if self.kind in ("any", "all"):
            return a | b if self.kind == "any" else a & b
        if self.kind in ("sum", "prod"):
            return a + b if self.kind == "sum" else a * b
        if self.dtype.kind == "uint":
            return f.umax(a, b) if self.largest else f.umin(a, b)
        if self.skips_nan and self.dtype.is_float:
            return f.max_fast(b, a) if self.largest else f.min_fast(b, a)
        # The new one first: its NaN test is off the loop-carried dependency chain.
        return f.max(b, a) if self.largest else f.min(b, a)

    def _combine_positions(self, a: State, b: State) -> State:
        """The better element, the first one of equals. NaN is better than all numbers."""
        f, (x, i), (y, j) = self.f, a, b
        if self.dtype.is_float:
            beats = f.compare("gt" if self.largest else "lt", y, x) | (y.is_nan() & x.eq(x))
            equal = x.eq(y) | (x.is_nan() & y.is_nan())
        else:
            sign = "u" if self.dtype.kind == "uint" else "s"
            beats = f.compare(sign + ("gt" if self.largest else "lt"), y, x)
            equal = x.eq(y)
        wins = beats | (equal & (j < i))
        return [f.select(wins, y, x), f.select(wins, j, i)]

    def widened(self, state: State) -> State:
        """A narrow accumulator's state in the types of this wide one."""
        return [v.to(f64) for v in state] if self.wide else state

    def reduce_lanes(self, state: State) -> State:
        """Horizontal reduction by halving, in a fixed order."""
        lanes = state[0].type.lanes
        while lanes > 1:
            lanes //= 2
            low, high = ([self.f.slice(v, at, lanes) for v in state] for at in (0, lanes))
            state = self.combine(low, high)
        return state

    def result(self, state: State) -> Element:
        """The reduced element."""
        if self.positions:
            # if all elements equal the identity, the first one is the answer
            return self.f.select(state[1].eq(NO_POSITION), 0, state[1])
        if self.kind in ("any", "all"):
            return state[0].ne(0)
        if self.wide:
            state = [v.to(f32) for v in state]
        return joined(state)


def accumulator_type(dtype: DType) -> Type:
    """The scalar accumulator type of an element, or of a component of a complex one."""
    return i32 if dtype is bool_ else register_type(dtype.part)


def combine_all(
    accumulators: Sequence[Accumulator], a: Sequence[State], b: Sequence[State]
) -> list[State]:
    """Combine the states of several reductions."""
    return [acc.combine(x, y) for acc, x, y in zip(accumulators, a, b, strict=True)]
