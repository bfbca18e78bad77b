"""Split-KV: the keys of all work items in ranges per worker, and the splits combined to outputs.

Keys are cut into runs of KV blocks at multiples of RUN, and run r belongs to split r % SPLITS. Each
split has a partial result of its own, whichever worker computes it. The splits of an item are
combined in one order, and rows divided by their sums, by one function for prefill and decode. So
all workers are busy whatever the numbers of heads, rows and keys, and neither the number of workers
nor the other rows of a run change a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlx.backends.cpu.kernels.attention.problem import (
    KV_BLOCK,
    RUN,
    SPLITS,
    PartialLayout,
    Rows,
    finite_max,
    softmax_exp,
)
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.llvm import math
from rlx.llvm.builder import Function, Module, Value, i64, ptr, vec
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass


@dataclass(frozen=True)
class KVSpan:
    """A worker's part of a work item: splits `begin` … `end` of the keys [first, last) that a query
    block sees. Splits are counted from that of the first run."""

    batch: Value
    head: Value
    row: Value
    first: Value
    last: Value
    begin: Value
    end: Value
    whole: Value
    """i1: it is the whole item."""
    continues: Value
    """i1: an earlier worker began the item."""


def _emit_kv_range(m: Module, layout: PartialLayout) -> tuple[Function, Function]:
    """i64 first_key(args, block), i64 last_key(args, block): keys that a query block sees."""
    made = []
    for name in ("first_key", "last_key"):
        f = m.function(name, [("args", ptr), ("block", i64)], i64, internal=True)
        rows, size = Rows(f, layout.problem), layout.block_rows
        first = f["block"] * size
        last = f.min(first + size, rows.count) - 1
        end = rows.kv_end(last)
        f.ret(end if name == "last_key" else f.min(rows.kv_start(first), end))
        made.append(f)
    return made[0], made[1]


def kv_runs(f: Function, first: Value, last: Value) -> Value:
    """The number of runs that keys [first, last) lie in; one for none."""
    return f.max(f.ceil_div(last, RUN) - first.udiv(RUN), 1)


def each_block(f: Function, run: Value, first: Value, last: Value) -> Iterator[tuple[Value, Value]]:
    """Emit the loop over the KV blocks of the split of a run, from that run on, that have keys of
    [first, last): the first key and the number of keys of each."""
    for start in f.range(run * RUN, last, SPLITS * RUN):
        begin, end = f.max(start, first - first.urem(KV_BLOCK)), f.min(start + RUN, last)
        for key in f.range(begin, end, KV_BLOCK):
            yield key, f.min(end - key, KV_BLOCK)


def split_bases(cost: Value, base: Value) -> list[Value]:
    """Where the splits of an item of `cost` runs begin, that itself begins at `base`."""
    found = [base]
    for i in range(SPLITS - 1):
        found.append(found[-1] + (cost + (SPLITS - 1 - i)).udiv(SPLITS))
    return found


class WorkSplit:
    """Divides the runs of all work items among the workers, by whole splits."""

    def __init__(self, f: Function, layout: PartialLayout) -> None:
        self.f, self.layout = f, layout
        self.rows = Rows(f, layout.problem)
        self.block = layout.block_rows
        self._kv_range = _emit_kv_range(f.module, layout)
        self.blocks = f.ceil_div(self.rows.count, self.block)
        cost = f.carry([f.i64(0)])
        for block in cost.range(0, self.blocks):
            cost.values = [cost.values[0] + self.cost(block)]
        [self.cost_per_head] = cost.values
        total = self.cost_per_head * (self.rows.args["batch"] * layout.problem.kv_heads)
        self.total = self._if_mine(total)
        nth = f["nth"].to(i64)
        self._per_worker = self.total.udiv(nth)
        self._remainder = self.total - self._per_worker * nth

    def _if_mine(self, total: Value) -> Value:
        """0 when the other kernel handles this number of queries."""
        queries, wanted = self.rows.args["queries"], self.layout.queries
        if wanted == "any":
            return total
        mine = queries.eq(1) if wanted == "one" else queries.ne(1)
        return self.f.select(mine, total, 0)

    def kv_range(self, block: Value) -> tuple[Value, Value]:
        """The keys that some row of the block sees."""
        first, last = (self.f.call(key, self.f["args"], block) for key in self._kv_range)
        return first, last

    def cost(self, block: Value) -> Value:
        """Runs of an item; one without keys still writes a result."""
        return kv_runs(self.f, *self.kv_range(block))

    def boundary(self, worker: Value) -> Value:
        """Where the range of a worker begins: it has the splits that begin in it."""
        return worker * self._per_worker + self.f.min(worker, self._remainder)

    def splits_before(self, cost: Value, base: Value, limit: Value) -> Value:
        """How many splits of an item of `cost` runs, which begins at `base`, begin before
        `limit`."""
        found = self.f.i64(0)
        for i, at in enumerate(split_bases(cost, base)):
            found = found + ((cost > i) & (at < limit)).to(i64)
        return found

    def each_span(self) -> Iterator[KVSpan]:
        """The loop over this worker's spans, written `for span in split.each_span():`."""
        f, tid = self.f, self.f["tid"].to(i64)
        lo, hi = self.boundary(tid), self.boundary(tid + 1)
        for _ in f.when(lo < hi):
            first = lo.udiv(self.cost_per_head)
            item = f.carry([first, f.i64(0), first * self.cost_per_head])
            for _ in item.forever():
                group, block, base = item.values
                item.break_unless(base < hi)
                cost = self.cost(block)
                end = base + cost
                begin, until = (self.splits_before(cost, base, at) for at in (lo, hi))
                for _ in f.when(begin < until):
                    yield self._span_of(group, block, begin, until, cost)
                following = block + 1
                wraps = following.eq(self.blocks)
                item.values = [group + wraps.to(i64), f.select(wraps, 0, following), end]

    def _span_of(self, group: Value, block: Value, begin: Value, end: Value, cost: Value) -> KVSpan:
        first, last = self.kv_range(block)
        continues, ends = begin > 0, end.eq(self.f.min(cost, SPLITS))
        place, row = self.place(group), block * self.block
        return KVSpan(*place, row, first, last, begin, end, ~continues & ends, continues)

    def place(self, number: Value) -> tuple[Value, Value]:
        """(batch entry, KV head) of a head's number."""
        batch = number.udiv(self.layout.problem.kv_heads)
        return batch, number - batch * self.layout.problem.kv_heads

    def find(self, at: Value) -> tuple[Value, Value, Value]:
        """(number of the head, block, base) of the item that a boundary falls into."""
        f = self.f
        group = at.udiv(self.cost_per_head)
        base = group * self.cost_per_head
        item = f.carry([f.i64(0), base])
        for _ in item.forever():
            block, base = item.values
            item.break_unless(base + self.cost(block) <= at)
            item.values = [block + 1, base + self.cost(block)]
        block, base = item.values
        return group, block, base


