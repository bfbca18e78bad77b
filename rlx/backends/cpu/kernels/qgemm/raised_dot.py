"""Products by `pmaddubsw` of signed codes of weights with rows as unsigned bytes.

Rows have RAISE added (see `layouts.quant_rows`), so that codes keep no offset. What the 128 add to
a sum depends on the weights alone: it is known when they are unpacked, and is taken off where a sum
starts. Codes with an offset cost every row the sums of its codes times all scales instead.

A step multiplies two bytes of a lane; the sums of some steps fit 16 bits before `pmaddwd` widens
and scales them. Additions of 16 bits wrap, so that only the last sum must fit: with a start for
each of those sums the 128 need no room in them, and half as many are widened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.kernels.qgemm.dot import DotLoop, IntDot, Maddubs, Pairwise
from rlx.backends.cpu.layouts.quant_rows import RAISE
from rlx.llvm.builder import Function, Value
from rlx.llvm.target import Target

_MOST_BYTE = 127  # of a row
_PER_LANE = 2  # products of a step in 16 bits


def takes_raised_rows(magnitude: int, kind: type[IntDot] | None, target: Target) -> bool:
    """Whether rows are raised for signed codes of at most this magnitude; 0: they have none."""
    few_registers = kind is Maddubs and target.num_vector_registers <= 16
    return magnitude > 0 and few_registers  # with more, rows read packed codes


def starts_each_sum(magnitude: int) -> bool:
    """Whether every 16-bit sum has a start: where two steps do not fit without."""
    return _steps(magnitude, RAISE + _MOST_BYTE) < 2


def _steps(magnitude: int, byte: int) -> int:
    return 0x7FFF // (_PER_LANE * byte * magnitude)


ROWS = 2  # of a pass: sums, codes, starts and scales of more do not fit 16 registers


class RaisedDot(Pairwise):
    """Adds products of raised rows to the sums of a pass: of `ROWS` rows from `first` on."""

    signed_bytes = True
    first = 0

    def __init__(self, f: Function, rows: int, lanes: int, magnitude: int) -> None:
        super().__init__(f, rows, lanes)
        started = starts_each_sum(magnitude)
        self.steps = _steps(magnitude, _MOST_BYTE if started else RAISE + _MOST_BYTE)

    def accumulate(
        self,
        loop: DotLoop,
        sums: Sequence[Value],
        starts: Callable[[Value], Sequence[Value]] | None = None,
    ) -> list[Value]:
        """The sums plus the dot products of the loop; `starts(g)` has a vector for each stream."""
        f, groups = self.f, loop.groups
        assert isinstance(groups, int)
        assert loop.scales is not None
        factors = [self.factor(scale) for scale in loop.scales]
        at_once = max(n for n in (1, 2, 4, 8) if n <= self.steps and groups % n == 0)

        def some(g: Value, *given: Value) -> list[Value]:
            out = list(given)
            lines = [loop.codes(g + j) for j in range(at_once)]
            begin = list(starts(g)) if starts else []
            for i in range(ROWS):
                places = [loop.x(g + j, 0) for j in range(at_once)]
                words = [self.row(place, self.first + i).bits(self.bytes) for place in places]
                for s, factor in enumerate(factors):
                    total = begin[s] if begin else f.const(0, self.halves)
                    for x, line in zip(words, lines, strict=True):
                        total = total + self.multiply(x, line[s])
                    at = loop.columns[s] * ROWS + i
                    out[at] = self.pairs(out[at], total, factor)
            return out

        for g in range(0, groups, at_once):
            sums = some(f.i64(g), *sums)
        return list(sums)
