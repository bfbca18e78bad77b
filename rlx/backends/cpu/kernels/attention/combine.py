"""From partial results to outputs: rows divided by their running sum, split-KV parts combined."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.kernels.attention.problem import (
    AttentionKernel,
    Rows,
    finite_max,
    softmax_exp,
)
from rlx.backends.cpu.kernels.attention.work_split import KVSpan, WorkSplit
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.llvm import math
from rlx.llvm.builder import Function, Module, Value, i64, ptr, vec
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass


def partial_of(f: Function, kernel: AttentionKernel, worker: Value, number: Value | int) -> Value:
    """Partial result `number` of a worker: 0 for items of its own, 1 for one that an earlier worker
    began, 2 for one that a later worker continues."""
    base = f.gep(Rows(f, kernel.problem).args["scratch"], worker, kernel.worker_bytes(f.target))
    return f.gep(base, number, kernel.partial_bytes(f.target))


def discard(*_: object) -> None:
    """Drops the value of a call, for the body of an `if_`."""


def partial_of_span(f: Function, kernel: AttentionKernel, span: KVSpan) -> Value:
    shared = f.select(span.continues, f.i64(1), f.i64(2))
    number = f.select(span.whole, f.i64(0), shared)
    return partial_of(f, kernel, f["tid"].to(i64), number)


def workspace_of(f: Function, kernel: AttentionKernel) -> Value:
    return partial_of(f, kernel, f["tid"].to(i64), 3)


class _Item:
    """The rows of an item's results, in a function with `args`, `batch`, `head` and `row`."""

    def __init__(self, f: Function, kernel: AttentionKernel) -> None:
        self.f, self.kernel, self.problem = f, kernel, kernel.problem
        self.rows = Rows(f, kernel.problem)
        self.type = kernel.problem.acc
        self.row_bytes = kernel.value_columns(f.target) * self.type.bytes
        self.block = kernel.block_rows(f.target)
        # an item of several heads has one full block of each
        left = f.min(self.rows.count - f["row"], self.block)
        self.count = (
            f.i64(self.block * kernel.heads_per_item) if kernel.heads_per_item > 1 else left
        )

    def place(self, row: Value) -> tuple[Value, Value]:
        """(KV head, row of that head) of a row of the item."""
        f = self.f
        skipped = row.udiv(self.block) if self.kernel.heads_per_item > 1 else f.i64(0)
        return f["head"] + skipped, f["row"] + row - skipped * self.block

    def with_sink(self, total: Value, row_max: Value, row: Value) -> Value:
        """A row's running sum plus the exponential of its head's attention sink, if any."""
        dtype = self.problem.sinks
        if dtype is None:
            return total
        head, inside = self.place(row)
        number = head * self.problem.gqa_group + self.rows.place(inside)[1]
        at = self.f.gep(self.rows.args["sinks"], number, memory_type(dtype))
        sink = self.f.extract(load(self.f, at, dtype, 1, self.type), 0)
        return total + math.exp(sink - finite_max(row_max))  # a sink may exceed every score

    def sum_at(self, partial: Value, row: Value) -> Value:
        f = self.f
        return f.gep(f.gep(partial, self.kernel.sum_offset(f.target)), row, self.type)

    def max_at(self, partial: Value, row: Value) -> Value:
        f = self.f
        return f.gep(f.gep(partial, self.kernel.max_offset(f.target)), row, self.type)

    def write(self, row: Value, columns: Callable[[Value, int], Value]) -> None:
        """Write a row; columns(offset, lanes) gives its values from a byte offset on."""
        f, dtype = self.f, self.problem.dtype("out")
        out = self.rows.address("out", f["batch"], *self.place(row))
        lanes = self.problem.vector_width("out", f.target)
        for d in f.range(0, self.problem.head_dim, lanes):
            value = columns(d * self.type.bytes, lanes)
            store(f, value, f.gep(out, d, memory_type(dtype)), dtype)


_ITEM_PARAMS = [("batch", i64), ("head", i64), ("row", i64)]


def emit_normalize(m: Module, kernel: AttentionKernel) -> Function:
    """void normalize(args, batch, head, row, partial): the output of an item that is not split."""
    f = m.function("normalize", [("args", ptr), *_ITEM_PARAMS, ("partial", ptr)], internal=True)
    item = _Item(f, kernel)
    for r in f.range(0, item.count):
        total, row_max = (
            f.load(at(f["partial"], r), item.type) for at in (item.sum_at, item.max_at)
        )
        scale = safe_inverse(item.with_sink(total, row_max, r))
        values = f.gep(f["partial"], r, item.row_bytes)

        def columns(at: Value, lanes: int, values: Value = values, scale: Value = scale) -> Value:
            return f.load(f.gep(values, at), vec(lanes, scale.type)) * f.splat(scale, lanes)

        item.write(r, columns)
    return f