def partials_of(f: Function, layout: PartialLayout, worker: Value, item: Value | int) -> Value:
    """The partial results of an item of a worker: 0 for one of its own, 1 for one that an earlier
    worker began, 2 for one that a later worker continues; 3 is its workspace."""
    base = f.gep(Rows(f, layout.problem).args["scratch"], worker, layout.worker_bytes)
    return f.gep(base, item, layout.item_bytes)


def partials_of_span(f: Function, layout: PartialLayout, span: KVSpan) -> Value:
    shared = f.select(span.continues, f.i64(1), f.i64(2))
    return partials_of(f, layout, f["tid"].to(i64), f.select(span.whole, f.i64(0), shared))


def workspace_of(f: Function, layout: PartialLayout) -> Value:
    return partials_of(f, layout, f["tid"].to(i64), 3)


class Combine:
    """Calls of `combine` for items of a kernel, in its function f."""

    def __init__(self, f: Function, layout: PartialLayout) -> None:
        self.f, self.layout = f, layout
        self._combine = _emit_combine(f.module, layout)
        self._table = f.alloca(SPLITS * 8)

    def own(self, item: Sequence[Value], first: Value, last: Value, partials: Value) -> None:
        """The output of an item whose splits are all in `partials`, over keys [first, last)."""
        f, size = self.f, self.layout.partial_bytes
        begin = first.udiv(RUN)
        count = f.ceil_div(last, RUN) - begin  # 0 for no key at all
        for split in range(SPLITS):
            there = _number(f, begin, split) < count
            self._enter(split, f.select(there, f.gep(partials, split * size), f.null()))
        self._call(item, f.i64(0), f.i64(1))

    def shared(
        self, split: WorkSplit, worker: Value, cost: Value, base: Value, item: Sequence[Value],
        first: Value,
    ) -> None:  # fmt: skip
        """The output of an item that worker `worker` − 1 began; every worker does some rows."""
        f, nth = self.f, self.f["nth"].to(i64)
        begin = first.udiv(RUN)
        bases = split_bases(cost, base)
        for number in range(SPLITS):
            search = f.carry([worker])
            for _ in search.forever():
                [t] = search.values
                search.break_unless((t < nth) & (split.boundary(t) <= bases[number]))
                search.values = [t + 1]
            [owner] = search.values
            began = owner.eq(worker)
            partials = partials_of(f, self.layout, owner - 1, f.select(began, f.i64(2), f.i64(1)))
            # splits are counted from that of the first run, and combined in their own order
            place = (begin + number).urem(SPLITS)
            at = f.gep(partials, place, self.layout.partial_bytes)
            f.store(f.select(cost > number, at, f.null()), f.gep(self._table, place, 8))
        # small items start with different workers
        start = f["tid"].to(i64) + worker * self.layout.block_rows
        self._call(item, start.urem(nth), nth)

    def _enter(self, split: int, partial: Value) -> None:
        self.f.store(partial, self._table, split * 8)

    def _call(self, item: Sequence[Value], start: Value, step: Value) -> None:
        self.f.call(self._combine, self.f["args"], *item, self._table, start, step)


