"""Phi-3: Llama with fused weights of q, k, v and of gate and up."""

from __future__ import annotations

from rlx.models.arch.llama import COMMON, LAYER, embed, finish
from rlx.models.arch.llama import PLAIN as _LLAMA
from rlx.models.builder import activate
from rlx.models.config import ModelConfig
from rlx.models.config_fields import number, read
from rlx.models.config_hf import HfSettings
from rlx.models.decoder_builder import DecoderBuilder, Tensor

_APART = tuple(f"{part}.weight" for part in ("attn_q", "attn_k", "attn_v", "ffn_gate"))
HF_NAMES = {
    **{ours: theirs for ours, theirs in _LLAMA.items() if not ours.endswith(_APART)},
    "blk.{i}.attn_qkv.weight": f"{LAYER}.self_attn.qkv_proj.weight",
    "blk.{i}.ffn_up.weight": f"{LAYER}.mlp.gate_up_proj.weight",
}
SHAPES = {"ffn_up": "2*ffn, hidden"}
FIELDS = {
    **COMMON,
    **read(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096,
        original_max_position_embeddings=number(4096), rms_norm_eps=1e-5, sliding_window=number(),
    ),
}  # fmt: skip


def read_config(s: HfSettings) -> ModelConfig:
    rope = s.rope(s.head_dim(), 1.0, ("default", "longrope"), older=("su", "yarn"))
    return s.decoder("phi3", {}, rope=rope, sliding_window=s.window())


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.split_qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    joined = net.linear(net.norm(x, f"blk.{i}.ffn_norm"), f"blk.{i}.ffn_up")
    gate, up = net.split(joined, [net.config.ffn] * 2)
    gate = activate(net.g, net.config.activation, gate)
    return x + net.linear(gate * up, f"blk.{i}.ffn_down")


__all__ = ["FIELDS", "HF_NAMES", "embed", "finish", "layer", "read_config"]
