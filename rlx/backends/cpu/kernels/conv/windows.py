"""Loops over the sliding windows of an image, shared by pooling and depthwise convolution.

Workers divide the output rows. Within a plane, blocks of columns are the outer loop, so that the
border masks of a block are computed once for all rows of the plane.

Vector loads from a row of pixels are strided, and masked where a window reaches over the border.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from rlx.backends.cpu.kernels.spec import Operands
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


UNROLL = 4  # vectors of a row that are computed together where they fit
MAX_UNROLLED_TAPS = 8  # taps per row; more become a loop

GEOMETRY = ["height", "width", "out_height", "out_width", "stride_y", "stride_x"]
GEOMETRY += ["taps_y", "start_y", "dilation_y", "start_x"]
"""Arguments of every kernel over windows. Tap (i, j) of output (y, x) reads the input at
(y·stride_y + start_y + i·dilation_y, x·stride_x + start_x + j·dilation_x)."""

Loader = Callable[[Value], Value]


class Windows(ABC):
    """The loops. A kernel defines the initial accumulator, the update by a tap, and the result."""

    def __init__(
        self, f: Function, o: Operands, loads: RowLoads, out: DType, taps_x: int, dilation_x: int
    ) -> None:
        self.f, self.o, self.loads, self.dtype = f, o, loads, out
        self.taps_x, self.dilation_x, self.lanes = taps_x, dilation_x, loads.lanes

    @abstractmethod
    def begin_plane(self, plane: Value) -> Value:
        """Begin an output plane. Returns the index of its input plane."""

    @abstractmethod
    def initial(self) -> Value:
        """The initial accumulator."""

    @abstractmethod
    def accumulate(
        self, sums: list[Value], inputs: list[Value] | None, i: Value, j: Value
    ) -> list[Value]:
        """Add the inputs under tap (i, j); None where the row is outside the image."""

    def finish(self, total: Value, top: Value, left: Value) -> Value:
        """The result, from the accumulator and the position of the window's first input."""
        return total

    def emit(self, planes: Value) -> None:
        """Emit the loops over all output planes."""
        f, o = self.f, self.o
        lo, hi = f.split(planes * o["out_height"])
        rows = f.max(o["out_height"], 1)
        for plane in f.range(lo.udiv(rows), (hi + rows - 1).udiv(rows)):
            first = f.max(lo - plane * rows, 0)
            last = f.min(hi - plane * rows, rows)
            self._plane(plane, first, last)

    def _plane(self, plane: Value, first: Value, last: Value) -> None:
        f, o = self.f, self.o
        image = self.begin_plane(plane)
        size = memory_type(self.loads.dtype).bytes
        self.image = f.gep(o["x"], image * (o["height"] * o["width"]), size)
        results = plane * (o["out_height"] * o["out_width"])
        self.out = f.gep(o["out"], results, memory_type(self.dtype).bytes)
        f.while_([f.i64(0)], lambda x: x < o["out_width"], lambda x: self._columns(x, first, last))

    def _columns(self, x: Value, first: Value, last: Value) -> Value:
        """One block of columns from x on. Returns the column after it."""
        f, o = self.f, self.o
        left = x * o["stride_x"] + o["start_x"]
        right = left + (self.taps_x - 1) * self.dilation_x

        def fits(vectors: int) -> Value:
            ahead = right + o["stride_x"] * ((vectors - 1) * self.lanes)
            inside = self.loads.is_inside(f, ahead, o["width"], o["stride_x"])
            return (left >= 0) & inside & (o["out_width"] - x >= vectors * self.lanes)

        def run(vectors: int, inside: bool) -> Value:
            starts = [left + o["stride_x"] * (v * self.lanes) for v in range(vectors)]
            self._block(x, starts, first, last, inside)
            return x + vectors * self.lanes

        def one() -> list[Value]:
            return f.if_(fits(1), lambda: run(1, True), lambda: run(1, False))

        return f.if_(fits(UNROLL), lambda: run(UNROLL, True), one)[0]

    def _block(
        self, x: Value, starts: list[Value], first: Value, last: Value, inside: bool
    ) -> None:
        f, o = self.f, self.o
        unrolled = [self._loaders(starts, f.i64(j), inside) for j in self._unrolled_taps]
        mask = None if inside else f.lane_mask(o["out_width"] - x, self.lanes)
        size = memory_type(self.dtype).bytes
        for y in f.range(first, last):
            top = y * o["stride_y"] + o["start_y"]

            def row(i: Value, *sums: Value, top: Value = top) -> list[Value]:
                return self._tap_row(
                    i, top + i * o["dilation_y"], starts, unrolled, list(sums), inside
                )

            sums = f.loop(0, o["taps_y"], 1, [self.initial()] * len(starts), row)
            for v, total in enumerate(sums):
                offset = y * o["out_width"] + x + v * self.lanes
                value = self.finish(total, top, starts[v])
                store_masked(f, value, f.gep(self.out, offset, size), self.dtype, mask)

    @property
    def _unrolled_taps(self) -> range:
        """Taps of a row that are unrolled; none if they are a loop."""
        return range(self.taps_x if self.taps_x <= MAX_UNROLLED_TAPS else 0)

    def _loaders(self, starts: list[Value], j: Value, inside: bool) -> list[tuple[Value, Loader]]:
        f, o = self.f, self.o
        starts_at = [start + j * self.dilation_x for start in starts]
        return [
            (at, self.loads.loader(f, at, o["width"], o["stride_x"], inside)) for at in starts_at
        ]

    def _tap_row(
        self,
        i: Value,
        y: Value,
        starts: list[Value],
        unrolled: list[list[tuple[Value, Loader]]],
        sums: list[Value],
        inside: bool,
    ) -> list[Value]:
        """Row i of the taps, on row y of the image."""
        f, o = self.f, self.o
        size = memory_type(self.loads.dtype).bytes
        row = f.gep(self.image, y * o["width"], size)

        def add(j: Value, loaders: list[tuple[Value, Loader]], sums: list[Value]) -> list[Value]:
            inputs = [load(f.gep(row, at, size)) for at, load in loaders]
            return self.accumulate(sums, inputs, i, j)

        def accumulate_column(j: Value, *sums: Value) -> list[Value]:
            return add(j, self._loaders(starts, j, inside), list(sums))

        def inside_row() -> list[Value]:
            out = sums
            for j, loaders in enumerate(unrolled):
                out = add(f.i64(j), loaders, out)
            return out if unrolled else f.loop(0, self.taps_x, 1, out, accumulate_column)

        def outside_row() -> list[Value]:
            def none(j: Value, *sums: Value) -> list[Value]:
                return self.accumulate(list(sums), None, i, j)

            return f.loop(0, self.taps_x, 1, sums, none)

        return f.if_((y >= 0) & (y < o["height"]), inside_row, outside_row)