def _number(f: Function, begin: Value, split: int) -> Value:
    """A split's number, counted from that of run `begin`."""
    return (f.i64(split + SPLITS) - begin.urem(SPLITS)).urem(SPLITS)


@dataclass(frozen=True)
class CombineSplitKV(KernelSpec):
    """args: problem.ARGS. Combines the partial results of items that were split between workers.

    Every worker visits every boundary and combines some rows of the item there.
    """

    layout: PartialLayout

    @property
    def label(self) -> str:
        return "combine_split_kv"

    def emit(self, m: Module) -> None:
        f = m.kernel()
        combine, split = Combine(f, self.layout), WorkSplit(f, self.layout)
        for worker in f.range(1, f["nth"].to(i64)):
            for _ in f.when(split.boundary(worker) < split.total):
                at = split.boundary(worker)
                group, block, base = split.find(at)
                # an item is combined at the first boundary inside it, if a split begins after that
                cost = split.cost(block)
                divides = split.splits_before(cost, base, at) < f.min(cost, SPLITS)
                first = (base < at) & (split.boundary(worker - 1) <= base) & divides
                item = (*split.place(group), block * split.block)
                key = split.kv_range(block)[0]
                for _ in f.when(first):
                    combine.shared(split, worker, cost, base, item, key)


class _Item:
    """The rows of an item's results, in a function with `args`, `batch`, `head` and `row`."""

    def __init__(self, f: Function, layout: PartialLayout) -> None:
        self.f, self.layout, self.problem = f, layout, layout.problem
        self.rows = Rows(f, layout.problem)
        self.type = layout.problem.acc
        self.row_bytes = layout.value_columns * self.type.bytes
        self.count = f.min(self.rows.count - f["row"], layout.block_rows)

    def with_sink(self, total: Value, row_max: Value, row: Value) -> Value:
        """A row's running sum plus the exponential of its head's attention sink, if any."""
        f, dtype = self.f, self.problem.sinks
        if dtype is None:
            return total
        number = f["head"] * self.problem.gqa_group + self.rows.place(f["row"] + row)[1]
        at = f.gep(self.rows.args["sinks"], number, memory_type(dtype))
        sink = f.extract(load(f, at, dtype, 1, self.type), 0)
        return total + math.exp(sink - row_max)  # a sink may exceed every score

    def sum_of(self, partial: Value, row: Value) -> Value:
        f = self.f
        at = f.gep(f.gep(partial, self.layout.sum_offset), row, self.type)
        return f.load(at, self.type)

    def lse_of(self, row: Value) -> Value:
        """Where the log-sum-exp of a row lies, [batch, heads, queries]."""
        f, p, args = self.f, self.problem, self.rows.args
        query, member = self.rows.place(f["row"] + row)
        head = (f["batch"] * p.kv_heads + f["head"]) * p.gqa_group + member
        return f.gep(args["lse"], head * args["queries"] + query, self.type)

    def max_of(self, partial: Value, row: Value) -> Value:
        f = self.f
        at = f.gep(f.gep(partial, self.layout.max_offset), row, self.type)
        return f.load(at, self.type)


