"""Vector loads from a row of pixels: strided, and masked where a window reaches over the border."""

from __future__ import annotations

from collections.abc import Callable

from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Type, Value, i32, vec
from rlx.llvm.storage import memory_type, narrow, widen
from rlx.support.records import dataclass

MAX_SHUFFLED_STRIDE = 4  # up to this, whole vectors are loaded and shuffled; beyond, gathered


def raw_vector(dtype: DType, lanes: int) -> Type:
    """The type to load and shuffle elements in: 16-bit floats as integers, which LLVM does without
    library calls."""
    type_ = vec(lanes, memory_type(dtype))
    return type_.as_int if type_.bits == 16 else type_


def from_raw(f: Function, raw: Value, dtype: DType, compute: Type) -> Value:
    """Elements loaded as `raw_vector`, converted to `compute`."""
    return widen(f, raw.bits(vec(raw.type.lanes, memory_type(dtype))), dtype, compute)


def store_masked(f: Function, value: Value, to: Value, dtype: DType, mask: Value | None) -> None:
    """Convert to `dtype` and store all lanes, or those of the mask."""
    element = narrow(f, value, dtype)
    if mask is None:
        f.store(element, to)
    else:
        f.masked_store(element.bits(raw_vector(dtype, value.type.lanes)), to, mask)


@dataclass(frozen=True)
class RowLoads:
    """Loads from a row: every `stride`-th element of `dtype`, converted to `compute`.

    Lanes outside the row hold `fill`. A `stride` of 0 stands for one known only at run time.
    """

    dtype: DType
    compute: Type
    lanes: int
    stride: int = 1
    fill: float = 0

    def is_inside(self, f: Function, start: Value, limit: Value, stride: Value) -> Value:
        """i1: whether all lanes from element `start` on are within 0 … limit - 1.

        Shuffled strides load whole vectors, so these must be inside too.
        """
        span = stride * (self.lanes - 1) + 1
        if 1 < self.stride <= MAX_SHUFFLED_STRIDE:
            span = f.i64(self.stride * self.lanes)
        return (start >= 0) & (start + span <= limit)

    def loader(
        self, f: Function, start: Value, limit: Value, stride: Value, inside: bool
    ) -> Callable[[Value], Value]:
        """A function that loads the vector, given the address of element `start`.

        Masks are computed here, once for all rows.
        """
        raw = raw_vector(self.dtype, self.lanes)
        if self.stride == 0 or self.stride > MAX_SHUFFLED_STRIDE:
            return self._gather_loader(f, start, limit, stride, inside)
        masks = [None if inside else self._mask(f, start, limit, i) for i in range(self.stride)]

        def load_vector(address: Value) -> Value:
            vectors = []
            for i, mask in enumerate(masks):
                at = i * raw.bytes
                if mask is None:
                    value = f.load(address, raw, at)
                else:
                    value = f.masked_load(address, raw, mask, offset=at)
                vectors.append(value)
            value = from_raw(f, f.deinterleave(vectors), self.dtype, self.compute)
            if inside or self.fill == 0:
                return value
            return f.select(self._lane_mask(f, start, limit, stride), value, self.fill)

        return load_vector

    def _mask(self, f: Function, start: Value, limit: Value, number: int) -> Value:
        """Mask of the vector at `start` + `number` vectors: the elements inside the row."""
        low, high = -start - number * self.lanes, limit - start - number * self.lanes
        return self._lane_range(f, low, high)

    def _lane_mask(self, f: Function, start: Value, limit: Value, stride: Value) -> Value:
        low = f.max(stride - 1 - start, 0).udiv(stride)
        return self._lane_range(f, low, f.max(limit - start + stride - 1, 0).udiv(stride))

    def _lane_range(self, f: Function, low: Value, high: Value) -> Value:
        first = f.splat(f.min(f.max(low, 0), self.lanes).to(i32), self.lanes)
        last = f.splat(f.min(f.max(high, 0), self.lanes).to(i32), self.lanes)
        lane = f.iota(first.type)
        return (lane >= first) & (lane < last)

    def _gather_loader(
        self, f: Function, start: Value, limit: Value, stride: Value, inside: bool
    ) -> Callable[[Value], Value]:
        offsets = f.iota(vec(self.lanes, i32)) * f.splat(stride.to(i32), self.lanes)
        mask = None if inside else self._lane_mask(f, start, limit, stride)
        raw = raw_vector(self.dtype, self.lanes)

        def load_vector(address: Value) -> Value:
            value = from_raw(f, f.gather(address, offsets, raw, mask), self.dtype, self.compute)
            if mask is None or self.fill == 0:
                return value
            return f.select(mask, value, self.fill)

        return load_vector
