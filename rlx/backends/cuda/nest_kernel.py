"""The GPU kernel of a loop nest: a thread per element, a thread, a warp or a block per row of a
reduction.

The instructions of the nest are emitted by the same code as on the CPU, with one lane. Long rows
are shared by the threads of a warp, few ones by a block; they combine their accumulators at the end
of each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from rlx.backends.cuda.builder import THREADS, WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import GpuKernel
from rlx.llvm.builder import Value, i64
from rlx.llvm.nest.instructions import IterPoint, NestBody, VectorPoint
from rlx.llvm.nest.reductions import Accumulator, State
from rlx.llvm.nest.registers import Element, register_type
from rlx.loops.nest import Apply, Nest, Reduce, Store
from rlx.loops.stages import Pass, Stages
from rlx.support.records import dataclass

_LONG = 2 * WARP  # elements of a row that keep a warp busy


@dataclass(frozen=True)
class NestKernel(GpuKernel):
    """args: those of the nest. `columns`: accesses are contiguous along the last row axis. `few`:
    there are so few rows that a block shares each."""

    nest: Nest
    columns: bool = False
    few: bool = False

    def emit(self, m: KernelModule) -> None:
        if self.nest.reduces:
            RowEmitter(m, self).emit()
        else:
            emit_elements(m, self.nest)

    @property
    def shares_rows(self) -> bool:
        """Whether a warp shares each row: rows are long, and contiguous along the row."""
        if self.columns or not self.nest.reduces:
            return False
        sizes = [space[-1] for space in self.nest.spaces]
        return any(not isinstance(s, int) or s >= _LONG for s in sizes)

    @property
    def threads_per_item(self) -> int:
        """How many threads have work for each element, or for each row of a reduction."""
        return (THREADS if self.few else WARP) if self.shares_rows else 1

    @property
    def shared(self) -> int:
        """Accumulators of the warps of a block, 16 bytes for each."""
        if not self.few or not self.shares_rows:
            return 0
        count = sum(isinstance(i, Reduce) for i in self.nest.code)
        return 16 * THREADS // WARP * count

    @cached_property
    def _hash(self) -> int:
        return hash((self.nest, self.columns, self.few))

    def __hash__(self) -> int:
        return self._hash

    @property
    def label(self) -> str:
        return self.nest.label


def emit_elements(m: KernelModule, nest: Nest) -> None:
    """A nest without reductions: neighbouring threads have neighbouring elements."""
    f = m.begin_kernel()
    body = NestBody(f, nest, columns=False)
    body.reject_empty_gathers()
    width = body.product(nest.spaces[0])
    for element in f.elements(body.product(nest.rows) * width):
        row, point = element.udiv(width) if nest.rows else f.i64(0), body.origin()
        if nest.rows:
            point = body.at_row(row, nest.rows)
        vpoint = VectorPoint(point, element - row * width, 1, None, {})
        for store in nest.stores:
            body.store(store.access, body.value(store.operand, vpoint), vpoint)


class RowEmitter:
    """A nest with reductions: a thread, or a warp, does all passes over its rows in turn."""

    def __init__(self, m: KernelModule, kernel: NestKernel) -> None:
        nest, columns = kernel.nest, kernel.columns
        self.f, self.nest, self.columns = m.begin_kernel(), nest, columns
        self.team = self.f.warp if kernel.shares_rows else 1
        self.lane = self.f.lane() if self.team > 1 else self.f.i64(0)
        self.by_block = kernel.few and isinstance(self.f, BlockFunction) and self.team > 1
        if self.by_block:
            assert isinstance(self.f, BlockFunction)
            self.team, self.lane = THREADS, self.f.thread().to(i64)
        self.body = NestBody(self.f, nest, columns)
        self.stages = Stages(nest, buffers=False)  # values are rematerialised, or kept in a result
        self.row: dict[int, Element] = {}

    def emit(self) -> None:
        body, rows = self.body, self.nest.rows
        body.reject_empty_gathers()
        for row in self.f.elements(body.product(rows), self.team):
            outer, column = row, self.f.i64(0)
            if self.columns:  # the last row axis is the one that the nest calls its vector axis
                outer = row.udiv(body.number(rows[-1]))
                column = row - outer * body.number(rows[-1])
            sizes = rows[:-1] if self.columns else rows
            self._emit_row(body.at_row(outer, sizes) if sizes else body.origin(), column)

    def _emit_row(self, point: IterPoint, column: Value) -> None:
        self.row = {}
        for stage in range(-1, self.stages.last + 1):
            for pass_ in self.stages.passes:
                if pass_.stage == stage:
                    self._emit_pass(pass_, point, column)
            vpoint = VectorPoint(point, column, 1, None, self.row)
            for number in self.stages.row_code(stage):
                self.body.value(number, vpoint)
            for store in self.stages.row_stores(stage):
                self._store_row(store, vpoint)

    def _store_row(self, store: Store, vpoint: VectorPoint) -> None:
        """A value of the row is stored once."""

        def write() -> None:
            self.body.store(store.access, self.row[store.operand], vpoint)

        if self.team > 1:
            self.f.if_(self.lane.eq(0), write)
        else:
            write()

    def _emit_pass(self, pass_: Pass, point: IterPoint, column: Value) -> None:
        accumulators = [self._accumulator(n) for n in pass_.reductions]
        states = [a.start(1) for a in accumulators]
        finals = _Loops(self, pass_, accumulators, column).run(point, states)
        place = 0
        for number, a, state in zip(pass_.reductions, accumulators, finals, strict=True):
            distance = min(self.team, self.f.warp) // 2
            while distance:  # a butterfly: every thread of the warp gets the whole
                state = a.combine(state, [self.f.exchange(v, distance) for v in state])
                distance //= 2
            if self.by_block:
                state = self._combine_block(a, state, place)
                place += 16 * THREADS // WARP
            self.row[number] = a.result(state)

    def _combine_block(self, a: Accumulator, state: State, place: int) -> State:
        """Combine the accumulators of all warps of the block, in order."""
        f = self.f
        assert isinstance(f, BlockFunction)
        own = (f.thread() >> 5) * 16 + place
        for i, value in enumerate(state):
            f.store_shared(value, own, 8 * i)
        f.barrier()

        def part(warp: int) -> list[Value]:
            where = f.i32(place + 16 * warp)
            return [f.load_shared(where, v.type, 8 * i) for i, v in enumerate(state)]

        whole: State = part(0)
        for warp in range(1, THREADS // WARP):
            whole = a.combine(whole, part(warp))
        f.barrier()
        return whole

    def _accumulator(self, number: int) -> Accumulator:
        """Sums of f32 are kept in f64, since few threads add up a row; sums of products are long
        in matrix products only, where the fused multiply-add counts."""
        found = self.nest.code[number]
        assert isinstance(found, Reduce)
        wide = self.factors(found) is None
        return Accumulator(self.f, found.kind, self.nest.code[found.operand].dtype, wide)

    def factors(self, reduction: Reduce) -> tuple[int, int] | None:
        """The factors of a sum of float products, which can be fused multiply-adds."""
        product = self.nest.code[reduction.operand]
        if reduction.kind != "sum" or not isinstance(product, Apply):
            return None
        types = {self.nest.code[a].dtype for a in product.args} | {product.dtype}
        if product.record.name not in ("mul", "square") or len(types) > 1:
            return None
        if not product.dtype.is_float or product.dtype.bits == 8:
            return None
        return product.args[0], product.args[-1]


class _Loops:
    """The loops of one pass over a row."""

    def __init__(
        self, row: RowEmitter, pass_: Pass, accumulators: Sequence[Accumulator], column: Value
    ) -> None:
        self.row, self.pass_, self.accumulators, self.column = row, pass_, accumulators, column
        self.f, self.body, self.sizes = row.f, row.body, row.nest.spaces[pass_.space]

    def run(self, point: IterPoint, states: list[State], position: int = 0) -> list[State]:
        """All elements from axis `position` of the space on; gives the new states."""
        if position == len(self.sizes):
            return self._element(VectorPoint(point, self.column, 1, None, self.row.row), states)
        is_last = position == len(self.sizes) - 1

        def body(index: Value, *carried: Value) -> list[Value]:
            rest = iter(carried)
            now = [[next(rest) for _ in state] for state in states]
            if is_last and not self.row.columns:
                new = self._element(VectorPoint(point, index, 1, None, self.row.row), now)
            else:
                inner = self.body.advance(point, self.pass_.space, position, index)
                new = self.run(inner, now, position + 1)
            return [v for state in new for v in state]

        flat = [v for state in states for v in state]
        size = self.body.number(self.sizes[position])
        first, step = (self.row.lane, self.row.team) if is_last else (self.f.i64(0), 1)
        finals = iter(self.f.loop(first, size, step, flat, body))
        return [[next(finals) for _ in state] for state in states]

    def _element(self, vpoint: VectorPoint, states: Sequence[State]) -> list[State]:
        body, spills = self.body, self.row.stages.spills
        vpoint.row = dict(vpoint.row)  # what is computed inside the loop is not known after it
        for number in self.pass_.reloaded:
            access = spills[number].access
            assert access is not None
            vpoint.values[number] = body.load(access, vpoint)
        pairs = zip(self.pass_.reductions, self.accumulators, states, strict=True)
        new = [self._accumulate(n, a, state, vpoint) for n, a, state in pairs]
        for store in self.pass_.stores:
            body.store(store.access, body.value(store.operand, vpoint), vpoint)
        for number in self.pass_.spilled:
            access = spills[number].access
            assert access is not None
            body.store(access, body.value(number, vpoint), vpoint)
        return new

    def _accumulate(self, number: int, a: Accumulator, state: State, vpoint: VectorPoint) -> State:
        reduction = self.row.nest.code[number]
        assert isinstance(reduction, Reduce)
        factors = self.row.factors(reduction)
        if factors is not None and state[0].type is register_type(a.dtype):
            x, y = (self.body.value(n, vpoint) for n in factors)
            assert isinstance(x, Value) and isinstance(y, Value)
            return [self.f.fma(x, y, state[0])]
        x = self.body.value(reduction.operand, vpoint)
        position: Element | None = None
        if reduction.position is not None:
            position = self.body.value(reduction.position, vpoint)
        assert position is None or isinstance(position, Value)
        return a.update(state, x, position, None)
