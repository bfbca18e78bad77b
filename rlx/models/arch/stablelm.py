"""StableLM: Llama with layer norms and partial rotary positions.

Larger ones have attention and FFN in parallel, after one norm.
"""

from __future__ import annotations

from rlx.models.arch.llama import COMMON, PLAIN, embed, finish
from rlx.models.arch.llama import layer as _sequential_layer
from rlx.models.arch.qwen2 import QKV_BIASES
from rlx.models.arch.starcoder2 import NORM_BIASES
from rlx.models.config import ModelConfig
from rlx.models.config_fields import PARTIAL, number, only, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor

HF_NAMES = {**PLAIN, **QKV_BIASES, **NORM_BIASES}
SWITCHES = {"use_qkv_bias": tuple(ours.removeprefix("blk.{i}.") for ours in QKV_BIASES)}
FIELDS = {
    **without(COMMON, "rms_norm_eps"),
    **read(
        vocab_size=50304, intermediate_size=6912, hidden_size=2560, num_key_value_heads=number(32),
        max_position_embeddings=4096, layer_norm_eps=1e-5, use_qkv_bias=False,
        qk_layernorm=only(False), use_parallel_residual=False,
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    hidden, heads = s.get("hidden_size"), s.get("num_attention_heads")
    s.require("head_dim", s.head_dim() == hidden // heads, "hidden_size / num_attention_heads")
    parallel = s.get("use_parallel_residual")
    absent = {f"blk.{{i}}.ffn_norm.{end}" for end in ("weight", "bias")} if parallel else set()
    rope = s.rope(s.head_dim(), 0.25, PARTIAL)
    return s.decoder("stablelm", SWITCHES, rope=rope, without=frozenset(absent))


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    if f"blk.{i}.ffn_norm.weight" in net.weights:
        return _sequential_layer(net, x, i)
    h = net.norm(x, f"blk.{i}.attn_norm")
    y = net.linear(net.attend(*net.qkv(h, i), i), f"blk.{i}.attn_output")
    return x + y + net.ffn(h, i)


__all__ = ["FIELDS", "HF_NAMES", "embed", "finish", "layer", "read_config"]
