"""Activations quantised by whole tiles: what one row does across lanes, all rows do side by side.

Largest magnitudes of the rows are found together, and words of codes are brought into their order,
`[word][row]`, in registers. Results are those of single rows, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.codegen.attention_fold import fold
from rlx.codegen.emit import Function, Value, f32, i8, i32, vec
from rlx.codegen.storage import load, memory_type
from rlx.ir.dtype import DType
from rlx.ir.quant_rows import BIAS, RUN, TINY, RowLayout

_STEP = 16  # codes of a vector, a run of the smallest kind


def has_tiles(layout: RowLayout) -> bool:
    """Whether blocks are made of whole groups."""
    return layout.block > 0 and layout.block % RUN == 0


class TileBlock:
    """A block of all rows of a tile; `x` is the first row's, the others follow in steps of
    `stride` bytes."""

    def __init__(
        self, f: Function, dtype: DType, layout: RowLayout, x: Value, stride: Value, to: Value
    ) -> None:
        self.f, self.dtype, self.layout, self.to = f, dtype, layout, to
        self.tile = layout.tile
        self.rows = [f.gep(x, stride * r) for r in range(self.tile)]

    def emit(self) -> None:
        f, block = self.f, self.layout.block
        self.scale, inverse = scale_and_inverse(f, self._peaks())
        self.factors = [f.shuffle(inverse, None, [r] * _STEP) for r in range(self.tile)]
        self._put(self.scale, 0)
        if self.layout.kind == "super":
            for half in f.range(0, 2):
                self._half(half)
            return
        if self.layout.kind == "runs":
            for i in f.range(0, block, RUN):
                self._put(beginning(sum_of(self._encode(i))), i.udiv(RUN) + 1)
            return
        start = [f.const(0, vec(self.tile, i32))]

        def group(i: Value, total: Value) -> Value:
            return total + sum_of(self._encode(i))

        [total] = f.loop(0, block, RUN, start, group)
        self._put(-total, 1)
        self._put(self.scale * total.to(f32), 2)

    def _load(self, row: int, i: Value) -> Value:
        at = self.f.gep(self.rows[row], i, memory_type(self.dtype))
        return load(self.f, at, self.dtype, _STEP, f32)

    def _peaks(self) -> Value:
        """Each row's largest magnitude. As integers they order like numbers, NaN on top."""
        f = self.f

        def larger(i: Value, *found: Value) -> list[Value]:
            out = []
            for r, top in enumerate(found):
                both = [self._load(r, i + at).bits() & 0x7FFFFFFF for at in (0, _STEP)]
                out.append(f.max(top, f.max(*both)))
            return out

        start = [f.const(0, vec(_STEP, i32))] * self.tile
        tops = f.loop(0, self.layout.block, RUN, start, larger)
        [peaks] = fold(f, tops, self.tile, f.max)
        return peaks.bits(vec(self.tile, f32))

    def _encode(self, i: Value) -> list[Value]:
        """Write the codes from i on of all rows; gives the sums of both runs of every row."""
        f, t = self.f, self.tile
        words = [f.concat(self._words(r, i), self._words(r, i + _STEP)) for r in range(t)]
        while len(words) > 1:
            half = len(words) // 2
            words = [f.interleave(words[j], words[j + half]) for j in range(half)]
        [lines] = words
        f.store(lines, f.gep(self.to, i * t))
        return [self._sum(f.slice(lines, j * 4 * t, 4 * t)) for j in range(2)]

    def _words(self, row: int, i: Value) -> Value:
        codes = encode(self.f, self._load(row, i), self.factors[row])
        return codes.to(i8).bits(vec(_STEP // 4, i32))

    def _sum(self, lines: Value) -> Value:
        """The sum of each row's codes in four lines."""
        f = self.f
        total = lines.ashr(24)
        for shift in (8, 16, 24):
            total = total + (lines << shift).ashr(24)
        while total.type.lanes > self.tile:
            half = total.type.lanes // 2
            total = f.slice(total, 0, half) + f.slice(total, half, half)
        return total

    def _half(self, half: Value) -> None:
        """128 codes: the sums of runs of 16 as pairs, and those of runs of 32."""
        first, last = half * 4, half * 2
        longer: list[Value] = []
        for quarter in range(2):
            runs = []
            for group in range(2):
                runs += self._encode(half * 128 + (quarter * 2 + group) * RUN)
            for i in range(2):
                self._put(pair(runs[i], runs[i + 2]), first + (quarter * 2 + i + 1))
            longer += [runs[0] + runs[1], runs[2] + runs[3]]
        for i in range(2):
            self._put(pair(longer[i], longer[i + 2]), last + (9 + i))

    def _put(self, values: Value, word: Value | int) -> None:
        """A word of every row behind the codes."""
        behind = self.f.gep(self.to, self.layout.block * self.tile)
        self.f.store(values, self.f.gep(behind, word, 4 * self.tile))


def sum_of(runs: Sequence[Value]) -> Value:
    low, high = runs
    return low + high


def beginning(total: Value) -> Value:
    """What the products of bytes begin with, from the sum of a run of codes."""
    return -(total << 7) + BIAS


def pair(low: Value, high: Value) -> Value:
    return low & 0xFFFF | high << 16


def scale_and_inverse(f: Function, peak: Value) -> tuple[Value, Value]:
    """What codes are multiplied with, and numbers before they are codes."""
    usable = ~(peak < TINY)
    inverse = f.select(usable, f.const(127.0, peak.type) / peak, 0.0)
    return f.select(usable, peak * (1 / 127), 0.0), inverse


def encode(f: Function, numbers: Value, inverse: Value) -> Value:
    """Codes, as i32. Adding 1.5 * 2^23 rounds to nearest even and leaves them in the low bits."""
    with f.exact():
        return (numbers * inverse + 12582912.0).bits() - BIAS
