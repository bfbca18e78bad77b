"""From sums to results: rows divided by their totals, and items joined that several workers had."""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen import math
from rlx.codegen.attention import AttentionKernel, Rows, or_zero, weight
from rlx.codegen.attention_schedule import Piece, Schedule
from rlx.codegen.emit import Function, Module, Value, i64, ptr, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.storage import load, memory_type, store
from rlx.support.records import dataclass


def sums_of(f: Function, kernel: AttentionKernel, worker: Value, number: Value | int) -> Value:
    """Sums `number` of a worker: 0 for items of its own, 1 for one that others began, 2 for one
    that others go on with."""
    base = f.gep(Rows(f, kernel.problem).args["scratch"], worker, kernel.worker_bytes(f.target))
    return f.gep(base, number, kernel.sums_bytes(f.target))


def sums_of_piece(f: Function, kernel: AttentionKernel, piece: Piece) -> Value:
    shared = f.select(piece.begun, f.i64(1), f.i64(2))
    number = f.select(piece.whole, f.i64(0), shared)
    return sums_of(f, kernel, f["tid"].to(i64), number)


def working_memory(f: Function, kernel: AttentionKernel) -> Value:
    return sums_of(f, kernel, f["tid"].to(i64), 3)


class _Item:
    """The rows of an item's results, in a function with `args`, `batch`, `head` and `row`."""

    def __init__(self, f: Function, kernel: AttentionKernel) -> None:
        self.f, self.kernel, self.problem = f, kernel, kernel.problem
        self.rows = Rows(f, kernel.problem)
        self.type = kernel.problem.sums
        self.row_bytes = kernel.value_columns(f.target) * self.type.bytes
        self.block = kernel.block_rows(f.target)
        # heads that are done together have one block each, which is full
        left = f.min(self.rows.count - f["row"], self.block)
        self.count = f.i64(self.block * kernel.together) if kernel.together > 1 else left

    def place(self, row: Value) -> tuple[Value, Value]:
        """(key head, row of that head) of a row of the item."""
        f = self.f
        skipped = row.udiv(self.block) if self.kernel.together > 1 else f.i64(0)
        return f["head"] + skipped, f["row"] + row - skipped * self.block

    def with_sink(self, total: Value, top: Value, row: Value) -> Value:
        """The total of a row's weights, and the weight of its head's sink where there is one."""
        dtype = self.problem.sinks
        if dtype is None:
            return total
        head, inside = self.place(row)
        number = head * self.problem.group + self.rows.place(inside)[1]
        at = self.f.gep(self.rows.args["sinks"], number, memory_type(dtype))
        sink = self.f.extract(load(self.f, at, dtype, 1, self.type), 0)
        return total + math.exp(sink - or_zero(top))  # a sink may lie above every score

    def total(self, sums: Value, row: Value) -> Value:
        f = self.f
        return f.gep(f.gep(sums, self.kernel.totals(f.target)), row, self.type)

    def maximum(self, sums: Value, row: Value) -> Value:
        f = self.f
        return f.gep(f.gep(sums, self.kernel.maxima(f.target)), row, self.type)

    def write(self, row: Value, column: Callable[[Value, int], Value]) -> None:
        """Write a row; `column` gives `lanes` numbers of it from a byte offset in the sums on."""
        f, dtype = self.f, self.problem.dtype("out")
        out = self.rows.address("out", f["batch"], *self.place(row))
        lanes = self.problem.chunk("out", f.target)
        for d in f.range(0, self.problem.head_dim, lanes):
            value = column(d * self.type.bytes, lanes)
            store(f, value, f.gep(out, d, memory_type(dtype)), dtype)


_PLACE = [("batch", i64), ("head", i64), ("row", i64)]


def emit_finish(m: Module, kernel: AttentionKernel) -> Function:
    """void finish(args, batch, head, row, sums): the results of an item that has one part."""
    f = m.function("finish", [("args", ptr), *_PLACE, ("sums", ptr)], internal=True)
    item = _Item(f, kernel)
    for r in f.range(0, item.count):
        total, top = (f.load(at(f["sums"], r), item.type) for at in (item.total, item.maximum))
        scale = inverse(item.with_sink(total, top, r))
        values = f.gep(f["sums"], r, item.row_bytes)

        def column(at: Value, lanes: int, values: Value = values, scale: Value = scale) -> Value:
            return f.load(f.gep(values, at), vec(lanes, scale.type)) * f.splat(scale, lanes)

        item.write(r, column)
    return f


