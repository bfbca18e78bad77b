"""Attention query by query: blocks divide the keys, the last one combines."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.attention.attention_problem import LOG2_E, AttentionForm
from rlx.backends.cuda.kernels.attention.key_pieces import piece_at
from rlx.backends.cuda.kernels.attention.query_emitter import (
    AHEAD,
    WARPS,
    QueryEmitter,
    shared_bytes,
)
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i8, i64
from rlx.llvm.storage import load, memory_type
from rlx.support.records import dataclass


@dataclass(frozen=True)
class DecodeAttention(BlockKernel):
    """args: q, k, v, result, mask, sinks, partial results, counters, batch · key heads, queries,
    keys, strides of q, k, v and the result (batch, head, token), of the mask (batch, head, query,
    key)

    A block has a query of the heads of one key head, and one of `splits` parts of the keys.
    """

    form: AttentionForm
    splits: int

    @property
    def label(self) -> str:
        return "attention(decode)"

    @property
    def threads(self) -> int:
        return WARPS * WARP

    @property
    def shared(self) -> int:
        return shared_bytes(self.form)

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared), self).emit()


class _Emitter(QueryEmitter):
    """Keys of a sequence follow each other."""

    def __init__(self, f: BlockFunction, kernel: DecodeAttention) -> None:
        super().__init__(f, kernel.form)
        args, form = f["args"], kernel.form
        self.q, self.k, self.v, self.out, self.mask, self.sinks, self.partial, self.counters = (
            f.arg(args, i) for i in range(8)
        )
        pairs, self.rows, self.keys = (f.arg(args, i, i64) for i in (8, 9, 10))
        numbers = [f.arg(args, i, i64) for i in range(11, 27)]
        self.q_strides, self.k_strides, self.v_strides, self.out_strides = (
            numbers[3 * i : 3 * i + 3] for i in range(4)
        )
        self.mask_strides = numbers[12:16]
        block = f.block_number()
        whole = block.udiv(kernel.splits)
        self.splits = kernel.splits
        self.split = block - whole * kernel.splits
        self.item = whole.to(i64)  # number of query, sequence and key head together
        self.row = self.item.udiv(pairs)
        pair = self.item - self.row * pairs
        self.sequence = pair.udiv(form.kv_heads)
        self.head = pair - self.sequence * form.kv_heads

    def emit(self) -> None:
        f = self.f
        f.if_(self.row < self.rows, self._prefetch)
        f.let_next_start()
        f.wait_for_previous()
        f.if_(self.row < self.rows, lambda: self.emit_query(*self._range()))

    def _prefetch(self) -> None:
        """Bring the first keys and values near: all but the last were there before."""
        f = self.f
        low, high = self._range()
        for i in range(AHEAD):
            key = f.max(f.min(self.first(low) + i * self.steps, high - 1), 0)
            for base in (self.k, self.v):
                f.bring_near(piece_at(f, self.form, self.row_at(base, key), self.piece(0)))

    def _range(self) -> tuple[Value, Value]:
        """The keys of this block."""
        f, form = self.f, self.form
        low, high = f.i64(0), self.keys
        own = self.keys - self.rows + self.row
        if form.behind is not None:
            low = f.max(own - form.behind, 0)
        if form.ahead is not None:
            high = f.max(f.min(own + (form.ahead + 1), self.keys), low)
        return self.part_of(low, high)

    def query_at(self, g: int) -> Value:
        at = self._at(self.q_strides, self.head * self.form.group + g)
        return self.f.gep(self.q, at, self.form.q.bytes)

    def result_at(self, g: Value) -> Value:
        at = self._at(self.out_strides, self.head * self.form.group + g)
        return self.f.gep(self.out, at, self.form.out.bytes)

    def row_at(self, base: Value, key: Value) -> Value:
        strides = self.k_strides if base is self.k else self.v_strides
        at = self.sequence * strides[0] + self.head * strides[1] + key * strides[2]
        return self.f.gep(base, at, self.form.key_bytes)

    def _at(self, strides: Sequence[Value], head: Value) -> Value:
        """Where this query is."""
        return self.sequence * strides[0] + head * strides[1] + self.row * strides[2]

    def masked(self, score: Value, key: Value, g: int) -> Value:
        f, form = self.f, self.form
        if not form.mask:
            return score
        column = self.mask_strides[3]
        at = self._at(self.mask_strides, self.head * form.group + g) + key * column
        if form.mask == "bool":
            keeps = f.load(f.gep(self.mask, at), i8).ne(0)
            return f.select(keeps, score, float("-inf"))
        dtype = DType.of(form.mask)
        added = load(f, f.gep(self.mask, at, memory_type(dtype).bytes), dtype, 1, f32)
        return score + added * LOG2_E
