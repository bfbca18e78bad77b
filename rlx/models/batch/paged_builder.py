"""The builder of language models whose run has tokens of many sequences: paged attention."""

from __future__ import annotations

from typing import Any

from rlx.ir.dim import Dim
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.support.records import dataclass

PAGE = 64  # tokens


@dataclass
class PagedDecoderBuilder(DecoderBuilder):
    """Tokens come flat, [1, tokens], each with its sequence, its position, and its slot in the KV
    cache."""

    slots: int  # tokens of the KV cache, all pages together
    requests: int
    adapter_count: int = 0

    def __post_init__(self) -> None:
        g, pages = self.g, -(-self.context // PAGE)
        self.rows = g.input("rows", ["seq"], "i32")
        self.positions = g.input("positions", ["seq"], "i32")
        self.into = g.input("slots", ["seq"], "i32")
        self.table = g.input("table", [self.requests, pages], "i32")
        self.which = g.input("adapters", ["seq"], "i32") if self.adapter_count else None

    def position_args(self, seq: Dim) -> dict[str, Any]:
        return {"positions": self.positions}

    def pick(self, x: Tensor) -> Tensor:
        """The tokens whose logits are wanted."""
        picked = self.g.input("picked", ["picked"], "i32")
        if self.which is not None:
            self.which = self.which.gather(picked, axis=0)
        return x.gather(picked, axis=1)

    def adapter_matmul(self, x: Tensor, name: str, inner: int, out: int) -> Tensor:
        """Each token · A or B of its own adapter; number 0 is none."""
        assert self.which is not None
        rows = x.shape.dims[1]
        stack = self.g.state(name, [1 + self.adapter_count, inner, out], "f32")
        flat = x.reshape(rows, inner)
        y = self.g.grouped_matmul(flat, stack, self.which)
        return y.reshape(1, rows, out)

    def position_rows(self, table: Tensor, seq: Dim) -> Tensor:
        return table.gather(self.positions, axis=0)

    def append_to_cache(self, x: Tensor, name: str) -> Tensor:
        state, rows = self.cache_rows(x, name, self.slots)
        if rows.shape.dtype is not self.kv.dtype:
            rows = rows.astype(self.kv.dtype)
        return self.g.state_update(state, rows, self.into, axis=2)

    def attend_to_cache(
        self, q: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Tensor | None = None
    ) -> Tensor:
        c = self.config
        operands = [q, keys, values, self.table, self.rows, self.positions]
        operands += [] if sinks is None else [sinks]
        return self.g.paged_attention(
            *operands, num_heads=c.heads, num_kv_heads=c.kv_heads, head_dim=c.head_dim, page=PAGE,
            window=window, scale=c.attention_scale, softcap=c.attention_softcap,
        )  # fmt: skip
