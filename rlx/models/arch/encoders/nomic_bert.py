"""Nomic BERT: post-norm as in BERT, rotary positions, a gated FFN, no biases."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import HEAD, finish
from rlx.models.config import ModelConfig
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor
from rlx.models.rope_tables import RopeConfig

PREFIXES = ("nomic_bert.", "bert.", "")
_EMBEDDINGS = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "cls.weight": "pooler.dense.weight",
    "cls.bias": "pooler.dense.bias",
}
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_output_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "layer_output_norm": "post_mlp_layernorm",
}
# as the models were first published
_FIRST_PARTS = {
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "attn_output_norm": "norm1",
    "ffn_gate": "mlp.fc12",
    "ffn_up": "mlp.fc11",
    "ffn_down": "mlp.fc2",
    "layer_output_norm": "norm2",
}


def _table(norm: str, layers: str, parts: dict[str, str]) -> dict[str, str]:
    both = ("weight", "bias")
    return {
        **_EMBEDDINGS,
        **{f"token_embd_norm.{part}": f"{norm}.{part}" for part in both},
        **{
            f"blk.{{i}}.{ours}.{part}": f"{layers}.{{i}}.{theirs}.{part}"
            for ours, theirs in parts.items()
            for part in both
        },
    }


BODY = _table("embeddings.LayerNorm", "layers", _PARTS)
FIRST_BODY = _table("emb_ln", "encoder.layers", _FIRST_PARTS)


def read_config(s: HfSettings) -> ModelConfig:
    s.require("prenorm", False, False)
    s.require("rotary_emb_interleaved", False, False)
    s.require("rotary_emb_fraction", 1.0, 1.0)
    s.require("moe_every_n_layers", 0, 0)
    rope = s.inside("rope_parameters")
    base = s.get("rotary_emb_base", "rope_theta", default=1000.0)
    longest = s.need("max_position_embeddings", "n_positions")
    # the first release says 8192 positions, but was trained on fewer; beyond those its rotation
    # would depend on the length of the text
    trained = s.get("max_trained_positions", default=longest)
    trained = rope.get("original_max_position_embeddings", default=trained)
    return s.encoder(
        "nomic_bert",
        rope=RopeConfig(rope.get("rope_theta", default=base)),
        context=min(longest, trained),
        activation=s.activation("hidden_act", "activation_function", default="silu"),
    )


def embed(net: EncoderBuilder, ids: Tensor, types: Tensor | None) -> Tensor:
    return net.embed_without_positions(ids, types)


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    return net.post_norm_layer(x, i, net.gated_ffn)


__all__ = ["BODY", "FIRST_BODY", "HEAD", "PREFIXES", "embed", "finish", "layer", "read_config"]
