"""Depthwise convolution and pooling of images with channels last: vectors are along the channels.

A worker takes output rows. Taps above and below the image are left out, and so are those beside
it: only windows that reach over the left or right border are computed one at a time, all others
several pixels together, so that a weight is loaded once for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType, f32, u8
from rlx.llvm.builder import Module, Value, i8, vec
from rlx.llvm.builder import f32 as f32_type
from rlx.llvm.nest.elements import activate
from rlx.support.records import dataclass

POINTERS = frozenset(["x", "filters", "out", "bias", "residual"])
_SIZES = [
    "batch", "channels", "height", "width", "out_height", "out_width", "stride_y", "stride_x",
    "taps_y", "start_y", "start_x", "dilation_y",
]  # fmt: skip
_PIXELS, _MOST_UNROLLED = 4, 8


@dataclass(frozen=True)
class ChannelsLastWindows(KernelSpec):
    """args: as `self.args` lists them.

    `kind` is what a window gives: "depthwise" the sum of products with `filters [taps, channels]`,
    "max" its largest element, "mean" the sum over the window's size, "inner" over the part of the
    window that is inside the image.
    """

    kind: str
    taps_x: int
    dilation_x: int
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
        self.vectors = 2 if m.target.num_vector_registers >= 32 else 1
        self.type = vec(self.lanes, f32_type if spec.dtype is f32 else i8)

    def emit(self) -> None:
        f, o = self.f, self.o
        self.pitch = o["channels"] * self.size
        lo, hi = f.split(o["batch"] * o["out_height"])
        for line in f.range(lo, hi):
            image, y = line.udiv(o["out_height"]), line.urem(o["out_height"])
            top = y * o["stride_y"] + o["start_y"]
            self.low, self.high = self._inside(top, o["dilation_y"], o["taps_y"], o["height"])
            first = image * o["height"] + top
            self.rows = f.gep(o["x"], first * o["width"] * self.pitch)
            self.out = f.gep(o["out"], line * o["out_width"] * self.pitch)
            self.residual = self.out
            if self.spec.residual:
                self.residual = f.gep(o["residual"], line * o["out_width"] * self.pitch)
            self._channels()

    def _inside(
        self, first: Value, step: Value | int, taps: Value | int, size: Value
    ) -> tuple[Value, Value]:
        """The taps low … high whose positions first + tap · step are inside 0 … size."""
        f = self.f
        step, taps = f.const(step), f.const(taps)
        low = (f.max(-first, 0) + step - 1).udiv(step)
        high = (f.max(size - first, 0) + step - 1).udiv(step)
        return f.min(low, taps), f.min(high, taps)

    def _channels(self) -> None:
        """A row, some channels at a time."""
        f, o = self.f, self.o
        wide = self.vectors * self.lanes
        whole = o["channels"] - o["channels"].urem(wide)
        for c in f.range(0, whole, wide):
            self._row(c, self.vectors, None)
        for c in f.range(whole, o["channels"], self.lanes):
            mask = f.lane_mask(o["channels"] - c, self.lanes)
            self._row(c, 1, mask)

    def _row(self, c: Value, vectors: int, mask: Value | None) -> None:
        """Pixels before, inside and after those whose windows are inside the row."""
        f, o, spec = self.f, self.o, self.spec
        span = (spec.taps_x - 1) * spec.dilation_x
        stride = o["stride_x"]
        begin = f.min((f.max(-o["start_x"], 0) + stride - 1).udiv(stride), o["out_width"])
        room = f.max(o["width"] - span - o["start_x"] + stride - 1, 0).udiv(stride)
        end = f.max(f.min(room, o["out_width"]), begin)
        together = begin + ((end - begin) & -_PIXELS)
        for x in f.range(0, begin):
            self._pixels(x, 1, c, vectors, mask, False)
        for x in f.range(begin, together, _PIXELS):
            self._pixels(x, _PIXELS, c, vectors, mask, True)
        for x in f.range(together, end):
            self._pixels(x, 1, c, vectors, mask, True)
        for x in f.range(end, o["out_width"]):
            self._pixels(x, 1, c, vectors, mask, False)

    def _pixels(
        self, x: Value, pixels: int, c: Value, vectors: int, mask: Value | None, inside: bool
    ) -> None:
        """`pixels` outputs from x on, for the channels from c on."""
        f, o, spec = self.f, self.o, self.spec
        left = x * o["stride_x"] + o["start_x"]
        low, high = f.i64(0), f.i64(spec.taps_x)
        if not inside:
            low, high = self._inside(left, spec.dilation_x, spec.taps_x, o["width"])
        source = f.gep(self.rows, left * self.pitch + c * self.size)
        step = o["stride_x"] * self.pitch
        weights = f.gep(o["filters"], c, 4) if spec.kind == "depthwise" else f.null()
        line, down = o["width"] * self.pitch, o["dilation_y"]
        across = self.pitch * spec.dilation_x
        sums = f.carry([f.const(self._start, self.type)] * (pixels * vectors))
        for i in sums.range(self.low, self.high):
            row = f.gep(source, i * down * line)
            taps = f.gep(weights, i * spec.taps_x * self.pitch) if weights is not None else row
            if inside and spec.taps_x <= _MOST_UNROLLED:
                for j in range(spec.taps_x):
                    at = f.gep(row, across * j), f.gep(taps, self.pitch * j)
                    sums.values = self._tap(*at, step, pixels, vectors, mask, sums.values)
            else:
                inner = f.carry(sums.values)
                for tap in inner.range(low, high):
                    at = f.gep(row, across * tap), f.gep(taps, self.pitch * tap)
                    inner.values = self._tap(*at, step, pixels, vectors, mask, inner.values)
                sums.values = inner.values
        number = (self.high - self.low) * (high - low)
        for p in range(pixels):
            for v in range(vectors):
                place = (x + p) * self.pitch + c * self.size + v * self.type.bytes
                value = self._result(sums.values[p * vectors + v], number, c, v, place, mask)
                if mask is None:
                    f.store(value, f.gep(self.out, place))
                else:
                    f.masked_store(value, f.gep(self.out, place), mask)

    @property
    def _start(self) -> float:
        if self.spec.kind != "max":
            return 0.0
        return float("-inf") if self.spec.dtype is f32 else int(np.iinfo(self.spec.dtype.numpy).min)

    def _tap(
        self, x: Value, weights: Value, step: Value, pixels: int, vectors: int,
        mask: Value | None, sums: Sequence[Value],
    ) -> list[Value]:  # fmt: skip
        f, found = self.f, []
        kernel = []
        if self.spec.kind == "depthwise":
            kernel = [self._load(weights, v, mask) for v in range(vectors)]
        for p in range(pixels):
            pixel = f.gep(x, step * p)
            for v in range(vectors):
                value, total = self._load(pixel, v, mask), sums[p * vectors + v]
                if kernel:
                    found.append(f.fma(value, kernel[v], total))
                elif self.spec.kind == "max":
                    largest = f.umax if self.spec.dtype is u8 else f.max
                    found.append(largest(total, value))
                else:
                    found.append(total + value)
        return found

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
            value = value + self._load(f.gep(self.residual, place), 0, mask)
        return activate(spec.activation, value)

    def _load(self, base: Value, v: int, mask: Value | None) -> Value:
        f, at = self.f, v * self.type.bytes
        if mask is None:
            return f.load(base, self.type, at)
        return f.masked_load(base, self.type, mask, offset=at)
