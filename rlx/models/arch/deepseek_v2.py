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
from rlx.models.arch.llama import COMMON, LAYER, embed, finish
from rlx.models.arch.llama import HF_NAMES as _LLAMA
from rlx.models.arch.qwen2_moe import ROUTED
from rlx.models.config import LatentConfig, ModelConfig
from rlx.models.config_fields import PARTIAL, Field, number, only, read, without
from rlx.models.config_hf import HfSettings, only_experts
from rlx.models.decoder_builder import DecoderBuilder, Tensor
from rlx.models.weights import Derived, Names, named


def _key_up(config: ModelConfig, joined: Array) -> Array:
    """[heads, rank, nope_dim]"""
    return _by_head(config, joined)[:, : _latent(config).nope_dim].transpose(0, 2, 1)


def _value_up(config: ModelConfig, joined: Array) -> Array:
    """[heads, value, rank]"""
    return _by_head(config, joined)[:, _latent(config).nope_dim :]


def _by_head(config: ModelConfig, joined: Array) -> Array:
    return joined.reshape(config.heads, -1, joined.shape[1])


_KV_B = f"{LAYER}.self_attn.kv_b_proj.weight"
_KV_B_DIMS = ("heads*latent.nope_dim+heads*latent.value, latent.rank",)
_FFN = ("gate", "up", "down")
_COMPRESSED = {"attn_q_a": "self_attn.q_a_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa"}
HF_NAMES: Names = {
    **{n: s for n, s in _LLAMA.items() if not n.endswith(("_q.bias", "_k.weight", "_v.weight"))},
    **ROUTED,
    **{
        f"blk.{{i}}.ffn_{part}_shexp.{end}": f"{LAYER}.mlp.shared_experts.{part}_proj.{end}"
        for part in _FFN
        for end in ("weight", "bias")
    },
    **named(LAYER, _COMPRESSED),
    "blk.{i}.attn_q_a_norm.weight": f"{LAYER}.self_attn.q_a_layernorm.weight",
    "blk.{i}.attn_q_b.weight": f"{LAYER}.self_attn.q_b_proj.weight",
    "blk.{i}.attn_kv_a_norm.weight": f"{LAYER}.self_attn.kv_a_layernorm.weight",
    "blk.{i}.attn_k_b.weight": Derived((_KV_B,), _key_up, dims=_KV_B_DIMS),
    "blk.{i}.attn_v_b.weight": Derived((_KV_B,), _value_up, dims=_KV_B_DIMS),
}
HF_NAMES = {n: s for n, s in HF_NAMES.items() if not n.endswith(("attn_k.bias", "attn_v.bias"))}
SHAPES = {
    "attn_q": "heads*latent.nope_dim+heads*latent.rope_dim, hidden",
    "attn_q_a": "latent.query_rank, hidden",
    "attn_q_a_norm": "latent.query_rank",
    "attn_q_b": "heads*latent.nope_dim+heads*latent.rope_dim, latent.query_rank",
    "attn_kv_a_mqa": "latent.rank+latent.rope_dim, hidden",
    "attn_kv_a_norm": "latent.rank",
    "attn_output": "hidden, heads*latent.value",
}
GGUF_ONLY = ("blk.{i}.attn_kv_b.weight",)  # what k_b and v_b are made of: some files have both
SWITCHES = {
    "attention_bias": ("attn_q_a.bias", "attn_kv_a_mqa.bias", "attn_output.bias"),
    "mlp_bias": tuple(f"ffn_{part}{kind}.bias" for part in _FFN for kind in ("", "_shexp")),
}
FIELDS = {
    **without(COMMON, "head_dim"),
    **read(
        vocab_size=102400, attention_bias=False, mlp_bias=False, first_k_dense_replace=0,
        kv_lora_rank=512, q_lora_rank=number(1536), qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=Field(64, also=("num_experts",)), n_shared_experts=2,
        num_experts_per_tok=number(), moe_intermediate_size=1407, routed_scaling_factor=1.0,
        topk_method=only("greedy"), norm_topk_prob=only(False), moe_layer_freq=only(1),
        scoring_func=only("softmax"),
    ),
}  # fmt: skip
# groups are of another topk_method; head_dim follows from qk_rope_head_dim
HARMLESS = ("n_group", "topk_group", "head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_*")


def read_config(s: HfSettings) -> ModelConfig:
    heads, rank = s.get("num_attention_heads"), s.get("q_lora_rank")
    same = s.get("num_key_value_heads") in (None, heads)
    s.require("num_key_value_heads", same, "num_attention_heads")
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for name in sizes:
        s.require(name, s.get(name) > 0, "a positive number")
    s.require("n_shared_experts", s.get("n_shared_experts") > 0, "a positive number")
    # transformers gives the norms of compressed vectors its own epsilon
    kv_rank, nope, rope, value = map(s.get, sizes)
    latent = LatentConfig(kv_rank, nope, rope, value, query_rank=rank or 0, eps=1e-6)
    width, layers = s.get("moe_intermediate_size"), s.get("num_hidden_layers")
    experts = s.experts(
        "n_routed_experts", normalize=False, scale=s.get("routed_scaling_factor"), width=width,
        shared_width=width * s.get("n_shared_experts"),
    )  # fmt: skip
    dense = min(s.get("first_k_dense_replace"), layers)
    absent = only_experts(frozenset(range(dense)), layers, HF_NAMES)
    absent |= {"blk.{i}.attn_q.weight"} if rank else {n for n in HF_NAMES if ".attn_q_" in n}
    config = s.decoder(
        "deepseek_v2", SWITCHES, rope=s.rope(latent.rope_dim, types=PARTIAL), latent=latent,
        experts=experts, without=absent,
    )  # fmt: skip
    return configure(config)


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
        scale *= (0.1 * rope.log_factor * math.log(max(rope.factor, 1.0)) + 1) ** 2
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
    latent = net.norm(latent, f"blk.{i}.attn_kv_a_norm", c.eps)
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
        eps = _latent(net.config).eps
        x = net.norm(net.linear(x, f"blk.{i}.attn_q_a"), f"blk.{i}.attn_q_a_norm", eps)
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


__all__ = ["FIELDS", "HF_NAMES", "configure", "embed", "finish", "layer", "read_config"]
