"""Attention over several heads with a KV cache, and the layers of a transformer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

import rlx.numpy as rnp
from rlx import random
from rlx.errors import AttributeValueError, OptionError
from rlx.ir.dtype import i32
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.nn import functional as F
from rlx.nn import init
from rlx.nn.dense import Dropout, Linear
from rlx.nn.functional.operands import ArrayLike, call, require_rank
from rlx.nn.module import Module, Unset
from rlx.nn.normalization import LayerNorm
from rlx.numpy.array import Array
from rlx.numpy.dispatch import as_array


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, [batch, kv_heads, capacity, head_dim] each, and their
    number. A call returns a new one; a jitted function that donates it writes in place."""

    keys: Array
    values: Array
    length: Array


class MultiHeadAttention(Module):
    """Attention of x [batch, length, embed_dim] to itself or to other tokens.

    Parameters are named as those of PyTorch's `MultiheadAttention` with `batch_first`; with fewer
    `num_kv_heads` than heads, groups of heads share keys and values. `causal` hides later tokens,
    `rope_base` rotates queries and keys by their positions. Returns the attended tokens, and with a
    cache the new cache too.
    """

    in_proj_bias: Array | None

    def __init__(
        self, embed_dim: int, num_heads: int, bias: bool = True, *,
        num_kv_heads: int | None = None, causal: bool = False, rope_base: float | None = None,
        key: Array | None = None, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if embed_dim % num_heads or num_heads % kv_heads:
            raise AttributeValueError(
                "heads do not divide", where="MultiHeadAttention",
                got=f"{embed_dim} dims, {num_heads} heads, {kv_heads} key heads",
            )  # fmt: skip
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim, self.causal, self.rope_base = embed_dim // num_heads, causal, rope_base
        rows = (num_heads + 2 * kv_heads) * self.head_dim
        shape, element = (rows, embed_dim), rnp.asarray([0.0], dtype=dtype).dtype
        self.in_proj_weight: Any = Unset(shape, element)
        if key is not None:
            self.in_proj_weight = init.xavier_uniform(random.fold_in(key, 0), shape, dtype=dtype)
        self.in_proj_bias = rnp.zeros((rows,), dtype=dtype) if bias else None
        own = None if key is None else random.fold_in(key, 1)
        self.out_proj = Linear(embed_dim, embed_dim, bias, key=own, dtype=dtype)
        if bias and key is not None:
            self.out_proj.bias = rnp.zeros((embed_dim,), dtype=dtype)

    def make_cache(self, batch: int, capacity: int, dtype: Any = rnp.float32) -> KVCache:
        """An empty cache for `capacity` tokens."""
        shape = (batch, self.num_kv_heads, capacity, self.head_dim)
        zero = as_array(np.zeros((), np.int32))
        return KVCache(rnp.zeros(shape, dtype=dtype), rnp.zeros(shape, dtype=dtype), zero)

    def __call__(
        self, query: ArrayLike, key: ArrayLike | None = None, value: ArrayLike | None = None, *,
        mask: ArrayLike | None = None,
    ) -> Array:  # fmt: skip
        """`query` attends to itself, or to `key` and `value` [batch, length, embed_dim]."""
        q, k, v = self._projected(query, key, value)
        if self.rope_base is not None:
            q, k = (self._rotated(t, t.shape[2], None) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self._joined(y)

    def step(self, x: ArrayLike, cache: KVCache) -> tuple[Array, KVCache]:
        """The next tokens x [batch, length, embed_dim] attend to the cached ones and to themselves,
        up to each. Returns the attended tokens and the new cache."""
        if not self.causal:
            raise OptionError("a cache is for causal attention", where="MultiHeadAttention.step")
        q, k, v = self._projected(x, None, None)
        if self.rope_base is not None:
            at = call(_positions, [q, cache.length])
            capacity = cache.keys.shape[2]
            q, k = (self._rotated(t, capacity, at) for t in (q, k))
        keys = F.update_cache(cache.keys, k, cache.length)
        values = F.update_cache(cache.values, v, cache.length)
        mask = F.cache_mask(q, keys, cache.length)
        y = F.scaled_dot_product_attention(q, keys, values, mask)
        return self._joined(y), KVCache(keys, values, call(_longer, [cache.length, q]))

    def _projected(
        self, query: ArrayLike, key: ArrayLike | None, value: ArrayLike | None
    ) -> tuple[Array, Array, Array]:
        x = require_rank(query, (3,), "MultiHeadAttention", "[batch, length, embed_dim]")
        q_rows = self.num_heads * self.head_dim
        kv_rows = self.num_kv_heads * self.head_dim
        cuts = (0, q_rows, q_rows + kv_rows, q_rows + 2 * kv_rows)
        if key is None and value is None:
            joined = F.linear(x, self.in_proj_weight, self.in_proj_bias)
            parts = [joined[..., a:b] for a, b in pairwise(cuts)]
        else:
            other = x if key is None else as_array(key)
            tokens = (x, other, other if value is None else as_array(value))
            parts = []
            for t, (a, b) in zip(tokens, pairwise(cuts), strict=True):
                bias = None if self.in_proj_bias is None else self.in_proj_bias[a:b]
                parts.append(F.linear(t, self.in_proj_weight[a:b], bias))
        q, k, v = (self._split(p) for p in parts)
        return q, k, v

    def _split(self, x: Array) -> Array:
        """[batch, length, heads · D] as [batch, heads, length, D]."""
        rows = rnp.reshape(x, (x.shape[0], x.shape[1], -1, self.head_dim))
        return rnp.permute_dims(rows, (0, 2, 1, 3))

    def _joined(self, y: Array) -> Array:
        rows = rnp.permute_dims(y, (0, 2, 1, 3))
        return self.out_proj(rnp.reshape(rows, (rows.shape[0], rows.shape[1], self.embed_dim)))

    def _rotated(self, x: Array, length: int, positions: Array | None) -> Array:
        assert self.rope_base is not None
        cos, sin = F.rope_tables(length, self.head_dim, self.rope_base)
        return F.rope(x, cos, sin, positions)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"


def _positions(g: Graph, q: Value, length: Value) -> Any:
    """Positions of the tokens of q [B, heads, L, D] behind those so far."""
    return g.add(g.iota((q.shape.dims[2],), dtype=i32), g.cast(length, i32))


def _longer(g: Graph, length: Value, q: Value) -> Any:
    return g.add(length, g.dim_value(q.shape.dims[2], dtype=length.shape.dtype))


class TransformerEncoderLayer(Module):
    """Self-attention and a feed-forward network with norms and residuals, PyTorch's parameters."""

    causal = False

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: str = "relu", layer_norm_eps: float = 1e-5, norm_first: bool = False,
        bias: bool = True, *, key: Array | None = None, dtype: Any = rnp.float32,
    ) -> None:  # fmt: skip
        if activation not in ("relu", "gelu", "silu"):
            raise OptionError("no such activation", where="TransformerEncoderLayer", got=activation)
        keys = _keys(key, 4)
        self.activation, self.norm_first = activation, norm_first
        self.self_attn = MultiHeadAttention(
            d_model, nhead, bias, causal=self.causal, key=keys[0], dtype=dtype
        )
        self._more_attention(d_model, nhead, bias, keys[3], dtype)
        self.linear1 = Linear(d_model, dim_feedforward, bias, key=keys[1], dtype=dtype)
        self.linear2 = Linear(dim_feedforward, d_model, bias, key=keys[2], dtype=dtype)
        for name in self._norms():
            setattr(self, name, LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype))
        self.drop = Dropout(dropout)

    def _more_attention(
        self, d_model: int, nhead: int, bias: bool, key: Array | None, dtype: Any
    ) -> None:
        """The attention to other tokens, of a decoder."""

    def _norms(self) -> tuple[str, ...]:
        return ("norm1", "norm2")

    def __call__(
        self, x: ArrayLike, mask: ArrayLike | None = None, *, key: Array | None = None
    ) -> Array:
        keys = _keys(key, 3)
        y = self._residual(as_array(x), "norm1", lambda t: self.self_attn(t, mask=mask), keys[0])
        return self._residual(y, "norm2", lambda t: self._feed_forward(t, keys[2]), keys[1])

    def _feed_forward(self, x: Array, key: Array | None) -> Array:
        hidden = getattr(F, self.activation)(self.linear1(x))
        return self.linear2(self.drop(hidden, key=key))

    def _residual(self, x: Array, norm: str, layer: Any, key: Array | None) -> Array:
        """x + layer(norm(x)), or norm(x + layer(x))."""
        normed = getattr(self, norm)
        if self.norm_first:
            return rnp.add(x, self.drop(layer(normed(x)), key=key))
        made: Array = normed(rnp.add(x, self.drop(layer(x), key=key)))
        return made


