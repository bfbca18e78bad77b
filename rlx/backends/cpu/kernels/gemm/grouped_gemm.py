"""Grouped GEMM for mixture of experts: each row of x times the weight of its expert.

Two steps. `Route` (one worker) sorts the rows by expert and cuts them into chunks; `GroupedGemm`
runs each chunk as a GEMM of gathered rows whose results are scattered back. They share a table: the
number of chunks, the chunks, then the sorted row numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rlx.backends.cpu.kernels.gemm.gemm import MC, Gemm, GemmEmitter
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Value, i32, i64
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

# Fields of a chunk, each an i32: its expert, its first row in sorted order, its number of rows, and
# the total cost of the chunks before it.
_EXPERT, _START, _COUNT, _BEFORE, _ENTRY = 0, 4, 8, 12, 16
_HEADER = 64
_START_COST = 2  # overhead of a chunk, in rows


def table_bytes(rows: int, experts: int) -> int:
    """Bytes for any routing of `rows` rows: a chunk has at least one row."""
    size = _HEADER + _ENTRY * (rows + 1) + 4 * rows + 4 * (experts + 1)
    return -(-size // 64) * 64


@dataclass(frozen=True)
class Route(KernelSpec):
    """args: expert, table, m, experts, status, number

    Run by one worker. A row whose expert is out of range leaves `number` in `status` and goes to
    expert 0.
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
        # Counting sort: starts[e] becomes the first row of expert e, then where its next row goes.
        for e in f.range(0, experts):
            at = f.gep(starts, e, 4)
            f.store(f.load(at, i32, 4) + f.load(at, i32), at, 4)
        for r in f.range(0, rows):
            at = f.gep(starts, self._expert(f, expert, r, experts), 4)
            place = f.load(at, i32)
            f.store(r.to(i32), f.gep(order, place, 4))
            f.store(place + 1, at)
        _write_chunks(f, table, starts, experts)

    def _expert(self, f: Function, expert: Value, r: Value, experts: Value) -> Value:
        raw = f.load(f.gep(expert, r, memory_type(self.index)), memory_type(self.index))
        e = raw.to(i64, signed=self.index.kind == "int")
        exists = e.ult(experts)
        status, number = f.arg(f["args"], 4), f.arg(f["args"], 5, i64)
        f.if_(~exists, lambda: f.store(number, status))
        return f.select(exists, e, 0)


def row_order(f: Function, table: Value, rows: Value) -> Value:
    """Address of the sorted row numbers (i32)."""
    return f.gep(f.gep(table, _HEADER), rows + 1, _ENTRY)


def _write_chunks(f: Function, table: Value, ends: Value, experts: Value) -> None:
    """Write the chunks of all experts; the rows of expert e end at ends[e]."""

    def expert(e: Value, chunks: Value, start: Value, before: Value) -> list[Value]:
        end = f.load(f.gep(ends, e, 4), i32)

        def chunk(_: Value, chunks: Value, start: Value, before: Value) -> list[Value]:
            count = f.min(end - start, MC)
            entry = f.gep(f.gep(table, _HEADER), chunks, _ENTRY)
            values = ((_EXPERT, e.to(i32)), (_START, start), (_COUNT, count), (_BEFORE, before))
            for at, value in values:
                f.store(value, entry, at)
            return [chunks + 1, start + count, before + count + _START_COST]

        return f.loop(start, end, MC, [chunks, start, before], chunk)

    zero = f.i32(0)
    chunks, _, before = f.loop(0, experts, 1, [f.i64(0), zero, zero], expert)
    f.store(before, f.gep(f.gep(table, _HEADER), chunks, _ENTRY), _BEFORE)
    f.store(chunks, table)


@dataclass(frozen=True)
class GroupedGemm(Gemm):
    """args: as `self.args` lists them; `table` is what `Route` left, `w_expert` the bytes from
    one expert's weight to the next."""

    @property
    def args(self) -> list[str]:
        return [*super().args, "table", "w_expert"]

    @property
    def reads_x_in_place(self) -> bool:
        """Rows of a chunk are gathered."""
        return False

    def emit(self, m: Module) -> None:
        GroupedGemmEmitter(self, m).emit()


class GroupedGemmEmitter(GemmEmitter):
    """A GEMM per chunk of routed rows."""

    def __init__(self, spec: GroupedGemm, m: Module) -> None:
        super().__init__(spec, m, routed=True)

    def emit(self) -> None:
        f = self.f
        panels = f.ceil_div(self["n"], self.columns)
        self.lay_out_scratch(f["tid"].to(i64) * self["worker_bytes"], f.min(self["m"], MC))
        for chunk in each_chunk(f, self["table"], self["m"], panels):
            self.route = chunk.route
            self.choose_kc(chunk.size)
            w = f.gep(self["w"], chunk.expert * self["w_expert"])
            self.row_block(self["x"], w, chunk.size, f.i64(0), chunk.first, chunk.last)


class Chunk(NamedTuple):
    """Rows of one expert, and this worker's panels [first, last) of its weight."""

    number: Value
    expert: Value
    start: Value  # first row in sorted order
    size: Value
    route: Value  # address of its row numbers
    first: Value
    last: Value


def each_chunk(f: Function, table: Value, rows: Value, panels: Value) -> Iterator[Chunk]:
    """A loop over the chunks. The work split balances their cost, in units of a panel."""
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
        first = _panels_before(f, lo - begin, cost, panels)
        last = _panels_before(f, hi - begin, cost, panels)
        yield Chunk(c, expert, start, count, f.gep(order, start, 4), first, last)


def _panels_before(f: Function, cost: Value, each: Value, panels: Value) -> Value:
    """How many panels of cost `each` begin before `cost`."""
    return f.min((f.max(cost, 0) + each - 1).udiv(each), panels)
