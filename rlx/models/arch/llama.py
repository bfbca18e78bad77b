"""Llama, SmolLM2; Mistral and Mixtral by their GGUF name: pre-norm, rotary positions, gated FFN."""

from __future__ import annotations

from rlx.models.decoder_builder import DecoderBuilder, Tensor

HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    **{
        f"blk.{{i}}.{ours}.{part}": f"model.layers.{{i}}.{theirs}.{part}"
        for ours, theirs in {
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }.items()
        for part in ("weight", "bias")
    },
}


def embed(net: DecoderBuilder, ids: Tensor) -> Tensor:
    return net.embed(ids, net.config.embedding_scale)


def layer(net: DecoderBuilder, x: Tensor, i: int) -> Tensor:
    q, k, v = net.qkv(net.norm(x, f"blk.{i}.attn_norm"), i)
    x = x + net.linear(net.attend(q, k, v, i), f"blk.{i}.attn_output")
    return x + net.ffn(net.norm(x, f"blk.{i}.ffn_norm"), i)


def finish(net: DecoderBuilder, x: Tensor) -> Tensor:
    return net.norm(x, "output_norm")
