"""Paged attention: tokens of many sequences, with keys and values in pages of a KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.dim import same
from rlx.ir.dtype import DType
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    cast,
    compute,
    quiet,
    require_float,
    require_indices,
    require_integer,
    require_rank,
    require_same,
    rounded,
    wide,
)
from rlx.ir.ops.attention import attention_weights, check_heads, require_sinks
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme, decode
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


@op("paged_attention", group="attention")
class PagedAttention(Op):
    """Each token attends to its own sequence, up to and with itself.

    q is [1, T, H*D], tokens of any sequences in any order; k and v are [1, KV, slots, D], cut along
    the slots into pages of `page`. Token t belongs to sequence rows[t] and is at positions[t]
    in it; position p of sequence b is in slot table[b, p // page] * page + p % page. `window`
    limits how many positions a token sees (0: all). Scale, softcap, sinks, `coarse` and `kv_scheme`
    are those of `attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0
    coarse: bool = False
    kv_scheme: QuantScheme | None = None

    def check(self) -> None:
        check_heads(self)
        if self.kv_scheme not in (None, GGUF_SCHEMES["Q8_0"]):
            raise AttributeValueError(
                "not a scheme of keys and values", where=f"{self.name}.kv_scheme",
                got=self.kv_scheme, expected="none or Q8_0",
            )  # fmt: skip
        for field, least in (("page", 1), ("window", 0)):
            if getattr(self, field) < least:
                raise AttributeValueError(
                    "out of range", where=f"{self.name}.{field}", got=getattr(self, field),
                    expected=f"{least} or more",
                )  # fmt: skip

    def row_width(self) -> int:
        """Stored elements of a head of a token."""
        return self.kv_scheme.row_bytes(self.head_dim) if self.kv_scheme else self.head_dim

    @property
    def score_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def infer(
        self, q: Shape, k: Shape, v: Shape, table: Shape, rows: Shape, positions: Shape,
        sinks: Shape | None = None,
    ) -> Shape:  # fmt: skip
        require_float(q, "q")
        require_rank(q, 3, "q")
        require_same(q.dims[0], 1, "batch of q")
        require_same(q.dims[2], self.num_heads * self.head_dim, "width of q")
        for x, what in ((k, "k"), (v, "v")):
            if self.kv_scheme is None:
                require_float(x, what)
            elif x.dtype.name != "u8":
                raise DTypeError("packed keys and values are bytes", got=x, expected="u8")
            require_rank(x, 4, what)
            expected = (1, self.num_kv_heads, k.dims[2], self.row_width())
            if not all(map(same, x.dims, expected)):
                raise ShapeError(f"{what} has the wrong shape", got=x, expected=expected)
        for x, what, rank in ((table, "table", 2), (rows, "rows", 1), (positions, "positions", 1)):
            require_integer(x, what)
            require_rank(x, rank, what)
        for x, what in ((rows, "rows"), (positions, "positions")):
            require_same(x.dims[0], q.dims[1], f"length of {what} against the tokens of q")
        if sinks is not None:
            require_sinks(sinks, self.num_heads)
        return q

    def reference(
        self, q: Array, k: Array, v: Array, table: Array, rows: Array, positions: Array,
        sinks: Array | None = None,
    ) -> Array:  # fmt: skip
        require_indices(rows, table.shape[0], "rows")
        require_indices(positions, table.shape[1] * self.page, "positions")
        if self.kv_scheme is not None:
            k, v = (decode(self.kv_scheme, x) for x in (k, v))
        keys, values = compute(k[0]), compute(v[0])
        heads = compute(q[0]).reshape(-1, self.num_kv_heads, self._group, self.head_dim)
        out = np.zeros_like(heads)
        for t, (row, position) in enumerate(zip(rows, positions, strict=True)):
            first = max(0, int(position) + 1 - self.window) if self.window else 0
            seen = np.arange(first, int(position) + 1)
            slots = np.asarray(table[row], np.int64)[seen // self.page] * self.page
            slots += seen % self.page
            require_indices(slots, k.shape[2], "slots")
            out[t] = self._attend(heads[t], keys[:, slots], values[:, slots], sinks)
        return rounded(out.reshape(q.shape), DType.of(q.dtype))

    @property
    def _group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def _attend(self, q: Array, k: Array, v: Array, sinks: Array | None) -> Array:
        """One token: q [KV, group, D], k and v [KV, n, D]."""
        with quiet():
            scores = (q @ k.transpose(0, 2, 1)) * q.dtype.type(self.score_scale)
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            by_head = scores.reshape(1, self.num_heads, 1, -1)
            return attention_weights(by_head, sinks).reshape(scores.shape) @ v

    def decompose(
        self, g: Graph, q: Value, k: Value, v: Value, table: Value, rows: Value, positions: Value,
        sinks: Value | None = None,
    ) -> Any:  # fmt: skip
        """Keys and values of each token's sequence gathered, then plain attention."""
        tokens, most = q.shape.dims[1], table.shape.dims[1] * self.page
        keys, values = self._gathered(g, k, v, table, rows)
        dims = (tokens, self.num_kv_heads, self._group, self.head_dim)
        heads = g.transpose(g.reshape(wide(g, q), shape=dims), axes=(1, 0, 2, 3))
        scores = g.mul(g.matmul(heads, g.transpose(keys, axes=(0, 1, 3, 2))), self.score_scale)
        if self.softcap:
            scores = g.mul(g.tanh(g.div(scores, self.softcap)), self.softcap)
        at = g.reshape(positions, shape=(tokens, 1, 1))
        key_positions = g.iota(shape=(most,), dtype=positions.shape.dtype)
        keep = g.le(key_positions, at)
        if self.window:
            keep = g.logical_and(keep, g.gt(key_positions, g.sub(at, self.window)))
        scores = g.where(keep, scores, float("-inf"))
        if sinks is not None:
            more = g.reshape(wide(g, sinks), shape=(self.num_kv_heads, 1, self._group, 1))
            more = g.expand(more, shape=(self.num_kv_heads, tokens, self._group, 1))
            joined = g.softmax(g.concat(scores, more, axis=3), axis=-1)
            weights = g.narrow(joined, axis=3, start=0, length=most)
        else:
            weights = g.softmax(scores, axis=-1)
        mixed = g.transpose(g.matmul(weights, values), axes=(1, 0, 2, 3))
        return cast(g, g.reshape(mixed, shape=q.shape.dims), q.shape.dtype)

    def _gathered(self, g: Graph, k: Value, v: Value, table: Value, rows: Value) -> list[Value]:
        """Keys and values of every token's pages: [KV, T, slots of a sequence, D]."""
        tokens, pages = rows.shape.dims[0], table.shape.dims[1]
        offsets = g.iota(shape=(self.page,), dtype=table.shape.dtype)
        own = g.reshape(g.gather(table, rows, axis=0), shape=(tokens, pages, 1))
        slots = g.add(g.mul(own, self.page), offsets)
        slots = g.reshape(slots, shape=(tokens * (pages * self.page),))
        dims = (self.num_kv_heads, tokens, pages * self.page, self.head_dim)
        found = (self._unpacked(g, x) for x in (k, v))
        return [g.reshape(g.gather(wide(g, x), slots, axis=2), shape=dims) for x in found]

    def _unpacked(self, g: Graph, x: Value) -> Value:
        """Packed keys or values as f32."""
        if self.kv_scheme is None:
            return x
        rows = g.reshape(x, shape=(-1, self.row_width()))
        numbers = g.dequant_gather(rows, g.iota(shape=rows.shape.dims[:1]), scheme=self.kv_scheme)
        return g.reshape(numbers, shape=(*x.shape.dims[:-1], self.head_dim))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """An estimate: every token attends to half of the longest sequence."""
        q, k, _, table, *_ = inputs
        seen = self.window or table.dims[1] * self.page
        tokens = q.dims[1]
        read = tokens * seen * (self.num_kv_heads * self.head_dim * k.dtype.bytes)
        flops = tokens * seen * (2 * self.num_heads * self.head_dim)
        return Cost(flops, q.size_bytes * 2 + read)