def safe_inverse(total: Value) -> Value:
    """1 / total; a row without any key has the sum 0 and keeps its zeros."""
    f = total.fn
    return 1.0 / f.select(total.eq(0.0), 1.0, total)


@dataclass(frozen=True)
class CombineSplitKV(KernelSpec):
    """args: problem.ARGS. Combines the partial results of items that were split between workers.

    Every worker visits every boundary and combines some rows of the item there.
    """

    kernel: AttentionKernel

    @property
    def label(self) -> str:
        return "combine_split_kv"

    def emit(self, m: Module) -> None:
        combine = _emit_combine(m, self.kernel)
        f = m.kernel()
        split = WorkSplit(f, self.kernel)
        nth = f["nth"].to(i64)

        def inspect(worker: Value) -> None:
            group, block, base = split.find(split.boundary(worker))
            # an item is combined at the first boundary inside it
            inside = base < split.boundary(worker)
            first = inside & (split.boundary(worker - 1) <= base)
            f.if_(first, lambda: self._combine(f, combine, split, worker, (group, block, base)))

        for worker in f.range(1, nth):
            f.if_(split.boundary(worker) < split.total, lambda w=worker: inspect(w))  # type: ignore[misc]

    def _combine(
        self,
        f: Function,
        combine: Function,
        split: WorkSplit,
        worker: Value,
        item: tuple[Value, Value, Value],
    ) -> None:
        group, block, base = item
        end, nth = base + split.units(block), f["nth"].to(i64)
        [last] = f.while_(
            [worker + 1],
            lambda t: (t < nth) & (split.boundary(t) < end),
            lambda t: t + 1,
        )
        # small items start with different workers
        first_row = f["tid"].to(i64) + worker * split.kernel.partial_rows(f.target)
        f.call(
            combine,
            f["args"],
            *split.place(group),
            block * split.block,
            partial_of(f, self.kernel, worker - 1, 2),
            partial_of(f, self.kernel, worker, 1),
            last - worker + 1,
            first_row.urem(nth),
            nth,
        )


def _emit_combine(m: Module, kernel: AttentionKernel) -> Function:
    """void combine(args, batch, head, row, first, others, count, start, step)

    Rows start, start + step, ... of an item. Partial result 0 is at `first`, i > 0 at
    others + (i - 1) * the bytes of a worker.
    """
    parts = [("first", ptr), ("others", ptr), ("count", i64), ("start", i64), ("step", i64)]
    f = m.function("combine", [("args", ptr), *_ITEM_PARAMS, *parts], internal=True)
    item = _Item(f, kernel)
    for r in f.range(f["start"], item.count, f["step"]):
        scale = safe_inverse(_weigh_partials(f, item, r))

        def columns(at: Value, lanes: int, r: Value = r, scale: Value = scale) -> Value:
            def add(i: Value, sum_: Value) -> Value:
                partial = _partial(f, kernel, i)
                factor = f.broadcast_load(item.max_at(partial, r), item.type, lanes)
                values = f.gep(f.gep(partial, r, item.row_bytes), at)
                return f.fma(f.load(values, sum_.type), factor, sum_)

            zero = f.const(0.0, vec(lanes, item.type))
            return f.loop(0, f["count"], 1, [zero], add)[0] * f.splat(scale, lanes)

        item.write(r, columns)
    return f


def _partial(f: Function, kernel: AttentionKernel, i: Value) -> Value:
    other = f.gep(f["others"], i - 1, kernel.worker_bytes(f.target))
    return f.select(i.eq(0), f["first"], other)


def _weigh_partials(f: Function, item: _Item, row: Value) -> Value:
    """Replace each partial's running max of a row by its factor; returns the combined sum."""

    def larger(i: Value, found: Value) -> Value:
        return f.max(found, f.load(item.max_at(_partial(f, item.kernel, i), row), item.type))

    def add(i: Value, total: Value) -> Value:
        partial = _partial(f, item.kernel, i)
        place = item.max_at(partial, row)
        factor = softmax_exp(f.load(place, item.type) - row_max)
        f.store(factor, place)
        return f.fma(factor, f.load(item.sum_at(partial, row), item.type), total)

    lowest = f.const(float("-inf"), item.type)
    row_max = finite_max(f.loop(0, f["count"], 1, [lowest], larger)[0])
    total = f.loop(0, f["count"], 1, [f.const(0.0, item.type)], add)[0]
    return item.with_sink(total, row_max, row)