class TransformerDecoderLayer(TransformerEncoderLayer):
    """Causal self-attention, attention to a memory, and a feed-forward network, PyTorch's
    parameters."""

    causal = True

    def _more_attention(
        self, d_model: int, nhead: int, bias: bool, key: Array | None, dtype: Any
    ) -> None:
        self.multihead_attn = MultiHeadAttention(d_model, nhead, bias, key=key, dtype=dtype)

    def _norms(self) -> tuple[str, ...]:
        return ("norm1", "norm2", "norm3")

    def __call__(  # type: ignore[override]
        self, x: ArrayLike, memory: ArrayLike, mask: ArrayLike | None = None,
        memory_mask: ArrayLike | None = None, *, key: Array | None = None,
    ) -> Array:  # fmt: skip
        keys = _keys(key, 4)
        y = self._residual(as_array(x), "norm1", lambda t: self.self_attn(t, mask=mask), keys[0])
        y = self._residual(
            y, "norm2", lambda t: self.multihead_attn(t, memory, memory, mask=memory_mask), keys[1]
        )
        return self._residual(y, "norm3", lambda t: self._feed_forward(t, keys[3]), keys[2])


def _keys(key: Array | None, count: int) -> list[Array | None]:
    return [None] * count if key is None else [random.fold_in(key, i) for i in range(count)]