def inverse(total: Value) -> Value:
    """1 / total; a row without any key has the total 0 and keeps its zeros."""
    f = total.fn
    return 1.0 / f.select(total.eq(0.0), 1.0, total)


@dataclass(frozen=True)
class Join(KernelSpec):
    """args: attention.ARGS. Joins the parts of items that lie across borders of workers.

    Every worker looks at every border, and takes its share of the rows of the item there.
    """

    kernel: AttentionKernel

    def emit(self, m: Module) -> None:
        join = _emit_join(m, self.kernel)
        f = m.kernel()
        schedule = Schedule(f, self.kernel)
        nth = f["nth"].to(i64)

        def look(worker: Value) -> None:
            group, block, base = schedule.find(schedule.border(worker))
            # an item is joined at the first border inside it
            inside = base < schedule.border(worker)
            first = inside & (schedule.border(worker - 1) <= base)
            f.if_(first, lambda: self._join(f, join, schedule, worker, (group, block, base)))

        for worker in f.range(1, nth):
            f.if_(schedule.border(worker) < schedule.total, lambda w=worker: look(w))  # type: ignore[misc]

    def _join(
        self,
        f: Function,
        join: Function,
        schedule: Schedule,
        worker: Value,
        item: tuple[Value, Value, Value],
    ) -> None:
        group, block, base = item
        end, nth = base + schedule.units(block), f["nth"].to(i64)
        [last] = f.while_(
            [worker + 1],
            lambda t: (t < nth) & (schedule.border(t) < end),
            lambda t: t + 1,
        )
        # items with few rows begin with different workers
        turn = f["tid"].to(i64) + worker * schedule.kernel.sums_rows(f.target)
        f.call(
            join,
            f["args"],
            *schedule.place(group),
            block * schedule.block,
            sums_of(f, self.kernel, worker - 1, 2),
            sums_of(f, self.kernel, worker, 1),
            last - worker + 1,
            turn.urem(nth),
            nth,
        )


def _emit_join(m: Module, kernel: AttentionKernel) -> Function:
    """void join(args, batch, head, row, first, others, count, start, step)

    Rows start, start + step, ... of an item. Part 0 of the sums is at `first`, part i > 0 at
    others + (i - 1) * the bytes of a worker.
    """
    parts = [("first", ptr), ("others", ptr), ("count", i64), ("start", i64), ("step", i64)]
    f = m.function("join", [("args", ptr), *_PLACE, *parts], internal=True)
    item = _Item(f, kernel)
    for r in f.range(f["start"], item.count, f["step"]):
        scale = inverse(_weigh_parts(f, item, r))

        def column(at: Value, lanes: int, r: Value = r, scale: Value = scale) -> Value:
            def add(i: Value, sum_: Value) -> Value:
                sums = _part(f, kernel, i)
                share = f.broadcast_load(item.maximum(sums, r), item.type, lanes)
                values = f.gep(f.gep(sums, r, item.row_bytes), at)
                return f.fma(f.load(values, sum_.type), share, sum_)

            zero = f.const(0.0, vec(lanes, item.type))
            return f.loop(0, f["count"], 1, [zero], add)[0] * f.splat(scale, lanes)

        item.write(r, column)
    return f


def _part(f: Function, kernel: AttentionKernel, i: Value) -> Value:
    other = f.gep(f["others"], i - 1, kernel.worker_bytes(f.target))
    return f.select(i.eq(0), f["first"], other)


def _weigh_parts(f: Function, item: _Item, row: Value) -> Value:
    """Replace each part's maximum of a row by its factor; gives the total over all parts."""

    def larger(i: Value, found: Value) -> Value:
        return f.max(found, f.load(item.maximum(_part(f, item.kernel, i), row), item.type))

    def add(i: Value, total: Value) -> Value:
        sums = _part(f, item.kernel, i)
        place = item.maximum(sums, row)
        factor = weight(f.load(place, item.type) - top)
        f.store(factor, place)
        return f.fma(factor, f.load(item.total(sums, row), item.type), total)

    lowest = f.const(float("-inf"), item.type)
    top = or_zero(f.loop(0, f["count"], 1, [lowest], larger)[0])
    total = f.loop(0, f["count"], 1, [f.const(0.0, item.type)], add)[0]
    return item.with_sink(total, top, row)
