"""What language models are made of: the parts that a page per architecture puts together.

A `Net` is an HIR builder with the model's configuration and weights at hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim, sym
from rlx.models.builder import Parts, Tensor
from rlx.models.config import ModelConfig
from rlx.models.experts import experts_ffn, has_experts
from rlx.models.kv_cache import CacheType
from rlx.models.rope_tables import RopeConfig, rope_tables
from rlx.records import dataclass


@dataclass
class Net(Parts):
    """A language model under construction."""

    config: ModelConfig
    context: int
    kv: CacheType

    # -- weights ------------------------------------------------------------------------------

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm, or layer norm where the file has a bias for it."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        if bias in self.weights:
            return self.g.layer_norm(x, self.param(weight), self.param(bias), eps=self.config.eps)
        if self.config.centred_norms:
            return self.g.layer_norm(x, self.param(weight), eps=self.config.eps)
        return self.g.rms_norm(x, self.gamma(weight), eps=self.config.eps)

    def gamma(self, name: str) -> Tensor:
        offset = self.config.norm_offset
        if not offset:
            return self.param(name)
        stored = self.weights.get(name).array
        return self.param(name, lambda: stored.astype(np.float32) + np.float32(offset))

    # -- parts --------------------------------------------------------------------------------

    def head(self, x: Tensor, last_only: bool) -> Tensor:
        """Logits of the last token alone or of all; by the embedding where there is no head."""
        if last_only:
            seq = x.shape.dims[1]
            x = self.g.hir_mir("narrow", [x], axis=1, start=seq - 1, length=1)
        name = "output.weight" if "output.weight" in self.weights else "token_embd.weight"
        bias = self.param("output.bias") if "output.bias" in self.weights else None
        logits = self.product(x, self.weights.get(name), bias)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_softcap
        if cap:
            logits = self.g.hir_mir("tanh", [logits * (1 / cap)]) * cap
        return logits

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, rope: bool = True) -> Tensor:
        """Rotate, append to the cache, attend to all of it. q, k, v are [1, seq, heads · dim]."""
        c = self.config
        settings = c.local_rope if c.slides(layer) and c.local_rope is not None else c.rope
        if rope:
            names = [f"blk.{layer}.attn_{p}_norm.weight" for p in ("q", "k")]
            q, k = (self._turned(t, n, settings) for t, n in zip((q, k), names, strict=True))
        keys, values = self.cached(k, f"k.{layer}"), self.cached(v, f"v.{layer}")
        name = f"blk.{layer}.attn_sinks.weight"
        sinks = self.param(name) if name in self.weights else None
        return self.scored(q, keys, values, c.sliding_window if c.slides(layer) else 0, sinks)

    def _turned(self, x: Tensor, norm: str, rope: RopeConfig) -> Tensor:
        """Heads turned by their position, after a norm of each or of all together."""
        if norm not in self.weights:
            return self.rotate(x, rope, self.config.head_dim)
        gamma = self.gamma(norm)
        if gamma.shape.dims[0] != self.config.head_dim:
            x = self.g.rms_norm(x, gamma, eps=self.config.eps)
            return self.rotate(x, rope, self.config.head_dim)
        return self.rotate(x, rope, self.config.head_dim, gamma)

    def rotate(
        self, x: Tensor, rope: RopeConfig, head_dim: int, gamma: Tensor | None = None
    ) -> Tensor:
        cos, sin = self._tables(rope)
        options: dict[str, Any] = {"head_dim": head_dim, "n_rot": rope.n_rot}
        options |= {"interleaved": rope.interleaved, **self.place()}
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

    # -- where tokens stand, and the cache of one sequence -----------------------------------------

    def place(self) -> dict[str, Any]:
        """Positions of the tokens, as a rotation takes them."""
        return {"offset": sym.PAST_SEQ}

    def learned(self, table: Tensor, seq: Dim) -> Tensor:
        """Rows of a table of positions for the tokens."""
        return self.g.hir_mir("narrow", [table], axis=0, start=sym.PAST_SEQ, length=seq)

    def cached(self, x: Tensor, name: str) -> Tensor:
        """The state with x written behind what is there: everything up to now."""
        state, rows = self.cache_rows(x, name, self.context)
        return self.g.cache_append(state, rows, start=sym.PAST_SEQ, axis=2)

    def cache_rows(self, x: Tensor, name: str, length: int) -> tuple[Tensor, Tensor]:
        """A state for so many tokens, and x in its form.

        Heads come first, so that what a head reads lies in one piece.
        """
        c, seq, width = self.config, x.shape.dims[1], self.kv.width(self.config.head_dim)
        state = self.g.state(name, [1, c.kv_heads, length, width], self.kv.dtype)
        if self.kv.scheme is not None:
            x = self.g.hir_mir("quantize_blocks", [x], scheme=self.kv.scheme)
        heads = self.g.hir_mir("reshape", [x], dims=(1, seq, c.kv_heads, width))
        return state, self.g.hir_mir("transpose", [heads], perm=(0, 2, 1, 3))

    def scored(
        self, q: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention to the cache, or to its last `window` tokens (0: all)."""
        c = self.config
        mask = MaskKind.SLIDING_WINDOW(window) if window else MaskKind.CAUSAL
        return self.g.attention(
            q, keys, values, sinks=sinks, num_heads=c.heads, num_kv_heads=c.kv_heads,
            head_dim=c.head_dim, mask_kind=mask, scale=c.attention_scale,
            softcap=c.attention_softcap, kv_layout="bhsd", kv_scheme=self.kv.scheme,
        )  # fmt: skip

    # -- layers ------------------------------------------------------------------------------------

    def ffn(self, x: Tensor, layer: int) -> Tensor:
        """Experts where the layer has them, else a gated network."""
        return experts_ffn(self, x, layer) if has_experts(self, layer) else self.gated_ffn(x, layer)

    def gated_ffn(self, x: Tensor, layer: int, activation: str = "silu", part: str = "") -> Tensor:
        """down(act(gate(x)) · up(x))"""
        gate = self.linear(x, f"blk.{layer}.ffn_gate{part}")
        up = self.linear(x, f"blk.{layer}.ffn_up{part}")
        return self.linear(self.g.hir_mir(activation, [gate]) * up, f"blk.{layer}.ffn_down{part}")

    def plain_ffn(self, x: Tensor, layer: int, activation: str) -> Tensor:
        """down(act(up(x)))"""
        up = self.linear(x, f"blk.{layer}.ffn_up", activation)
        return self.linear(up, f"blk.{layer}.ffn_down")

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


__all__ = ["Net", "Tensor"]
