"""Windows of pictures as rows for products by tensor cores.

A block has eight windows, which lie beside each other, and its threads divide their numbers: so
threads read neighbours. Numbers become two of f16 each, as `split_rows` does it, or stay as they
are where they have 16 bits.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import BlockFunction, KernelModule
from rlx.backends.cuda.kernels.conv.conv_form import Windows
from rlx.backends.cuda.kernels.gemm.split_rows import CHUNK, SplitEmitter, SplitRows, padded
from rlx.llvm.builder import Value, f32, i32, i64
from rlx.llvm.storage import load, memory_type
from rlx.support.records import dataclass


@dataclass(frozen=True)
class SplitWindows(SplitRows):
    """args: x, its strides (batch, channel, down, across), windows down, result, scales, windows
    across, windows of all pictures, size of a picture (down, across)"""

    windows: Windows = Windows(1, (1, 1), (1, 1), (0, 0), (1, 1))
    whole: bool = False  # numbers stay as they are

    @property
    def label(self) -> str:
        return f"windows({self.k})"

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared), self).emit()


class _Emitter(SplitEmitter):
    kernel: SplitWindows

    def __init__(self, f: BlockFunction, kernel: SplitWindows) -> None:
        super().__init__(f, kernel)
        args = f["args"]
        self.steps = [f.arg(args, i, i64) for i in (1, 2, 3, 4)]
        self.down, self.across = f.arg(args, 5, i32), f.arg(args, 8, i32)
        self.size = [f.arg(args, i, i32) for i in (10, 11)]

    def find_row(self, row: Value) -> Value:
        f, windows = self.f, self.kernel.windows
        each = self.down * self.across
        picture = row.udiv(each.to(i64))
        place = (row - picture * each.to(i64)).to(i32)
        down = place.udiv(self.across)
        at = (down, place - down * self.across)
        self.corner = [
            p * s - low for p, s, low in zip(at, windows.stride, windows.low, strict=True)
        ]
        return f.gep(self.source, picture * self.steps[0], self.kernel.x.bytes)

    def load_chunk(self, base: Value, chunk: Value) -> list[Value]:
        f, kernel, found = self.f, self.kernel, list[Value]()
        first = (chunk * CHUNK).to(i32)
        for i in range(CHUNK):
            k = first + i
            channel, *moves = kernel.windows.place(f.min(k, kernel.k - 1))
            places = [corner + move for corner, move in zip(self.corner, moves, strict=True)]
            inside = places[0].ult(self.size[0]) & places[1].ult(self.size[1])
            if kernel.k % CHUNK:
                inside = inside & (k < kernel.k)
            numbers = (channel, *places)
            at = sum(
                (n.to(i64) * s for n, s in zip(numbers, self.steps[1:], strict=True)), f.i64(0)
            )
            there = f.gep(base, f.select(inside, at, 0), kernel.x.bytes)
            found.append(f.select(inside, load(f, there, kernel.x, 1, f32), 0.0))
        return found

    def emit_numbers(self, row: Value, base: Value, first: Value, step: int) -> None:
        if not self.kernel.whole:
            super().emit_numbers(row, base, first, step)
            return
        f, width = self.f, padded(self.kernel.k)
        element = memory_type(self.kernel.x)

        def write() -> None:
            to = f.gep(self.out, row * width, 2)
            for chunk in f.range(first, f.i64(width // CHUNK), step):
                v = self.load_chunk(base, chunk)
                words = [f.pack_halves(v[i], v[i + 1], element) for i in range(0, CHUNK, 2)]
                f.store(f.join(words), f.gep(to, chunk * CHUNK, 2), align=16)

        f.if_(row < self.count, write)
