"""A language model for tokens of many sequences in one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlx.ir.dim import Dim
from rlx.ir.module import GraphModule
from rlx.models.blocks import Net, Tensor
from rlx.models.build import Described, ModelFile, body
from rlx.models.kv import CacheType
from rlx.models.weights import Weights

PAGE = 64  # tokens


@dataclass
class BatchNet(Net):
    """Tokens come flat, [1, tokens], each with its sequence, its place in it, and the slot of the
    cache that is its own."""

    slots: int  # of the cache, all pages together
    requests: int

    def __post_init__(self) -> None:
        g, pages = self.g, -(-self.context // PAGE)
        self.rows = g.input("rows", ["seq"], "i32")
        self.positions = g.input("positions", ["seq"], "i32")
        self.into = g.input("slots", ["seq"], "i32")
        self.table = g.input("table", [self.requests, pages], "i32")

    def place(self) -> dict[str, Any]:
        return {"positions": self.positions}

    def learned(self, table: Tensor, seq: Dim) -> Tensor:
        return self.g.hir_mir("gather", [table, self.positions], axis=0)

    def cached(self, x: Tensor, name: str) -> Tensor:
        state, rows = self.cache_rows(x, name, self.slots)
        if rows.shape.dtype is not self.kv.dtype:
            rows = self.g.hir_mir("cast", [rows], dtype=self.kv.dtype)
        return self.g.hir_mir("state_update", [state, rows, self.into], axis=2)

    def scored(
        self, q: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Tensor | None = None
    ) -> Tensor:
        c = self.config
        operands = [q, keys, values, self.table, self.rows, self.positions]
        operands += [] if sinks is None else [sinks]
        return self.g.hir_mir(
            "paged_attention", operands, num_heads=c.heads, num_kv_heads=c.kv_heads,
            head_dim=c.head_dim, page=PAGE, window=window, scale=c.attention_scale,
            softcap=c.attention_softcap,
        )  # fmt: skip


def describe_batch(
    model: ModelFile, weights: Weights, context: int, kv: CacheType, slots: int, requests: int
) -> Described:
    """The model for tokens of up to so many sequences: logits of the tokens that are picked."""
    nets: list[BatchNet] = []

    def build(g: GraphModule) -> dict[str, Tensor]:
        ids = g.input("ids", [1, "seq"], "i32")
        net = BatchNet(g, model.config, weights, context, kv, slots, requests)
        nets.append(net)
        x = body(net, model, ids)
        picked = g.hir_mir("gather", [x, g.input("picked", ["picked"], "i32")], axis=1)
        return {"logits": net.head(picked, last_only=False)}

    module = GraphModule.define(model.config.arch, build)
    return Described(module, nets[0].params)
