"""Depthwise convolution and pooling of images with channels last: vectors are along the channels.

A tile is some pixels of a row and some vectors of channels. Each input pixel under it is loaded
once for all windows that it is in, each weight once for all pixels. Taps above and below the image
are left out; those beside it read a vector of what they would not change. Tiles of a few rows that
lie below each other follow each other, so that the rows between them are still in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType, f32, u8
from rlx.llvm.builder import Module, Value, i8, vec
from rlx.llvm.builder import f32 as f32_type
from rlx.llvm.nest.elements import activate
from rlx.llvm.target import Target
from rlx.support.records import dataclass

POINTERS = frozenset(["x", "filters", "out", "bias", "residual"])
_SIZES = [
    "batch", "channels", "height", "width", "out_height", "out_width", "stride_y", "taps_y",
    "start_y", "start_x",
]  # fmt: skip
_SUMS, _MOST_UNROLLED = 8, 8  # sums of a tile; taps of a row
_DOWN = 4  # rows whose tiles follow each other


def tile_vectors(target: Target) -> int:
    """Vectors of channels that a tile has."""
    return 2 if target.num_vector_registers >= 32 else 1


@dataclass(frozen=True)
class ChannelsLastWindows(KernelSpec):
    """args: as `self.args` lists them.

    `kind` is what a window gives: "depthwise" the sum of products with `filters [taps, channels]`,
    "max" its largest element, "mean" the sum over the window's size, "inner" over the part of the
    window that is inside the image.
    """

    kind: str
    taps_x: int
    stride_x: int
    dilation: tuple[int, int]
    whole: bool  # whether there are as many channels as a tile has
    rest: int  # vectors of the channels that are left, the last one masked
    bias: bool = False
    residual: bool = False
    activation: str = "none"
    dtype: DType = f32  # u8 and i8 for "max" alone

    @property
    def flushes_denormals(self) -> bool:
        return self.kind != "max"

    @property
    def args(self) -> list[str]:
        given = ["filters"] * (self.kind == "depthwise")
        given += ["bias"] * self.bias + ["residual"] * self.residual
        return ["x", "out", *given, *_SIZES]

    def emit(self, m: Module) -> None:
        _Emitter(self, m).emit()


class _Emitter:
    def __init__(self, spec: ChannelsLastWindows, m: Module) -> None:
        self.spec, self.f = spec, m.kernel()
        self.o = Operands(self.f, spec.args, POINTERS)
        self.size = spec.dtype.bytes
        self.lanes = m.target.lanes(8 * self.size)
        self.vectors = tile_vectors(m.target)
        self.type = vec(self.lanes, f32_type if spec.dtype is f32 else i8)

    def emit(self) -> None:
        f, o, spec = self.f, self.o, self.spec
        self.pitch = o["channels"] * self.size
        self.border = f.alloca(self.vectors * self.type.bytes)
        for v in range(self.vectors):
            f.store(f.const(self._start, self.type), self.border, v * self.type.bytes)
        wide = self.vectors * self.lanes
        tiles = o["channels"].udiv(wide)
        groups = tiles + (1 if spec.rest else 0)  # of channels
        bands = f.ceil_div(o["out_height"], _DOWN)
        lo, hi = f.split(o["batch"] * bands * groups)
        for band in f.range(lo.udiv(groups), (hi + groups - 1).udiv(groups)):
            image = band.udiv(bands)
            y = (band - image * bands) * _DOWN
            lines = y, f.min(y + _DOWN, o["out_height"])
            begin, end = f.max(lo - band * groups, 0), f.min(hi - band * groups, groups)
            if spec.whole:
                for group in f.range(begin, f.min(end, tiles)):
                    self._band(image, lines, group * wide, self.vectors, None)
            if spec.rest:
                for _ in f.when(end > tiles):
                    c = tiles * wide
                    left = o["channels"] - c - (spec.rest - 1) * self.lanes
                    mask = f.lane_mask(left, self.lanes)
                    self._band(image, lines, c, spec.rest, mask)

    def _inside(
        self, first: Value, step: Value | int, taps: Value | int, size: Value
    ) -> tuple[Value, Value]:
        """The taps low … high whose positions first + tap · step are inside 0 … size."""
        f = self.f
        step, taps = f.const(step), f.const(taps)
        low = (f.max(-first, 0) + step - 1).udiv(step)
        high = (f.max(size - first, 0) + step - 1).udiv(step)
        return f.min(low, taps), f.min(high, taps)

    def _band(
        self, image: Value, lines: tuple[Value, Value], c: Value, vectors: int, mask: Value | None
    ) -> None:
        """Some rows of an image, for the channels from c on."""
        f, o, spec = self.f, self.o, self.spec
        pixels = _SUMS // vectors
        span = (pixels - 1) * spec.stride_x + (spec.taps_x - 1) * spec.dilation[1]
        for x in f.range(0, o["out_width"], pixels):
            left = x * spec.stride_x + o["start_x"]
            inside = (left >= 0) & (left + span < o["width"]) & (x + pixels <= o["out_width"])
            for is_inside in f.either(inside):
                for y in f.range(*lines):
                    self._begin_line(image, y)
                    self._tile(x, left, pixels, c, vectors, mask, is_inside)

    def _begin_line(self, image: Value, y: Value) -> None:
        f, o = self.f, self.o
        top = y * o["stride_y"] + o["start_y"]
        self.low, self.high = self._inside(top, self.spec.dilation[0], o["taps_y"], o["height"])
        first = image * o["height"] + top
        self.rows = f.gep(o["x"], first * o["width"] * self.pitch)
        place = (image * o["out_height"] + y) * o["out_width"] * self.pitch
        self.out = f.gep(o["out"], place)
        self.residual = f.gep(o["residual"], place) if self.spec.residual else self.out

    def _tile(
        self, x: Value, left: Value, pixels: int, c: Value, vectors: int, mask: Value | None,
        inside: bool,
    ) -> None:  # fmt: skip
        f, o, spec = self.f, self.o, self.spec
        source = f.gep(self.rows, left * self.pitch + c * self.size)
        weights = f.gep(o["filters"], c, 4) if spec.kind == "depthwise" else None
        masks = [None] * (vectors - 1) + [mask]
        sums = f.carry([f.const(self._start, self.type)] * (pixels * vectors))
        for i in sums.range(self.low, self.high):
            row = f.gep(source, i * spec.dilation[0] * (o["width"] * self.pitch))
            taps = weights
            if weights is not None:
                taps = f.gep(weights, i * spec.taps_x * self.pitch)
            if spec.taps_x <= _MOST_UNROLLED:
                sums.values = self._tap_row(row, left, taps, pixels, masks, inside, sums.values)
            else:
                inner = f.carry(sums.values)
                for j in inner.range(0, spec.taps_x):
                    at = left + j * spec.dilation[1]
                    moved = f.gep(row, j * spec.dilation[1] * self.pitch)
                    tap = None if taps is None else f.gep(taps, j * self.pitch)
                    inner.values = self._tap_row(
                        moved, at, tap, pixels, masks, inside, inner.values, 1
                    )
                sums.values = inner.values
        for p in range(pixels):
            if inside:
                self._store(x, left, p, c, masks, sums.values)
            else:
                for _ in f.when(x + p < o["out_width"]):
                    self._store(x, left, p, c, masks, sums.values)

    def _tap_row(
        self, row: Value, left: Value, weights: Value | None, pixels: int,
        masks: Sequence[Value | None], inside: bool, sums: Sequence[Value], taps: int = 0,
    ) -> list[Value]:  # fmt: skip
        """A row of taps, in the order of the input pixels, which is that of the taps too."""
        f, spec, found = self.f, self.spec, list(sums)
        kernel = []
        if weights is not None:
            taps_at = [f.gep(weights, self.pitch * j) for j in range(taps or spec.taps_x)]
            kernel = [[self._load(at, v, m) for v, m in enumerate(masks)] for at in taps_at]
        users: dict[int, list[tuple[int, int]]] = {}  # of an input: pixel and tap
        for p in range(pixels):
            for j in range(taps or spec.taps_x):
                users.setdefault(p * spec.stride_x + j * spec.dilation[1], []).append((p, j))
        for n in sorted(users):
            pixel = f.gep(row, self.pitch * n)
            if not inside:
                there = (left + n).ult(self.o["width"])
                pixel = f.select(there, pixel, self.border)
            for v, mask in enumerate(masks):
                value = self._load(pixel, v, mask)
                for p, j in users[n]:
                    at = p * len(masks) + v
                    found[at] = self._add(found[at], value, kernel[j][v] if kernel else None)
        return found

    def _add(self, total: Value, value: Value, weight: Value | None) -> Value:
        f = self.f
        if weight is not None:
            return f.fma(value, weight, total)
        if self.spec.kind == "max":
            return (f.umax if self.spec.dtype is u8 else f.max)(total, value)
        return total + value

    def _store(
        self, x: Value, left: Value, p: int, c: Value, masks: Sequence[Value | None],
        sums: Sequence[Value],
    ) -> None:  # fmt: skip
        """The results of pixel p of a tile."""
        f, o, spec = self.f, self.o, self.spec
        number = f.i64(0)
        if spec.kind == "inner":
            at = left + p * spec.stride_x
            low, high = self._inside(at, spec.dilation[1], spec.taps_x, o["width"])
            number = (self.high - self.low) * (high - low)
        place = (x + p) * self.pitch + c * self.size
        for v, mask in enumerate(masks):
            value = self._result(sums[p * len(masks) + v], number, c, v, place, mask)
            if mask is None:
                f.store(value, f.gep(self.out, place), v * self.type.bytes)
            else:
                f.masked_store(value, f.gep(self.out, place), mask, v * self.type.bytes)

    @property
    def _start(self) -> float:
        if self.spec.kind != "max":
            return 0.0
        return float("-inf") if self.spec.dtype is f32 else int(np.iinfo(self.spec.dtype.numpy).min)

    def _result(
        self, value: Value, number: Value, c: Value, v: int, place: Value, mask: Value | None
    ) -> Value:
        f, o, spec = self.f, self.o, self.spec
        if spec.kind == "mean":
            count = o["taps_y"] * spec.taps_x
            return value / f.splat(count.to(f32_type), self.lanes)
        if spec.kind == "inner":
            return value / f.splat(number.to(f32_type), self.lanes)
        if spec.bias:
            value = value + self._load(f.gep(o["bias"], c, 4), v, mask)
        if spec.residual:
            value = value + self._load(f.gep(self.residual, place), v, mask)
        return activate(spec.activation, value)

    def _load(self, base: Value, v: int, mask: Value | None) -> Value:
        f, at = self.f, v * self.type.bytes
        if mask is None:
            return f.load(base, self.type, at)
        return f.masked_load(base, self.type, mask, offset=at)
