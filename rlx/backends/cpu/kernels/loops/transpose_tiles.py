"""Transposing nests: some accesses are contiguous along a row axis, others along the vector axis.

Square tiles are loaded along the one axis, transposed in registers and used along the other, so
that every cache line is read and written once.
"""

from __future__ import annotations

from rlx.backends.cpu.kernels.loops.rows import RowEmitter
from rlx.backends.cpu.kernels.loops.vector_body import VectorBody
from rlx.llvm.builder import Function, Module, Value, vec
from rlx.llvm.nest.instructions import IterPoint, VectorPoint
from rlx.llvm.nest.registers import from_memory, raw_type
from rlx.loops.nest import ROW, Access, Instruction, Load, Nest

BLOCK = 64  # rows, and elements of each row, of a work item
MAX_TILE = 16  # rows of a tile


class TransposeEmitter(RowEmitter):
    def __init__(self, m: Module, nest: Nest) -> None:
        super().__init__(m, nest)
        self.crossing = {
            n: i.access for n, i in enumerate(nest.code) if isinstance(i, Load) and _is_crossing(i)
        }
        widest = max((w.dtype.bytes for w in self.crossing.values()), default=8)
        self.size = min(MAX_TILE, m.target.vector_bits // 8 // widest)
        self.is_copy = self._is_copy()
        if not self.is_copy:
            area = self.size**2
            self.buffers |= {
                n: self.f.alloca(area * w.dtype.bytes) for n, w in self.crossing.items()
            }

    def _is_copy(self) -> bool:
        """Whether the nest is a plain transpose: tiles go from registers to the result."""
        [store, *others] = self.nest.stores
        alone = len(self.nest.code) == len(self.crossing) == 1 and not others
        return alone and store.access.strides.inner[-1] == 1

    def emit(self) -> None:
        f, body = self.f, self.body
        body.reject_empty_gathers()
        *others, last = self.nest.rows
        rows, size = body.number(last), body.number(self.nest.spaces[0][-1])
        down, along = f.ceil_div(rows, BLOCK), f.ceil_div(size, BLOCK)
        lo, hi = f.split(body.product(others) * down * along)
        for item in f.range(lo, hi):
            band = item.udiv(along)
            start = (item - band * along) * BLOCK
            row = band.udiv(down)
            first = (band - row * down) * BLOCK
            point = body.at_row(row, others) if others else body.origin()
            stop = f.min(start + BLOCK, size)
            self._block(point, (first, f.min(first + BLOCK, rows)), (start, stop))

    def _block(
        self, point: IterPoint, rows: tuple[Value, Value], bounds: tuple[Value, Value]
    ) -> None:
        """Full tiles, then the remainders to the right and below."""
        f, n = self.f, self.size
        (first, last), (start, stop) = rows, bounds
        below, beside = first + (last - first & -n), start + (stop - start & -n)
        for i in f.range(first, below, n):
            for j in f.range(start, beside, n):
                self._tile(point, i, j)
        for i in f.range(first, last):
            at = f.select(i < below, beside, start)
            self.emit_row(self._row_point(point, i), (at, stop))

    def _row_point(self, point: IterPoint, index: Value) -> IterPoint:
        return self.body.advance(point, ROW, len(self.nest.rows) - 1, index)

    def _tile(self, point: IterPoint, i: Value, j: Value) -> None:
        f, n = self.f, self.size
        for number, access in self.crossing.items():
            rows = self._load_transposed(point, access, i, j)
            if self.is_copy:
                self._store(point, i, j, rows)
                return
            for at, row in enumerate(rows):
                f.store(row, self.buffers[number], at * n * access.dtype.bytes)
        [pass_] = self.stages.passes
        vector_body = VectorBody(self.body, self.stages, pass_, self.buffers, spills=False)
        for k in f.range(0, n):
            row_point = self._row_point(point, i + k)
            self.row = {}
            self.row_values(-1, row_point)
            vpoint = VectorPoint(row_point, j, n, None, self.row)
            for number, access in self.crossing.items():
                row_address = f.gep(self.buffers[number], k * n, access.dtype.bytes)
                raw = f.load(row_address, vec(n, raw_type(access.dtype)))
                vpoint.values[number] = from_memory(f, raw, access.dtype)
            vector_body.emit(vpoint, [])

    def _load_transposed(self, point: IterPoint, access: Access, i: Value, j: Value) -> list[Value]:
        """Load n columns of n elements, as n rows."""
        f, n = self.f, self.size
        step = self.body.number(access.strides.inner[-1])
        base = f.gep(point.pointers[access], i + j * step, access.dtype.bytes)
        vectors = [
            f.load(f.gep(base, step * k, access.dtype.bytes), vec(n, raw_type(access.dtype)))
            for k in range(n)
        ]
        return transposed(f, vectors)

    def _store(self, point: IterPoint, i: Value, j: Value, rows: list[Value]) -> None:
        f, access = self.f, self.nest.stores[0].access
        step = self.body.number(access.strides.rows[-1])
        base = f.gep(point.pointers[access], i * step + j, access.dtype.bytes)
        for k, row in enumerate(rows):
            f.store(row, f.gep(base, step * k, access.dtype.bytes))


def _is_crossing(i: Instruction) -> bool:
    """Whether a load is contiguous along the last row axis."""
    if not isinstance(i, Load) or i.level == ROW or i.access.dtype.is_complex or i.access.gathered:
        return False
    steps = i.access.strides
    return steps.rows[-1] == 1 and steps.inner[-1] not in (0, 1)


def transposed(f: Function, rows: list[Value]) -> list[Value]:
    """The transpose of n vectors of n lanes, by n log2(n) shuffles.

    First inside the 128-bit parts of vectors, then of whole parts: such shuffles are single
    instructions.
    """
    n = len(rows)
    inside = min(n, max(1, 128 // rows[0].type.scalar.bits))
    groups = [_transposed_inside(f, rows[i : i + inside], n) for i in range(0, n, inside)]
    columns = [_transposed_parts(f, list(parts), inside) for parts in zip(*groups, strict=True)]
    return [column[i] for i in range(n // inside) for column in columns]


def _transposed_inside(f: Function, rows: list[Value], lanes: int) -> list[Value]:
    """The transpose of each square of `len(rows)` lanes, by perfect shuffles."""
    n, done = len(rows), 1
    starts = range(0, lanes, n)
    while done < n:
        pairs = [(rows[k], rows[k + n // 2]) for k in range(n // 2)]
        rows = []
        for a, b in pairs:
            for half in (0, n // 2):
                picked = [half + k // 2 + (k % 2) * lanes for k in range(n)]
                rows.append(f.shuffle(a, b, [start + i for start in starts for i in picked]))
        done *= 2
    return rows


def _transposed_parts(f: Function, rows: list[Value], size: int) -> list[Value]:
    """The transpose of 1, 2 or 4 vectors of as many parts, each of `size` lanes."""

    def join(a: Value, b: Value, *parts: int) -> Value:
        return f.shuffle(a, b, [p * size + i for p in parts for i in range(size)])

    if len(rows) == 1:
        return rows
    if len(rows) == 2:
        a, b = rows
        return [join(a, b, i, 2 + i) for i in range(2)]
    # Halves of vectors side by side, then every other part of both.
    a, b, c, d = rows
    low = join(a, b, 0, 1, 4, 5), join(c, d, 0, 1, 4, 5)
    high = join(a, b, 2, 3, 6, 7), join(c, d, 2, 3, 6, 7)
    return [join(x, y, i, 2 + i, 4 + i, 6 + i) for x, y in (low, high) for i in range(2)]
