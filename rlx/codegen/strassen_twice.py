"""Two steps of Strassen's scheme: 49 products of blocks in place of 64.

Rows are taken in fours of tiles, columns in fours of panels, k in quarters. The step of
`codegen/strassen.py` is taken with blocks of two by two tiles, and again within each of its seven
products, its turns. The first and third panel of a four, and the second and fourth, are the columns
of one block: so the sums of a weight for one step are the outer ones for two.

A worker takes four tiles of rows at a time and goes through the turns; the sums of rows for a turn
are made while the products of the one before run (`codegen/strassen_seven.py`). Rows that are no
whole four go through one step.
"""

from __future__ import annotations

from rlx.codegen.emit import Module, Value, i64
from rlx.codegen.matmul import TERMS, round_up, up
from rlx.codegen.strassen import Strassen, StrassenProduct, tall_geometry
from rlx.codegen.strassen_seven import (
    INNER_TILES,
    OUTER_TILES,
    RESULTS,
    SECTIONS,
    STATE_BYTES,
    TURNS,
    Seven,
    emit_turn_sums,
)
from rlx.codegen.target import Target
from rlx.support.records import dataclass

_MOST = 1 << 20  # elements of a weight: with its sums it takes 3.75 times its size
_TERMS = 384  # of a quarter of k, per block
_KEPT = 4  # fours of panels that sums of rows are made once for
_UNITS = 2  # of work for each worker, at least


def suits_twice(target: Target, k: int, n: int) -> bool:
    """Whether products of weights that suit one step are faster by two, and the weights small."""
    g = tall_geometry(target)
    whole = k >= TERMS and k % (4 * g.lanes) == 0 and n % (4 * g.width) == 0
    return whole and target.num_vector_registers >= 32 and k * n <= _MOST


