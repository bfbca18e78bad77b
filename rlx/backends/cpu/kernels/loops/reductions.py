"""Accumulators of reductions: how they begin, take elements, join each other and end.

A state is a list of values, all of the same number of lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.backends.cpu.kernels.loops import complex_numbers
from rlx.backends.cpu.kernels.loops.registers import Complex, Element, joined, parts, register_type
from rlx.ir.dtype import DType, bool_, c64
from rlx.llvm.builder import Function, Type, Value, f32, f64, i32, vec

NOWHERE = 0x7FFFFFFF  # the position of no element

State = list[Value]


class Accumulator:
    """One fold of elements of `dtype`; `wide` sums are kept in f64, for joining many parts. A
    maximum or minimum that `skips_nan` is one of the other elements."""

    def __init__(
        self, f: Function, kind: str, dtype: DType, wide: bool = False, skips_nan: bool = False
    ) -> None:
        self.f, self.kind, self.dtype, self.skips_nan = f, kind, dtype, skips_nan
        self.positions = kind in ("argmax", "argmin")
        self.largest = kind in ("max", "argmax")
        self.wide = wide and self.widens

    @property
    def widens(self) -> bool:
        """Whether long sums gain from a wider type."""
        return self.kind == "sum" and register_or_part(self.dtype) is f32

    def types(self, lanes: int) -> list[Type]:
        if self.kind in ("any", "all"):
            return [vec(lanes, i32)]
        element = vec(lanes, f64 if self.wide else register_or_part(self.dtype))
        if self.positions:
            return [element, vec(lanes, i32)]
        return [element] * (2 if self.dtype is c64 else 1)

    def start(self, lanes: int) -> State:
        """The state of no element."""
        types = self.types(lanes)
        if self.kind in ("any", "all"):
            return [self.f.const(int(self.kind == "all"), types[0])]
        if self.kind == "sum":
            return [self.f.const(0, t) for t in types]
        if self.kind == "prod":
            return [self.f.const(1 - i, t) for i, t in enumerate(types)]
        state = [self.f.const(self._worst(), types[0])]
        return [*state, self.f.const(NOWHERE, types[1])] if self.positions else state

    def _worst(self) -> int | float:
        """What every element beats."""
        if self.dtype.is_float:
            return -math.inf if self.largest else math.inf
        least, most = 0, (1 << self.dtype.bits) - 1
        if self.dtype.kind == "int":
            least, most = -(1 << self.dtype.bits - 1), (1 << self.dtype.bits - 1) - 1
        return least if self.largest else most

    def take(self, state: State, x: Element, place: Value | None, mask: Value | None) -> State:
        """The state with one element more in each lane (of the mask)."""
        new = [v.to(i32, signed=False) for v in parts(x)] if self._is_flag else parts(x)
        if self.wide:
            new = [v.to(f64) for v in new]
        if place is not None:
            new = [*new, place]
        if mask is not None:
            start = self.start(mask.type.lanes)
            new = [self.f.select(mask, v, s) for v, s in zip(new, start, strict=True)]
        return self.join(state, new)

    @property
    def _is_flag(self) -> bool:
        return self.kind in ("any", "all")

    def join(self, a: State, b: State) -> State:
        """Two states as one; elements of `a` come before those of `b`."""
        f = self.f
        if self.positions:
            return self._join_positions(a, b)
        if self.kind == "prod" and self.dtype is c64:
            return list(complex_numbers.mul(f, Complex(*a), Complex(*b)))
        return [self._join(x, y) for x, y in zip(a, b, strict=True)]

    def _join(self, a: Value, b: Value) -> Value:
        f = self.f
        if self.kind in ("any", "all"):
            return a | b if self.kind == "any" else a & b
        if self.kind in ("sum", "prod"):
            return a + b if self.kind == "sum" else a * b
        if self.dtype.kind == "uint":
            return f.umax(a, b) if self.largest else f.umin(a, b)
        if self.skips_nan and self.dtype.is_float:
            return f.max_fast(b, a) if self.largest else f.min_fast(b, a)
        # The new one first: whether it is NaN is found out while the old one is still waited for.
        return f.max(b, a) if self.largest else f.min(b, a)

    def _join_positions(self, a: State, b: State) -> State:
        """b where it is better, or as good and further in front. NaN is better than all numbers."""
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
        """A state of a plain accumulator as one of this, wide one."""
        return [v.to(f64) for v in state] if self.wide else state

    def across(self, state: State) -> State:
        """All lanes as one, halving each time so that the order is fixed."""
        lanes = state[0].type.lanes
        while lanes > 1:
            lanes //= 2
            low, high = ([self.f.slice(v, at, lanes) for v in state] for at in (0, lanes))
            state = self.join(low, high)
        return state

    def result(self, state: State) -> Element:
        """The folded element."""
        if self.positions:
            # what no element beat is as good as the first one
            return self.f.select(state[1].eq(NOWHERE), 0, state[1])
        if self.kind in ("any", "all"):
            return state[0].ne(0)
        if self.wide:
            state = [v.to(f32) for v in state]
        return joined(state)


def register_or_part(dtype: DType) -> Type:
    """The scalar type of a real element, or of a part of a complex one."""
    return f32 if dtype is c64 else i32 if dtype is bool_ else register_type(dtype)


def join_all(
    accumulators: Sequence[Accumulator], a: Sequence[State], b: Sequence[State]
) -> list[State]:
    """The states of several folds, joined one by one."""
    return [acc.join(x, y) for acc, x, y in zip(accumulators, a, b, strict=True)]
