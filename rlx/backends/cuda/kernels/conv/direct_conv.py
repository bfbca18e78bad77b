"""Convolutions whose sums are short: a thread adds up the taps of one number of the result."""

from __future__ import annotations

from rlx.backends.cuda.builder import THREADS, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.conv.conv_form import Windows
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i32, i64
from rlx.llvm.storage import load, store
from rlx.support.records import dataclass

_MOST_TAPS = 49  # that are written out


@dataclass(frozen=True)
class DirectConv(BlockKernel):
    """args: x, its strides (batch, channel, down, across), w, bias (else 0), result, size of a
    picture (down, across), windows (down, across), pictures"""

    windows: Windows
    groups: int
    out: int
    x: DType
    w: DType
    bias: DType | None
    result: DType
    activation: str = "none"

    @property
    def label(self) -> str:
        return f"conv({self.windows.k})"

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads), self).emit()


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: DirectConv) -> None:
        self.f, self.kernel = f, kernel
        args = f["args"]
        self.x, self.w, self.bias, self.result = (f.arg(args, i) for i in (0, 5, 6, 7))
        self.steps = [f.arg(args, i, i64) for i in (1, 2, 3, 4)]
        self.size, self.counts = ([f.arg(args, i + j, i32) for j in range(2)] for i in (8, 10))
        self.pictures = f.arg(args, 12, i64)

    def emit(self) -> None:
        f, kernel = self.f, self.kernel
        f.let_next_start()
        f.wait_for_previous()
        number = f.block_number().to(i64) * THREADS + f.thread().to(i64)
        places = self.counts[0] * self.counts[1]
        total = self.pictures * kernel.out * places.to(i64)
        f.if_(number < total, lambda: self._emit_number(number, places))

    def _emit_number(self, number: Value, places: Value) -> None:
        f, kernel = self.f, self.kernel
        row = number.udiv(places.to(i64))  # picture and channel of the result
        place = (number - row * places.to(i64)).to(i32)
        picture = row.udiv(kernel.out)
        out = (row - picture * kernel.out).to(i32)
        down = place.udiv(self.counts[1])
        at = (down, place - down * self.counts[1])
        windows = kernel.windows
        corner = [p * s - low for p, s, low in zip(at, windows.stride, windows.low, strict=True)]
        group = out.udiv(kernel.out // kernel.groups) if kernel.groups > 1 else f.i32(0)
        first = (group * windows.channels).to(i64) * self.steps[1]
        base = f.gep(self.x, picture * self.steps[0] + first, kernel.x.bytes)
        weights = f.gep(self.w, out.to(i64) * windows.k, kernel.w.bytes)

        def add(channel: Value, total: Value) -> Value:
            there = f.gep(base, channel.to(i64) * self.steps[1], kernel.x.bytes)
            own = f.gep(weights, channel.to(i64) * windows.taps, kernel.w.bytes)
            return self._taps(there, own, corner, total)

        [total] = f.loop(f.i32(0), f.i32(windows.channels), 1, [f.const(0.0, f32)], add)
        if kernel.bias is not None:
            there = f.gep(self.bias, out.to(i64), kernel.bias.bytes)
            total = total + load(f, there, kernel.bias, 1, f32)
        total = f.activate(kernel.activation, total)
        store(f, total, f.gep(self.result, number, kernel.result.bytes), kernel.result)

    def _taps(self, base: Value, own: Value, corner: list[Value], total: Value) -> Value:
        """Add the taps of a channel."""
        f, windows = self.f, self.kernel.windows

        def add(tap: Value, total: Value) -> Value:
            _, *moves = windows.place(tap)
            return self._tap(
                base, own, tap, [a + b for a, b in zip(corner, moves, strict=True)], total
            )

        if windows.taps > _MOST_TAPS:
            return f.loop(f.i32(0), f.i32(windows.taps), 1, [total], add)[0]
        for number in range(windows.taps):
            down, across = divmod(number, windows.kernel[1])
            at = [corner[0] + down * windows.dilation[0], corner[1] + across * windows.dilation[1]]
            total = self._tap(base, own, f.i32(number), at, total)
        return total

    def _tap(self, base: Value, own: Value, tap: Value, at: list[Value], total: Value) -> Value:
        f, kernel = self.f, self.kernel
        inside = at[0].ult(self.size[0]) & at[1].ult(self.size[1])
        far = at[0].to(i64) * self.steps[2] + at[1].to(i64) * self.steps[3]
        x = load(f, f.gep(base, f.select(inside, far, 0), kernel.x.bytes), kernel.x, 1, f32)
        w = load(f, f.gep(own, tap.to(i64), kernel.w.bytes), kernel.w, 1, f32)
        return f.fma(f.select(inside, x, 0.0), w, total)
