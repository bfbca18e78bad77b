"""The builder of language models whose run has tokens of many sequences: paged attention."""

from __future__ import annotations

from typing import Any

from rlx.ir.dim import Dim, sym
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.support.records import dataclass

PAGE = 64  # tokens


@dataclass
class PagedDecoderBuilder(DecoderBuilder):
    """Tokens run flat, [1, tokens], each with its sequence, its position, and its slot in the KV
    cache. Those of models with recurrent layers come as [runs, seq], from `runs` sequences equally
    many, so that a recurrence goes along `seq`; each sequence has a row of every state."""

    slots: int  # tokens of the KV cache, all pages together
    requests: int
    adapter_count: int = 0

    def __post_init__(self) -> None:
        g, pages = self.g, -(-self.context // PAGE)
        if self.config.recurrent is not None:
            self.states = g.input("states", ["runs"], "i32")  # the row of each sequence
            self.fresh = g.input("fresh", ["runs"], "i32")  # 1: it begins here, from zeros
        self.rows, self.positions, self.into = map(self._each, ("rows", "positions", "slots"))
        self.table = g.input("table", [self.requests, pages], "i32")
        self.which = self._each("adapters") if self.adapter_count else None

    def _each(self, name: str) -> Tensor:
        """An input with a number for each token."""
        if self.config.recurrent is None:
            return self.g.input(name, ["seq"], "i32")
        return self.g.input(name, ["runs", "seq"], "i32").reshape(self.tokens)

    @property
    def tokens(self) -> Any:
        """How many tokens run."""
        return sym("runs") * sym.SEQ

    def ids(self) -> Tensor:
        """The tokens, [1, tokens]."""
        if self.config.recurrent is None:
            return self.g.input("ids", [1, "seq"], "i32")
        return self._each("ids").reshape(1, self.tokens)

    def by_sequence(self, x: Tensor) -> Tensor:
        return x.reshape(sym("runs"), sym.SEQ, *x.shape.dims[2:])

    def carried(self, name: str, dims: tuple[int, ...]) -> Tensor:
        rows = self._rows_of(name, dims).gather(self.states, axis=0)
        fresh = self.fresh.reshape(sym("runs"), *(1 for _ in dims))
        return self.g.where(fresh != 0, 0.0, rows)

    def carry(self, name: str, state: Tensor, last: Tensor) -> None:
        self.g.state_update(self._rows_of(name, last.shape.dims[1:]), last, self.states, axis=0)

    def carry_written(self, name: str, last: Tensor) -> None:
        self.carry(name, last, last)  # it was given a copy of the rows

    def _rows_of(self, name: str, dims: tuple[int, ...]) -> Tensor:
        if name not in self._values:
            self._values[name] = self.g.state(name, [self.requests, *dims], "f32")
        return self._values[name]

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
