"""Nomic BERT: post-norm as in BERT, rotary positions, a gated FFN, no biases."""

from __future__ import annotations

from rlx.models.arch.encoders.bert import FIELDS as _FIELDS
from rlx.models.arch.encoders.bert import HARMLESS as _HARMLESS
from rlx.models.arch.encoders.bert import HARMLESS_TENSORS, HEAD, finish
from rlx.models.arch.encoders.bert import SHAPES as _SHAPES
from rlx.models.builder import activation_named
from rlx.models.config import ModelConfig
from rlx.models.config_fields import BIDIRECTIONAL, ROPE, Field, number, only, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor

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


def _table(
    norm: str, layers: str, parts: dict[str, str], biased: tuple[str, ...]
) -> dict[str, str]:
    both = ("weight", "bias")
    return {
        **_EMBEDDINGS,
        **{f"token_embd_norm.{part}": f"{norm}.{part}" for part in both},
        **{
            f"blk.{{i}}.{ours}.{part}": f"{layers}.{{i}}.{theirs}.{part}"
            for ours, theirs in parts.items()
            for part in (both if ours in biased else ("weight",))
        },
    }


_NORMS = ("attn_output_norm", "layer_output_norm")
BODY = _table("embeddings.LayerNorm", "layers", _PARTS, _NORMS)
FIRST_BODY = _table("emb_ln", "encoder.layers", _FIRST_PARTS, tuple(_FIRST_PARTS))
# weights that are there only if a field of the first folders is true
SWITCHES = {
    "qkv_proj_bias": ("attn_qkv.bias", "attn_output.bias"),
    "mlp_fc1_bias": ("ffn_gate.bias", "ffn_up.bias"),
    "mlp_fc2_bias": ("ffn_down.bias",),
}
SHAPES = {**_SHAPES, "attn_qkv": "3*hidden, hidden"}
FIELDS = {
    **_FIELDS,
    **without(ROPE, "original_max_position_embeddings"),
    **read(
        vocab_size=30528, hidden_size=Field(768, also=("n_embd",)),
        num_hidden_layers=Field(12, also=("n_layer",)),
        num_attention_heads=Field(12, also=("n_head",)),
        intermediate_size=Field(3072, also=("n_inner",)),
        max_position_embeddings=Field(2048, also=("n_positions",)),
        hidden_act=Field("silu", also=("activation_function",)),
        layer_norm_eps=Field(1e-12, also=("layer_norm_epsilon",)),
        rope_theta=1000.0, rotary_emb_base=Field(None, kind=float), head_dim=Field(None, kind=int),
        prenorm=only(False), rotary_emb_interleaved=only(False), rotary_emb_fraction=only(1.0),
        rotary_emb_scale_base=only(None), rotary_scaling_factor=Field(None, kind=float),
        moe_every_n_layers=only(0), max_trained_positions=number(), causal=only(False),
        use_rms_norm=only(False), parallel_block=only(False),
        qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False,
    ),
}  # fmt: skip
# how the first code of the model runs and trained
HARMLESS = (
    *_HARMLESS, "expert_choice_router", "ffn_div", "moe_*", "num_experts", "num_shared_experts",
    "pad_vocab_*", "fused_*", "parallel_block_*",
    "scale_attn*", "reorder_and_upcast_attn", "summary_*",
    "use_xentropy", "dense_seq_output", "last_layer_subset", "mup_*",
)  # fmt: skip
_GATED = {"swiglu": "silu", "geglu": "gelu", "glu": "sigmoid"}


def read_config(s: HfSettings) -> ModelConfig:
    longest = s.get("max_position_embeddings")
    # the first release says 8192 positions, but was trained on fewer; beyond those its rotation
    # would depend on the length of the text
    trained = s.get("max_trained_positions") or longest
    width = s.get("hidden_size") // max(s.get("num_attention_heads"), 1)
    s.require("head_dim", s.get("head_dim") in (None, width), str(width))
    rope, given = s.rope(width, types=BIDIRECTIONAL), s.get("rope_parameters") or {}
    base = s.get("rotary_emb_base")
    s.require("rotary_emb_base", base in (None, rope.theta), f"{rope.theta}, or rope_theta instead")
    if rope.scaling == "none":
        trained = given.get("original_max_position_embeddings") or trained
    activation = s.get("hidden_act")
    off = (parts for field, parts in SWITCHES.items() if not s.get(field))
    absent = {f"blk.{{i}}.{part}" for parts in off for part in parts}
    absent |= set() if s.get("type_vocab_size") else {"token_types.weight"}
    return s.encoder(
        "nomic_bert",
        {"types": s.get("type_vocab_size")},
        rope=rope,
        context=min(longest, trained),
        activation=activation_named(_GATED.get(activation, activation), s.where, "hidden_act"),
        without=frozenset(absent),
    )


def embed(net: EncoderBuilder, ids: Tensor, types: Tensor | None) -> Tensor:
    return net.embed_without_positions(ids, types)


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    return net.post_norm_layer(x, i, net.gated_ffn)


__all__ = [
    "BODY",
    "FIELDS",
    "FIRST_BODY",
    "HARMLESS",
    "HARMLESS_TENSORS",
    "HEAD",
    "PREFIXES",
    "SHAPES",
    "embed",
    "finish",
    "layer",
    "read_config",
]
