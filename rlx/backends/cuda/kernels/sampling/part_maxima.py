"""The largest logit of each part of a row: what sampling begins with."""

from __future__ import annotations

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.llvm.builder import Value, f32, i32, i64
from rlx.support.records import dataclass

PARTS = 512
AHEAD = 10  # logits that a lane loads at a time
_WARPS = 8
BLOCKS = PARTS // _WARPS  # of a row


@dataclass(frozen=True)
class PartMaxima(BlockKernel):
    """args: logits [rows, vocab] (f32), maxima [rows, PARTS] (f32, then indices i32), rows

    A warp has a part of a row. NaN counts as -inf; of equal ones the first wins.
    """

    vocab: int

    @property
    def label(self) -> str:
        return "sample(parts)"

    @property
    def threads(self) -> int:
        return _WARPS * WARP

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        logits, maxima = (f.arg(f["args"], i) for i in range(2))
        number = f.block_number() * _WARPS + (f.thread() >> 5)
        row = number.udiv(PARTS)
        part = number - row * PARTS
        f.let_next_start()
        f.wait_for_previous()
        inside = row < f.arg(f["args"], 2, i32)
        f.if_(inside, lambda: self._emit_part(f, logits, maxima, row, part))

    def _emit_part(
        self, f: BlockFunction, logits: Value, maxima: Value, row: Value, part: Value
    ) -> None:
        base = f.gep(logits, row.to(i64) * self.vocab, 4)
        low, high = part_range(f, part, self.vocab)

        def take(first: Value, top: Value, at: Value) -> list[Value]:
            places = [first + WARP * i for i in range(AHEAD)]
            found = [logit(f, base, f.min(i, high - 1)) for i in places]
            for i, x in zip(places, found, strict=True):
                better = (i < high) & (x > top)
                top, at = f.select(better, x, top), f.select(better, i, at)
            return [top, at]

        start = [f.const(float("-inf"), f32), f.i32(self.vocab)]
        top, at = f.loop(low + f.lane32(), high, WARP * AHEAD, start, take)
        distance = WARP // 2
        while distance:
            other, there = f.exchange(top, distance), f.exchange(at, distance)
            top, at = better_of(f, (top, at), (other, there))
            distance //= 2

        def write() -> None:
            to = f.gep(maxima, row.to(i64), 8 * PARTS)
            f.store(top, f.gep(to, part.to(i64), 4))
            f.store(at, f.gep(to, part.to(i64), 4), 4 * PARTS)

        f.if_(f.lane32().eq(0), write)


def part_range(f: BlockFunction, part: Value, vocab: int) -> tuple[Value, Value]:
    """First and last index (i32) of a part."""
    each = -(-vocab // PARTS)
    low = f.min(part * each, vocab)
    return low, f.min(low + each, vocab)


def logit(f: BlockFunction, base: Value, index: Value) -> Value:
    x = f.load(f.gep(base, index.to(i64), 4), f32)
    return f.select(x.is_nan(), float("-inf"), x)


def better_of(
    f: BlockFunction, a: tuple[Value, Value], b: tuple[Value, Value]
) -> tuple[Value, Value]:
    """The larger of two logits, with its index; of equals the one that comes first."""
    wins = (b[0] > a[0]) | (b[0].eq(a[0]) & (b[1] < a[1]))
    return f.select(wins, b[0], a[0]), f.select(wins, b[1], a[1])


def order_key(f: BlockFunction, x: Value) -> Value:
    """An i32 that orders unsigned as the float does; -0 counts as 0."""
    bits = (x + 0.0).bits()
    return f.select(bits < 0, bits ^ -1, bits ^ -(1 << 31))
