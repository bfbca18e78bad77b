"""Rows routed to experts: each row of x times the weight of its expert.

Two steps. `Route` (one worker) sorts the rows by expert and cuts them into chunks; `GroupedMatmul`
runs every chunk as a product of gathered rows, whose results are scattered to where they belong.
Both know the table between them: a count of chunks, then the chunks, then the sorted row numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rlx.codegen.emit import Function, Module, Value, i32, i64
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.matmul import CHUNK, Matmul, Product
from rlx.codegen.storage import memory_type
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

# A chunk: its expert, where its rows begin in the sorted order, how many there are, and the cost of
# the chunks before it; each an i32.
_EXPERT, _START, _COUNT, _BEFORE, _ENTRY = 0, 4, 8, 12, 16
_HEADER = 64
_START_COST = 2  # of a chunk, in rows


def table_bytes(rows: int, experts: int) -> int:
    """Room for any routing of `rows` rows: a chunk has a row at least."""
    size = _HEADER + _ENTRY * (rows + 1) + 4 * rows + 4 * (experts + 1)
    return -(-size // 64) * 64


@dataclass(frozen=True)
class Route(KernelSpec):
    """args: expert, table, m, experts, status, number

    Run by one worker. A row whose expert does not exist leaves `number` in `status` and is given to
    the first expert.
    """

    index: DType

    def emit(self, m: Module) -> None:
        f = m.kernel()
        expert, table = f.arg(f["args"], 0), f.arg(f["args"], 1)
        rows, experts = f.arg(f["args"], 2, i64), f.arg(f["args"], 3, i64)
        order = row_order(f, table, rows)
        starts = f.gep(order, rows, 4)
        for e in f.range(0, experts + 1):
            f.store(f.i32(0), f.gep(starts, e, 4))
        for r in f.range(0, rows):
            at = f.gep(starts, self._expert(f, expert, r, experts), 4)
            f.store(f.load(at, i32, 4) + 1, at, 4)
        # starts[e] becomes where expert e begins, and then where its next row goes.
        for e in f.range(0, experts):
            at = f.gep(starts, e, 4)
            f.store(f.load(at, i32, 4) + f.load(at, i32), at, 4)
        for r in f.range(0, rows):
            at = f.gep(starts, self._expert(f, expert, r, experts), 4)
            place = f.load(at, i32)
            f.store(r.to(i32), f.gep(order, place, 4))
            f.store(place + 1, at)
        _cut(f, table, starts, experts)

    def _expert(self, f: Function, expert: Value, r: Value, experts: Value) -> Value:
        raw = f.load(f.gep(expert, r, memory_type(self.index)), memory_type(self.index))
        e = raw.to(i64, signed=self.index.kind == "int")
        exists = e.ult(experts)
        status, number = f.arg(f["args"], 4), f.arg(f["args"], 5, i64)
        f.if_(~exists, lambda: f.store(number, status))
        return f.select(exists, e, 0)


def row_order(f: Function, table: Value, rows: Value) -> Value:
    """Where the sorted row numbers (i32) lie."""
    return f.gep(f.gep(table, _HEADER), rows + 1, _ENTRY)


def _cut(f: Function, table: Value, ends: Value, experts: Value) -> None:
    """Write the chunks of all experts; the rows of expert e end at ends[e]."""

    def expert(e: Value, chunks: Value, start: Value, before: Value) -> list[Value]:
        end = f.load(f.gep(ends, e, 4), i32)

        def chunk(_: Value, chunks: Value, start: Value, before: Value) -> list[Value]:
            count = f.min(end - start, CHUNK)
            entry = f.gep(f.gep(table, _HEADER), chunks, _ENTRY)
            values = ((_EXPERT, e.to(i32)), (_START, start), (_COUNT, count), (_BEFORE, before))
            for at, value in values:
                f.store(value, entry, at)
            return [chunks + 1, start + count, before + count + _START_COST]

        return f.loop(start, end, CHUNK, [chunks, start, before], chunk)

    zero = f.i32(0)
    chunks, _, before = f.loop(0, experts, 1, [f.i64(0), zero, zero], expert)
    f.store(before, f.gep(f.gep(table, _HEADER), chunks, _ENTRY), _BEFORE)
    f.store(chunks, table)


@dataclass(frozen=True)
class GroupedMatmul(Matmul):
    """args: as `self.args` lists them; `table` is what `Route` left, `w_expert` the bytes from
    one expert's weight to the next."""

    @property
    def args(self) -> list[str]:
        return [*super().args, "table", "w_expert"]

    @property
    def direct(self) -> bool:
        """Rows that are read together do not lie together."""
        return False

    def emit(self, m: Module) -> None:
        GroupedProduct(self, m).emit()


class GroupedProduct(Product):
    """A product per chunk of routed rows."""

    def __init__(self, spec: GroupedMatmul, m: Module) -> None:
        super().__init__(spec, m, routed=True)

    def emit(self) -> None:
        f = self.f
        panels = f.ceil_div(self["n"], self.columns)
        self.lay_out_scratch(f["tid"].to(i64) * self["step"], f.min(self["m"], CHUNK))
        for chunk in each_chunk(f, self["table"], self["m"], panels):
            self.route = chunk.route
            self.cut_terms(chunk.size)
            w = f.gep(self["w"], chunk.expert * self["w_expert"])
            self.chunk(self["x"], w, chunk.size, f.i64(0), chunk.first, chunk.last)


class Chunk(NamedTuple):
    """Rows of one expert, and the panels of it that are this worker's."""

    number: Value
    expert: Value
    start: Value  # in the sorted order
    size: Value
    route: Value  # address of the numbers of its rows
    first: Value
    last: Value


def each_chunk(f: Function, table: Value, rows: Value, panels: Value) -> Iterator[Chunk]:
    """A loop over the chunks. Workers share their cost evenly, at the grain of a panel."""
    chunks, entries = f.load(table, i64), f.gep(table, _HEADER)
    order = row_order(f, table, rows)
    total = f.load(f.gep(entries, chunks, _ENTRY), i32, _BEFORE).to(i64) * panels
    lo, hi = f.split(total)
    for c in f.range(0, chunks):
        entry = f.gep(entries, c, _ENTRY)
        expert, start, count, before = (
            f.load(entry, i32, at).to(i64) for at in (_EXPERT, _START, _COUNT, _BEFORE)
        )
        begin, cost = before * panels, count + _START_COST
        first = _share(f, lo - begin, cost, panels)
        last = _share(f, hi - begin, cost, panels)
        yield Chunk(c, expert, start, count, f.gep(order, start, 4), first, last)


def _share(f: Function, cost: Value, each: Value, panels: Value) -> Value:
    """How many whole panels of `each` cost begin before `cost`."""
    return f.min((f.max(cost, 0) + each - 1).udiv(each), panels)
