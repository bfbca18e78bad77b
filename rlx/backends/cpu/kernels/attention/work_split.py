"""The work split of attention: the KV splits of all work items, end to end, in ranges per worker.

Keys are cut into runs of KV blocks at multiples of RUN, and run r belongs to split r % SPLITS. Each
split has a partial result of its own, whichever worker computes it, and the splits of an item are
combined in one order (`combine.py`). So all workers are busy whatever the numbers of heads, rows
and keys, and neither the number of workers nor the other rows of a run change a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlx.backends.cpu.kernels.attention.problem import KV_BLOCK, RUN, SPLITS, AttentionKernel, Rows
from rlx.llvm.builder import Function, Module, Value, i64, ptr
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


def _emit_kv_range(m: Module, kernel: AttentionKernel) -> tuple[Function, Function]:
    """i64 first_key(args, block), i64 last_key(args, block): keys that a query block sees."""
    made = []
    for name in ("first_key", "last_key"):
        f = m.function(name, [("args", ptr), ("block", i64)], i64, internal=True)
        rows, size = Rows(f, kernel.problem), kernel.block_rows(f.target)
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

    def __init__(self, f: Function, kernel: AttentionKernel) -> None:
        self.f, self.kernel = f, kernel
        self.rows = Rows(f, kernel.problem)
        self.block = kernel.block_rows(f.target)
        self._kv_range = _emit_kv_range(f.module, kernel)
        self.blocks = f.ceil_div(self.rows.count, self.block)
        [self.cost_per_head] = f.loop(
            0, self.blocks, 1, [f.i64(0)], lambda block, total: total + self.cost(block)
        )
        total = self.cost_per_head * (self.rows.args["batch"] * kernel.problem.kv_heads)
        self.total = self._if_mine(total)
        nth = f["nth"].to(i64)
        self._per_worker = self.total.udiv(nth)
        self._remainder = self.total - self._per_worker * nth

    def _if_mine(self, total: Value) -> Value:
        """0 when the other kernel handles this number of queries."""
        queries, wanted = self.rows.args["queries"], self.kernel.queries
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

    def each_span(self, body: Callable[[KVSpan], None]) -> None:
        """Emit the loop over this worker's spans."""
        f, tid = self.f, self.f["tid"].to(i64)
        lo, hi = self.boundary(tid), self.boundary(tid + 1)

        def next_item(group: Value, block: Value, base: Value) -> list[Value]:
            cost = self.cost(block)
            end = base + cost
            begin, until = (self.splits_before(cost, base, at) for at in (lo, hi))
            f.if_(begin < until, lambda: body(self._span_of(group, block, begin, until, cost)))
            following = block + 1
            wraps = following.eq(self.blocks)
            return [group + wraps.to(i64), f.select(wraps, 0, following), end]

        def work() -> None:
            group = lo.udiv(self.cost_per_head)
            start = [group, f.i64(0), group * self.cost_per_head]
            f.while_(start, lambda group, block, base: base < hi, next_item)

        f.if_(lo < hi, work)

    def _span_of(self, group: Value, block: Value, begin: Value, end: Value, cost: Value) -> KVSpan:
        first, last = self.kv_range(block)
        continues, ends = begin > 0, end.eq(self.f.min(cost, SPLITS))
        place, row = self.place(group), block * self.block
        return KVSpan(*place, row, first, last, begin, end, ~continues & ends, continues)

    def place(self, number: Value) -> tuple[Value, Value]:
        """(batch entry, KV head) of a head's number."""
        batch = number.udiv(self.kernel.problem.kv_heads)
        return batch, number - batch * self.kernel.problem.kv_heads

    def find(self, at: Value) -> tuple[Value, Value, Value]:
        """(number of the head, block, base) of the item that a boundary falls into."""
        f = self.f
        group = at.udiv(self.cost_per_head)
        base = group * self.cost_per_head
        block, base = f.while_(
            [f.i64(0), base],
            lambda block, base: base + self.cost(block) <= at,
            lambda block, base: [block + 1, base + self.cost(block)],
        )
        return group, block, base