def _emit_combine(m: Module, layout: PartialLayout) -> Function:
    """void combine(args, batch, head, row, table, start, step): rows start, start + step, … of an
    item. `table` has the addresses of the partial results of its splits, 0 for those without keys.
    """
    item = [("batch", i64), ("head", i64), ("row", i64)]
    rest = [("table", ptr), ("start", i64), ("step", i64)]
    f = m.function("combine", [("args", ptr), *item, *rest], internal=True)
    rows = _Item(f, layout)
    places, factors = f.alloca(SPLITS * 8), f.alloca(SPLITS * 8)
    for r in f.range(f["start"], rows.count, f["step"]):
        count, row_max = _collect(f, rows, r, places, factors)
        row_max = finite_max(row_max)
        sums = f.carry([f.const(0.0, rows.type)])
        for i in sums.range(0, count):
            place, at = f.load(f.gep(places, i, 8), ptr), f.gep(factors, i, 8)
            factor = softmax_exp(f.load(at, rows.type) - row_max)
            f.store(factor, at)
            sums.values = [f.fma(factor, rows.sum_of(place, r), sums.values[0])]
        total = rows.with_sink(sums.values[0], row_max, r)
        scale = safe_inverse(total)
        if layout.problem.lse:
            f.store(row_max + math.log(total), rows.lse_of(r))
        _write_row(f, rows, r, (count, places, factors, scale))
    return f


def _collect(
    f: Function, rows: _Item, row: Value, places: Value, factors: Value
) -> tuple[Value, Value]:
    """List the splits in which the row saw a key: their addresses, and their running maxima in the
    places of their factors. Returns their number and the largest maximum."""
    listed = f.carry([f.i64(0), f.const(float("-inf"), rows.type)])
    for split in listed.range(0, SPLITS):
        count, found = listed.values
        partial = f.load(f.gep(f["table"], split, 8), ptr)
        for is_null in f.either(f.bitcast(partial, i64).eq(0), listed):
            if is_null:
                listed.values = [count, found]
                continue
            row_max = rows.max_of(partial, row)
            f.store(partial, f.gep(places, count, 8))
            f.store(row_max, f.gep(factors, count, 8))
            # an accumulator that no key reached has no value; a NaN counts
            seen = rows.sum_of(partial, row).ne(0.0).to(i64)
            listed.values = [count + seen, f.max(found, row_max)]
    count, found = listed.values
    return count, found


def _write_row(
    f: Function, rows: _Item, row: Value, parts: tuple[Value, Value, Value, Value]
) -> None:
    """Σ factor · values of a row's splits, times the inverse of their sum."""
    count, places, factors, scale = parts
    dtype = rows.problem.dtype("out")
    out = rows.rows.address("out", f["batch"], f["head"], f["row"] + row)
    lanes = rows.problem.vector_width("out", f.target)
    for d in f.range(0, rows.problem.head_dim, lanes):
        sums = f.carry([f.const(0.0, vec(lanes, rows.type))])
        for i in sums.range(0, count):
            [total] = sums.values
            partial = f.gep(f.load(f.gep(places, i, 8), ptr), row, rows.row_bytes)
            factor = f.broadcast_load(f.gep(factors, i, 8), rows.type, lanes)
            value = f.load(f.gep(partial, d, rows.type), total.type)
            sums.values = [f.fma(value, factor, total)]
        store(f, sums.values[0] * f.splat(scale, lanes), f.gep(out, d, memory_type(dtype)), dtype)


def safe_inverse(total: Value) -> Value:
    """1 / total; a row without any key has the sum 0 and keeps its zeros."""
    f = total.fn
    return 1.0 / f.select(total.eq(0.0), 1.0, total)
