"""DeepSeek-V2: multi-head latent attention (MLA), mixture of experts.

The KV cache has one head: the compressed vector and the rotary part of the key, which all heads
share. The up-projections of keys and values are absorbed: applied to queries and to attention's
output instead, head h with weight h, as a grouped matmul.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlx.errors import FormatError
from rlx.ir.op import Array
from rlx.models.arch.llama import embed, finish
from rlx.models.arch.qwen2_moe import HF_NAMES as _QWEN
from rlx.models.config import LatentConfig, ModelConfig
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.weights import Derived

_LAYER = "model.layers.{i}"


def _key_up(config: ModelConfig, joined: Array) -> Array:
    """[heads, rank, nope_dim]"""
    return _by_head(config, joined)[:, : _latent(config).nope_dim].transpose(0, 2, 1)


def _value_up(config: ModelConfig, joined: Array) -> Array:
    """[heads, value, rank]"""
    return _by_head(config, joined)[:, _latent(config).nope_dim :]


def _by_head(config: ModelConfig, joined: Array) -> Array:
    return joined.reshape(config.heads, -1, joined.shape[1])


_JOINED = (f"{_LAYER}.self_attn.kv_b_proj.weight",)
HF_NAMES = {
    **_QWEN,
    **{
        f"blk.{{i}}.ffn_{part}_shexp.weight": f"{_LAYER}.mlp.shared_experts.{part}_proj.weight"
        for part in ("gate", "up", "down")
    },
    **{
        f"blk.{{i}}.attn_{ours}.weight": f"{_LAYER}.self_attn.{theirs}.weight"
        for ours, theirs in {
            "q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj",
            "kv_a_mqa": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm",
        }.items()
    },
    "blk.{i}.attn_k_b.weight": Derived(_JOINED, _key_up),
    "blk.{i}.attn_v_b.weight": Derived(_JOINED, _value_up),
}  # fmt: skip


def _latent(config: ModelConfig) -> LatentConfig:
    if config.latent is None:
        raise FormatError(
            "no rank of the compressed keys and values", where=config.arch, expected="kv_lora_rank"
        )
    return config.latent


def configure(config: ModelConfig) -> ModelConfig:
    c, rope = _latent(config), config.rope
    scale = (c.nope_dim + c.rope_dim) ** -0.5
    if rope.scaling != "none" and rope.log_factor:
        scale *= (0.1 * rope.log_factor * math.log(rope.factor) + 1) ** 2
    # angles are not scaled, unless the file says so
    factor = rope.attention_factor or float(bool(rope.log_factor))
    rope = replace(rope, interleaved=True, n_rot=c.rope_dim, attention_factor=factor)
    return replace(
        config, rope=rope, kv_heads=1, head_dim=c.rank + c.rope_dim, attention_scale=scale
    )


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    x = x + _attention(net, net.norm(x, f"blk.{i}.attn_norm"), i)
    return x + net.ffn(net.norm(x, f"blk.{i}.ffn_norm"), i)


def _attention(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    c, heads, g = _latent(net.config), net.config.heads, net.g
    seq = x.shape.dims[1]
    nope, rope = net.split(_queries(net, x, i, (1, seq, heads, -1)), [c.nope_dim, c.rope_dim])
    rope = net.rotate(rope, net.config.rope, c.rope_dim)
    latent, key = net.split(net.linear(x, f"blk.{i}.attn_kv_a_mqa"), [c.rank, c.rope_dim])
    key = net.rotate(key, net.config.rope, c.rope_dim)
    latent = net.norm(latent, f"blk.{i}.attn_kv_a_norm")
    q = g.concat([_each_head(net, nope, f"blk.{i}.attn_k_b"), rope], axis=3)
    kept = net.append_to_cache(g.concat([latent, key], axis=2), f"k.{i}")
    q = q.reshape(1, seq, heads * net.config.head_dim)
    y = net.attend_to_cache(q, kept, kept, window=0)
    y = y.reshape(1, seq, heads, net.config.head_dim)
    y, _ = net.split(y, [c.rank, c.rope_dim])
    y = _each_head(net, y, f"blk.{i}.attn_v_b")
    y = y.reshape(1, seq, heads * c.value)
    return net.linear(y, f"blk.{i}.attn_output")


def _queries(net: DecoderBuilder, x: Tensor, i: int, dims: tuple[object, ...]) -> Tensor:
    if f"blk.{i}.attn_q_a.weight" in net.weights:
        x = net.norm(net.linear(x, f"blk.{i}.attn_q_a"), f"blk.{i}.attn_q_a_norm")
        return net.linear(x, f"blk.{i}.attn_q_b").reshape(dims)
    return net.linear(x, f"blk.{i}.attn_q").reshape(dims)


def _each_head(net: DecoderBuilder, x: Tensor, name: str) -> Tensor:
    """[1, seq, heads, in] -> [1, seq, heads, out], each head by its own weight."""
    g, (_, seq, heads, width) = net.g, x.shape.dims
    number = g.iota((1, heads), axis=1)
    number = number.expand(seq, heads)
    head = number.reshape(seq * heads)
    rows = net.grouped(x.reshape(seq * heads, width), name, head)
    return rows.reshape(1, seq, heads, rows.shape.dims[1])


__all__ = ["HF_NAMES", "configure", "embed", "finish", "layer"]
