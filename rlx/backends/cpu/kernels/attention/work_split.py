"""The work split of attention: the keys of all work items, end to end, in equal ranges per worker.

A boundary between two workers may fall inside an item (split-KV, as in flash decoding). Each then
leaves a partial result in scratch, and a second kernel combines them (`combine.py`). So all workers
are busy whatever the numbers of heads, rows and keys, and the result depends on the number of
workers only.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.kernels.attention.problem import AttentionKernel, Rows
from rlx.llvm.builder import Function, Module, Value, i64, ptr
from rlx.support.records import dataclass


@dataclass(frozen=True)
class KVSpan:
    """A worker's part of a work item: keys [first, last) of a query block."""

    batch: Value
    head: Value
    row: Value
    first: Value
    last: Value
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


class WorkSplit:
    """Divides the units (of `kernel.unit` keys) of all work items among the workers."""

    def __init__(self, f: Function, kernel: AttentionKernel) -> None:
        self.f, self.kernel = f, kernel
        self.rows = Rows(f, kernel.problem)
        self.block = kernel.block_rows(f.target)
        self._kv_range = _emit_kv_range(f.module, kernel)
        self.blocks = f.ceil_div(self.rows.count, self.block)
        [self.units_per_group] = f.loop(
            0, self.blocks, 1, [f.i64(0)], lambda block, total: total + self.units(block)
        )
        self.groups = kernel.problem.kv_heads // kernel.heads_per_item
        total = self.units_per_group * (self.rows.args["batch"] * self.groups)
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

    def units(self, block: Value) -> Value:
        """Length of an item; one without keys still writes a result."""
        first, last = self.kv_range(block)
        return self.f.max(self.f.ceil_div(last - first, self.kernel.unit), 1)

    def boundary(self, worker: Value) -> Value:
        """The first unit of a worker."""
        return worker * self._per_worker + self.f.min(worker, self._remainder)

    def each_span(self, body: Callable[[KVSpan], None]) -> None:
        """Emit the loop over this worker's spans."""
        f, tid = self.f, self.f["tid"].to(i64)
        lo, hi = self.boundary(tid), self.boundary(tid + 1)

        def next_item(group: Value, block: Value, base: Value) -> list[Value]:
            units = self.units(block)
            end = base + units
            f.if_(end > lo, lambda: body(self._span_of(group, block, base, units, lo, hi)))
            following = block + 1
            wraps = following.eq(self.blocks)
            return [group + wraps.to(i64), f.select(wraps, 0, following), end]

        def work() -> None:
            group = lo.udiv(self.units_per_group)
            start = [group, f.i64(0), group * self.units_per_group]
            f.while_(start, lambda group, block, base: base < hi, next_item)

        f.if_(lo < hi, work)

    def _span_of(
        self, group: Value, block: Value, base: Value, units: Value, lo: Value, hi: Value
    ) -> KVSpan:
        f = self.f
        first, last = self.kv_range(block)
        a, b = f.max(lo - base, 0), f.min(hi - base, units)
        continues, ends = a > 0, b.eq(units)
        return KVSpan(
            *self.place(group),
            block * self.block,
            first + a * self.kernel.unit,
            f.min(first + b * self.kernel.unit, last),
            ~continues & ends,
            continues,
        )

    def place(self, number: Value) -> tuple[Value, Value]:
        """(batch entry, first KV head) of a group of heads that make one item."""
        batch = number.udiv(self.groups)
        return batch, (number - batch * self.groups) * self.kernel.heads_per_item

    def find(self, unit: Value) -> tuple[Value, Value, Value]:
        """(group of heads, block, first unit) of the item that a unit belongs to."""
        f = self.f
        group = unit.udiv(self.units_per_group)
        base = group * self.units_per_group
        block, base = f.while_(
            [f.i64(0), base],
            lambda block, base: base + self.units(block) <= unit,
            lambda block, base: [block + 1, base + self.units(block)],
        )
        return group, block, base
