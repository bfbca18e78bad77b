"""Decode where the heads of a key are neighbours in memory (layout "bshd").

One head alone would be read with gaps, which costs half of the bandwidth. So a few keys of all
heads are read before the next ones: memory is streamed. Each head has the sums, and their order,
that `decode` gives it.

Work is shared by splits, then by heads: a worker has whole splits of all heads, and some heads of
those at the ends of its range. Partial results lie in common memory; a second kernel combines them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlx.backends.cpu.kernels.attention.combine import (
    Combine,
    CombineSplitKV,
    WorkSplit,
    each_block,
    split_bases,
)
from rlx.backends.cpu.kernels.attention.decode import Decode, DecodeAttend
from rlx.backends.cpu.kernels.attention.problem import (
    GROUP,
    KV_BLOCK,
    RUN,
    SPLITS,
    Args,
    PartialLayout,
)
from rlx.llvm.builder import Function, Module, Value, i64, ptr, vec
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_AHEAD = 64 << 10  # bytes of all heads from the key that is read to the one that is prefetched


@dataclass(frozen=True)
class DecodeHeads(Decode):
    """args: problem.ARGS. `scratch` has the partial results of all heads of `batch` batch entries,
    then a workspace for each worker."""

    batch: int = 1

    def layout(self, target: Target) -> PartialLayout:
        """The workspace is that of all heads, a multiple of a cache line."""
        one = super().layout(target)
        size = self.problem.kv_heads * one.workspace_bytes
        return replace(one, workspace_bytes=-(-size // 64) * 64)

    def partials_bytes(self, target: Target) -> int:
        return self.batch * self.problem.kv_heads * self.layout(target).item_bytes

    def scratch_bytes(self, target: Target, workers: int) -> int:
        """Scratch of all workers."""
        return self.partials_bytes(target) + workers * self.layout(target).workspace_bytes

    def partials_of(self, f: Function, batch: Value, head: Value) -> Value:
        """The partial results of a head; those of the next head follow."""
        number = batch * self.problem.kv_heads + head
        return f.gep(Args(f)["scratch"], number, self.layout(f.target).item_bytes)

    def emit(self, m: Module) -> None:
        numbers = ("batch", "head", "heads", "row", "first", "last", "number")
        params = [("args", ptr), ("workspace", ptr), ("partials", ptr)]
        attend = m.function("attend", [*params, *((n, i64) for n in numbers)], internal=True)
        _Attend(attend, self).emit()
        f = m.kernel()
        layout = self.layout(m.target)
        first_workspace = f.gep(Args(f)["scratch"], self.partials_bytes(f.target))
        workspace = f.gep(first_workspace, f["tid"].to(i64), layout.workspace_bytes)
        split = WorkSplit(f, layout)
        first, last = split.kv_range(f.i64(0))

        for _ in f.when(split.total > 0):
            for batch, number, head, end in self._each_span(f, split):
                partials = self.partials_of(f, batch, head)
                item = (batch, head, end - head, f.i64(0), first, last, f.i64(number))
                f.call(attend, f["args"], workspace, partials, *item)

    def _each_span(
        self, f: Function, split: WorkSplit
    ) -> Iterator[tuple[Value, int, Value, Value]]:
        """Emit the loop over this worker's spans: a batch entry, the number of a split and a range
        of heads. All splits of all heads lie end to end, and a worker has those that begin in its
        range."""
        heads, runs = self.problem.kv_heads, split.cost_per_head
        lo, hi = (split.boundary(f["tid"].to(i64) + i) for i in (0, 1))
        bases, entry = [*split_bases(runs, f.i64(0)), runs], runs * heads
        for batch in f.range(lo.udiv(entry), (hi + entry - 1).udiv(entry)):
            for number in range(SPLITS):
                base = (batch * runs + bases[number]) * heads
                cost = bases[number + 1] - bases[number]
                each = f.max(cost, 1)
                # the first heads that begin at the limits of the range, or after them
                head, end = (
                    f.min((f.max(limit - base, 0) + each - 1).udiv(each), heads)
                    for limit in (lo, hi)
                )
                there = (cost > 0) & (head < end)
                for _ in f.when(there):
                    yield batch, number, head, end


class _Attend(DecodeAttend):
    """void attend(args, workspace, partials, batch, head, heads, row, first, last, number)

    The partial results of split `number`, counted from that of the first run, of all rows of some
    heads over keys [first, last).
    """

    def __init__(self, f: Function, kernel: Decode) -> None:
        super().__init__(f, kernel)
        heads, size = kernel.problem.kv_heads, self.type.bytes
        scores = f.gep(f["workspace"], heads * self.rows * self.query_bytes)
        factors = f.gep(scores, heads * self.rows * KV_BLOCK * size)
        self.first_head = (self.queries, scores, factors, self.bases)
        self.head_stride = {n: self.args.row_bytes(n, self.problem, "head") for n in "kv"}

    def emit(self) -> None:
        f, dim = self.f, self.problem.head_dim
        run = f["first"].udiv(RUN) + f["number"]
        self.split = run.urem(SPLITS)
        for _ in self._each_head():
            self.pack_queries()
            self.clear()
        for key, count in each_block(f, run, f["first"], f["last"]):
            self.key, begin = key, self.first_of_block(key)
            for j in f.range(begin, count, self.lanes, guard=False):
                for _ in self._each_head():
                    self.score_keys(self.rows_from("k", key), j, count - 1)
            for _ in self._each_head():
                self.softmax(begin, count)
                self._rescale()
            for j in f.range(begin, count, GROUP, guard=False):
                keys = (begin, j, f.min(j + GROUP, count), count)
                for _ in self._each_head():
                    for d in f.range(0, dim, self.width * self.v_lanes):
                        self.add_values(self.rows_from("v", key), d, keys, None)

    def _each_head(self) -> Iterator[Value]:
        """Emit the loop over the heads, and point at what belongs to each."""
        f, rows, size = self.f, self.rows, self.type.bytes
        queries, scores, factors, bases = self.first_head
        for h in f.range(0, f["heads"], guard=False):
            self.head = f["head"] + h
            self.queries = f.gep(queries, h, rows * self.query_bytes)
            self.scores = f.gep(scores, h, rows * KV_BLOCK * size)
            self.factors = f.gep(factors, h, rows * size)
            self.bases = {n: f.gep(base, h * self.head_stride[n]) for n, base in bases.items()}
            self.partials = f.gep(f["partials"], h, self.kernel.layout(f.target).item_bytes)
            self.select_split(self.split)
            yield h

    def rows_ahead(self, name: str) -> int:
        key = self.problem.kv_heads * self.row_size(name)
        ahead = self.f.module.tunable("kv_read_ahead", _AHEAD, _AHEAD // 2, 2 * _AHEAD)
        return max(GROUP, min(ahead // key, KV_BLOCK))

    def _rescale(self) -> None:
        """acc = acc * factors."""
        f, lanes, dim = self.f, self.v_lanes, self.problem.head_dim
        for r, factor in enumerate(self.load_factors()):
            for d in f.range(0, dim, lanes):
                at = f.gep(self.acc, d + r * dim, self.type)
                f.store(f.load(at, vec(lanes, self.type)) * factor, at)


@dataclass(frozen=True)
class CombineHeads(CombineSplitKV):
    """args: problem.ARGS. Combines the partial results of every head."""

    kernel: DecodeHeads

    def emit(self, m: Module) -> None:
        f = m.kernel()
        kernel, combine, split = self.kernel, Combine(f, self.layout), WorkSplit(f, self.layout)
        keys = split.kv_range(f.i64(0))
        heads = Args(f)["batch"] * kernel.problem.kv_heads
        lo, hi = f.split(f.select(split.total > 0, heads, 0))
        for number in f.range(lo, hi):
            batch, head = split.place(number)
            item = (batch, head, f.i64(0))
            combine.own(item, *keys, kernel.partials_of(f, batch, head))
