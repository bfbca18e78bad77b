"""Who does what: all keys of all items are laid end to end, and each worker takes an equal part.

The border between two workers may fall inside an item. Each of them then leaves its part of the
sums in scratch, and a second kernel joins the parts (`attention_finish`). So every worker is busy
whatever the numbers of heads, rows and keys, and the result depends on the number of workers only.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.codegen.attention import AttentionKernel, Rows
from rlx.codegen.emit import Function, Module, Value, i64, ptr
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Piece:
    """A worker's part of an item: keys [first, last) of a block of rows."""

    batch: Value
    head: Value
    row: Value
    first: Value
    last: Value
    whole: Value
    """i1: there are no other parts."""
    begun: Value
    """i1: an earlier worker has the first part."""


def _emit_span(m: Module, kernel: AttentionKernel) -> tuple[Function, Function]:
    """i64 first_key(args, block) and i64 last_key(args, block): what some row of a block sees."""
    made = []
    for name in ("first_key", "last_key"):
        f = m.function(name, [("args", ptr), ("block", i64)], i64, internal=True)
        rows, size = Rows(f, kernel.problem), kernel.block_rows(f.target)
        first = f["block"] * size
        last = f.min(first + size, rows.count) - 1
        end = rows.end(last)
        f.ret(end if name == "last_key" else f.min(rows.start(first), end))
        made.append(f)
    return made[0], made[1]


class Schedule:
    def __init__(self, f: Function, kernel: AttentionKernel) -> None:
        self.f, self.kernel = f, kernel
        self.rows = Rows(f, kernel.problem)
        self.block = kernel.block_rows(f.target)
        self._span = _emit_span(f.module, kernel)
        self.blocks = f.ceil_div(self.rows.count, self.block)
        [self.units_of_heads] = f.loop(
            0, self.blocks, 1, [f.i64(0)], lambda block, total: total + self.units(block)
        )
        self.groups = kernel.problem.kv_heads // kernel.together
        total = self.units_of_heads * (self.rows.args["batch"] * self.groups)
        self.total = self._if_meant(total)
        nth = f["nth"].to(i64)
        self._each = self.total.udiv(nth)
        self._rest = self.total - self._each * nth

    def _if_meant(self, total: Value) -> Value:
        """Nothing, when the number of queries is another kernel's business."""
        queries, wanted = self.rows.args["queries"], self.kernel.queries
        if wanted == "any":
            return total
        meant = queries.eq(1) if wanted == "one" else queries.ne(1)
        return self.f.select(meant, total, 0)

    def span(self, block: Value) -> tuple[Value, Value]:
        """The keys that some row of the block sees."""
        first, last = (self.f.call(key, self.f["args"], block) for key in self._span)
        return first, last

    def units(self, block: Value) -> Value:
        """Length of an item; one without keys still has a result to write."""
        first, last = self.span(block)
        return self.f.max(self.f.ceil_div(last - first, self.kernel.unit), 1)

    def border(self, worker: Value) -> Value:
        """The unit where a worker's part begins."""
        return worker * self._each + self.f.min(worker, self._rest)

    def each_piece(self, body: Callable[[Piece], None]) -> None:
        """Emit the loop over this worker's pieces."""
        f, tid = self.f, self.f["tid"].to(i64)
        lo, hi = self.border(tid), self.border(tid + 1)

        def go_on(group: Value, block: Value, base: Value) -> list[Value]:
            units = self.units(block)
            end = base + units
            f.if_(end > lo, lambda: body(self._piece(group, block, base, units, lo, hi)))
            following = block + 1
            wraps = following.eq(self.blocks)
            return [group + wraps.to(i64), f.select(wraps, 0, following), end]

        def work() -> None:
            group = lo.udiv(self.units_of_heads)
            start = [group, f.i64(0), group * self.units_of_heads]
            f.while_(start, lambda group, block, base: base < hi, go_on)

        f.if_(lo < hi, work)

    def _piece(
        self, group: Value, block: Value, base: Value, units: Value, lo: Value, hi: Value
    ) -> Piece:
        f = self.f
        first, last = self.span(block)
        a, b = f.max(lo - base, 0), f.min(hi - base, units)
        begun, ends = a > 0, b.eq(units)
        return Piece(
            *self.place(group),
            block * self.block,
            first + a * self.kernel.unit,
            f.min(first + b * self.kernel.unit, last),
            ~begun & ends,
            begun,
        )

    def place(self, number: Value) -> tuple[Value, Value]:
        """(batch entry, first key head) of a group of heads that are done together."""
        batch = number.udiv(self.groups)
        return batch, (number - batch * self.groups) * self.kernel.together

    def find(self, unit: Value) -> tuple[Value, Value, Value]:
        """(group of heads, block, first unit) of the item that a unit belongs to."""
        f = self.f
        group = unit.udiv(self.units_of_heads)
        base = group * self.units_of_heads
        block, base = f.while_(
            [f.i64(0), base],
            lambda block, base: base + self.units(block) <= unit,
            lambda block, base: [block + 1, base + self.units(block)],
        )
        return group, block, base
