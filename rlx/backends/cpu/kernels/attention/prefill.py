"""Prefill: FlashAttention for many rows. KV blocks pass by query blocks, with an online softmax.

A query block is a few panels of rows. For each KV block its keys and values are copied once, and
each panel runs QKᵀ, softmax and PV on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce

from rlx.backends.cpu.kernels.attention.combine import (
    Combine,
    WorkSplit,
    each_block,
    partials_of_span,
    safe_inverse,
    workspace_of,
)
from rlx.backends.cpu.kernels.attention.problem import (
    GROUP,
    KV_BLOCK,
    Q8_0,
    RUN,
    SPLITS,
    Args,
    AttentionKernel,
    PartialLayout,
    Problem,
    Rows,
    finite_max,
    softmax_exp,
)
from rlx.backends.cpu.kernels.attention.softmax import PanelSoftmax
from rlx.backends.cpu.kernels.attention.tiles import (
    Tiling,
    WorkspaceLayout,
    emit_copy_kv,
    emit_pack_q,
    emit_pv,
    emit_qk,
)
from rlx.llvm.builder import Function, Module, Value, i32, i64, ptr
from rlx.llvm.storage import LINE, memory_type, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass


def emit_panel(m: Module, kernel: Prefill) -> Function:
    """void panel(args, workspace, partial, batch, head, row, p, key, count, is_first, is_last, q,
    k, v)

    Adds the KV block of `count` keys from `key` on to the partial result of panel p of an item.
    `is_first` marks the first KV block of a split, `is_last` an only one, which writes the output.
    Rows at `q`, `k` and `v` come next and are prefetched into the L2 cache.
    """
    params = [("args", ptr), ("workspace", ptr), ("partial", ptr)]
    numbers = ("batch", "head", "row", "p", "key", "count", "is_first", "is_last")
    params += [(name, i64) for name in numbers]
    f = m.function("panel", [*params, *((name, ptr) for name in "qkv")], internal=True)
    _PanelEmitter(f, kernel).emit()
    return f


class _PanelEmitter:
    def __init__(self, f: Function, kernel: Prefill) -> None:
        self.f, self.kernel, self.problem = f, kernel, kernel.problem
        self.tiling = kernel.tiling(f.target)
        self.layout = WorkspaceLayout.of(self.tiling)
        self.writes_output = kernel.writes_output(f.target)
        tables = (self._table(offset, size) for offset, size in (
            (self.layout.ends, 4), (self.layout.starts, 4), (self.layout.masks, 8)
        ))  # fmt: skip
        scores = self.workspace(self.layout.scores)
        self.softmax = PanelSoftmax(f, self.problem, self.tiling, scores, f["key"], *tables)
        p, by_key = self.problem, self.softmax.masks_keys_only
        self.max_in_qk = not (p.right_bounded or p.softcap or p.mask) or (
            by_key and not p.right_bounded
        )
        layout = kernel.layout(f.target)
        self.running_max, self.running_sum = (
            f.gep(f.gep(f["partial"], at), f["p"], self.tiling.score_row_bytes)
            for at in (layout.max_offset, layout.sum_offset)
        )
        self.result = Rows(f, self.problem).addresses("out", f["batch"], f["head"])
        self.row_bytes = {n: Args(f).row_bytes(n, self.problem) for n in "qkv"}

    def workspace(self, offset: int) -> Value:
        return self.f.gep(self.f["workspace"], offset)

    def _table(self, offset: int, size: int) -> Value:
        """The panel's part of a table with `size` bytes per row."""
        return self.f.gep(self.workspace(offset), self.f["p"], self.tiling.panel * size)

    def _relative_key(self, table: Value, row: int | Value) -> Value:
        """A row's entry of `ends` or `starts`, relative to the KV block and clamped to it."""
        entry = self.f.load(self.f.gep(table, row, 4), i32)
        return self.f.max(self.f.min(entry.to(i64) - self.f["key"], self.f["count"]), 0)

    def emit(self) -> None:
        """Keys that neither the first nor the last row sees are skipped."""
        f, t, tables = self.f, self.tiling, self.softmax
        first, last = f.i64(0), f["count"]
        if self.problem.right_bounded:
            last = self._relative_key(tables.ends, t.panel - 1)
        if self.problem.left_bounded:
            start = self._relative_key(tables.starts, 0)
            first = start - start.urem(max(GROUP, t.keys))
        for _ in f.when(first < last):
            self._attend(first, last)

    def _attend(self, first: Value, last: Value) -> None:
        f, t = self.f, self.tiling
        before = self._resume(
            [f.const(float("-inf"), t.vector)] * t.vectors, self._load(self.running_max)
        )
        found = self._qk(first, last, before)
        self.softmax.adjust(first, last)
        if self.problem.right_bounded:
            seen = self._relative_key(self.softmax.ends, 0)
            self.softmax.mask_invisible(f.max(seen, first), last)
        if self.problem.left_bounded:
            seen = self._relative_key(self.softmax.starts, t.panel - 1)
            self.softmax.mask_invisible(first, f.min(seen, last))
        if not self.max_in_qk:
            found = self.softmax.row_max(first, last, before)
        self._update_softmax(first, last, before, found)
        self._pv(first, last)

    def _qk(self, first: Value, last: Value, before: list[Value]) -> list[Value]:
        """All scores; returns the row maxima, which are final where `max_in_qk`."""
        f, t = self.f, self.tiling
        queries = f.gep(self.workspace(self.layout.queries), f["p"], t.q_panel_bytes)
        keys = self.workspace(self.layout.keys)
        found = f.carry(before)
        for k in found.range(first, last, t.keys, guard=False):
            self._prefetch(k)
            scores = emit_qk(f, t, queries, f.gep(keys, k, t.key_bytes))
            if self.softmax.masks_keys_only:
                scores = self._mask_keys(scores, k)
            for i, score in enumerate(scores):
                f.store(score, self.softmax.row(k), i * t.vector.bytes)
            if self.max_in_qk:
                columns = [scores[j :: t.vectors] for j in range(t.vectors)]
                both = zip(columns, found.values, strict=True)
                found.values = [reduce(f.max_fast, c, m) for c, m in both]
        return found.values

    def _mask_keys(self, scores: list[Value], k: Value) -> list[Value]:
        """A tile's scores with a mask over keys; keys beyond the last repeat it."""
        f, n = self.f, self.tiling.vectors
        numbers = [f.min(k + i, f["count"] - 1) for i in range(self.tiling.keys)]
        found = [
            self.softmax.mask_key(scores[i * n : (i + 1) * n], key) for i, key in enumerate(numbers)
        ]
        return [score for row in found for score in row]

    def _prefetch(self, k: Value) -> None:
        """Prefetch the next rows evenly, a few per QKᵀ tile (as many come next as there are keys in
        a block), and the output rows of this item.
        """
        f, t, p = self.f, self.tiling, self.problem
        first = (f["p"] * KV_BLOCK + k).udiv(t.panels)
        names = [n for n in "qkv" if n not in p.strided and (n != "q" or p.gqa_group == 1)]
        for row in f.range(first, first + -(-t.keys // t.panels), guard=False):
            for name in names:
                self._prefetch_row(name, f.gep(f[name], row * self.row_bytes[name]))
            if self.writes_output:
                self._prefetch_row("out", self.result(f["row"] + row))

    def _prefetch_row(self, name: str, row: Value) -> None:
        for line in range(0, self._bytes(name), LINE):
            # what is written soon may stay in the L1 cache
            self.f.prefetch(row, line, locality=3 if name == "out" else 2, writes=name == "out")

    def _bytes(self, name: str) -> int:
        """Bytes of a row of a head."""
        p = self.problem
        if p.q8_kv and name in "kv":
            return p.head_dim // Q8_0.block_size * Q8_0.bytes_per_block
        return p.head_dim * memory_type(p.dtype(name)).bytes

    def _update_softmax(
        self, first: Value, last: Value, before: list[Value], running_max: list[Value]
    ) -> None:
        """Scores to probabilities; store running max, running sum and rescaling factors."""
        f, t = self.f, self.tiling
        running_sum = self._resume(
            [f.const(0.0, t.vector)] * t.vectors, self._load(self.running_sum)
        )
        maxima = [finite_max(m) for m in running_max]
        factors = [softmax_exp(was - row_max) for was, row_max in zip(before, maxima, strict=True)]
        with f.exact():
            start = [total * factor for total, factor in zip(running_sum, factors, strict=True)]
        running_sum = self.softmax.exponentiate(first, last, maxima, start)
        self._store(self.running_max, running_max)
        self._store(self.running_sum, running_sum)
        self._store(self.factors, factors)
        if self.writes_output:
            self._store(
                self.workspace(self.layout.inverses), [safe_inverse(total) for total in running_sum]
            )

    def _load(self, base: Value) -> Callable[[], list[Value]]:
        f, t = self.f, self.tiling
        return lambda: [f.load(base, t.vector, at) for at in self.softmax.offsets]

    def _store(self, base: Value, numbers: list[Value]) -> None:
        for number, at in zip(numbers, self.softmax.offsets, strict=True):
            self.f.store(number, base, at)

    @property
    def factors(self) -> Value:
        return self.workspace(self.layout.factors)

    def _resume(self, empty: list[Value], load: Callable[[], list[Value]]) -> list[Value]:
        """State that earlier KV blocks left, or the initial one. With a window a panel may skip
        the first KV block, so the partial result has been cleared."""
        f = self.f
        if self.problem.left_bounded:
            return load()
        state = f.carry()
        for is_first in f.either(f["is_first"].ne(0), state):
            state.values = empty if is_first else load()
        return state.values

    def _pv(self, first: Value, last: Value) -> None:
        f, t = self.f, self.tiling
        probs = self.softmax.row(first)
        v_panels = f.gep(self.workspace(self.layout.values), first.udiv(t.pair), t.v_row_bytes)
        for v_panel in f.range(0, t.v_panels):
            values = f.gep(v_panels, v_panel, t.v_panel_bytes)
            for row in f.range(0, t.panel, t.rows):
                end = last
                if self.problem.right_bounded:
                    end = f.min(self._relative_key(self.softmax.ends, row + (t.rows - 1)), last)
                at = f.gep(probs, row * t.acc.bytes)
                self._pv_tile(row, v_panel, at, values, end - first)

    def _pv_tile(
        self, row: Value, v_panel: Value, probs: Value, values: Value, count: Value
    ) -> None:
        """PV of the rows from `row` on and the columns of a panel of values."""
        f, t = self.f, self.tiling
        size, row_bytes = t.acc.bytes, t.columns * t.acc.bytes
        places = [(i, j * t.vector.bytes) for i in range(t.rows) for j in range(t.width)]
        partial = f.gep(
            f.gep(f["partial"], f["p"] * t.panel + row, row_bytes), v_panel, t.v_row_bytes
        )

        def each_row(table: Value) -> list[Value]:
            first = f.gep(table, row * size)
            return [f.broadcast_load(first, t.acc, t.lanes, i * size) for i in range(t.rows)]

        def load() -> list[Value]:
            scale = each_row(self.factors)
            return [f.load(partial, t.vector, i * row_bytes + at) * scale[i] for i, at in places]

        start = self._resume([f.const(0.0, t.vector)] * len(places), load)
        done = emit_pv(f, t, probs, values, count, start)

        def keep() -> None:
            for value, (i, at) in zip(done, places, strict=True):
                f.store(value, partial, i * row_bytes + at)

        def write() -> None:
            dtype = self.problem.dtype("out")
            scale = each_row(self.workspace(self.layout.inverses))
            first, last = f["row"] + f["p"] * t.panel + row, Rows(f, self.problem).count - 1
            column = v_panel * (t.width * t.lanes)
            for i in range(t.rows):
                # rows beyond the last repeat it
                to = f.gep(self.result(f.min(first + i, last)), column, memory_type(dtype))
                for j in range(t.width):
                    at = f.gep(to, j * t.lanes * memory_type(dtype).bytes)
                    store(f, done[i * t.width + j] * scale[i], at, dtype)

        if not self.writes_output:
            keep()
            return
        for is_last in f.either(f["is_last"].ne(0)):
            if is_last:
                write()
            else:
                keep()


_ITEM_PARAMS = [("batch", i64), ("head", i64), ("row", i64)]


@dataclass(frozen=True)
class Prefill(AttentionKernel):
    """args: problem.ARGS. `rows` is the most rows a KV head has (0: unknown)."""

    rows: int = 0

    def tiling(self, target: Target) -> Tiling:
        return _tiling(target, self.problem, self.rows)

    def layout(self, target: Target) -> PartialLayout:
        t = self.tiling(target)
        workspace = WorkspaceLayout.of(t).size
        return PartialLayout(self.problem, self.queries, t.panels * t.panel, t.columns, workspace)

    def writes_output(self, target: Target) -> bool:
        """Whether an item of one KV block is written without a partial result: every panel sees
        the block."""
        p = self.problem
        whole = self.tiling(target).columns == p.head_dim
        return whole and not p.right_bounded and p.sinks is None and not p.lse

    def emit(self, m: Module) -> None:
        attend = _emit_attend(m, self)
        f, layout = m.kernel(), self.layout(m.target)
        combine, split = Combine(f, layout), WorkSplit(f, layout)
        for span in split.each_span():
            partials, item = partials_of_span(f, layout, span), (span.batch, span.head, span.row)
            keys, whole = (span.first, span.last), span.whole
            direct = f.i64(0).ne(0)
            if self.writes_output(m.target):
                direct = whole & (span.last > 0) & (span.last <= KV_BLOCK)
            spans = (*keys, span.begin, span.end, direct.to(i64))
            f.call(attend, f["args"], workspace_of(f, layout), partials, *item, *spans)
            for _ in f.when(whole & ~direct):
                combine.own(item, *keys, partials)


_tiling = lru_cache(maxsize=None)(Tiling.of)


def _emit_attend(m: Module, kernel: Prefill) -> Function:
    """void attend(args, workspace, partials, batch, head, row, first, last, begin, end, direct)

    The partial results of splits begin … end of a query block over keys [first, last), or its
    output if there is only one KV block (`direct`).
    """
    problem, t = kernel.problem, kernel.tiling(m.target)
    copies = {name: emit_copy_kv(m, name, problem, t) for name in "kv"}
    prepare = _emit_prepare(m, kernel)
    panel = emit_panel(m, kernel)
    buffers = [("workspace", ptr), ("partials", ptr)]
    keys = [(name, i64) for name in ("first", "last", "begin", "end", "direct")]
    f = m.function("attend", [("args", ptr), *buffers, *_ITEM_PARAMS, *keys], internal=True)
    args, layout = Args(f), WorkspaceLayout.of(t)
    left = Rows(f, problem).count - f["row"]
    panels = f.min(f.ceil_div(left, t.panel), t.panels)
    item = [f[name] for name, _ in _ITEM_PARAMS]
    f.call(prepare, f["args"], f["workspace"], *item, panels)
    for number in f.range(f["begin"], f["end"]):
        run = f["first"].udiv(RUN) + number
        size = kernel.layout(m.target).partial_bytes
        partial = f.gep(f["partials"], run.urem(SPLITS), size)
        _clear_partial(f, kernel, partial, panels)
        for key, count in each_block(f, run, f["first"], f["last"]):
            for name, place in (("k", layout.keys), ("v", layout.values)):
                row = args.row_bytes(name, problem)
                src = f.gep(args.head(name, problem, f["batch"], f["head"]), key * row)
                step = args.row_bytes(name, problem, "step")
                f.call(copies[name], src, row, step, count, f.gep(f["workspace"], place))
            marks = (key.eq(run * RUN).to(i64), f["direct"])
            spans = (key, count, *marks, *_next_rows(f, kernel, key))
            for p in f.range(0, panels, guard=False):
                f.call(panel, f["args"], f["workspace"], partial, *item, p, *spans)
    return f


def _next_rows(f: Function, kernel: Prefill, key: Value) -> list[Value]:
    """The rows of q, k and v to prefetch during a KV block: those of the next KV block or of the
    next item. They need not exist."""
    problem, rows, args = kernel.problem, Rows(f, kernel.problem), Args(f)
    row = f["row"] + kernel.layout(f.target).block_rows
    ends = row >= rows.count
    row, head = f.select(ends, f.i64(0), row), f["head"] + ends.to(i64)
    wraps = head.eq(problem.kv_heads)
    head, batch = f.select(wraps, f.i64(0), head), f["batch"] + wraps.to(i64)
    after, found = key + KV_BLOCK, []
    for name in "kv":
        size = args.row_bytes(name, problem)
        here = f.gep(args.head(name, problem, f["batch"], f["head"]), after * size)
        there = f.gep(args.head(name, problem, batch, head), rows.kv_start(row) * size)
        found.append(f.select(after < f["last"], here, there))
    return [rows.address("q", batch, head, row), *found]


def _emit_prepare(m: Module, kernel: Prefill) -> Function:
    """void prepare(args, workspace, batch, head, row, panels): row tables and packed queries."""
    problem, t = kernel.problem, kernel.tiling(m.target)
    pack = emit_pack_q(m, problem, t)
    params = [("args", ptr), ("workspace", ptr), *_ITEM_PARAMS, ("panels", i64)]
    f = m.function("prepare", params, internal=True)
    layout, workspace, item = WorkspaceLayout.of(t), f["workspace"], (f["batch"], f["head"])
    if problem.mask is not None or problem.right_bounded:
        for r in f.range(0, f["panels"] * t.panel):
            _fill_row_tables(f, problem, layout, r)
    for p in f.range(0, f["panels"]):
        packed = f.gep(f.gep(workspace, layout.queries), p, t.q_panel_bytes)
        f.call(pack, f["args"], *item, f["row"] + p * t.panel, packed)
    return f


def _fill_row_tables(f: Function, problem: Problem, layout: WorkspaceLayout, number: Value) -> None:
    """A row's entries in the tables `masks`, `ends` and `starts`."""
    rows, workspace = Rows(f, problem), f["workspace"]
    row = f.min(f["row"] + number, rows.count - 1)  # rows beyond the last repeat it
    if problem.mask is not None:
        offset = rows.mask_offset(f["batch"], f["head"], row)
        f.store(offset, f.gep(f.gep(workspace, layout.masks), number, 8))
    if problem.right_bounded:
        f.store(rows.kv_end(row).to(i32), f.gep(f.gep(workspace, layout.ends), number, 4))
        f.store(rows.kv_start(row).to(i32), f.gep(f.gep(workspace, layout.starts), number, 4))


def _clear_partial(f: Function, kernel: Prefill, partial: Value, panels: Value) -> None:
    """The partial result of no keys; with a window the accumulators too (see `_resume`)."""
    t, layout = kernel.tiling(f.target), kernel.layout(f.target)
    row_bytes = panels * t.score_row_bytes
    if kernel.problem.left_bounded:
        _fill(f, t, partial, row_bytes * t.columns, 0.0)
    _fill(f, t, f.gep(partial, layout.max_offset), row_bytes, float("-inf"))
    _fill(f, t, f.gep(partial, layout.sum_offset), row_bytes, 0.0)


def _fill(f: Function, t: Tiling, base: Value, size: Value, number: float) -> None:
    for at in f.range(0, size, t.vector.bytes):
        f.store(f.const(number, t.vector), f.gep(base, at))


__all__ = ["Prefill", "Problem"]
