"""GTE (v1.5 and multilingual): Nomic BERT with biases, and up and gate in one weight."""

from __future__ import annotations

from functools import partial

from rlx.models.arch.encoders.bert import FIELDS as _FIELDS
from rlx.models.arch.encoders.bert import HARMLESS as _HARMLESS
from rlx.models.arch.encoders.bert import HARMLESS_TENSORS, HEAD, finish
from rlx.models.arch.encoders.bert import SHAPES as _SHAPES
from rlx.models.arch.encoders.nomic_bert import embed
from rlx.models.config import ModelConfig
from rlx.models.config_fields import BIDIRECTIONAL, ROPE, ROPE_KEYS, only, read, without
from rlx.models.config_hf import HfSettings
from rlx.models.encoder_builder import EncoderBuilder, Tensor
from rlx.models.rope_tables import RopeConfig

PREFIXES = ("gte.", "new.", "")
_PARTS = {
    "attn_qkv": "attention.qkv_proj",
    "attn_output": "attention.o_proj",
    "attn_output_norm": "attn_ln",
    "ffn_up": "mlp.up_gate_proj",
    "ffn_down": "mlp.down_proj",
    "layer_output_norm": "mlp_ln",
}
BODY = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "token_embd_norm.weight": "embeddings.LayerNorm.weight",
    "token_embd_norm.bias": "embeddings.LayerNorm.bias",
    "cls.weight": "pooler.dense.weight",
    "cls.bias": "pooler.dense.bias",
    **{
        f"blk.{{i}}.{ours}.{part}": f"encoder.layer.{{i}}.{theirs}.{part}"
        for ours, theirs in _PARTS.items()
        for part in ("weight", "bias")
    },
}
SHAPES = {**_SHAPES, "attn_qkv": "3*hidden, hidden", "ffn_up": "2*ffn, hidden"}
OPTIONAL = ("blk.{i}.ffn_up.bias",)
FIELDS = {
    **_FIELDS,
    **without(ROPE, "original_max_position_embeddings"),
    **read(
        vocab_size=250048, max_position_embeddings=8192, type_vocab_size=1, rope_theta=160_000.0,
        position_embedding_type=only("rope"), layer_norm_type=only("layer_norm"),
        logn_attention_scale=only(False), pack_qkv=only(True),
    ),
}  # fmt: skip
# how the first code of the model runs, and masked language models
HARMLESS = (*_HARMLESS, "logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention")


def read_config(s: HfSettings) -> ModelConfig:
    width = s.get("hidden_size") // max(s.get("num_attention_heads"), 1)
    parts = {"types": s.get("type_vocab_size")}
    absent = set() if parts["types"] else {"token_types.weight"}
    return s.encoder("gte", parts, rope=_rope(s, width), without=frozenset(absent))


def _rope(s: HfSettings, width: int) -> RopeConfig:
    """As transformers has it, or the first code's own scaling."""
    old = s.get("rope_scaling") or {}
    if old.get("type", old.get("rope_type")) != "ntk":
        return s.rope(width, types=BIDIRECTIONAL)
    given = s.inside("rope_scaling", {**ROPE_KEYS, **read(mixed_b=only(None))})
    given.require("factor", (given.get("factor") or 0) > 0, "a positive number")
    return RopeConfig(s.get("rope_theta"), scaling="ntk", factor=given.get("factor"))


def layer(net: EncoderBuilder, x: Tensor, i: int) -> Tensor:
    return net.post_norm_layer(x, i, partial(net.joined_ffn, gate_first=False))


__all__ = [
    "BODY",
    "FIELDS",
    "HARMLESS",
    "HARMLESS_TENSORS",
    "HEAD",
    "OPTIONAL",
    "PREFIXES",
    "SHAPES",
    "embed",
    "finish",
    "layer",
    "read_config",
]