@dataclass(frozen=True)
class StrassenTwice(Strassen):
    """args: as `self.args` lists them. `w` is laid out as `twiceW`."""

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        g = self.geometry(target)
        sums = 2 * TURNS * g.rows * min(up(k // 4, g.lanes), _TERMS) * g.sums.bytes
        tiles = (INNER_TILES + _KEPT * (OUTER_TILES + RESULTS)) * g.tile_bytes
        return max(super().scratch(target, rows, n, k), up(sums, 64) + tiles)

    def emit(self, m: Module) -> None:
        _StrassenTwice(self, m).emit()


class _StrassenTwice(StrassenProduct):
    def __init__(self, spec: StrassenTwice, m: Module) -> None:
        self.sum_turn = emit_turn_sums(m, spec.geometry(m.target))
        super().__init__(spec, m)
        self.seven = Seven(self, m).f

    def _in_blocks(self) -> None:
        """Fours where there are enough for the workers, or else pairs."""
        f = self.f
        pairs, tall = self["n"].udiv(2 * self.columns), self.g.rows * 4
        fours = self["m"].udiv(tall)
        enough = (fours > 1) & ((fours * pairs).udiv(2) >= f["nth"].to(i64) * _UNITS)
        per_chunk = f.select(enough, tall, self.rows_of_pairs(pairs))
        self.lay_out_pairs(pairs, per_chunk)
        self._lay_out_fours()
        each = f.select(enough, 2, f.i64(1))  # pairs of a unit
        columns = pairs.udiv(each)
        lo, hi = self._share(columns, per_chunk)

        def run(unit: Value) -> Value:
            chunk = unit.udiv(columns)
            first = unit - chunk * columns
            last = f.min(columns, first + (hi - unit))
            row = chunk * per_chunk
            x, at = f.gep(self["x"], row * self["x_line"]), row * self["n"]
            rows = f.min(per_chunk, self["m"] - row)
            f.if_(
                enough & rows.eq(tall),
                lambda: self._fours_of(x, at, first, last),
                lambda: self.pairs_of(x, self["w"], rows, at, first * each, last * each),
            )
            return unit + (last - first)

        f.while_([lo], lambda u: u < hi, run)

    def _share(self, columns: Value, per_chunk: Value) -> tuple[Value, Value]:
        """The units of this worker: those of the last chunk may be smaller."""
        f, workers = self.f, self.f["nth"].to(i64)
        whole = self["m"].udiv(per_chunk) * columns
        left = self["m"].urem(per_chunk)

        def start(worker: Value) -> Value:
            rows = (self["m"] * columns * worker).udiv(workers)
            beyond = rows - whole * per_chunk
            among = (rows + per_chunk.udiv(2)).udiv(per_chunk)
            last = (beyond + left - 1).udiv(f.max(left, 1))
            return f.select(beyond > 0, whole + last, among)

        tid = f["tid"].to(i64)
        return start(tid), start(tid + 1)

    def _lay_out_fours(self) -> None:
        """This worker's sums of rows for two turns, and tiles, where those of pairs would lie."""
        f, g = self.f, self.g
        self.quarter = self["k"].udiv(4)
        self.quarter_terms = self.block_of(self.quarter, _TERMS)
        size = self.quarter_terms * (2 * TURNS * g.rows * g.sums.bytes)
        self.inner = f.gep(self.row_sums, round_up(size))
        self.outer = f.gep(self.inner, INNER_TILES * g.tile_bytes)
        self.sections, self.state = f.alloca(SECTIONS * 8), f.alloca(STATE_BYTES)

    def _fours_of(self, x: Value, at: Value, first: Value, last: Value) -> None:
        """Four tiles of rows against fours of panels."""
        f = self.f
        for start in f.range(first, last, _KEPT):
            stop = f.min(start + _KEPT, last)
            for k in f.range(0, self.quarter, self.quarter_terms, guard=False):
                self._turns(f.gep(x, k, self.g.sums), at, start, stop, k)

    def _turns(self, x: Value, at: Value, start: Value, stop: Value, k: Value) -> None:
        """All turns over one block of k."""
        f, g = self.f, self.g
        terms = f.min(self.quarter_terms, self.quarter - k)
        sums = self["x_line"], self.quarter * g.sums.bytes, terms
        size = terms * (TURNS * g.rows * g.sums.bytes)
        is_last = (k + self.quarter_terms >= self.quarter).to(i64, signed=False)
        self._begin_sums(x, f.i64(0))
        f.call(self.sum_turn, f.i64(0), self.state, *sums, self.row_sums)
        for turn in f.range(0, TURNS):
            now = f.gep(self.row_sums, (turn & 1) * size)
            then = f.gep(self.row_sums, (1 - (turn & 1)) * size)
            self._begin_sums(x, f.select(turn < TURNS - 1, 0, terms * g.rows))
            for p in f.range(start, stop):
                self._point_at_weights(p, k)
                column = p * (4 * self.columns)
                tiles = f.gep(self.outer, p - start, (OUTER_TILES + RESULTS) * g.tile_bytes)
                f.call(
                    self.seven, f["args"], turn, now, self.quarter * g.row_bytes, self.sections,
                    self.inner, tiles, k, is_last, at + column, column, self.state, *sums, then,
                )  # fmt: skip
            f.call(self.sum_turn, turn + 1, self.state, *sums, then)

    def _begin_sums(self, x: Value, done: Value) -> None:
        """Of rows from x on, for another turn; `done` numbers of them are there already."""
        self.f.store(done, self.state)
        self.f.store(x, self.state, 8)

    def _point_at_weights(self, p: Value, k: Value) -> None:
        """At the sections of the weight that a four of panels reads: itself, outer, inner sums."""
        f = self.f
        quarters = p * 16, self.panels * 4 + p * 16, self.panels * 8 + p * 28
        for i, number in enumerate(quarters):
            section = f.gep(self["w"], number * self.quarter + k, self.g.row_bytes)
            f.store(section, self.sections, i * 8)
