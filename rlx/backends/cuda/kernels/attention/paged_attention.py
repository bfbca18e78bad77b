"""Attention over a paged KV cache: runs of tokens of one sequence by tensor cores, others alone.

Tokens are cut into tiles, as many tokens as a block has room for with the query heads of one key
head. A tile whose tokens follow each other in one sequence is a run. One kernel does all runs,
another all other tokens; both cut tokens in the same way, so no host has to. The second one divides
the keys of a token among more blocks where there are fewer tokens.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.attention.attention_problem import AttentionForm
from rlx.backends.cuda.kernels.attention.flash_attention import (
    QUERIES,
    FlashAttention,
    FlashEmitter,
)
from rlx.backends.cuda.kernels.attention.key_pieces import piece_at
from rlx.backends.cuda.kernels.attention.query_emitter import (
    AHEAD,
    WARPS,
    QueryEmitter,
    shared_bytes,
)
from rlx.llvm.builder import Value, i32, i64
from rlx.support.records import dataclass


def tile_tokens(form: AttentionForm) -> int:
    """Tokens of a tile."""
    return QUERIES // form.group


@dataclass(frozen=True)
class PagedDecode(BlockKernel):
    """args: q, k, v, result, sinks, table, rows, positions, partial results, counters, status,
    error number, tokens, sequences, pages of a sequence, pages of the cache, strides of q and the
    result (token), of k and v (head, slot)

    `blocks` take work items in turn: a token, a key head and a part of the keys. `most` are the
    most parts. With `runs`, tokens of runs are left to the other kernel. `early`: no kernel writes
    rows, positions and the table.
    """

    form: AttentionForm
    page: int
    blocks: int
    most: int
    runs: bool
    early: bool = False

    @property
    def label(self) -> str:
        return "paged(decode)"

    @property
    def threads(self) -> int:
        return WARPS * WARP

    @property
    def shared(self) -> int:
        return shared_bytes(self.form)

    def emit(self, m: KernelModule) -> None:
        form = self.form
        loads = form.group + bool(form.softcap) + form.q8 + self.runs  # what takes registers
        together = 2 if form.group == 1 or loads <= 3 else 1  # blocks that fit without spills
        _DecodeEmitter(m.begin_block(self.threads, self.shared, together), self).emit()


@dataclass(frozen=True)
class PagedFlash(FlashAttention):
    """args: those of `PagedDecode`

    A block has a tile of tokens with the query heads of one key head.
    """

    page: int = 64

    @property
    def label(self) -> str:
        return "paged(flash)"

    def emit(self, m: KernelModule) -> None:
        PagedFlashEmitter(m.begin_block(self.threads, self.shared), self).emit()


class Pages:
    """Where tokens and their keys are."""

    def __init__(self, f: BlockFunction, form: AttentionForm, page: int) -> None:
        self.f, self.form, self.page = f, form, page
        args = f["args"]
        self.q, self.k, self.v, _, self.sinks, self.table, self.rows, self.positions = (
            f.arg(args, i) for i in range(8)
        )
        self.partial, self.counters = (f.arg(args, i) for i in (8, 9))
        self.tokens, self.sequences, self.pages, self.cache = (
            f.arg(args, i, i32) for i in range(12, 16)
        )
        self.q_step = f.arg(args, 16, i64)
        self.steps = [[f.arg(args, i + j, i64) for j in range(2)] for i in (18, 20)]

    def result(self, token: Value, head: Value) -> Value:
        """Where the result of a token and a head goes. Its args are read late, so that they take no
        registers before."""
        f, args = self.f, self.f["args"]
        at = token.to(i64) * f.arg(args, 17, i64) + head.to(i64) * self.form.dim
        return f.gep(f.arg(args, 3), at, self.form.out.bytes)

    def number(self, of: Value, at: Value) -> Value:
        """An element of rows, positions or the table."""
        return self.f.load(self.f.gep(of, at.to(i64), 4), i32)

    def place(self, token: Value) -> tuple[Value, Value, Value]:
        """Row and position of a token, and whether there are such."""
        row, position = self.number(self.rows, token), self.number(self.positions, token)
        known = row.ult(self.sequences) & position.ult(self.pages * self.page)
        return row, position, known

    def report(self) -> None:
        f, args = self.f, self.f["args"]
        f.store(f.arg(args, 11, i64), f.arg(args, 10))

    def key_rows(self, row: Value, head: Value, key: Value) -> tuple[Value, Value]:
        """Where a key (i32) of a sequence and its value are."""
        f = self.f
        number = key.udiv(self.page)
        found = self.number(self.table, row * self.pages + number)
        good = found.ult(self.cache)
        f.if_(good, lambda: None, self.report)
        slot = f.select(good, found, 0) * self.page + (key - number * self.page)
        k, v = (
            f.gep(base, head.to(i64) * a + slot.to(i64) * b, self.form.key_bytes)
            for base, (a, b) in zip((self.k, self.v), self.steps, strict=True)
        )
        return k, v

    def run_of(self, first: Value, size: int = 0) -> tuple[Value, Value]:
        """Whether the tile from token `first` on is a run, and how many tokens it has."""
        f, size = self.f, size or tile_tokens(self.form)
        row, position = (self.number(of, first) for of in (self.rows, self.positions))
        others = f.i32(0)
        for i in range(0, size, WARP):
            at = f.lane32() + i
            token = f.min(first + at, self.tokens - 1)
            same = self.number(self.rows, token).eq(row)
            same = same & self.number(self.positions, token).eq(position + at)
            outside = (at >= size) | (first + at >= self.tokens)
            others = others + f.select(same | outside, f.i32(0), 1)
        count = f.min(self.tokens - first, size)
        return f.warp_sum(others).eq(0) & (count > 1), count


class _DecodeEmitter(QueryEmitter):
    def __init__(self, f: BlockFunction, kernel: PagedDecode) -> None:
        super().__init__(f, kernel.form)
        self.kernel = kernel

    def emit(self) -> None:
        f, kernel, form = self.f, self.kernel, self.form
        self.pages = pages = Pages(f, form, kernel.page)
        self.k, self.v, self.sinks = pages.k, pages.v, pages.sinks
        self.partial, self.counters = pages.partial, pages.counters
        items = pages.tokens * form.kv_heads
        fitting = f.i32(kernel.blocks).udiv(f.max(items, 1))
        splits = f.max(f.min(fitting, kernel.most), 1)
        self.splits = splits if kernel.most > 1 else 1
        if kernel.early and not kernel.runs:
            self._take(f.block_number(), splits)
            f.if_(f.block_number() < items * splits, self._prefetch)
        f.let_next_start()
        f.wait_for_previous()
        for number in f.range(f.block_number(), items * splits, kernel.blocks):
            self._take(number, splits)
            if not kernel.runs:
                self._attend()
                continue
            tile = self.token.udiv(tile_tokens(form)) * tile_tokens(form)
            is_run, _ = pages.run_of(tile)
            f.if_(is_run, lambda: None, self._attend)

    def _take(self, number: Value, splits: Value) -> None:
        """The work item of this number."""
        item = number.udiv(splits)
        self.split, self.item = number - item * splits, item.to(i64)
        self.token = item.udiv(self.form.kv_heads)
        self.head = (item - self.token * self.form.kv_heads).to(i64)

    def _range(self, position: Value) -> tuple[Value, Value]:
        """The keys of this block."""
        f, behind = self.f, self.form.behind
        low = f.i64(0) if behind is None else f.max(position.to(i64) - behind, 0)
        return self.part_of(low, position.to(i64) + 1)

    def _prefetch(self) -> None:
        """Bring the first keys and values near: all but the last were there before."""
        f, pages = self.f, self.pages
        self.row, position, known = pages.place(self.token)

        def bring() -> None:
            low, high = self._range(position)
            for i in range(AHEAD):
                key = f.max(f.min(self.first(low) + i * self.steps, high - 1), 0)
                for row in pages.key_rows(self.row, self.head, key.to(i32)):
                    f.bring_near(piece_at(f, self.form, row, self.piece(0)))

        f.if_(known, bring)

    def _attend(self) -> None:
        f, pages = self.f, self.pages
        self.row, position, known = pages.place(self.token)

        def attend() -> None:
            self.emit_query(*self._range(position))
            f.barrier()  # shared memory is used again

        f.if_(known, attend, pages.report)

    def query_at(self, g: int) -> Value:
        head = (self.head * self.form.group + g) * self.form.dim
        at = self.token.to(i64) * self.pages.q_step + head
        return self.f.gep(self.pages.q, at, self.form.q.bytes)

    def result_at(self, g: Value) -> Value:
        return self.pages.result(self.token, self.head * self.form.group + g)

    def row_at(self, base: Value, key: Value) -> Value:
        rows = self.pages.key_rows(self.row, self.head, key.to(i32))
        return rows[0] if base is self.k else rows[1]


class PagedFlashEmitter(FlashEmitter):
    kernel: PagedFlash

    def find_queries(self) -> None:
        """Nothing of it depends on the kernel in front but the numbers in memory."""
        f, form = self.f, self.form
        pages = self.find_pages()
        block = f.block_number()
        tile = block.udiv(form.kv_heads)
        self.head = block - tile * form.kv_heads  # of keys
        self.token = tile * tile_tokens(form)
        self.first = f.i32(0)
        self.has_work = self.token < pages.tokens

    def find_pages(self) -> Pages:
        """Where keys are."""
        self.pages = Pages(self.f, self.form, self.kernel.page)
        self.sinks = self.pages.sinks
        return self.pages

    def _emit_tile(self) -> None:
        f, pages = self.f, self.pages
        is_run, self.count = pages.run_of(self.token)
        self.sequence, self.position, known = pages.place(self.token)
        self.rows = self.count * self.form.group
        self.keys = self.position + self.count
        known = known & (self.keys <= pages.pages * self.kernel.page)
        attend = super()._emit_tile
        f.if_(is_run, lambda: drop(f.if_(known, attend, pages.report)))

    def range(self) -> tuple[Value, Value]:
        f, behind = self.f, self.form.behind
        low = f.i32(0) if behind is None else f.max(self.position - behind, 0)
        return low, self.keys

    def place(self, query: Value) -> Value:
        return self.position + query.udiv(self.form.group)

    def head_of(self, query: Value) -> Value:
        group = self.form.group
        return self.head * group + (query - query.udiv(group) * group)

    def rows_at(self, key: Value) -> tuple[Value, Value]:
        return self.pages.key_rows(self.sequence, self.head, key)

    def query_at(self, query: Value) -> Value:
        there = self.f.min(query, self.rows - 1)
        head = self.head_of(there).to(i64) * self.form.dim
        at = self._token(there).to(i64) * self.pages.q_step + head
        return self.f.gep(self.pages.q, at, self.form.q.bytes)

    def result_at(self, query: Value) -> tuple[Value, Value]:
        return self.pages.result(self._token(query), self.head_of(query)), query < self.rows

    def _token(self, query: Value) -> Value:
        return self.token + query.udiv(self.form.group)


def drop(value: object) -> None:
    """Use a result for its effect alone."""
