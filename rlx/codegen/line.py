"""Vectors from a line of elements of which only some exist: windows that reach over an edge."""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.emit import Function, Type, Value, i32, vec
from rlx.codegen.storage import memory_type, narrow, widen
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

MOST_LOADS = 4  # steps up to this are read as whole vectors and shuffled; longer ones gathered


def raw_vector(dtype: DType, lanes: int) -> Type:
    """The type to move elements in: LLVM shuffles and masks halves through calls, integers not."""
    type_ = vec(lanes, memory_type(dtype))
    return type_.as_int if type_.bits == 16 else type_


def from_raw(f: Function, raw: Value, dtype: DType, compute: Type) -> Value:
    """Elements moved as `raw_vector` says, as numbers."""
    return widen(f, raw.bits(vec(raw.type.lanes, memory_type(dtype))), dtype, compute)


def store_some(f: Function, value: Value, to: Value, dtype: DType, mask: Value | None) -> None:
    """Numbers as elements of `dtype`: the lanes of the mask, or all of them."""
    element = narrow(f, value, dtype)
    if mask is None:
        f.store(element, to)
    else:
        f.masked_store(element.bits(raw_vector(dtype, value.type.lanes)), to, mask)


@dataclass(frozen=True)
class Line:
    """How a line is read: elements of `dtype`, every `step`-th, as numbers of type `compute`.

    Lanes that fall outside the line hold `fill`. A `step` of 0 stands for one known only at run
    time.
    """

    dtype: DType
    compute: Type
    lanes: int
    step: int = 1
    fill: float = 0

    def is_inside(self, f: Function, start: Value, limit: Value, step: Value) -> Value:
        """i1: do all lanes from element `start` on lie within 0 .. limit - 1?

        With steps that are shuffled, whole vectors are read, so a little more must be there.
        """
        reach = step * (self.lanes - 1) + 1
        if 1 < self.step <= MOST_LOADS:
            reach = f.i64(self.step * self.lanes)
        return (start >= 0) & (start + reach <= limit)

    def reader(
        self, f: Function, start: Value, limit: Value, step: Value, inside: bool
    ) -> Callable[[Value], Value]:
        """A function from the address of element `start` to the vector.

        Masks are made here, so that one reader serves many lines of the same shape.
        """
        raw = raw_vector(self.dtype, self.lanes)
        if self.step == 0 or self.step > MOST_LOADS:
            return self._gatherer(f, start, limit, step, inside)
        masks = [None if inside else self._mask(f, start, limit, i) for i in range(self.step)]

        def read(address: Value) -> Value:
            parts = []
            for i, mask in enumerate(masks):
                at = i * raw.bytes
                if mask is None:
                    value = f.load(address, raw, at)
                else:
                    value = f.masked_load(address, raw, mask, offset=at)
                parts.append(value)
            value = from_raw(f, every(f, parts), self.dtype, self.compute)
            if inside or self.fill == 0:
                return value
            return f.select(self._lane_mask(f, start, limit, step), value, self.fill)

        return read

    def _mask(self, f: Function, start: Value, limit: Value, part: int) -> Value:
        """Which elements of the `part`-th vector from `start` on lie in the line."""
        low, high = -start - part * self.lanes, limit - start - part * self.lanes
        return self._between(f, low, high)

    def _lane_mask(self, f: Function, start: Value, limit: Value, step: Value) -> Value:
        low = f.max(step - 1 - start, 0).udiv(step)
        return self._between(f, low, f.max(limit - start + step - 1, 0).udiv(step))

    def _between(self, f: Function, low: Value, high: Value) -> Value:
        first = f.splat(f.min(f.max(low, 0), self.lanes).to(i32), self.lanes)
        last = f.splat(f.min(f.max(high, 0), self.lanes).to(i32), self.lanes)
        lane = f.iota(first.type)
        return (lane >= first) & (lane < last)

    def _gatherer(
        self, f: Function, start: Value, limit: Value, step: Value, inside: bool
    ) -> Callable[[Value], Value]:
        places = f.iota(vec(self.lanes, i32)) * f.splat(step.to(i32), self.lanes)
        mask = None if inside else self._lane_mask(f, start, limit, step)
        raw = raw_vector(self.dtype, self.lanes)

        def read(address: Value) -> Value:
            value = from_raw(f, f.gather(address, places, raw, mask), self.dtype, self.compute)
            if mask is None or self.fill == 0:
                return value
            return f.select(mask, value, self.fill)

        return read


def every(f: Function, parts: list[Value], first: int = 0) -> Value:
    """Every n-th lane, from `first` on, of n vectors laid end to end."""
    count, lanes = len(parts), parts[0].type.lanes
    places = [first + i * count for i in range(lanes)]
    result = parts[0]
    if lanes == 1:
        return parts[first]
    for n, part in enumerate(parts[1:], start=1):
        # lanes found in earlier parts stay where the step before put them
        picks = []
        for i, at in enumerate(places):
            if at < n * lanes:
                picks.append(at if n == 1 else i)
            else:
                picks.append(at % lanes + lanes if at // lanes == n else -1)
        result = f.shuffle(result, part, picks)
    return result
