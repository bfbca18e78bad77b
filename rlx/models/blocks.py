"""What models are made of: the parts that a page per architecture puts together.

A `Net` is an HIR builder with the model's configuration and weights at hand. Quantisation belongs
to the weight: `net.linear(x, name)` is a plain or a dequantising product, as the file says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim, sym
from rlx.ir.module import GraphModule
from rlx.ir.op import Array
from rlx.models.config import ModelConfig, RopeConfig
from rlx.models.rope_tables import rope_tables
from rlx.models.weights import Weight, Weights

Tensor = Any  # a value of the module


@dataclass
class Net:
    """A model under construction; `params` collects what its parameters are bound to."""

    g: GraphModule
    config: ModelConfig
    weights: Weights
    context: int
    kv_dtype: str = "f16"
    params: dict[str, Array] = field(default_factory=dict)
    _values: dict[str, Tensor] = field(default_factory=dict)

    # -- weights ------------------------------------------------------------------------------

    def param(self, name: str, make: Callable[[], Array] | None = None) -> Tensor:
        """A parameter of the graph: from the file, or computed by `make`."""
        if name not in self._values:
            array = make() if make is not None else self.weights.get(name).array
            self.params[name] = array
            self._values[name] = self.g.param(name, list(array.shape), array.dtype)
        return self._values[name]

    def linear(self, x: Tensor, name: str, activation: str | None = None) -> Tensor:
        """x · Wᵀ (+ bias), W as the file has it: [out, in], plain or packed."""
        weight = self.weights.get(f"{name}.weight")
        bias = self.param(f"{name}.bias") if f"{name}.bias" in self.weights else None
        return self.product(x, weight, bias, activation)

    def product(
        self, x: Tensor, weight: Weight, bias: Tensor = None, activation: str | None = None
    ) -> Tensor:
        w = self.param(weight.name)
        if weight.scheme is None:
            return self.g.linear(x, w, bias, activation=activation, transposed=True)
        y = self.g.dequant_matmul(x, w, scheme=weight.scheme)
        y = y if bias is None else y + bias
        return y if activation is None else self.g.hir_mir(activation, [y])

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm, or layer norm where the file has a bias for it."""
        weight = f"{name}.weight"
        if f"{name}.bias" in self.weights:
            return self.g.layer_norm(
                x, self.param(weight), self.param(f"{name}.bias"), eps=self.config.eps
            )
        return self.g.rms_norm(x, self.gamma(weight), eps=self.config.eps)

    def gamma(self, name: str) -> Tensor:
        offset = self.config.norm_offset
        if not offset:
            return self.param(name)
        stored = self.weights.get(name).array
        return self.param(name, lambda: stored.astype(np.float32) + np.float32(offset))

    # -- parts --------------------------------------------------------------------------------

    def embed(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Rows of the token table, as f32."""
        weight = self.weights.get("token_embd.weight")
        table = self.param("token_embd.weight")
        if weight.scheme is not None:
            x = self.g.hir_mir("dequant_gather", [table, ids], scheme=weight.scheme)
            return x if scale == 1.0 else x * scale
        x = self.g.embedding(ids, table)
        x = x if x.shape.dtype.name == "f32" else self.g.hir_mir("cast", [x], dtype="f32")
        return x if scale == 1.0 else x * scale

    def head(self, x: Tensor, last_only: bool) -> Tensor:
        """Logits of the last token alone or of all; by the embedding where there is no head."""
        if last_only:
            seq = x.shape.dims[1]
            x = self.g.hir_mir("narrow", [x], axis=1, start=seq - 1, length=1)
        name = "output.weight" if "output.weight" in self.weights else "token_embd.weight"
        logits = self.product(x, self.weights.get(name))
        cap = self.config.final_softcap
        if cap:
            logits = self.g.hir_mir("tanh", [logits * (1 / cap)]) * cap
        return logits

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, rope: bool = True) -> Tensor:
        """Rotate, append to the cache, attend to all of it. q, k, v are [1, seq, heads · dim]."""
        c, past = self.config, sym.PAST_SEQ
        settings = c.local_rope if c.slides(layer) and c.local_rope is not None else c.rope
        names = [f"blk.{layer}.attn_{p}_norm.weight" for p in ("q", "k")]
        gammas = [self.gamma(n) if n in self.weights else None for n in names]
        if rope:
            q, k = (self._rotate(t, w, settings, past) for t, w in zip((q, k), gammas, strict=True))
        keys = self._cached(k, f"k.{layer}", past)
        values = self._cached(v, f"v.{layer}", past)
        window = c.slides(layer)
        mask = MaskKind.SLIDING_WINDOW(c.sliding_window) if window else MaskKind.CAUSAL
        return self.g.attention(
            q, keys, values, num_heads=c.heads, num_kv_heads=c.kv_heads, head_dim=c.head_dim,
            mask_kind=mask, scale=c.attention_scale, softcap=c.attention_softcap,
        )  # fmt: skip

    def _rotate(self, x: Tensor, gamma: Tensor, rope: RopeConfig, past: Dim) -> Tensor:
        cos, sin = self._tables(rope)
        options: dict[str, Any] = {"head_dim": self.config.head_dim, "n_rot": rope.n_rot}
        options |= {"interleaved": rope.interleaved, "offset": past}
        if gamma is not None:
            return self.g.qk_norm_rope(x, gamma, cos, sin, eps=self.config.eps, **options)
        return self.g.rope(x, cos, sin, **options)

    def _tables(self, rope: RopeConfig) -> tuple[Tensor, Tensor]:
        kind = "local" if rope is self.config.local_rope else "rope"
        if f"{kind}.cos" not in self._values:
            factors = self.weights.find("rope_freqs.weight") if kind == "rope" else None
            array = None if factors is None else factors.array
            cos, sin = rope_tables(rope, self.config.head_dim, self.context, array)
            self.param(f"{kind}.cos", lambda: cos)
            self.param(f"{kind}.sin", lambda: sin)
        return self._values[f"{kind}.cos"], self._values[f"{kind}.sin"]

    def _cached(self, x: Tensor, name: str, past: Dim) -> Tensor:
        """The state with x written behind what is there: everything up to now."""
        c = self.config
        state = self.g.state(name, [1, self.context, c.kv_heads * c.head_dim], self.kv_dtype)
        return self.g.cache_append(state, x, start=past, axis=1)

    def gated_ffn(self, x: Tensor, layer: int, activation: str = "silu") -> Tensor:
        """down(act(gate(x)) · up(x))"""
        gate = self.linear(x, f"blk.{layer}.ffn_gate")
        up = self.linear(x, f"blk.{layer}.ffn_up")
        return self.linear(self.g.hir_mir(activation, [gate]) * up, f"blk.{layer}.ffn_down")

    def qkv(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.linear(x, f"blk.{layer}.attn_{p}") for p in ("q", "k", "v"))
        return q, k, v

    def split_qkv(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same from one joined weight."""
        c = self.config
        joined = self.linear(x, f"blk.{layer}.attn_qkv")
        widths = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        q, k, v = self.split(joined, widths)
        return q, k, v

    def split(self, x: Tensor, widths: list[int]) -> list[Tensor]:
        parts, start = [], 0
        for width in widths:
            parts.append(self.g.hir_mir("narrow", [x], axis=2, start=start, length=width))
            start += width
        return parts
