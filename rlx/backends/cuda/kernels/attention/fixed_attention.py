"""Attention over a paged KV cache in the same order for every token, alone or in a prompt.

Runs of tokens and single tokens go through the tiles of `flash_attention`. Tiles of keys begin at
multiples of their size. Keys are cut into pieces at fixed positions; blocks have one each, and the
last one of a tile combines those that it sees, in order. Keys that a query does not see change no
bit of its sums.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import BlockFunction, KernelModule
from rlx.backends.cuda.kernels.attention.attention_problem import LOG2_E, LOWEST, AttentionForm
from rlx.backends.cuda.kernels.attention.attention_tile import Softmax
from rlx.backends.cuda.kernels.attention.flash_attention import KEYS
from rlx.backends.cuda.kernels.attention.paged_attention import PagedFlash, PagedFlashEmitter
from rlx.backends.cuda.kernels.attention.query_emitter import merge
from rlx.llvm.builder import Value, f32, i64
from rlx.llvm.storage import load, memory_type, store
from rlx.support.records import dataclass

_PIECE = 256  # keys, at least
_MOST_PIECES = 16
_ALONE = 64  # tokens, up to which each has blocks of its own
_SHARING = 4


def piece_keys(most: int) -> int:
    """Keys of a piece, where a sequence has `most` at most."""
    return max(_PIECE, -(-most // (_MOST_PIECES * KEYS)) * KEYS)


@dataclass(frozen=True)
class FixedPagedFlash(PagedFlash):
    """args: those of `PagedDecode`; a counter for each token and key head, partial results for each
    token, head and piece

    A block has a tile of `tokens` tokens, a key head and one of `pieces` pieces of keys. `sharing`
    blocks divide the tokens of a tile that is no run.
    """

    tokens: int = 1
    sharing: int = 1
    pieces: int = 1
    piece: int = _PIECE  # keys

    @property
    def label(self) -> str:
        return "paged(fixed)"

    def blocks(self, tokens: int) -> int:
        tiles = -(-tokens // self.tokens)
        return tiles * self.form.kv_heads * self.sharing * self.pieces

    def partial_bytes(self, tokens: int) -> int:
        if self.pieces == 1:
            return 0
        return 4 * tokens * self.form.heads * self.pieces * (self.form.dim + 2)

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared), self).emit()


class _Emitter(PagedFlashEmitter):
    kernel: FixedPagedFlash

    def __init__(self, f: BlockFunction, kernel: FixedPagedFlash) -> None:
        super().__init__(f, kernel)

    def find_queries(self) -> None:
        f, kernel = self.f, self.kernel
        self.find_pages()
        rest = f.block_number().udiv(kernel.pieces)
        item, rest = rest, rest.udiv(kernel.sharing)
        self.share = item - rest * kernel.sharing
        tile = rest.udiv(kernel.form.kv_heads)
        self.head = rest - tile * kernel.form.kv_heads
        self.tile = tile * kernel.tokens
        self.first = f.i32(0)
        self.has_work = self.tile < self.pages.tokens

    @property
    def piece(self) -> Value:
        """The piece of this block."""
        number = self.f.block_number()
        return number - number.udiv(self.kernel.pieces) * self.kernel.pieces

    def _emit_tile(self) -> None:
        f, kernel = self.f, self.kernel
        if kernel.sharing == kernel.tokens:
            token = self.tile + self.share
            f.if_(token < self.pages.tokens, lambda: self._take(token, f.i32(1)))
            return
        is_run, count = self.pages.run_of(self.tile, kernel.tokens)

        each, end = f.select(is_run, count, 1), f.select(is_run, f.i32(1), count)
        for i in f.range(self.share, end, kernel.sharing):
            self._take(self.tile + i, each)

    def _take(self, token: Value, count: Value) -> None:
        """The tokens of a run, or one token: a piece of their keys."""
        f, kernel = self.f, self.kernel
        self.token, self.count = token, count
        self.sequence, self.position, known = self.pages.place(token)
        self.rows, self.keys = count * self.form.group, self.position + count
        known = known & (self.keys <= self.pages.pages * kernel.page)
        low, high = self.range()
        begin = f.max(low - (low & (KEYS - 1)), self.piece * kernel.piece)
        end = f.min(high, (self.piece + 1) * kernel.piece)

        f.if_(known & (end > low) & (begin < end), lambda: self._attend(begin, end))
        f.if_(known, lambda: None, self.pages.report)

    def _attend(self, begin: Value, end: Value) -> None:
        """A piece of the keys."""
        f, kernel = self.f, self.kernel
        state = self.sum_keys(begin, end)
        if kernel.pieces == 1:
            self._finish(state)
            return
        low, high = self.range()
        first, last = low.udiv(kernel.piece), (high - 1).udiv(kernel.piece)
        parts = last - first + 1

        def share() -> None:
            self._keep(state)
            place = self.token.to(i64) * self.form.kv_heads + self.head.to(i64)
            counter = f.gep(f.arg(f["args"], 9), place, 8)
            f.if_(f.is_last_block(counter, parts), lambda: self._combine(first, last))
            f.barrier()  # shared memory is used again

        f.if_(parts.eq(1), lambda: self._finish(state), share)

    # -- pieces -----------------------------------------------------------------------------------

    def _part(self, query: Value, piece: Value) -> Value:
        """Where the sums of a query of the tile, of a piece of its keys, are: values, then the
        largest score, then the sum of weights."""
        form, pieces = self.form, self.kernel.pieces
        row = self._token(query).to(i64) * form.heads + self.head_of(query).to(i64)
        number = (row * pieces + piece.to(i64)) * (form.dim + 2)
        return self.f.gep(self.f.arg(self.f["args"], 8), number, 4)

    def _keep(self, state: list[Value]) -> None:
        f, form = self.f, self.form
        softmax, out = Softmax(state[:2], state[2:4]), state[4:]
        for half in range(2):
            query = self.own + self.row + 8 * half
            total = f.warp_sum(softmax.sums[half], 4)
            mine = [v for i, v in enumerate(out) if i // 2 % 2 == half]

            def write(
                half: int = half, query: Value = query, total: Value = total,
                mine: list[Value] = mine,
            ) -> None:  # fmt: skip
                row = self._part(query, self.piece)
                for i in range(0, len(mine), 2):
                    to = f.gep(row, (self.column + 4 * i).to(i64), 4)
                    f.store(f.join(mine[i : i + 2]), to, align=8)

                def ends() -> None:
                    f.store(softmax.tops[half], row, 4 * form.dim)
                    f.store(total, row, 4 * form.dim + 4)

                f.if_(self.column.eq(0), ends)

            f.if_(query < self.rows, write)

    def _combine(self, first: Value, last: Value) -> None:
        """Add up the pieces of all queries of the tile, a number of a thread at a time."""
        f, form = self.f, self.form
        for item in f.range(f.thread(), self.rows * form.dim, self.kernel.threads):
            query = item.udiv(form.dim)
            column = item - query * form.dim

            def add(piece: Value, *known: Value) -> list[Value]:
                row = self._part(query, piece)  # noqa: B023  (used at once)
                ends = [f.load(row, f32, 4 * form.dim + 4 * e) for e in range(2)]
                one = f.load(f.gep(row, column.to(i64), 4), f32)  # noqa: B023
                return merge(f, known, [*ends, one])

            start = [f.const(LOWEST, f32), f.const(0.0, f32), f.const(0.0, f32)]
            found = f.loop(first, last + 1, 1, start, add)
            self._write(query, column, *found)

    def _write(self, query: Value, column: Value, top: Value, total: Value, one: Value) -> None:
        """As `results` finishes a sum."""
        f, form = self.f, self.form
        if form.sinks is not None:
            head = self.head_of(query).to(i64)
            there = f.gep(self.sinks, head, memory_type(form.sinks).bytes)
            sink, zero = load(f, there, form.sinks, 1, f32) * LOG2_E, f.const(0.0, f32)
            _, total, one = merge(f, [top, total, one], [sink, zero + 1.0, zero])
        some = total > 0.0
        factor = f.select(some, 1.0 / f.select(some, total, 1.0), 0.0)
        base, _ = self.result_at(query)
        store(f, one * factor, f.gep(base, column.to(i64), form.out.bytes), form.out)


def fixed_flash(
    form: AttentionForm, page: int, tokens: int, most: int, size: int
) -> FixedPagedFlash:
    """The kernel for up to `tokens` tokens, of sequences of up to `most`; a run has `size`."""
    keys = piece_keys(most)
    shared = (size, min(_SHARING, size)) if tokens > _ALONE else (tokens, tokens)
    return FixedPagedFlash(form, 1, True, page, *shared, -(-most // keys), keys)
