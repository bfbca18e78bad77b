"""Attention of many queries with keys and values in f32, by tensor cores, key tile by key tile.

Numbers become two of f16 each, which hold 22 bits, and three of the four products of such numbers
count. Queries, keys and values are divided by a power of two each first, which scores and weights
are multiplied with again; so numbers of any size keep their bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import BlockFunction, KernelModule
from rlx.backends.cuda.kernels.attention.attention_tile import Scores, Softmax
from rlx.backends.cuda.kernels.attention.flash_attention import (
    KEYS,
    FlashAttention,
    FlashEmitter,
    Planes,
)
from rlx.backends.cuda.kernels.gemm.planes import power_of_two
from rlx.backends.cuda.kernels.gemm.weight_rows import load_run
from rlx.ir.dtype import f32 as F32
from rlx.llvm.builder import Value, f16, f32, i32, i64, vec
from rlx.support.records import dataclass

F32_DIMS = (32, 64)  # numbers of a head whose queries and results fit into registers
_PRODUCTS = ((0, 0), (1, 0), (0, 1))  # parts of what is multiplied; the low ones are too small
_LEAST = 1 << 23  # the bits of the smallest power of two


@dataclass(frozen=True)
class F32Attention(FlashAttention):
    """args: those of `FlashAttention`"""

    @property
    def label(self) -> str:
        return "attention(f32)"

    @property
    def tile_bytes(self) -> int:
        """One part of a tile."""
        return KEYS * self.pitch

    @property
    def stage_bytes(self) -> int:
        """Two parts of keys and of values, then the powers of two of both."""
        return 4 * self.tile_bytes + 8 * KEYS

    @property
    def group_bytes(self) -> int:
        return 2 * self.stage_bytes

    def emit(self, m: KernelModule) -> None:
        together = 4 if self.form.dim == 32 else 2  # blocks that fit without spills
        _Emitter(m.begin_block(self.threads, self.shared, together), self).emit()


class _Emitter(FlashEmitter):
    kernel: F32Attention

    def __init__(self, f: BlockFunction, kernel: F32Attention) -> None:
        super().__init__(f, kernel)
        self.element, self.exact = f16, True

    # -- memory -----------------------------------------------------------------------------------

    def _copy_tile(self, key: Value, high: Value, stage: Value) -> None:
        f, form, kernel = self.f, self.form, self.kernel
        pieces = form.dim // 8
        start = stage * kernel.stage_bytes
        for item in f.range(self.thread, f.i32(KEYS * pieces), kernel.threads):
            number = item.udiv(pieces)
            piece = item - number * pieces
            wanted = key + number
            rows = self.rows_at(f.max(f.min(wanted, self.keys - 1), 0))
            at = start + number * kernel.pitch + piece * 16
            for i, row in enumerate(rows):
                numbers = load_run(f, row, (piece * 8).to(i64), 8, F32)
                numbers = [f.select(wanted < high, v, 0.0) for v in numbers]
                power, planes = self._parts(numbers, pieces)
                for p, words in enumerate(planes):
                    f.store_shared(f.join(words), at, (2 * i + p) * kernel.tile_bytes, align=16)
                scale = start + number * 4
                f.store_shared(power, scale, 4 * kernel.tile_bytes + 4 * KEYS * i)

    def _parts(self, numbers: Sequence[Value], lanes: int) -> tuple[Value, list[list[Value]]]:
        """Numbers of a row that so many lanes share: a power of two, and two parts of what is left
        when they are divided by it."""
        f, top = self.f, self.f.const(0.0, f32)
        for v in numbers:
            top = f.max_fast(f.abs(v), top)
        power = power_of_two(f, f.warp_max(top, lanes))
        factor = (f.i32(254 << 23) - power).bits(f32)
        scaled = [v * factor for v in numbers]
        pairs = [scaled[i : i + 2] for i in range(0, len(scaled), 2)]
        return power.bits(f32), self._planes(pairs)

    def _query(self) -> list[Planes]:
        f, dim = self.f, self.form.dim
        bases = [self.query_at(self.own + self.row + 8 * i) for i in range(2)]
        halves, self.powers = list[list[list[Value]]](), list[Value]()
        for base in bases:
            numbers = list[Value]()
            for k in range(0, dim, 8):
                pair = f.load(f.gep(base, (self.column + k).to(i64), 4), vec(2, f32), align=8)
                numbers += [f.extract(pair, i) for i in range(2)]
            power, planes = self._parts(numbers, 4)
            self.powers.append(power)
            halves.append(planes)
        # 16 numbers at a time: those of both queries, then the next eight of both
        return [
            [[halves[i % 2][p][k + i // 2] for i in range(4)] for p in range(2)]
            for k in range(0, dim // 8, 2)
        ]

    # -- a tile -----------------------------------------------------------------------------------

    def start(self) -> list[Value]:
        return [*super().start(), self.f.i32(_LEAST).bits(f32)]

    def _tile(
        self, query: list[Planes], key: Value, high: Value, stage: Value, state: Sequence[Value]
    ) -> list[Value]:
        f, kernel, at = self.f, self.kernel, stage * self.kernel.stage_bytes
        known, (*out, unit) = Softmax(list(state[:2]), list(state[2:4])), list(state[4:])
        powers = [self._powers(at, i) for i in range(2)]
        scores = self._scaled(self._scores(query, at), powers[0])
        weights, new, shrinks = self.weigh(self.finished(scores, key, high), known)
        largest = unit
        for v in powers[1]:
            largest = f.max_fast(v, largest)
        largest = f.warp_max(largest, 4)
        down = (f.i32(254 << 23) - largest.bits(i32)).bits(f32)
        for j, four in enumerate(weights):
            by = [v * down for v in powers[1][2 * j : 2 * j + 2]]
            weights[j] = [v * by[i % 2] for i, v in enumerate(four)]
        shrinks = [s * (unit * down) for s in shrinks]
        out = [v * shrinks[i // 2 % 2] for i, v in enumerate(out)]
        out = self._values(weights, out, at + 2 * kernel.tile_bytes)
        return [*new.values, *out, largest]

    def _powers(self, stage: Value, which: int) -> list[Value]:
        """What this thread's keys, or values, of a tile are multiplied with."""
        f, found = self.f, list[Value]()
        first = 4 * self.kernel.tile_bytes + 4 * KEYS * which
        for j in range(KEYS // 8):
            pair = f.load_shared(stage + self.column * 4, vec(2, f32), first + 32 * j, align=8)
            found += [f.extract(pair, i) for i in range(2)]
        return found

    def _scaled(self, scores: Scores, powers: Sequence[Value]) -> Scores:
        return [
            [s * powers[2 * j + i % 2] * self.powers[i // 2] for i, s in enumerate(four)]
            for j, four in enumerate(scores)
        ]

    def _scores(self, query: list[Planes], start: Value) -> Scores:
        f, zero = self.f, self.f.const(0.0, f32)
        scores = [[zero] * 4 for _ in range(KEYS // 8)]
        for k, planes in enumerate(query):
            for j in range(0, KEYS // 8, 2):
                found = [
                    self._matrices(start + p * self.kernel.tile_bytes, 8 * j, 2 * k, False)
                    for p in range(2)
                ]
                for i in range(2):
                    for a, b in _PRODUCTS:
                        pair = found[b][2 * i : 2 * i + 2]
                        scores[j + i] = f.multiply(planes[a], pair, scores[j + i], self.element)
        return scores

    def _values(self, weights: Scores, out: list[Value], start: Value) -> list[Value]:
        f = self.f
        for k in range(KEYS // 16):
            first, second = weights[2 * k : 2 * k + 2]
            planes = self._planes([first[:2], first[2:], second[:2], second[2:]])
            for j in range(0, self.form.dim // 8, 2):
                found = [
                    self._matrices(start + p * self.kernel.tile_bytes, 16 * k, j, True)
                    for p in range(2)
                ]
                for i in range(2):
                    at = 4 * (j + i)
                    for a, b in _PRODUCTS:
                        pair = found[b][2 * i : 2 * i + 2]
                        out[at : at + 4] = f.multiply(
                            planes[a], pair, out[at : at + 4], self.element
                        )
        return out

    def _finish(self, state: list[Value]) -> None:
        *rest, unit = state
        super()._finish([*rest[:4], *(v * unit for v in rest[4:])])
