"""The builder of language models: the blocks that the pages of architectures are made of.

Of a mixture of experts only the chosen ones are read: a grouped matmul multiplies rows of tokens
with the weights of their own expert, [experts, out, in], float or quantised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.ir.attrs import MaskKind
from rlx.ir.dim import Dim, sym
from rlx.ir.module import GraphModule
from rlx.models.builder import (
    EntryPoint,
    InputSums,
    ModelBuilder,
    Tensor,
    activate,
    sample,
    sample_each,
)
from rlx.models.config import KVCacheType
from rlx.models.rope_tables import LONG_ROPE, RopeConfig, rope_tables
from rlx.support.records import dataclass

if TYPE_CHECKING:
    from rlx.models.adapters import AdapterShape
    from rlx.models.model_file import ModelFile
    from rlx.models.weights import Weights


@dataclass
class DecoderBuilder(ModelBuilder):
    """Builds a language model that runs one sequence."""

    context: int
    kv: KVCacheType

    # -- norms and the head -------------------------------------------------------------------

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        """RMS norm, or layer norm where the file has a bias for it."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        eps = self.config.eps if eps is None else eps
        if bias in self.weights:
            return self.g.layer_norm(x, self.param(weight), self.param(bias), eps=eps)
        if self.config.centred_norms:
            return self.g.layer_norm(x, self.param(weight), eps=eps)
        return self.g.rms_norm(x, self.gamma(weight), eps=eps)

    def gamma(self, name: str) -> Tensor:
        offset = self.config.norm_offset
        if not offset:
            return self.param(name)
        stored = self.weights.get(name).array
        return self.param(name, lambda: stored.astype(np.float32) + np.float32(offset))

    @property
    def head_weight(self) -> str:
        """Tied to the embedding where there is no head."""
        return "output.weight" if "output.weight" in self.weights else "token_embd.weight"

    def head(self, x: Tensor, last_only: bool) -> Tensor:
        """Logits of all tokens, or of the last."""
        if last_only:
            seq = x.shape.dims[1]
            x = x.narrow(axis=1, start=seq - 1, length=1)
        bias = self.param("output.bias") if "output.bias" in self.weights else None
        logits = self.matmul(x, self.weights.get(self.head_weight), bias)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_softcap
        if cap:
            logits = self.g.tanh(logits * (1 / cap)) * cap
        return logits

    # -- attention ----------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, rope: bool = True) -> Tensor:
        """Rotate, append to the KV cache, attend to it. q, k, v are [1, seq, heads · dim]."""
        c = self.config
        settings = c.local_rope if c.slides(layer) and c.local_rope is not None else c.rope
        if rope:
            q = self._rotated(q, f"blk.{layer}.attn_q_norm.weight", settings)
            k = self._rotated(k, f"blk.{layer}.attn_k_norm.weight", settings)
        keys, values = self.append_to_cache(k, f"k.{layer}"), self.append_to_cache(v, f"v.{layer}")
        name = f"blk.{layer}.attn_sinks.weight"
        sinks = self.param(name) if name in self.weights else None
        return self.attend_to_cache(
            q, keys, values, c.sliding_window if c.slides(layer) else 0, sinks
        )

    def _rotated(self, x: Tensor, norm: str, rope: RopeConfig) -> Tensor:
        """Rotary embedding after QK norm, of each head or of all together, where there is one."""
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
        options |= {"interleaved": rope.interleaved, **self.position_args(x.shape.dims[1])}
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

    # -- positions and the KV cache: those of one sequence ------------------------------------

    def position_args(self, seq: Dim) -> dict[str, Any]:
        """Where `rope` takes the positions of the tokens from."""
        if not self.config.rope.switches_at(self.context):
            return {"offset": sym.PAST_SEQ}
        if LONG_ROPE not in self._values:
            at = self.g.iota((seq,)) + self.g.dim_value(dim=sym.PAST_SEQ)
            is_long = self.g.state(LONG_ROPE, [1], "i32")
            self._values[LONG_ROPE] = at + is_long * self.context  # rows with long factors
        return {"positions": self._values[LONG_ROPE]}

    def position_rows(self, table: Tensor, seq: Dim) -> Tensor:
        """Rows of a learned position table for the tokens."""
        return table.narrow(axis=0, start=sym.PAST_SEQ, length=seq)

    def append_to_cache(self, x: Tensor, name: str) -> Tensor:
        """Append x to a KV cache; all tokens up to now."""
        state, rows = self.cache_rows(x, name, self.context)
        return self.g.cache_append(state, rows, start=sym.PAST_SEQ, axis=2)

    def cache_rows(self, x: Tensor, name: str, length: int) -> tuple[Tensor, Tensor]:
        """The state of a KV cache for `length` tokens, and x in its layout.

        Heads come first, so that what a head reads is contiguous.
        """
        c, seq, width = self.config, x.shape.dims[1], self.kv.width(self.config.head_dim)
        state = self.g.state(name, [1, c.kv_heads, length, width], self.kv.dtype)
        if self.kv.scheme is not None:
            x = self.g.quantize_blocks(x, scheme=self.kv.scheme)
        heads = x.reshape(1, seq, c.kv_heads, width)
        return state, heads.transpose(0, 2, 1, 3)

    # -- recurrent states: those of one sequence ----------------------------------------------

    def carried(self, name: str, dims: tuple[int, ...]) -> Tensor:
        """A recurrent state before the tokens of a run, [sequences, *dims]."""
        return self.g.state(name, [1, *dims], "f32")

    def carry(self, name: str, state: Tensor, last: Tensor) -> None:
        """Set the state for the next run."""
        self.g.state_update(state, last)

    def carry_written(self, name: str, last: Tensor) -> None:
        """The same, where the op that reads a state has written it."""

    def by_sequence(self, x: Tensor) -> Tensor:
        """Tokens x [1, tokens, …] as [sequences, tokens of each, …]."""
        return x

    def attend_to_cache(
        self, q: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend to the KV cache, or to its last `window` tokens (0: all)."""
        c = self.config
        mask = MaskKind.SLIDING_WINDOW(window) if window else MaskKind.CAUSAL
        return self.g.attention(
            q, keys, values, sinks=sinks, num_heads=c.heads, num_kv_heads=c.kv_heads,
            head_dim=c.head_dim, mask_kind=mask, scale=c.attention_scale,
            softcap=c.attention_softcap, kv_layout="bhsd", kv_scheme=self.kv.scheme,
        )  # fmt: skip

    # -- layers -------------------------------------------------------------------------------

    def ffn(self, x: Tensor, layer: int) -> Tensor:
        """Mixture of experts where the layer has a router, else a gated FFN."""
        return experts_ffn(self, x, layer) if has_experts(self, layer) else self.gated_ffn(x, layer)

    def gated_ffn(self, x: Tensor, layer: int, part: str = "") -> Tensor:
        """down(act(gate(x)) · up(x))"""
        gate = self.linear(x, f"blk.{layer}.ffn_gate{part}")
        up = self.linear(x, f"blk.{layer}.ffn_up{part}")
        gate = activate(self.g, self.config.activation, gate)
        return self.linear(gate * up, f"blk.{layer}.ffn_down{part}")

    def plain_ffn(self, x: Tensor, layer: int) -> Tensor:
        """down(act(up(x)))"""
        up = self.linear(x, f"blk.{layer}.ffn_up", self.config.activation)
        return self.linear(up, f"blk.{layer}.ffn_down")

    def qkv(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.linear(x, f"blk.{layer}.attn_{p}") for p in ("q", "k", "v"))
        return q, k, v

    def split_qkv(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of one joined weight."""
        c = self.config
        joined = self.linear(x, f"blk.{layer}.attn_qkv")
        widths = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        q, k, v = self.split(joined, widths)
        return q, k, v


def build_decoder(
    g: GraphModule, model: ModelFile, weights: Weights, entry_point: EntryPoint, context: int,
    kv: str, adapters: AdapterShape | None,
) -> tuple[DecoderBuilder, dict[str, Tensor]]:  # fmt: skip
    """A language model with the outputs of an entry point."""
    cache = KVCacheType.of(kv, model.config.head_dim)
    ids, output = g.input("ids", [1, "seq"], "i32"), entry_point.output
    squares = InputSums() if output == "squares" else None
    net = DecoderBuilder(g, model.config, weights, context, cache, lora=adapters, squares=squares)
    x = net.layers(model.arch, model.arch.embed(net, ids))
    if output == "hidden":
        return net, {"hidden": net.as_f32(x)}
    if squares is not None:
        squares.observe(x, net.head_weight)
        return net, squares.outputs
    logits = net.head(x, last_only=output == "sample")
    if output == "logits":
        return net, {"logits": logits}
    if output == "verify":
        return net, sample_each(g, logits, entry_point.tokens)
    row = logits.reshape(1, model.config.vocab)
    return net, {**sample(g, row, entry_point), "logits": logits}


__all__ = [
    "DecoderBuilder",
    "Tensor",
    "build_decoder",
    "experts_ffn",
    "has_experts",
    "plain_gate",
]

Gate = Callable[[DecoderBuilder, Tensor, Tensor], Tensor]  # gate and up → the input of down


def plain_gate(net: DecoderBuilder, gate: Tensor, up: Tensor) -> Tensor:
    return activate(net.g, net.config.activation, gate) * up


def has_experts(net: DecoderBuilder, layer: int) -> bool:
    """Whether a layer has a router; the first layers of some models have none."""
    return f"blk.{layer}.ffn_gate_inp.weight" in net.weights


def experts_ffn(net: DecoderBuilder, x: Tensor, layer: int, gate: Gate = plain_gate) -> Tensor:
    """The weighted sum of the chosen experts, plus the shared expert where there is one."""
    g, blk = net.g, f"blk.{layer}"
    _, tokens, width = x.shape.dims
    scores, chosen = _route(net, x, layer)
    active = chosen.shape.dims[1]
    slots = tokens * active
    rows = x.reshape(tokens, 1, width)
    rows = rows.expand(tokens, active, width)
    rows = rows.reshape(slots, width)
    expert = chosen.reshape(slots)
    gated, up = (net.grouped(rows, f"{blk}.ffn_{p}_exps", expert) for p in ("gate", "up"))
    y = net.grouped(gate(net, gated, up), f"{blk}.ffn_down_exps", expert)
    y = y.reshape(tokens, active, width)
    y = g.sum(y * scores.reshape(tokens, active, 1), axis=1)
    y = y.reshape(x.shape.dims)
    return y if f"{blk}.ffn_up_shexp.weight" not in net.weights else y + _shared(net, x, layer)


def _route(net: DecoderBuilder, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """(scores, expert indices), both [tokens, active].

    A softmax over the chosen experts alone equals a normalised softmax over all.
    """
    settings = net.config.experts
    assert settings is not None
    logits = net.linear(x, f"blk.{layer}.ffn_gate_inp")
    logits = logits.reshape(x.shape.dims[1], settings.count)
    every = logits.softmax()
    scores, chosen = every.top_k(k=settings.active)
    if settings.normalize:
        scores = scores / scores.sum(axis=1, keepdims=True)
    return scores if settings.scale == 1.0 else scores * settings.scale, chosen


def _shared(net: DecoderBuilder, x: Tensor, layer: int) -> Tensor:
    """The shared expert, gated where the file has a gate for it."""
    y = net.gated_ffn(x, layer, part="_shexp")
    name = f"blk.{layer}.ffn_gate_inp_shexp.weight"
    if name not in net.weights:
        return y
    gate = net.param(name).reshape(x.shape.dims[2], 1)
    return y * net.g.sigmoid(x @ gate)
