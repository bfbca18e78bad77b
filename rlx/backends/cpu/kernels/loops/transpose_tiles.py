"""Nests in which some tensors lie along a row axis and others along the lanes, as in a transpose.

Square tiles of both axes are read along the one, turned in registers, and used along the other, so
that every cache line is read and written as a whole.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.loops.instructions import Frame, Spot
from rlx.backends.cpu.kernels.loops.registers import from_memory, raw_type
from rlx.backends.cpu.kernels.loops.rows import RowEmitter
from rlx.backends.cpu.kernels.loops.vector_body import Sweep
from rlx.ir.dtype import c64
from rlx.llvm.builder import Function, Module, Value, vec
from rlx.loops.nest import ROW, Instruction, Load, Nest, Walk

BLOCK = 64  # rows, and elements of each, that a worker takes at a time
MOST = 16  # rows of a tile


class TileEmitter(RowEmitter):
    def __init__(self, m: Module, nest: Nest) -> None:
        super().__init__(m, nest)
        self.turned = {
            n: i.walk for n, i in enumerate(nest.code) if isinstance(i, Load) and _is_turned(i)
        }
        widest = max((w.dtype.bytes for w in self.turned.values()), default=8)
        self.size = min(MOST, m.target.vector_bits // 8 // widest)
        self.is_copy = self._is_copy()
        if not self.is_copy:
            area = self.size**2
            self.buffers |= {n: self.f.alloca(area * w.dtype.bytes) for n, w in self.turned.items()}

    def _is_copy(self) -> bool:
        """Whether nothing is computed: rows go from registers to the result."""
        [store, *others] = self.nest.stores
        alone = len(self.nest.code) == len(self.turned) == 1 and not others
        return alone and store.walk.steps.inner[-1] == 1

    def emit(self) -> None:
        f, body = self.f, self.body
        body.refuse_empty_tables()
        *others, last = self.nest.rows
        rows, size = body.number(last), body.number(self.nest.spaces[0][-1])
        down, along = f.ceil_div(rows, BLOCK), f.ceil_div(size, BLOCK)
        lo, hi = f.split(body.product(others) * down * along)
        for item in f.range(lo, hi):
            strip = item.udiv(along)
            start = (item - strip * along) * BLOCK
            row = strip.udiv(down)
            first = (strip - row * down) * BLOCK
            frame = body.at_row(row, others) if others else body.home()
            stop = f.min(start + BLOCK, size)
            self._block(frame, (first, f.min(first + BLOCK, rows)), (start, stop))

    def _block(self, frame: Frame, rows: tuple[Value, Value], part: tuple[Value, Value]) -> None:
        """Whole tiles, then what is beside and below them."""
        f, n = self.f, self.size
        (first, last), (start, stop) = rows, part
        below, beside = first + (last - first & -n), start + (stop - start & -n)
        for i in f.range(first, below, n):
            for j in f.range(start, beside, n):
                self._tile(frame, i, j)
        for i in f.range(first, last):
            at = f.select(i < below, beside, start)
            self.walk_row(self._row_frame(frame, i), (at, stop))

    def _row_frame(self, frame: Frame, index: Value) -> Frame:
        return self.body.move(frame, ROW, len(self.nest.rows) - 1, index)

    def _tile(self, frame: Frame, i: Value, j: Value) -> None:
        f, n = self.f, self.size
        for number, walk in self.turned.items():
            rows = self._turn(frame, walk, i, j)
            if self.is_copy:
                self._store(frame, i, j, rows)
                return
            for at, row in enumerate(rows):
                f.store(row, self.buffers[number], at * n * walk.dtype.bytes)
        [this] = self.stages.passes
        sweep = Sweep(self.body, self.stages, this, self.buffers, keeps=False)
        for k in f.range(0, n):
            row_frame = self._row_frame(frame, i + k)
            self.row = {}
            self.row_values(-1, row_frame)
            spot = Spot(row_frame, j, n, None, self.row)
            for number, walk in self.turned.items():
                line = f.gep(self.buffers[number], k * n, walk.dtype.bytes)
                raw = f.load(line, vec(n, raw_type(walk.dtype)))
                spot.values[number] = from_memory(f, raw, walk.dtype)
            sweep.element(spot, [])

    def _turn(self, frame: Frame, walk: Walk, i: Value, j: Value) -> list[Value]:
        """n rows of n elements, from memory that lies the other way."""
        f, n = self.f, self.size
        step = self.body.number(walk.steps.inner[-1])
        base = f.gep(frame.pointers[walk], i + j * step, walk.dtype.bytes)
        lines = [
            f.load(f.gep(base, step * k, walk.dtype.bytes), vec(n, raw_type(walk.dtype)))
            for k in range(n)
        ]
        return transposed(f, lines)

    def _store(self, frame: Frame, i: Value, j: Value, rows: list[Value]) -> None:
        f, walk = self.f, self.nest.stores[0].walk
        step = self.body.number(walk.steps.rows[-1])
        base = f.gep(frame.pointers[walk], i * step + j, walk.dtype.bytes)
        for k, row in enumerate(rows):
            f.store(row, f.gep(base, step * k, walk.dtype.bytes))


def _is_turned(i: Instruction) -> bool:
    """Whether a load reads along the last row axis."""
    if not isinstance(i, Load) or i.level == ROW or i.walk.dtype is c64 or i.walk.terms:
        return False
    steps = i.walk.steps
    return steps.rows[-1] == 1 and steps.inner[-1] not in (0, 1)


def transposed(f: Function, rows: list[Value]) -> list[Value]:
    """The columns of n vectors of n lanes: perfect shuffles, log2(n) times."""
    n = len(rows)
    done = 1
    while done < n:
        pairs = [(rows[k], rows[k + n // 2]) for k in range(n // 2)]
        rows = []
        for a, b in pairs:
            for half in (0, n // 2):
                rows.append(f.shuffle(a, b, [half + k // 2 + (k % 2) * n for k in range(n)]))
        done *= 2
    return rows
